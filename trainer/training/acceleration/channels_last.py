"""Maps of the UNet laid out channel by channel at each place, as tensor cores want them: an experiment.

Convolutions keep that layout; PyTorch's GroupNorm on a card copies maps away from it and back. So a residual block's
norm and the SiLU after it become one function that keeps it, computed by kernels that torch.compile makes where a
compiler works, else by several operations. Results are the same but for rounding (docs/decisions/0021).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from trainer.adapter.lean.residual import NormAndSilu, Normed, is_channels_last, lean_residuals
from trainer.config.job import Job
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import epoch_showings
from trainer.files.architecture import Config
from trainer.training.acceleration.attention_autotune import Clock, by_depth, reason, stopwatch, tried_twice
from trainer.training.acceleration.compile import compile_apart, compiler_trouble
from trainer.training.device.device import DTYPES, numerics
from trainer.training.device.offload import release
from trainer.training.device.out_of_memory import is_out_of_memory

SECONDS = 1.0
"""For timing all sizes in both layouts, beside the first call of each."""
WORTH = 0.03
"""By so much of the time a layout must be quicker: less is chance."""
ALIKE = 0.05
"""Norm-relative: by how much gradients may differ, taken widely. A wrong one is off by about 1."""


class Kernels:
    """The norm with its SiLU for maps that are channels-last; compiled until that fails."""

    def __init__(self, *, compiled: bool) -> None:
        self.compiled = compiled
        self._forward = compile_apart(_forward) if compiled else _forward
        self._backward = compile_apart(_backward) if compiled else _backward

    @classmethod
    def of(cls, device: torch.device) -> Kernels:
        """Compiled on a card whose compiler works; on the CPU it would take longer to compile than it gains."""
        return cls(compiled=device.type == "cuda" and not compiler_trouble(device))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Normed:
        """x (B, C, h, w) to the same."""
        made: Normed = self._either(self._forward, _forward, x, weight, bias, groups, eps)
        return made

    def backward(self, above: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        """The gradient of x (B, C, h, w) from that of what forward gave."""
        made: Tensor = self._either(self._backward, _backward, above, x, weight, bias, mean, rstd)
        return made

    def _either(self, compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> Any:
        """Both change none of their inputs, so the one may follow on the other."""
        if self.compiled:
            try:
                return compiled(*inputs)
            except Exception as error:  # compilers fail in many ways; what is no fault of theirs fails once more
                if is_out_of_memory(error):
                    raise
                self.compiled = False
        return plain(*inputs)


class LastNormAndSilu(NormAndSilu):
    """A norm with its SiLU that leaves maps in the layout in which they come."""

    kernels: Kernels

    def normed(self, x: Tensor) -> Normed:
        """What it makes of maps x (B, C, h, w) in either layout."""
        if not is_channels_last(x):
            return super().normed(x)
        return self.kernels.forward(x, self.weight, self.bias, self.num_groups, self.eps)

    def gradient(self, above: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        """The gradient of x, in its layout."""
        if not is_channels_last(x):
            return super().gradient(above, x, mean, rstd)
        above = above.contiguous(memory_format=torch.channels_last)
        return self.kernels.backward(above, x, self.weight, self.bias, mean, rstd)


def lay_out(unet: nn.Module, kernels: Kernels) -> None:
    """Turns frozen convolutions to channels-last, and lets the norms of residual blocks, and the last, keep it.

    What learns lies as before. Biases and norms stay the parameters that they were.
    """
    lean_residuals(unet)
    for module in unet.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.requires_grad:
            module.weight.data = module.weight.data.to(memory_format=torch.channels_last)
        elif type(module) is NormAndSilu:
            module.__class__ = LastNormAndSilu
            cast(LastNormAndSilu, module).kernels = kernels


def _forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Normed:
    """Sums, mean and 1 / deviation in fp32 or wider; the maps are rounded once."""
    parts = _grouped(x, groups)
    variance, mean = torch.var_mean(parts, (1, 3), correction=0, keepdim=True)
    rstd = (variance + eps).rsqrt()
    scale, shift = (_grouped(row[None, :, None, None], groups) for row in (weight, bias))
    return _maps(F.silu((parts - mean) * rstd * scale + shift), x), mean, rstd


def _backward(above: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """By the chain rule through SiLU and norm: with u the normed maps, rstd · (g - mean(g) - u · mean(g · u))."""
    groups = mean.shape[2]
    unit = (_grouped(x, groups) - mean) * rstd
    scale, shift = (_grouped(row[None, :, None, None], groups) for row in (weight, bias))
    below = torch.ops.aten.silu_backward(_grouped(above, groups), unit * scale + shift) * scale
    common = below.mean((1, 3), keepdim=True) + unit * (below * unit).mean((1, 3), keepdim=True)
    return _maps((below - common) * rstd, x)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(B, C, h, w) that is channels-last seen as (B, places, groups, C / groups), in fp32 or wider."""
    rows = x.permute(0, 2, 3, 1).flatten(1, 2)
    return rows.reshape(*rows.shape[:2], groups, -1).to(torch.promote_types(x.dtype, torch.float32))


def _maps(parts: Tensor, like: Tensor) -> Tensor:
    """The way back, in the format of ``like``."""
    batch, channels, height, width = like.shape
    return parts.reshape(batch, height, width, channels).permute(0, 3, 1, 2).to(like.dtype)


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
class LayoutChoice:
    """Whether maps are to lie channels-last, and why."""

    pays: bool
    sentence: str
    """For the run's log."""


def layout_of(
    job: Job, unet: Config, pictures: Iterable[Picture], clock: Callable[[float], Clock] = stopwatch
) -> LayoutChoice | None:
    """Whether a frozen and planned job that asks for it gains by it here; None where nothing is to be found out.

    Where the user wants every run to be the same nothing is timed, as clocks differ: then it is done. Raises
    RuntimeError when memory runs out.
    """
    if not job.fit.channels_last:
        return None
    if job.recipe.layers == "all":  # each would be a copy there and back
        return LayoutChoice(False, "Maps lie as usual: so a LoRA on a convolution leaves them.")
    if job.fit.deterministic:
        return None
    shown = Counter(picture.bucket for picture, _ in epoch_showings(pictures, 0))
    (size, _), *_ = shown.most_common(1)
    blocks = residual_blocks(unet, size, min(job.fit.micro_batch or 1, job.recipe.effective_batch))
    if not blocks:
        return LayoutChoice(
            False, "Maps lie as usual: the base's config does not tell how many residual blocks there are."
        )
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
        return LayoutChoice(False, f"Maps lie as usual: timing them channels-last failed ({reason(error)}).")
    finally:
        release(device)
    usual, last = (sum(times * pair[place] for times, pair in pairs) for place in (0, 1))
    pays = last < (1 - WORTH) * usual
    told = f"channels-last residual blocks take {last * 1e3:.2f} ms a micro-batch instead of {usual * 1e3:.2f}"
    return LayoutChoice(pays, f"Maps lie {'channels-last' if pays else 'as usual'}: {told}.")


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
