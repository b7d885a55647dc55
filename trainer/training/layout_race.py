"""Times a UNet's residual blocks in both layouts of their maps, at the sizes of a run, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from trainer.adapter.lean.residual import lean_residuals
from trainer.config.job import Job
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import epoch_showings
from trainer.files.architecture import Config
from trainer.training.attention_race import Clock, by_depth, reason, stopwatch, tried_twice
from trainer.training.layout import Kernels, lay_out
from trainer.training.machine import numerics
from trainer.training.precision import DTYPES
from trainer.training.room import release
from trainer.training.shortage import is_out_of_memory

SECONDS = 1.0
"""For timing all sizes in both layouts, beside the first call of each."""
WORTH = 0.03
"""By so much of the time a layout must be quicker: less is chance."""
ALIKE = 0.05
"""Norm-relative: by how much gradients may differ, taken widely. A wrong one is off by about 1."""


@dataclass(frozen=True)
class Maps:
    """What a residual block works on."""

    pictures: int
    inputs: int
    outputs: int
    """Channels."""
    height: int
    width: int


@dataclass(frozen=True)
class Found:
    """Whether maps are to lie channels-last, and why."""

    pays: bool
    sentence: str
    """For the run's log."""


def layout_of(
    job: Job, unet: Config, pictures: Iterable[Picture], clock: Callable[[float], Clock] = stopwatch
) -> Found | None:
    """Whether a frozen and planned job that asks for it gains by it here; None where nothing is to be found out.

    Where the user wants every run to be the same nothing is timed, as clocks differ: then it is done. Raises
    RuntimeError when memory runs out.
    """
    if not job.fit.channels_last:
        return None
    if job.recipe.layers == "all":  # each would be a copy there and back
        return Found(False, "Maps lie as usual: so a LoRA on a convolution leaves them.")
    if job.fit.deterministic:
        return None
    shown = Counter(picture.bucket for picture, _ in epoch_showings(pictures, 0))
    (size, _), *_ = shown.most_common(1)
    blocks = residual_blocks(unet, size, min(job.fit.micro_batch or 1, job.recipe.effective_batch))
    if not blocks:
        return Found(False, "Maps lie as usual: the base's config does not tell how many residual blocks there are.")
    device, dtype = torch.device(job.fit.device or "cpu"), DTYPES[job.fit.dtype or "fp32"]
    measure = clock(SECONDS / (2 * len(blocks)))
    try:
        with numerics(job), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            kernels = Kernels.of(device)
            pairs = [
                (times, tried_twice(partial(_seconds, one, unet, kernels, device, dtype, measure), device))
                for one, times in blocks.items()
            ]
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return Found(False, f"Maps lie as usual: timing them channels-last failed ({reason(error)}).")
    finally:
        release(device)
    usual, last = (sum(times * pair[place] for times, pair in pairs) for place in (0, 1))
    pays = last < (1 - WORTH) * usual
    told = f"channels-last residual blocks take {last * 1e3:.2f} ms a micro-batch instead of {usual * 1e3:.2f}"
    return Found(pays, f"Maps lie {'channels-last' if pays else 'as usual'}: {told}.")


def residual_blocks(unet: Config, size: tuple[int, int], pictures: int) -> Counter[Maps]:
    """About how many blocks of which size a UNet has, for pictures of ``size`` (width, height) in pixels.

    On the way up, where maps from the way down are joined to them, they take twice as many channels. Empty where the
    config does not tell of each depth.
    """
    found: Counter[Maps] = Counter()
    blocks = list(zip(unet["block_out_channels"], by_depth(unet, "layers_per_block", 2), strict=False))
    for depth, (channels, layers) in enumerate(blocks):
        width, height = (-(-side // (8 << depth)) for side in size)
        found[Maps(pictures, channels, channels, height, width)] += layers + 2 * (depth == len(blocks) - 1)
        found[Maps(pictures, 2 * channels, channels, height, width)] += layers + 1
    return found


def _seconds(
    maps: Maps, unet: Config, kernels: Kernels, device: torch.device, dtype: torch.dtype, clock: Clock
) -> tuple[float, float]:
    """What a block takes forward and backward as usual and channels-last.

    Raises RuntimeError where its gradients are others there.
    """
    wide = unet["block_out_channels"][0] * 4
    block = ResnetBlock2D(
        in_channels=maps.inputs, out_channels=maps.outputs, temb_channels=wide, groups=unet.get("norm_num_groups") or 32
    )
    block.requires_grad_(requires_grad=False).to(device, dtype)
    sizes = (maps.height, maps.width)
    x = torch.randn(maps.pictures, maps.inputs, *sizes, device=device, dtype=dtype).requires_grad_()
    above = torch.randn(maps.pictures, maps.outputs, *sizes, device=device, dtype=dtype)
    embedding = torch.randn(maps.pictures, wide, device=device, dtype=dtype)

    def both(x: Tensor, above: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(block(x, embedding), x, above)
        return gradient

    lean_residuals(block)
    expected = both(x, above)
    usual = clock(lambda: both(x, above))
    lay_out(block, kernels)
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    above_last = above.to(memory_format=torch.channels_last)
    off = float((both(last, above_last).float() - expected.float()).norm() / expected.float().norm())
    if not off <= ALIKE:
        raise RuntimeError(f"other gradients, {off:.2g} of them")
    return usual, clock(lambda: both(last, above_last))
