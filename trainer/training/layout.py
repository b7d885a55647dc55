"""Maps of the UNet laid out channel by channel at each place, as tensor cores want them: an experiment.

Convolutions keep that layout; PyTorch's GroupNorm on a card copies maps away from it and back. So a residual block's
norm and the SiLU after it become one function that keeps it, computed by kernels that torch.compile makes where a
compiler works, else by several operations. Results are the same but for rounding (docs/decisions/0021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.adapter.lean.residual import NormAndSilu, Normed, is_channels_last, lean_residuals
from trainer.training.compiled import compile_apart, compiler_trouble
from trainer.training.shortage import is_out_of_memory


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
