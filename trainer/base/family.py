"""What a family of bases is made of: the questions that sd15.py and sdxl.py answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection
from transformers.modeling_outputs import BaseModelOutputWithPooling

TextEncoder = CLIPTextModel | CLIPTextModelWithProjection


@dataclass(frozen=True)
class EncodedRows:
    """What one text encoder made of rows of 77 tokens: encoder, ids (rows, 77), its inner model's output."""

    encoder: TextEncoder
    ids: Tensor
    output: BaseModelOutputWithPooling


@dataclass(frozen=True)
class TextEncoderFacts:
    """One text encoder of a family: its subfolder in diffusers' layout, class, padding, and names in a single file."""

    part: str
    model_class: type[TextEncoder]
    pad: int
    prefix: str
    open_clip: bool = False


@dataclass(frozen=True)
class FamilyFacts:
    """All that differs between families where models are loaded and text is encoded.

    `condition` takes each encoder's rows and the clip skip, and returns the text's hidden states (rows, 77, width) and,
    where the family has them, the pooled ones (rows, width).
    """

    text_encoders: tuple[TextEncoderFacts, ...]
    condition: Callable[[Sequence[EncodedRows], int | None], tuple[Tensor, Tensor | None]]


def inner_model(encoder: TextEncoder) -> nn.Module:
    """Return the transformer inside a text encoder; transformers 5.6 dropped that level in CLIPTextModel."""
    return getattr(encoder, "text_model", encoder)
