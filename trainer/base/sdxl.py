"""What is particular to SDXL: CLIP-L and OpenCLIP bigG side by side, and bigG's pooled text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from trainer.base.family import EncodedRows, FamilyFacts, TextEncoderFacts
from trainer.files.tokens import END


def condition(rows: Sequence[EncodedRows], clip_skip: int | None) -> tuple[Tensor, Tensor]:
    """Return both encoders' hidden states before the last, joined (rows, 77, 2048), and the pooled text (rows, 1280).

    SDXL is defined on the layer before the last, so `clip_skip` has no effect here, as in sd-scripts.
    """
    first, second = rows
    assert first.output.hidden_states is not None
    assert second.output.hidden_states is not None
    assert second.output.last_hidden_state is not None
    # The first end token by its id: published configs give eos_token_id as 2, as 49407, or wrong.
    end = (second.ids == END).int().argmax(dim=1)
    states = second.output.last_hidden_state[torch.arange(len(end), device=end.device), end]
    pooled = second.encoder.get_submodule("text_projection")(states)
    return torch.cat([first.output.hidden_states[-2], second.output.hidden_states[-2]], dim=-1), pooled


SDXL = FamilyFacts(
    text_encoders=(
        TextEncoderFacts("text_encoder", CLIPTextModel, END, "conditioner.embedders.0.transformer."),
        TextEncoderFacts(
            "text_encoder_2", CLIPTextModelWithProjection, 0, "conditioner.embedders.1.model.", open_clip=True
        ),
    ),
    condition=condition,
)
