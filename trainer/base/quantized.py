"""Frozen linear layers kept in 4 or 8 bits through bitsandbytes.

Products of int8 numbers over frozen int8 weights: each row of inputs, or of gradients, is rounded on the way.

A weight is W8 with a scale a row (outputs,): W = diag(scales / 127) W8, as bitsandbytes keeps it. A row of inputs is
rounded by its own largest number, so that the sums of integers, which are exact, only have to be scaled. As in LLM.int8
(Dettmers et al. 2022), but without its way round outliers: see docs/decisions/0019.

Eager PyTorch moves 9 bytes a number to round bf16 rows and 10 a result to scale it: the few operations are those that
move least. Triton could do with 3 and 6.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from bitsandbytes.functional import create_dynamic_map, dequantize_4bit, name2qmap
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from trainer.base.weights import Placer
from trainer.config.fit import ProductConfig

MULTIPLE = 8
"""torch._int_mm refuses inputs and outputs that are no multiples of it on CUDA cards."""
_LARGEST = 127
# From 1024 to 2048 numbers in fp16 are whole: added to this one, a number of at most 127 is rounded, half to even, and
# its last byte is then what int8 writes for it. That is two passes over memory where round and cast take three.
_WHOLE = 1536.0
_BLOCKS = "transformer_blocks"
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


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


def int8_product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., inputs) times the transposed weight (outputs, inputs), plus bias: (..., outputs) in the format of x."""
    rows, worth = rounded(x.reshape(-1, x.shape[-1]))
    wide = _times(torch._int_mm(rows, weight.t()), worth, x.dtype)
    result = wide.mul_(scales) if bias is None else torch.addcmul(bias, wide, scales, out=wide)
    return result.to(x.dtype).view(*x.shape[:-1], len(weight))


def int8_input_gradient(gradient: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
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


Quantisation = Literal["int8", "int8_products", "nf4"]


class FrozenInt8Linear(Linear8bitLt):
    """Weights in int8 with one scale a row; they are brought back to the input's dtype, or multiplied as they are.

    bitsandbytes' own forward on a GPU also rounds the inputs to int8, row by row, by way of fp16, and logs a line each
    time: bf16 activations past 65504 turn infinite, and the gradients belong to other outputs than those computed. Its
    function for CPUs has neither fault, but keeps every input where gradient checkpointing cannot drop it: 1.8 GiB for
    SDXL at 1024.
    """

    directions = NEVER
    """Where its products are made in int8 (fit.quantise = "int8_products"), which rounds inputs and gradients too."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., inputs) times the weights' values, plus bias; gradients flow to x alone."""
        if cast(Int8Params, self.weight).CB is not None:
            self.init_8bit_state()  # type: ignore[no-untyped-call]
        product: Tensor = _Int8Product.apply(  # type: ignore[no-untyped-call]
            x, self.state.CB, self.state.SCB, self.bias, self.directions
        )
        return product

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of x from that of what came out; call it after a forward."""
        return input_gradient(gradient, cast(Tensor, self.state.CB), cast(Tensor, self.state.SCB), self.directions)


class _Int8Product(torch.autograd.Function):
    """x (..., inputs) times frozen int8 weights (outputs, inputs) with a scale a row, plus bias; keeps no input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, directions: Directions
    ) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.directions = directions
        return product(x, weight, scales, bias, directions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, scales = ctx.saved_tensors
        return input_gradient(gradient, weight, scales, ctx.directions), None, None, None, None


def product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, directions: Directions = NEVER) -> Tensor:
    """x (..., inputs) times frozen int8 weights (outputs, inputs) with a scale a row, plus bias: in the format of x."""
    if enough(x, directions.forward):
        return int8_product(x, weight, scales, bias)
    return F.linear(x, _restored(weight, scales, x.dtype), bias)


def input_gradient(gradient: Tensor, weight: Tensor, scales: Tensor, directions: Directions = NEVER) -> Tensor:
    """What the gradient (..., outputs) of such a product makes that of its x: (..., inputs)."""
    if enough(gradient, directions.backward):
        return int8_input_gradient(gradient, weight, scales)
    return gradient @ _restored(weight, scales, gradient.dtype)


def _restored(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that int8 weights stand for, as bitsandbytes computes them: the largest of a row is 127."""
    return weight.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


class FrozenNF4Linear(Linear4bit):
    """Weights as NF4 with doubly quantised scales; the product is made in the input's dtype."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            inputs, outputs, bias, compute_dtype=dtype, compress_statistics=True, quant_type="nf4", device=device
        )
        # On CPUs with AVX512-BF16 a pass without gradient would repack the weights for a product that has
        # none, and every later training step would lose the gradient to the layers before.
        self.support_avx512bf16_for_cpu = False

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of x from that of what came out."""
        weight = cast(Params4bit, self.weight)
        return gradient @ dequantize_4bit(weight, weight.quant_state).to(gradient.dtype)


def quantisable(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside transformer blocks, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and _BLOCKS in name}


def quantise_linears(model: nn.Module, kind: Quantisation, dtype: torch.dtype, device: torch.device) -> Placer:
    """Exchange the empty linear layers inside transformer blocks, and return what quantises each weight as it comes.

    Sets the marks by which PEFT chooses its layers for quantised weights.
    """
    for name, linear in quantisable(model).items():
        model.set_submodule(name, _empty(linear, kind, dtype))
    setattr(model, "is_loaded_in_4bit" if kind == "nf4" else "is_loaded_in_8bit", True)
    # The library makes this map for the first weight and keeps it for all: one made for a weight on the meta device
    # would have no values for those that come after.
    name2qmap.setdefault("dynamic", create_dynamic_map())

    def place(module: nn.Module, leaf: str, tensor: Tensor) -> bool:
        if leaf != "weight" or not isinstance(module, (FrozenInt8Linear, FrozenNF4Linear)):
            return False
        # Weights on the device already, and `_quantize` outright: `.to(device)` comes to the same, but does nothing
        # for the meta device, where forecasts trace it.
        if isinstance(module, FrozenNF4Linear):
            linear = cast(Linear4bit, module)
            nf4 = Params4bit(
                tensor.to(device), requires_grad=False, compress_statistics=True, quant_type="nf4", module=linear
            )
            module.weight = nf4._quantize(device)
        else:
            int8 = Int8Params(tensor.to(device, torch.float16), requires_grad=False, has_fp16_weights=False)
            module.weight = int8._quantize(device)
        _return_freed_memory()
        return True

    return place


def choose_products(model: nn.Module, products: Sequence[ProductConfig]) -> None:
    """Let the layers in 8 bits that ``products`` are of multiply in int8; bits of weights stay as they are."""
    for module in model.modules():
        if isinstance(module, FrozenInt8Linear):
            module.directions = directions_of(module.in_features, module.out_features, products)


def _return_freed_memory() -> None:
    """Give freed pages back to the system, where the C library keeps them.

    Small weights that stay lie between large ones that were freed: without this, glibc's heap grows to two and a half
    times what is kept. Costs a second for SDXL.
    """
    if _MALLOC_TRIM:
        _MALLOC_TRIM(0)


def _empty(linear: nn.Linear, kind: Quantisation, dtype: torch.dtype) -> nn.Module:
    bias = linear.bias is not None
    if kind == "nf4":
        return FrozenNF4Linear(linear.in_features, linear.out_features, bias=bias, dtype=dtype, device="meta")
    return FrozenInt8Linear(
        linear.in_features, linear.out_features, bias, has_fp16_weights=False, device=torch.device("meta")
    )
