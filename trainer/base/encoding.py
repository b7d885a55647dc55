"""Encode captions with the text encoders and images with the VAE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn

from trainer.base.families import FAMILIES, EncodedRows, TextEncoder, inner_model
from trainer.config.base import Family
from trainer.errors import BaseModelError
from trainer.files.tokens import CHUNK, ClipTokens

_ROW = CHUNK + 2
TILE = 512
"""Side of a tile in pixels; images that fit into one tile are encoded in tiles with half this side."""
OVERLAP = 4
"""Divisor for the overlap: neighboring tiles share at least 1 / OVERLAP of their side and are blended there."""


@dataclass
class TextConditioning:
    """Encoded text that conditions the UNet, in the encoders' dtype.

    `hidden` is (B, T, C) with T = 77, 152 or 227 and C = 768 or 2048; `pooled` is (B, 1280) for SDXL, None for SD 1.5.
    """

    hidden: Tensor
    pooled: Tensor | None


def tokenize(family: Family, texts: Sequence[str], chunks: int = CHUNK, *, weighted: bool = False) -> list[Tensor]:
    """Return each text encoder's token ids, int64 (B, rows x 77); texts are cut to 75, 150 or 225 tokens (`chunks`).

    The syntax of weights is left out if ``weighted``; see `token_weights`.
    """
    tokenizers = [ClipTokens(encoder.pad) for encoder in FAMILIES[family].text_encoders]
    if weighted:
        return [torch.tensor([one.encode_weighted(text, chunks)[0] for text in texts]) for one in tokenizers]
    return [torch.tensor([tokenizer.encode(text, chunks) for text in texts]) for tokenizer in tokenizers]


def token_weights(texts: Sequence[str], chunks: int = CHUNK) -> Tensor:
    """Return the weight of each token, fp32 (B, rows x 77), for texts with weights such as "(tag:1.2)"."""
    tokenizer = ClipTokens()
    return torch.tensor([tokenizer.encode_weighted(text, chunks)[1] for text in texts], dtype=torch.float32)


def encode_text(
    family: Family,
    encoders: Sequence[TextEncoder],
    tokens: Sequence[Tensor],
    clip_skip: int | None,
    weights: Tensor | None = None,
) -> TextConditioning:
    """Encode the ids that `tokenize` returned; gradients flow into encoders whose weights require them.

    For a single row of 77 tokens, the result is the same as from the pipelines' `encode_prompt`. `clip_skip` uses
    kohya's numbering (2 is diffusers' 1). Longer texts are encoded row by row and joined as in sd-scripts: the start
    token, the 75 states of every row, the end token. SDXL's pooled text comes from the first row. `weights` of
    `token_weights` multiply the states but not the pooled text, as in sd-scripts (`encode_tokens_with_weights`).
    """
    encoded = [_encode_rows(encoder, ids.reshape(-1, _ROW)) for encoder, ids in zip(encoders, tokens, strict=True)]
    hidden, pooled = FAMILIES[family].condition(encoded, clip_skip)
    count = len(tokens[0])
    if weights is not None:
        hidden = (hidden * weights.reshape(-1, _ROW, 1)).to(hidden.dtype)  # the product is fp32 or wider
    if pooled is not None:
        pooled = pooled.reshape(count, -1, pooled.shape[-1])[:, 0]
    return TextConditioning(_joined(hidden, count), pooled)


@torch.no_grad()
def encode_texts(
    family: Family,
    encoders: Sequence[TextEncoder],
    texts: Sequence[str],
    clip_skip: int | None,
    device: torch.device,
    chunks: int = CHUNK,
    *,
    weighted: bool = False,
) -> TextConditioning:
    """Tokenize and encode texts without gradients on `device`, where the encoders are; see `encode_text`."""
    tokens = [ids.to(device) for ids in tokenize(family, texts, chunks, weighted=weighted)]
    weights = token_weights(texts, chunks).to(device) if weighted else None
    return encode_text(family, encoders, tokens, clip_skip, weights)


def padded(text: TextConditioning, empty: TextConditioning, tokens: int) -> TextConditioning:
    """Return a text's conditioning padded to ``tokens`` with the states of the ``empty`` text of 75 tokens.

    This equals encoding the text at that length, because rows are encoded one by one and a row of padding is the empty
    text.
    """
    rows = (tokens + 2 - text.hidden.shape[1]) // CHUNK
    return TextConditioning(
        torch.cat([text.hidden[:, :-1], *[empty.hidden[:, 1:-1]] * rows, empty.hidden[:, -1:]], 1), text.pooled
    )


def _encode_rows(encoder: TextEncoder, ids: Tensor) -> EncodedRows:
    return EncodedRows(encoder, ids, inner_model(encoder)(input_ids=ids, output_hidden_states=True))


def _joined(hidden: Tensor, count: int) -> Tensor:
    """Join rows (B x rows, 77, C) into (B, rows x 75 + 2, C), keeping only the first start and the last end token."""
    rows = hidden.reshape(count, -1, _ROW, hidden.shape[-1])
    return torch.cat([rows[:, 0, :1], rows[:, :, 1:-1].flatten(1, 2), rows[:, -1, -1:]], dim=1)


@torch.no_grad()
def encode_latents(vae: AutoencoderKL, pixels: Tensor, *, tiled: bool = False) -> tuple[Tensor, Tensor]:
    """Encode images (B, 3, H, W) in [-1, 1]; return the posterior's mean and standard deviation.

    Both are fp32 (B, 4, H/8, W/8). Pixels on the CPU are converted to the VAE's dtype before they are moved, so the GPU
    does not hold them twice. The latents are not scaled (see `scale_latents`). If an image gives NaN or infinity, as
    with some VAEs below fp32, that image is encoded again in fp32; raises BaseModelError if that fails too.
    Synchronizes with the device once, to read which images are finite.
    """
    mean, std, finite = posterior(vae, pixels, tiled=tiled)
    for index in (~finite).nonzero().flatten().tolist():
        mean[index], std[index] = _posterior_in_fp32(vae, pixels[index], tiled=tiled)
    return mean, std


@torch.no_grad()
def posterior(vae: AutoencoderKL, pixels: Tensor, *, tiled: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the posterior's mean and standard deviation, fp32, and which images are finite (B,).

    This function contains all work that encoding does on the device, and never synchronizes, so forecasts can trace it.
    With tiles, peak memory is what one tile needs. Norms and attention see only their tile, so the latents differ from
    the whole image's: by 5 to 7 % with the demo's VAE, compared with 7 to 8 % for diffusers' own tiles and 0.4 % for
    bf16.
    """
    if tiled:
        encoded = DiagonalGaussianDistribution(_moments_of_tiles(vae, pixels))
    else:
        encoded = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    mean, std = encoded.mean.float(), encoded.std.float()
    return mean, std, (mean.isfinite() & std.isfinite()).flatten(1).all(dim=1)


def scale_latents(vae_config: Mapping[str, Any], latents: Tensor) -> Tensor:
    """Scale a VAE's latents for the UNet: (latents - shift) x scaling factor, as in the pipelines."""
    shift, scale = float(vae_config.get("shift_factor") or 0.0), float(vae_config["scaling_factor"])
    return (latents - shift) * scale


def _moments_of_tiles(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Return the posterior's parameters (B, 8, H/8, W/8), fp32, blended linearly where tiles overlap.

    All tiles have the same size. diffusers' own tiling leaves strips at the right and bottom that are too narrow for
    the encoder's context.
    """
    height, width = pixels.shape[-2:]
    side = TILE if max(height, width) > TILE else TILE // 2
    scale = 2 ** (len(vae.config["block_out_channels"]) - 1)
    blended = weights = torch.zeros((), device=vae.device)
    for top in _tile_starts(height, side, scale):
        for left in _tile_starts(width, side, scale):
            tile = pixels[..., top : top + side, left : left + side].to(vae.device, vae.dtype)
            moments = vae.encode(tile).latent_dist.parameters.float()
            weight = _ramp(moments.shape[-2], moments)[:, None] * _ramp(moments.shape[-1], moments)
            margins = (
                left // scale,
                width // scale - left // scale - moments.shape[-1],
                top // scale,
                height // scale - top // scale - moments.shape[-2],
            )
            blended = blended + nn.functional.pad(moments * weight, margins)
            weights = weights + nn.functional.pad(weight, margins)
    return blended / weights


def _tile_starts(length: int, side: int, scale: int) -> list[int]:
    """Return the tile offsets along one axis in pixels: evenly spaced and aligned to whole latents."""
    if length <= side:
        return [0]
    shared = side // OVERLAP
    count = math.ceil((length - shared) / (side - shared))
    return [index * (length - side) // (count - 1) // scale * scale for index in range(count)]


def _ramp(length: int, like: Tensor) -> Tensor:
    """Return blending weights that rise linearly from both ends of a tile, across its overlap with the neighbors."""
    position = torch.arange(1, length + 1, device=like.device, dtype=like.dtype)
    return torch.minimum(position, length + 1 - position).clamp(max=max(length // OVERLAP, 1))


def _posterior_in_fp32(vae: AutoencoderKL, pixels: Tensor, *, tiled: bool) -> tuple[Tensor, Tensor]:
    """Encode one image (3, H, W) in fp32; casting the VAE's bf16 or fp16 weights to fp32 and back is exact."""
    dtype = vae.dtype
    nn.Module.to(vae, torch.float32)  # not diffusers' own `to`, which warns about an empty list of modules
    try:
        mean, std, finite = posterior(vae, pixels[None], tiled=tiled)
    finally:
        nn.Module.to(vae, dtype)
    if not finite.all():
        raise BaseModelError(
            "base.vae_not_finite",
            "Could not encode an image: the VAE returns NaN or infinity, even in fp32.",
            "The VAE is damaged: download the base again, or set another VAE in base.vae.",
        )
    return mean[0], std[0]
