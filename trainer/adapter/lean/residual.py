"""Residual blocks and frozen convolutions that save only what backward needs, based on diffusers' modules.

Norm and SiLU are one function that saves only its input and recomputes both in backward; a frozen convolution saves
nothing. A block whose convolutions are all frozen is a single autograd function, because on small maps the GPU runs
kernels faster than the host can record them for autograd one by one.
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
"""SiLU of the normalized maps, and each group's mean and 1 / standard deviation."""


class LeanResidual(ResnetBlock2D):
    """SD 1.5 and SDXL residual block without diffusers' division by 1.0; its norms include the SiLU."""

    def forward(self, input_tensor: Tensor, temb: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output maps for input maps (B, C, h, w) and the timestep embedding (B, width)."""
        hidden = self.conv1(self.norm1(input_tensor))
        hidden = hidden + self.time_emb_proj(F.silu(temb))[:, :, None, None]
        hidden = self.conv2(self.norm2(hidden))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        result: Tensor = input_tensor + hidden
        return result


class FrozenResidual(LeanResidual):
    """Residual block whose convolutions are all frozen, as a single autograd function."""

    norm1: NormAndSilu
    norm2: NormAndSilu
    conv1: FrozenConv
    conv2: FrozenConv
    conv_shortcut: FrozenConv | None

    def forward(self, input_tensor: Tensor, temb: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output maps for input maps (B, C, h, w) and the timestep embedding (B, width)."""
        result: Tensor = _Residual.apply(input_tensor, self.time_emb_proj(F.silu(temb)), self)  # type: ignore[no-untyped-call]
        return result


class NormAndSilu(nn.GroupNorm):
    """Frozen GroupNorm followed by SiLU."""

    def forward(self, input: Tensor) -> Tensor:
        """Return SiLU(GroupNorm(input)), with the same shape as the input (B, C, h, w)."""
        result: Tensor = _NormAndSilu.apply(input, self)  # type: ignore[no-untyped-call]
        return result

    def norm_silu(self, x: Tensor) -> Normed:
        """Return SiLU(GroupNorm(x)) and each group's statistics, for functions that call `gradient` in backward."""
        normed, mean, rstd = _normed(x, self)
        return F.silu(normed, inplace=True), mean, rstd

    def gradient(self, grad_output: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        """Return the gradient of x, given the gradient of `norm_silu`'s output; recompute the norm."""
        grad_output = torch.ops.aten.silu_backward(grad_output, _normed(x, self)[0])
        group_norm_backward = torch.ops.aten.native_group_norm_backward
        sizes, needed = _sizes(x, self), [True, False, False]
        grad_x: Tensor = group_norm_backward(
            grad_output.contiguous(), x.contiguous(), mean, rstd, self.weight, *sizes, needed
        )[0]
        return grad_x


class FrozenConv(nn.Conv2d):
    """Frozen convolution that saves nothing for backward: its input gradient needs only its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of the input (B, C, h, w)."""
        result: Tensor = _FrozenConv.apply(input, self)  # type: ignore[no-untyped-call]
        return result

    def convolve(self, x: Tensor) -> Tensor:
        """Return the convolution of x, for functions that call `gradient` in backward."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def gradient(self, grad_output: Tensor, like: Tensor) -> Tensor:
        """Return the input gradient, given the output gradient; only the shape and layout of ``like`` are used."""
        convolution_backward, settings = torch.ops.aten.convolution_backward, (self.stride, self.padding, self.dilation)
        rest = (False, [0, 0], self.groups)  # not transposed, no output padding
        grad_x: Tensor = convolution_backward(
            grad_output, like, self.weight, None, *settings, *rest, [True, False, False]
        )[0]
        return grad_x


def lean_residuals(unet: nn.Module) -> None:
    """Make a UNet's standard residual blocks, last norm and frozen convolutions lean; leave the rest unchanged."""
    # Only the class changes: parameters, hooks and module paths stay, so PEFT and saving still find them.
    for module in unet.modules():
        if type(module) is nn.Conv2d and _is_standard_convolution(module):
            module.__class__ = FrozenConv
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D) and _is_standard(module):
            module.norm1.__class__ = module.norm2.__class__ = NormAndSilu
            module.__class__ = FrozenResidual if _is_frozen(module) else LeanResidual
    if type(getattr(unet, "conv_norm_out", None)) is nn.GroupNorm and isinstance(unet.conv_act, nn.SiLU):
        unet.conv_norm_out.__class__, unet.conv_act = NormAndSilu, nn.Identity()


def _is_standard(block: ResnetBlock2D) -> bool:
    """Return whether our forward computes the same result as diffusers' for this block."""
    return (
        type(block) is ResnetBlock2D
        and type(block.norm1) is nn.GroupNorm
        and type(block.norm2) is nn.GroupNorm
        and not (_is_trained(block.norm1) or _is_trained(block.norm2))
        and isinstance(block.nonlinearity, nn.SiLU)
        and cast(object, block.time_emb_proj) is not None
        and block.time_embedding_norm == "default"
        and not (block.skip_time_act or block.upsample or block.downsample)
        and block.output_scale_factor == 1.0
        and block.dropout.p == 0.0
    )


def _is_standard_convolution(conv: nn.Conv2d) -> bool:
    return not _is_trained(conv) and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def _is_trained(module: nn.Module) -> bool:
    """Return whether a weight or bias of the module itself, not of a child, is trained."""
    return any(weight.requires_grad for weight in module.parameters(recurse=False))


def _is_frozen(block: ResnetBlock2D) -> bool:
    convolutions = (block.conv1, block.conv2, block.conv_shortcut)
    return all(conv is None or type(conv) is FrozenConv for conv in convolutions)


class _Residual(Function):
    """Whole residual block; saves each norm's input and statistics, and recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, time: Tensor, block: FrozenResidual) -> Tensor:
        active, *first = block.norm1.norm_silu(x)
        # In place is safe here: a frozen convolution saves neither its input nor its output.
        hidden = block.conv1.convolve(active).add_(time[:, :, None, None])
        active, *second = block.norm2.norm_silu(hidden)
        result: Tensor = block.conv2.convolve(active)
        ctx.save_for_backward(x, *first, hidden, *second)
        ctx.block = block
        return result.add_(x if block.conv_shortcut is None else block.conv_shortcut.convolve(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        block = ctx.block
        x, mean, rstd, hidden, *second = ctx.saved_tensors
        # `hidden` and `x` are also placeholders for the convolutions' inputs, which have the same shapes and layouts.
        grad = block.norm2.gradient(block.conv2.gradient(gradient, hidden), hidden, *second)
        grad_time = grad.sum((2, 3)) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_time, None
        # Reusing the name frees the previous gradient and lowers the peak by one map.
        grad = block.conv1.gradient(grad, x)
        grad_x = block.norm1.gradient(grad, x, mean, rstd)
        grad_shortcut = gradient if block.conv_shortcut is None else block.conv_shortcut.gradient(gradient, x)
        return grad_x.add_(grad_shortcut), grad_time, None


class _NormAndSilu(Function):
    """Norm and SiLU; saves the input and each group's statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: NormAndSilu) -> Tensor:
        result, mean, rstd = norm.norm_silu(x)
        ctx.save_for_backward(x, mean, rstd)
        ctx.norm = norm
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.norm.gradient(gradient, *ctx.saved_tensors), None


class _FrozenConv(Function):
    """Convolution that saves only the shape of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, conv: FrozenConv) -> Tensor:
        ctx.shape, ctx.conv = x.shape, conv
        return conv.convolve(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.conv.gradient(gradient, _like(gradient, ctx.shape)), None


def _like(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Return a placeholder for a convolution's input, from which cuDNN takes only the result's memory format.

    In the default format, the placeholder is one expanded element and takes no memory. Expanding cannot produce the
    channels-last format, so in that format the placeholder is briefly as large as the result.
    """
    like = gradient.new_empty(1).expand(shape)
    return torch.empty_like(like, memory_format=torch.channels_last) if is_channels_last(gradient) else like


def is_channels_last(x: Tensor) -> bool:
    """Return whether maps (B, C, h, w) are channels-last and not also contiguous, as 1x1 and one-channel maps are."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _normed(x: Tensor, norm: nn.GroupNorm) -> Normed:
    result: Normed = torch.ops.aten.native_group_norm(
        x.contiguous(), norm.weight, norm.bias, *_sizes(x, norm), norm.eps
    )
    return result


def _sizes(x: Tensor, norm: nn.GroupNorm) -> tuple[int, int, int, int]:
    return len(x), x.shape[1], x.shape[2] * x.shape[3], norm.num_groups
