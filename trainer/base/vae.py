"""Encode images to latents, whole or in tiles, and check each one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn

from trainer.errors import BaseModelError

TILE = 512
"""Pixels a side; images no larger than that are encoded in tiles of half the side."""
OVERLAP = 4
"""Neighboring tiles share at least one part in so many of their side, over which they are blended."""


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
