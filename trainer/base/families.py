"""How SD 1.5 and SDXL differ in loading models and encoding text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection
from transformers.modeling_outputs import BaseModelOutputWithPooling

from trainer.config.base import Family
from trainer.files.tokens import END

TextEncoder = CLIPTextModel | CLIPTextModelWithProjection


@dataclass(frozen=True)
class EncodedRows:
    """One text encoder, the ids (rows, 77) it encoded, and its inner model's output."""

    encoder: TextEncoder
    ids: Tensor
    output: BaseModelOutputWithPooling


@dataclass(frozen=True)
class TextEncoderFacts:
    """One text encoder of a family: diffusers subfolder, class, padding token, and key prefix in single-file bases."""

    part: str
    model_class: type[TextEncoder]
    pad: int
    prefix: str
    open_clip: bool = False


@dataclass(frozen=True)
class FamilyFacts:
    """How one family loads models and encodes text.

    `condition` takes each encoder's rows and the clip skip, and returns the hidden states (rows, 77, width) and the
    pooled text (rows, width), which is None for SD 1.5.
    """

    text_encoders: tuple[TextEncoderFacts, ...]
    condition: Callable[[Sequence[EncodedRows], int | None], tuple[Tensor, Tensor | None]]


def inner_model(encoder: TextEncoder) -> nn.Module:
    """Return the transformer inside a text encoder; since transformers 5.6, CLIPTextModel is itself the transformer."""
    return getattr(encoder, "text_model", encoder)


def condition_sd15(rows: Sequence[EncodedRows], clip_skip: int | None) -> tuple[Tensor, None]:
    """Return the normalized hidden states (rows, 77, 768) from the layer that `clip_skip` selects.

    Layers are counted from the end: 1 or None is the last layer and 2 the one before it, as in kohya; diffusers'
    clip_skip is one less.
    """
    (encoded,) = rows
    assert encoded.output.hidden_states is not None
    norm = inner_model(encoded.encoder).get_submodule("final_layer_norm")
    return norm(encoded.output.hidden_states[-(clip_skip or 1)]), None


SD15 = FamilyFacts(
    text_encoders=(TextEncoderFacts("text_encoder", CLIPTextModel, END, "cond_stage_model.transformer."),),
    condition=condition_sd15,
)


def condition_sdxl(rows: Sequence[EncodedRows], clip_skip: int | None) -> tuple[Tensor, Tensor]:
    """Return both encoders' second-to-last hidden states, joined (rows, 77, 2048), and the pooled text (rows, 1280).

    SDXL always uses the second-to-last layer, so `clip_skip` has no effect, as in sd-scripts.
    """
    first, second = rows
    assert first.output.hidden_states is not None
    assert second.output.hidden_states is not None
    assert second.output.last_hidden_state is not None
    # Finds the first end token by its real id, because eos_token_id in published configs is 2, 49407 or wrong.
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
    condition=condition_sdxl,
)


FAMILIES: Mapping[Family, FamilyFacts] = {"sd15": SD15, "sdxl": SDXL}
