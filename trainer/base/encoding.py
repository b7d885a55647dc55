"""Turns captions into what the UNet is conditioned on."""

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
"""Pixels a side; images no larger than that are encoded in tiles of half the side."""
OVERLAP = 4
"""Neighboring tiles share at least one part in so many of their side, over which they are blended."""


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


@torch.no_grad()
def encode_latents(vae: AutoencoderKL, pixels: Tensor, *, tiled: bool = False) -> tuple[Tensor, Tensor]:
    """Encode pictures (B, 3, H, W) in [-1, 1] to the posterior's mean and standard deviation, fp32 (B, 4, H/8, W/8).

    Pixels on the CPU go to the VAE's device in its own dtype, so that the card need not hold them twice. The latents
    are not scaled (see `scale_latents`). A picture that comes out with NaN or infinity, as some VAEs give below fp32,
    is encoded again in fp32 by itself; raises BaseModelError when that fails too. Reads one flag from the device.
    """
    mean, std, finite = posterior(vae, pixels, tiled=tiled)
    for index in (~finite).nonzero().flatten().tolist():
        mean[index], std[index] = _posterior_in_fp32(vae, pixels[index], tiled=tiled)
    return mean, std


@torch.no_grad()
def posterior(vae: AutoencoderKL, pixels: Tensor, *, tiled: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard deviation of the posterior, fp32, and whether a picture's are finite (B,); reads nothing back.

    All that encoding does on the device, so that forecasts can trace it. In tiles the peak of memory is that of one
    tile; each is normalized and attended to by itself, so latents differ from those of the whole image: by 5 to 7 %
    with the demo's VAE, where diffusers' own tiles give 7 to 8 and bf16 0.4.
    """
    if tiled:
        encoded = DiagonalGaussianDistribution(_moments_of_tiles(vae, pixels))
    else:
        encoded = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    mean, std = encoded.mean.float(), encoded.std.float()
    return mean, std, (mean.isfinite() & std.isfinite()).flatten(1).all(dim=1)


def scale_latents(vae_config: Mapping[str, Any], latents: Tensor) -> Tensor:
    """Bring a VAE's latents to the scale the UNet works at: (latents - shift) x scaling factor, as the pipelines do."""
    shift, scale = float(vae_config.get("shift_factor") or 0.0), float(vae_config["scaling_factor"])
    return (latents - shift) * scale


def _moments_of_tiles(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Return the posterior's parameters (B, 8, H/8, W/8), fp32, blended linearly where tiles overlap.

    All tiles have the same size: diffusers' own tiling leaves strips at the right and bottom, too narrow for the
    encoder to see what they show.
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
            around = (
                left // scale,
                width // scale - left // scale - moments.shape[-1],
                top // scale,
                height // scale - top // scale - moments.shape[-2],
            )
            blended = blended + nn.functional.pad(moments * weight, around)
            weights = weights + nn.functional.pad(weight, around)
    return blended / weights


def _tile_starts(length: int, side: int, scale: int) -> list[int]:
    """Return where tiles begin along one axis: evenly spaced, on whole latents, the last one ending with the image."""
    if length <= side:
        return [0]
    shared = side // OVERLAP
    count = math.ceil((length - shared) / (side - shared))
    return [index * (length - side) // (count - 1) // scale * scale for index in range(count)]


def _ramp(length: int, like: Tensor) -> Tensor:
    """Return weights that rise from both ends of a tile over the part that neighbors share."""
    place = torch.arange(1, length + 1, device=like.device, dtype=like.dtype)
    return torch.minimum(place, length + 1 - place).clamp(max=max(length // OVERLAP, 1))


def _posterior_in_fp32(vae: AutoencoderKL, pixels: Tensor, *, tiled: bool) -> tuple[Tensor, Tensor]:
    """Encode one picture (3, H, W) in fp32; bf16 and fp16 weights survive the way there and back exactly."""
    dtype = vae.dtype
    nn.Module.to(vae, torch.float32)  # diffusers' own `to` warns of an empty list of modules
    try:
        mean, std, finite = posterior(vae, pixels[None], tiled=tiled)
    finally:
        nn.Module.to(vae, dtype)
    if not finite.all():
        raise BaseModelError(
            "base.vae_not_finite",
            "The VAE turns a picture into numbers that are not finite (NaN or infinity), even in full precision.",
            "The VAE is damaged: get the base again, or give another VAE under base.vae.",
        )
    return mean[0], std[0]
