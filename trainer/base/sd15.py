"""What is particular to SD 1.5: one CLIP-L text encoder, of whose layers one is chosen and normed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import CLIPTextModel

from trainer.base.family import EncodedRows, FamilyFacts, TextEncoderFacts, inner_model
from trainer.files.tokens import END


def condition(rows: Sequence[EncodedRows], clip_skip: int | None) -> tuple[Tensor, None]:
    """Return the hidden states (rows, 77, 768) of the layer that `clip_skip` counts from the end, normed.

    1 (as None) is the last layer, 2 the one before it: kohya's counting; diffusers' clip_skip is one less.
    """
    (encoded,) = rows
    assert encoded.output.hidden_states is not None
    norm = inner_model(encoded.encoder).get_submodule("final_layer_norm")
    return norm(encoded.output.hidden_states[-(clip_skip or 1)]), None


SD15 = FamilyFacts(
    text_encoders=(TextEncoderFacts("text_encoder", CLIPTextModel, END, "cond_stage_model.transformer."),),
    condition=condition,
)
