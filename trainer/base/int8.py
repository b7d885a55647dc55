"""Products of int8 numbers over frozen int8 weights: each row of inputs, or of gradients, is rounded on the way.

A weight is W8 with a scale a row (outputs,): W = diag(scales / 127) W8, as bitsandbytes keeps it. A row of inputs is
rounded by its own largest number, so that the sums of integers, which are exact, only have to be scaled. As in LLM.int8
(Dettmers et al. 2022), but without its way round outliers: see docs/decisions/0019.

Eager PyTorch moves 9 bytes a number to round bf16 rows and 10 a result to scale it: the few operations are those that
move least. Triton could do with 3 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from trainer.config.products import ProductConfig

MULTIPLE = 8
"""torch._int_mm refuses inputs and outputs that are no multiples of it on CUDA cards."""
_LARGEST = 127
# From 1024 to 2048 numbers in fp16 are whole: added to this one, a number of at most 127 is rounded, half to even, and
# its last byte is then what int8 writes for it. That is two passes over memory where round and cast take three.
_WHOLE = 1536.0


@dataclass(frozen=True, slots=True)
class Directions:
    """From how many rows on a layer's two products are made in int8; None: never."""

    forward: int | None = None
    backward: int | None = None


NEVER = Directions()


def directions_of(inputs: int, outputs: int, products: Sequence[ProductConfig]) -> Directions:
    """What the first of ``products`` that is of a layer's size says of it; never where int8 cannot be multiplied."""
    if inputs % MULTIPLE or outputs % MULTIPLE:
        return NEVER
    found = next((each for each in products if each.is_of(inputs, outputs)), None)
    return Directions(found.forward, found.backward) if found else NEVER


def enough(x: Tensor, least: int | None) -> bool:
    """Whether x (..., inputs) has at least so many rows; none are enough for None."""
    return least is not None and x.numel() >= least * x.shape[-1]


def product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., inputs) times the transposed weight (outputs, inputs), plus bias: (..., outputs) in the format of x."""
    rows, worth = rounded(x.reshape(-1, x.shape[-1]))
    wide = _times(torch._int_mm(rows, weight.t()), worth, x.dtype)
    result = wide.mul_(scales) if bias is None else torch.addcmul(bias, wide, scales, out=wide)
    return result.to(x.dtype).view(*x.shape[:-1], len(weight))


def input_gradient(gradient: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Gradient (..., outputs) times the weight (outputs, inputs): (..., inputs) in its format.

    What scales the rows of the weight scales columns here, so it is multiplied in before rows are rounded.
    """
    above = gradient.reshape(-1, gradient.shape[-1])
    rows, worth = rounded(_times(above, scales, gradient.dtype))
    result = _times(torch._int_mm(rows, _by_columns(weight)), worth, gradient.dtype)
    return result.to(gradient.dtype).view(*gradient.shape[:-1], weight.shape[1])


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (M, N) as int8, the largest of each ±127, and what a unit is worth beside one of weights: fp32 (M, 1).

    A row with a number that is not finite has a worth that is not, so that all that comes of it is not finite either.
    But numbers are silently 0 where 127 times them is beyond fp32, from about 2.68e36 on.
    """
    largest = torch.linalg.vector_norm(rows, math.inf, -1, keepdim=True, dtype=torch.float32)
    whole = rows.new_empty(rows.shape, dtype=torch.float16)
    torch.addcdiv(rows.new_full((), _WHOLE), rows, largest, value=_LARGEST, out=whole)
    return whole.view(torch.int8)[:, ::2].contiguous(), largest.mul_(1 / _LARGEST**2)


def _times(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers (M, N) scaled, in a format as wide as fp32: ``dtype`` itself, but for fp16."""
    wide = torch.float32 if dtype == torch.float16 else dtype
    return torch.mul(numbers, scales, out=numbers.new_empty(numbers.shape, dtype=wide))


def _by_columns(weight: Tensor) -> Tensor:
    """The weight laid out column by column, for a moment, for cuBLAS takes the second matrix of int8 so alone.

    Where both lie row by row newer ones refuse, and some older gave wrong numbers (pytorch#106840, #169961).
    """
    return weight.t().contiguous().t()


def _flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


if torch.ops.aten._int_mm not in flop_registry:  # as of torch 2.13 such products count as no work
    register_flop_formula(torch.ops.aten._int_mm)(_flops)
