"""Residual blocks and frozen convolutions of which backward finds only what it needs, over diffusers' own modules.

A norm with its SiLU keeps its input, of which both are computed again; a frozen convolution keeps nothing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input


class LeanResidual(ResnetBlock2D):
    """A block as SD 1.5 and SDXL have it, without the division by 1.0; its norms apply the SiLU themselves."""

    def forward(self, input_tensor: Tensor, temb: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Maps (B, C, h, w) and the embedding of the time step (B, width) to maps."""
        hidden = self.conv1(self.norm1(input_tensor))
        hidden = hidden + self.time_emb_proj(F.silu(temb))[:, :, None, None]
        hidden = self.conv2(self.norm2(hidden))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        result: Tensor = input_tensor + hidden
        return result


class NormAndSilu(nn.GroupNorm):
    """A frozen GroupNorm with the SiLU after it."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C, h, w) to the same."""
        result: Tensor = _NormAndSilu.apply(input, self)  # type: ignore[no-untyped-call]
        return result


class FrozenConv(nn.Conv2d):
    """A convolution that does not learn."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps to maps."""
        result: Tensor = _FrozenConv.apply(input, self)  # type: ignore[no-untyped-call]
        return result


def lean_residuals(unet: nn.Module) -> None:
    """Let a UNet's residual blocks, its last norm and its frozen convolutions compute so; others stay as they are."""
    for module in unet.modules():
        if type(module) is nn.Conv2d and not module.weight.requires_grad and module.padding_mode == "zeros":
            module.__class__ = FrozenConv
        elif isinstance(module, ResnetBlock2D) and _is_ordinary(module):
            module.norm1.__class__ = module.norm2.__class__ = NormAndSilu
            module.__class__ = LeanResidual
    if type(getattr(unet, "conv_norm_out", None)) is nn.GroupNorm and isinstance(unet.conv_act, nn.SiLU):
        unet.conv_norm_out.__class__, unet.conv_act = NormAndSilu, nn.Identity()


def _is_ordinary(block: ResnetBlock2D) -> bool:
    """Whether diffusers' forward comes to the same for it as ours."""
    return (
        type(block) is ResnetBlock2D
        and type(block.norm1) is nn.GroupNorm
        and type(block.norm2) is nn.GroupNorm
        and isinstance(block.nonlinearity, nn.SiLU)
        and cast(object, block.time_emb_proj) is not None
        and block.time_embedding_norm == "default"
        and not (block.skip_time_act or block.upsample or block.downsample)
        and block.output_scale_factor == 1.0
        and block.dropout.p == 0.0
    )


class _NormAndSilu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.GroupNorm) -> Tensor:
        normed, mean, rstd = _normed(x, norm)
        ctx.save_for_backward(x, mean, rstd)
        ctx.norm = norm
        return F.silu(normed, inplace=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, mean, rstd = ctx.saved_tensors
        norm = ctx.norm
        above = torch.ops.aten.silu_backward(gradient, _normed(x, norm)[0])
        below = torch.ops.aten.native_group_norm_backward
        needed = [True, False, False]
        return below(above.contiguous(), x.contiguous(), mean, rstd, norm.weight, *_sizes(x, norm), needed)[0], None


class _FrozenConv(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conv: nn.Conv2d) -> Tensor:
        ctx.shape, ctx.conv = x.shape, conv
        return F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        conv = ctx.conv
        settings = (conv.stride, conv.padding, conv.dilation, conv.groups)
        return conv2d_input(ctx.shape, conv.weight, gradient, *settings), None  # type: ignore[no-untyped-call]


def _normed(x: Tensor, norm: nn.GroupNorm) -> tuple[Tensor, Tensor, Tensor]:
    """The maps, and mean and 1 / deviation of each group of them."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_group_norm(
        x.contiguous(), norm.weight, norm.bias, *_sizes(x, norm), norm.eps
    )
    return found


def _sizes(x: Tensor, norm: nn.GroupNorm) -> tuple[int, int, int, int]:
    return len(x), x.shape[1], x.shape[2] * x.shape[3], norm.num_groups
