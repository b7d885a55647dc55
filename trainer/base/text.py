"""Turns captions into what the UNet is conditioned on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.base.families import FAMILIES
from trainer.base.family import EncodedRows, TextEncoder, inner_model
from trainer.config.base import Family
from trainer.files.tokens import CHUNK, ClipTokens

_ROW = CHUNK + 2


@dataclass
class TextConditioning:
    """Text as the UNet takes it, in the encoders' dtype.

    `hidden` is (B, T, C) with T = 77, 152 or 227 and C = 768 or 2048; `pooled` is (B, 1280) for SDXL, None for SD 1.5.
    """

    hidden: Tensor
    pooled: Tensor | None


def tokenise(family: Family, texts: Sequence[str], chunks: int = CHUNK) -> list[Tensor]:
    """Return each text encoder's ids, int64 (B, rows x 77), for up to `chunks` (75, 150 or 225) tokens of text."""
    tokenizers = [ClipTokens(encoder.pad) for encoder in FAMILIES[family].text_encoders]
    return [torch.tensor([tokenizer.encode(text, chunks) for text in texts]) for tokenizer in tokenizers]


def encode_text(
    family: Family, encoders: Sequence[TextEncoder], tokens: Sequence[Tensor], clip_skip: int | None
) -> TextConditioning:
    """Encode the ids that `tokenise` returned; gradients flow into the encoders where they are wanted.

    With one row of 77 it equals the pipelines' `encode_prompt`; `clip_skip` is in kohya's counting (2 = diffusers' 1).
    Longer texts are encoded row by row and joined as start, all rows' 75 states, end, as sd-scripts does; SDXL's pooled
    text is the first row's.
    """
    encoded = [_encode_rows(encoder, ids.reshape(-1, _ROW)) for encoder, ids in zip(encoders, tokens, strict=True)]
    hidden, pooled = FAMILIES[family].condition(encoded, clip_skip)
    count = len(tokens[0])
    if pooled is not None:
        pooled = pooled.reshape(count, -1, pooled.shape[-1])[:, 0]
    return TextConditioning(_joined(hidden, count), pooled)


@torch.no_grad()
def encode_words(
    family: Family,
    encoders: Sequence[TextEncoder],
    texts: Sequence[str],
    clip_skip: int | None,
    device: torch.device,
    chunks: int = CHUNK,
) -> TextConditioning:
    """Encode texts on `device`, where the encoders are, without gradients; see `tokenise` and `encode_text`."""
    tokens = [ids.to(device) for ids in tokenise(family, texts, chunks)]
    return encode_text(family, encoders, tokens, clip_skip)


def _encode_rows(encoder: TextEncoder, ids: Tensor) -> EncodedRows:
    return EncodedRows(encoder, ids, inner_model(encoder)(input_ids=ids, output_hidden_states=True))


def _joined(hidden: Tensor, count: int) -> Tensor:
    """Join rows (B x rows, 77, C) to (B, rows x 75 + 2, C): the first start and the last end stay, the others go."""
    rows = hidden.reshape(count, -1, _ROW, hidden.shape[-1])
    return torch.cat([rows[:, 0, :1], rows[:, :, 1:-1].flatten(1, 2), rows[:, -1, -1:]], dim=1)
