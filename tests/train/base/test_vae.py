"""Latents against the pipeline's VAE, and the guard against numbers that are not finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import nn

from tests.support.jobs import PHOTOS
from tests.support.tiny import Family, tiny_configs, tiny_models
from trainer.base import encoding
from trainer.base.encoding import encode_latents, scale_latents
from trainer.base.source import open_base
from trainer.config.base import BaseConfig
from trainer.errors import BaseModelError
from trainer.files.assets import asset_path


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
    with pytest.raises(BaseModelError, match="NaN or infinity") as caught:
        encode_latents(vae, pixels(1))
    assert caught.value.code == "base.vae_not_finite"


# In tiles.


class Averaging(nn.Module):
    """A VAE that sees nothing but the 8 by 8 pixels of each latent: cutting the image must change nothing."""

    config: ClassVar = {"block_out_channels": (1, 1, 1, 1)}
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, ...]] = set()

    def encode(self, pixels: torch.Tensor) -> Any:
        self.sizes.add(tuple(pixels.shape[-2:]))
        means = nn.functional.avg_pool2d(pixels, 8)
        moments = torch.cat([means, means[:, :1], means.abs(), -means[:, :1]], dim=1)
        return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(moments))


@pytest.mark.parametrize("size", [(512, 512), (1024, 1024), (832, 1216), (1536, 640), (520, 64), (1032, 1000)])
def test_tiles_of_one_size_cover_the_image_and_join_without_a_trace(size: tuple[int, int]) -> None:
    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(2))
    vae = cast(Any, Averaging())
    whole, tiled = encode_latents(vae, image), encode_latents(vae, image, tiled=True)
    assert tiled[0].shape == whole[0].shape
    for one, other in zip(tiled, whole, strict=True):
        torch.testing.assert_close(one, other)
    side = 512 if max(size) > 512 else 256
    assert vae.sizes == {size, (min(side, size[0]), min(side, size[1]))}


def test_an_image_no_larger_than_a_tile_is_encoded_as_without() -> None:
    vae = fresh_vae()
    for one, other in zip(encode_latents(vae, pixels()), encode_latents(vae, pixels(), tiled=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_tiles_come_nearer_to_the_whole_image_than_diffusers_own() -> None:
    """By the demo's trained VAE and a photograph; random weights would hardly see beyond a few pixels."""
    vae = open_base(BaseConfig(model=str(asset_path("demo", "base")))).load_vae(torch.float32, torch.device("cpu"))
    with Image.open(PHOTOS / "astronaut.png") as photograph:
        levels = np.asarray(photograph.convert("RGB").resize((384, 384)), dtype=np.float32)
    image = torch.from_numpy(levels / 127.5 - 1).permute(2, 0, 1)[None]
    whole, ours = (encode_latents(vae, image, tiled=tiled)[0] for tiled in (False, True))
    vae.enable_tiling()
    vae.tile_sample_min_size = encoding.TILE // 2
    vae.tile_latent_min_size = vae.tile_sample_min_size // 8
    theirs, _ = encode_latents(vae, image)
    off = [float((tiled - whole).norm() / whole.norm()) for tiled in (ours, theirs)]
    assert 0 < off[0] < off[1] < 0.2
