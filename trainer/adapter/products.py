"""Compute what a frozen layer would return with other weights, without keeping what backward can compute again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.base.quantized import FrozenInt8Linear, FrozenNF4Linear

Frozen = nn.Linear | nn.Conv2d


def dense_weight(frozen: Frozen, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight of a frozen layer, dequantized if needed, in `dtype` or in the layer's own."""
    weight = frozen.dense_weight() if isinstance(frozen, FrozenInt8Linear | FrozenNF4Linear) else frozen.weight
    return weight.detach().to(dtype or weight.dtype)


def base_shape(frozen: Frozen) -> tuple[int, ...]:
    """Return the shape of a frozen layer's weight, which is packed if it is quantized."""
    if isinstance(frozen, nn.Conv2d):
        return (frozen.out_channels, frozen.in_channels, *frozen.kernel_size)
    return (frozen.out_features, frozen.in_features)


def apply_weight(frozen: Frozen, x: Tensor, weight: Tensor) -> Tensor:
    """Return the output of a layer like `frozen` for x, with another weight and without a bias."""
    if isinstance(frozen, nn.Conv2d):
        return F.conv2d(x, weight, None, frozen.stride, frozen.padding, frozen.dilation, frozen.groups)
    return F.linear(x, weight)


def apply_pointwise(hidden: Tensor, up: Tensor) -> Tensor:
    """Return the output of an up matrix, or of an up kernel of 1x1, for the hidden values of its down matrix."""
    return F.conv2d(hidden, up) if up.ndim == 4 else F.linear(hidden, up)


def minus_bias(frozen: Frozen, output: Tensor) -> Tensor:
    """Return a layer's output without the bias that is in it."""
    if frozen.bias is None:
        return output
    return output - (frozen.bias.view(-1, 1, 1) if isinstance(frozen, nn.Conv2d) else frozen.bias)


def without_bias(frozen: Frozen, x: Tensor) -> Tensor:
    """Return a layer's output for x without its bias."""
    if isinstance(frozen, FrozenInt8Linear | FrozenNF4Linear):
        without: Tensor = frozen.without_bias(x)
        return without
    return apply_weight(frozen, x, frozen.weight)


def apply_kronecker(frozen: Frozen, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Return the output for x with the weight w1 ⊗ w2: x as a matrix of (w1's inputs, w2's inputs) per position."""
    if not isinstance(frozen, nn.Conv2d):
        inner = F.linear(x.reshape(*x.shape[:-1], w1.shape[1], w2.shape[1]), w2)
        return (w1 @ inner).flatten(-2)
    count, _, *size = x.shape
    inner = apply_weight(frozen, x.reshape(count * w1.shape[1], w2.shape[1], *size), w2)
    size = list(inner.shape[2:])
    mixed = w1 @ inner.reshape(count, w1.shape[1], -1)
    return mixed.view(count, w1.shape[0] * w2.shape[0], *size)


def apply_built(frozen: Frozen, x: Tensor, build: Callable[..., Tensor], *weights: Tensor) -> Tensor:
    """Return the output for a weight built from smaller ones; backward builds it again instead of keeping it."""
    if torch.compiler.is_compiling():  # which decides itself what to keep
        return apply_weight(frozen, x, build(*weights).view(base_shape(frozen)))
    result: Tensor = _BuiltWeight.apply(x, frozen, build, *weights)  # type: ignore[no-untyped-call]
    return result


def recomputed(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return the output of a cheap function; backward computes it again instead of keeping what it saves."""
    if torch.compiler.is_compiling():
        return compute(*inputs)
    result: Tensor = _Recomputed.apply(compute, *inputs)  # type: ignore[no-untyped-call]
    return result


class _BuiltWeight(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: Frozen, build: Callable[..., Tensor], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.frozen, ctx.build = frozen, build
        return apply_weight(frozen, x, build(*weights).view(base_shape(frozen)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [weight.detach().requires_grad_() for weight in weights]
            built = ctx.build(*leaves)
        shaped = built.detach().view(base_shape(ctx.frozen))
        grad_x, grad_built = _gradients(ctx.frozen, gradient, x, shaped, needs_x=ctx.needs_input_grad[0])
        return grad_x, None, None, *torch.autograd.grad(built, leaves, grad_built.view(built.shape))


def _gradients(
    frozen: Frozen, gradient: Tensor, x: Tensor, weight: Tensor, *, needs_x: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of x (None unless needed) and of the weight of `apply_weight`."""
    if isinstance(frozen, nn.Conv2d):
        settings = (frozen.stride, frozen.padding, frozen.dilation, False, [0, 0], frozen.groups)
        convolution_backward = torch.ops.aten.convolution_backward
        grad_x, grad_weight, _ = convolution_backward(gradient, x, weight, None, *settings, [needs_x, True, False])
        return grad_x, grad_weight
    return (gradient @ weight if needs_x else None), gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.compute = compute
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            output = ctx.compute(*inputs)
        found = iter(torch.autograd.grad(output, [each for each in inputs if each.requires_grad], gradient))
        return None, *(next(found) if need else None for need in needed)
