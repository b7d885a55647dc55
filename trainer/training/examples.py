"""Operations of a given kind and size, to be timed: tensors of random numbers and a call that computes with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Thunk = Callable[[], object]

_HEAD = 64
_NARROWEST = 8


@dataclass(frozen=True, slots=True)
class Size:
    """Operations of one size; `trainer.protocol.rate.Operation` says what the fields mean."""

    kind: str
    dtype: str
    stage: str
    flops: int
    bytes: int


def examples_of(size: Size, device: torch.device) -> list[Thunk]:
    """Return calls that each take about as long as an operation of this size does; their mean stands for it.

    A trace knows flops and bytes but no shapes. Shapes are found that have both, as if matrices were square and
    convolutions had as many channels in as out.
    """
    return _MAKERS[size.kind](size, device)


def _random(size: Size, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(_format(size))


def _format(size: Size) -> torch.dtype:
    """The format to measure in: weights of 4 and 8 bits are multiplied in a 16-bit one."""
    found: torch.dtype = getattr(torch, size.dtype)
    return found if found.is_floating_point else torch.bfloat16


def _numbers(size: Size) -> float:
    return size.bytes / _format(size).itemsize


def _gemm(size: Size, device: torch.device) -> list[Thunk]:
    """M x N by N x N: 2 M N N flops, and M N + N N + M N numbers."""
    products = size.flops / 2
    side = round(_likely(_widths(1.0, _numbers(size), 2 * products), products ** (1 / 3)))
    left, right = _random(size, device, max(1, round(products / side**2)), side), _random(size, device, side, side)
    return [lambda: left @ right]


def _conv(size: Size, device: torch.device) -> list[Thunk]:
    """k x k over P places, C channels in and out: 2 k k P C C flops, and the numbers of maps of P C and the weight.

    Backward goes to the input only, as with a frozen base; it reads one map more.
    """
    maps = 3 if size.stage == "backward" else 2
    kernels: dict[float, int] = {}
    for kernel in (1, 3):
        products = size.flops / 2 / kernel**2
        kernels |= dict.fromkeys(_widths(kernel**2, _numbers(size), maps * products), kernel)
    channels = _likely(list(kernels), (size.flops / 162) ** (1 / 3))  # otherwise 3 x 3 over as many places as channels
    kernel = kernels.get(channels, 3)
    channels = round(channels)
    side = max(1, round(math.sqrt(size.flops / 2) / kernel / channels))
    image = _random(size, device, 1, channels, side, side)
    weight = _random(size, device, channels, channels, kernel, kernel)
    around, ones = [kernel // 2] * 2, [1, 1]
    if size.stage != "backward":
        return [lambda: F.conv2d(image, weight, padding=around)]
    back = torch.ops.aten.convolution_backward
    return [lambda: back(image, image, weight, None, ones, around, ones, False, [0, 0], 1, [True, False, False])]


def _attention(size: Size, device: torch.device) -> list[Thunk]:
    """S places attending to S with a width of D in all: 4 S S D flops and 4 S D numbers; backward 10 and 8."""
    backward = size.stage == "backward"
    flops, maps = (10, 8) if backward else (4, 4)
    plane = _numbers(size) / maps
    # No head is narrower than that, so there are no more places than these flops are enough for.
    places = max(1, round(min(size.flops / flops / plane, math.sqrt(size.flops / flops / _NARROWEST))))
    heads = max(1, round(plane / places / _HEAD))
    shape = (1, heads, places, max(_NARROWEST, min(_HEAD, round(plane / places / heads / 8) * 8)))
    query, key, value = (_random(size, device, *shape).requires_grad_(backward) for _ in range(3))
    if not backward:
        return [lambda: F.scaled_dot_product_attention(query, key, value)]
    result = F.scaled_dot_product_attention(query, key, value)
    above = torch.ones_like(result)
    return [lambda: torch.autograd.grad(result, (query, key, value), above, retain_graph=True)]


def _other(size: Size, device: torch.device) -> list[Thunk]:
    """What moves that many bytes: a sum, an activation and a normalisation, as they follow each other in a UNet."""
    numbers = _numbers(size)
    one, other = (_random(size, device, max(1, round(numbers / 3))) for _ in range(2))
    width = min(_HEAD, max(1, round(numbers / 2)))
    rows = _random(size, device, max(1, round(numbers / 2 / width)), width)
    return [lambda: one + other, lambda: F.silu(rows), lambda: F.layer_norm(rows, (width,))]


_MAKERS = {"gemm": _gemm, "conv": _conv, "attention": _attention, "other": _other}


def _widths(weight: float, numbers: float, plane: float) -> list[float]:
    """Return the widths w of at least 1 with weight w w + plane / w = numbers: two in general, or none."""
    roots = np.roots([weight, 0.0, -numbers, plane])
    return [float(root.real) for root in roots if abs(root.imag) < 1e-6 * abs(root) and root.real >= 1]


def _likely(widths: list[float], otherwise: float) -> float:
    """Return the width nearest to a multiple of eight, as models have; where there is none, ``otherwise``."""
    return min(widths, key=lambda width: abs(width / 8 - round(width / 8)) / width, default=max(1.0, otherwise))
