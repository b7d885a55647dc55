"""Latents against the pipeline's VAE, and the guard against numbers that are not finite."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from diffusers import AutoencoderKL
from torch import nn

from tests.support.tiny import Family, tiny_configs, tiny_models
from trainer.base.vae import encode_latents, scale_latents
from trainer.errors import BaseModelError


def fresh_vae(dtype: torch.dtype = torch.float32) -> Any:
    vae = cast(Any, AutoencoderKL.from_config(tiny_configs("sd15")["vae"]))
    vae.load_state_dict(tiny_models("sd15")["vae"].state_dict())
    return nn.Module.to(vae.eval().requires_grad_(False), dtype)


def pixels(count: int = 2) -> torch.Tensor:
    return torch.rand(count, 3, 64, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_latents_equal_the_pipelines(family: Family) -> None:
    vae = cast(Any, tiny_models(family)["vae"])
    mean, std = encode_latents(vae, pixels())
    posterior = vae.encode(pixels()).latent_dist
    assert mean.shape == std.shape == (2, 4, 8, 6)
    assert torch.equal(mean, posterior.mean)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(5))
    drawn = scale_latents(vae.config, mean + std * noise)
    pipeline = posterior.sample(torch.Generator().manual_seed(5)) * vae.config.scaling_factor
    torch.testing.assert_close(drawn, pipeline, rtol=1e-6, atol=1e-7)


def test_a_shift_is_taken_off_before_scaling() -> None:
    scaled = scale_latents({"scaling_factor": 0.5, "shift_factor": 0.1}, torch.ones(1))
    assert scaled.item() == pytest.approx(0.45)


def test_bf16_weights_give_fp32_latents() -> None:
    mean, std = encode_latents(fresh_vae(torch.bfloat16), pixels())
    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean, encode_latents(fresh_vae(), pixels())[0], rtol=0.1, atol=0.1)


def test_only_the_picture_that_overflows_is_encoded_again_in_fp32() -> None:
    vae = fresh_vae(torch.float16)
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    pictures = pixels(3)
    pictures[1] *= 3e5  # past fp16's largest number, well within fp32's
    mean, _ = encode_latents(vae, pictures)
    assert mean.isfinite().all()
    half = fresh_vae(torch.float16)
    full = fresh_vae(torch.float16).float()
    assert torch.equal(mean[0], half.encode(pictures.half()).latent_dist.mean[0].float())
    assert torch.equal(mean[1], full.encode(pictures[1:2]).latent_dist.mean[0])
    assert vae.dtype == torch.float16
    assert all(torch.equal(before[name], tensor) for name, tensor in vae.state_dict().items())


def test_a_damaged_vae_is_named() -> None:
    vae = fresh_vae()
    vae.quant_conv.bias.data[0] = float("nan")
    with pytest.raises(BaseModelError, match="not finite") as caught:
        encode_latents(vae, pixels(1))
    assert caught.value.code == "base.vae_not_finite"
