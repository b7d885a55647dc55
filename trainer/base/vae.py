"""Turns pictures into latents, checking each one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from trainer.errors import BaseModelError


@torch.no_grad()
def encode_latents(vae: AutoencoderKL, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Encode pictures (B, 3, H, W) in [-1, 1] to the posterior's mean and standard deviation, fp32 (B, 4, H/8, W/8).

    Pixels on the CPU go to the VAE's device in its own dtype, so that the card need not hold them twice. The latents
    are not scaled (see `scale_latents`). A picture that comes out with NaN or infinity, as some VAEs give below fp32,
    is encoded again in fp32 by itself; raises BaseModelError when that fails too. Reads one flag from the device.
    """
    mean, std, finite = posterior(vae, pixels)
    for index in (~finite).nonzero().flatten().tolist():
        mean[index], std[index] = _posterior_in_fp32(vae, pixels[index])
    return mean, std


@torch.no_grad()
def posterior(vae: AutoencoderKL, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard deviation of the posterior, fp32, and whether a picture's are finite (B,); reads nothing back.

    All that encoding does on the device, so that forecasts can trace it.
    """
    encoded = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    mean, std = encoded.mean.float(), encoded.std.float()
    return mean, std, (mean.isfinite() & std.isfinite()).flatten(1).all(dim=1)


def scale_latents(vae_config: Mapping[str, Any], latents: Tensor) -> Tensor:
    """Bring a VAE's latents to the scale the UNet works at: (latents - shift) x scaling factor, as the pipelines do."""
    shift, scale = float(vae_config.get("shift_factor") or 0.0), float(vae_config["scaling_factor"])
    return (latents - shift) * scale


def _posterior_in_fp32(vae: AutoencoderKL, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Encode one picture (3, H, W) in fp32; bf16 and fp16 weights survive the way there and back exactly."""
    dtype = vae.dtype
    nn.Module.to(vae, torch.float32)  # diffusers' own `to` warns of an empty list of modules
    try:
        mean, std, finite = posterior(vae, pixels[None])
    finally:
        nn.Module.to(vae, dtype)
    if not finite.all():
        raise BaseModelError(
            "base.vae_not_finite",
            "The VAE turns a picture into numbers that are not finite (NaN or infinity), even in full precision.",
            "The VAE is damaged: get the base again, or give another VAE under base.vae.",
        )
    return mean[0], std[0]
