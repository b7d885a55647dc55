"""Residual blocks and frozen convolutions of which backward finds only what it needs, over diffusers' own modules.

A norm with its SiLU keeps its input, of which both are computed again; a frozen convolution keeps nothing. A block
without a convolution that learns is one function: for small maps a card does operations quicker than the host records
them one by one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Normed = tuple[Tensor, Tensor, Tensor]
"""Maps, and mean and 1 / deviation of each group of them."""


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


class FrozenResidual(LeanResidual):
    """The same in one function, as none of its convolutions learns."""

    norm1: NormAndSilu
    norm2: NormAndSilu
    conv1: FrozenConv
    conv2: FrozenConv
    conv_shortcut: FrozenConv | None

    def forward(self, input_tensor: Tensor, temb: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Maps (B, C, h, w) and the embedding of the time step (B, width) to maps."""
        result: Tensor = _Residual.apply(input_tensor, self.time_emb_proj(F.silu(temb)), self)  # type: ignore[no-untyped-call]
        return result


class NormAndSilu(nn.GroupNorm):
    """A frozen GroupNorm with the SiLU after it."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C, h, w) to the same."""
        result: Tensor = _NormAndSilu.apply(input, self)  # type: ignore[no-untyped-call]
        return result

    def normed(self, x: Tensor) -> Normed:
        """What it makes of maps x (B, C, h, w), for functions that do backward themselves."""
        normed, mean, rstd = _normed(x, self)
        return F.silu(normed, inplace=True), mean, rstd

    def gradient(self, above: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        """The gradient of x from that of what `normed` made of it."""
        above = torch.ops.aten.silu_backward(above, _normed(x, self)[0])
        below = torch.ops.aten.native_group_norm_backward
        sizes, needed = _sizes(x, self), [True, False, False]
        of_x: Tensor = below(above.contiguous(), x.contiguous(), mean, rstd, self.weight, *sizes, needed)[0]
        return of_x


class FrozenConv(nn.Conv2d):
    """A convolution that does not learn."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps to maps."""
        result: Tensor = _FrozenConv.apply(input, self)  # type: ignore[no-untyped-call]
        return result

    def convolved(self, x: Tensor) -> Tensor:
        """What it makes of maps x, for functions that do backward themselves."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def gradient(self, above: Tensor, like: Tensor) -> Tensor:
        """The gradient of its input from that of its output; ``like`` has the shape of the input, and is not read."""
        back, settings = torch.ops.aten.convolution_backward, (self.stride, self.padding, self.dilation)
        whole = (False, [0, 0], self.groups)  # not transposed, no padding of the output
        of_x: Tensor = back(above, like, self.weight, None, *settings, *whole, [True, False, False])[0]
        return of_x


def lean_residuals(unet: nn.Module) -> None:
    """Let a UNet's residual blocks, its last norm and its frozen convolutions compute so; others stay as they are."""
    for module in unet.modules():
        if type(module) is nn.Conv2d and _is_ordinary_convolution(module):
            module.__class__ = FrozenConv
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D) and _is_ordinary(module):
            module.norm1.__class__ = module.norm2.__class__ = NormAndSilu
            module.__class__ = FrozenResidual if _is_frozen(module) else LeanResidual
    if type(getattr(unet, "conv_norm_out", None)) is nn.GroupNorm and isinstance(unet.conv_act, nn.SiLU):
        unet.conv_norm_out.__class__, unet.conv_act = NormAndSilu, nn.Identity()


def _is_ordinary(block: ResnetBlock2D) -> bool:
    """Whether diffusers' forward comes to the same for it as ours."""
    return (
        type(block) is ResnetBlock2D
        and type(block.norm1) is nn.GroupNorm
        and type(block.norm2) is nn.GroupNorm
        and not (_learns(block.norm1) or _learns(block.norm2))
        and isinstance(block.nonlinearity, nn.SiLU)
        and cast(object, block.time_emb_proj) is not None
        and block.time_embedding_norm == "default"
        and not (block.skip_time_act or block.upsample or block.downsample)
        and block.output_scale_factor == 1.0
        and block.dropout.p == 0.0
    )


def _is_ordinary_convolution(conv: nn.Conv2d) -> bool:
    return not _learns(conv) and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def _learns(module: nn.Module) -> bool:
    """Whether a weight or bias of its own does."""
    return any(weight.requires_grad for weight in module.parameters(recurse=False))


def _is_frozen(block: ResnetBlock2D) -> bool:
    convolutions = (block.conv1, block.conv2, block.conv_shortcut)
    return all(conv is None or type(conv) is FrozenConv for conv in convolutions)


class _Residual(Function):
    """Nothing is kept but the input of each norm, and the little that norms know of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, time: Tensor, block: FrozenResidual) -> Tensor:
        active, *first = block.norm1.normed(x)
        hidden = block.conv1.convolved(active).add_(time[:, :, None, None])
        active, *second = block.norm2.normed(hidden)
        result: Tensor = block.conv2.convolved(active)
        ctx.save_for_backward(x, *first, hidden, *second)
        ctx.block = block
        return result.add_(x if block.conv_shortcut is None else block.conv_shortcut.convolved(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        block = ctx.block
        x, mean, rstd, hidden, *second = ctx.saved_tensors
        above = block.norm2.gradient(block.conv2.gradient(gradient, hidden), hidden, *second)
        of_time = above.sum((2, 3)) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_time, None
        above = block.conv1.gradient(above, x)  # under the same name, so that what it was does not stay in memory
        of_x = block.norm1.gradient(above, x, mean, rstd)
        past = gradient if block.conv_shortcut is None else block.conv_shortcut.gradient(gradient, x)
        return of_x.add_(past), of_time, None


class _NormAndSilu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: NormAndSilu) -> Tensor:
        result, mean, rstd = norm.normed(x)
        ctx.save_for_backward(x, mean, rstd)
        ctx.norm = norm
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.norm.gradient(gradient, *ctx.saved_tensors), None


class _FrozenConv(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conv: FrozenConv) -> Tensor:
        ctx.shape, ctx.conv = x.shape, conv
        return conv.convolved(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.conv.gradient(gradient, _like(gradient, ctx.shape)), None


def _like(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Something of a shape that nobody reads, in the gradient's layout, as cuDNN takes its own from it.

    Without memory where that is the usual one; maps of channels-last cost as much as the result for a moment.
    """
    like = gradient.new_empty(1).expand(shape)
    return torch.empty_like(like, memory_format=torch.channels_last) if is_channels_last(gradient) else like


def is_channels_last(x: Tensor) -> bool:
    """Whether maps (B, C, h, w) lie so and not as usual; those of a single place or channel lie both ways."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _normed(x: Tensor, norm: nn.GroupNorm) -> Normed:
    found: Normed = torch.ops.aten.native_group_norm(x.contiguous(), norm.weight, norm.bias, *_sizes(x, norm), norm.eps)
    return found


def _sizes(x: Tensor, norm: nn.GroupNorm) -> tuple[int, int, int, int]:
    return len(x), x.shape[1], x.shape[2] * x.shape[3], norm.num_groups
