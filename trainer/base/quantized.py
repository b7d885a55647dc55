"""Frozen linear layers with 8-bit or 4-bit weights from bitsandbytes, and int8 GEMMs on the 8-bit ones.

A weight W8 has one scale per row (outputs,): W = diag(scales / 127) W8, as bitsandbytes stores it. For an int8 GEMM,
each row of inputs or gradients is quantized by its largest magnitude; the integer sums are exact and only need scaling.
This is LLM.int8 (Dettmers et al. 2022) without its special treatment of outliers (docs/decisions/0019).

The operations used here move the fewest bytes possible in eager PyTorch: 9 per value to quantize bf16 rows, and 10 per
output value to scale the result. Triton kernels would need 3 and 6.
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
from bitsandbytes.autograd._functions import matmul_4bit
from bitsandbytes.functional import create_dynamic_map, dequantize_4bit, name2qmap
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from trainer.base.weights import Placer
from trainer.config.fit import Int8LayerConfig

MULTIPLE = 8
"""Granularity of input and output sizes: on CUDA, torch._int_mm accepts only multiples of this."""
_LARGEST = 127
# Between 1024 and 2048, fp16 has only whole numbers. Adding a value within ±127 to 1536 therefore rounds it, half to
# even, and the low byte of the sum is its int8 representation: two passes over memory, where round and cast need 3.
_ROUNDING_OFFSET = 1536.0
_QUANTIZED_BLOCKS = "transformer_blocks"
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Directions:
    """Minimum number of rows for which a layer uses int8 GEMMs, forward and backward; None: never."""

    forward: int | None = None
    backward: int | None = None


NEVER = Directions()


def int8_directions(inputs: int, outputs: int, products: Sequence[Int8LayerConfig]) -> Directions:
    """Return the minimum row counts for int8 GEMMs from the first entry in ``products`` for this layer size.

    The result is NEVER if no entry applies or if int8 GEMMs do not support the size.
    """
    if inputs % MULTIPLE or outputs % MULTIPLE:
        return NEVER
    match = next((config for config in products if config.is_of(inputs, outputs)), None)
    return Directions(match.forward, match.backward) if match else NEVER


def has_enough_rows(x: Tensor, least: int | None) -> bool:
    """Return whether x (..., inputs) has at least ``least`` rows; False if ``least`` is None."""
    return least is not None and x.numel() >= least * x.shape[-1]


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (..., inputs) · weightᵀ + bias (..., outputs) in the dtype of x, computed with an int8 GEMM."""
    rows, row_scales = quantize_rows(x.reshape(-1, x.shape[-1]))
    scaled = _scaled(torch._int_mm(rows, weight.t()), row_scales, x.dtype)
    result = scaled.mul_(scales) if bias is None else torch.addcmul(bias, scaled, scales, out=scaled)
    return result.to(x.dtype).view(*x.shape[:-1], len(weight))


def int8_input_gradient(gradient: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return gradient (..., outputs) · weight (..., inputs) in the gradient's dtype, computed with an int8 GEMM.

    The scales belong to the dimension that is summed over here, so the gradient is scaled before it is quantized.
    """
    grad_rows = gradient.reshape(-1, gradient.shape[-1])
    rows, row_scales = quantize_rows(_scaled(grad_rows, scales, gradient.dtype))
    result = _scaled(torch._int_mm(rows, _column_major(weight)), row_scales, gradient.dtype)
    return result.to(gradient.dtype).view(*gradient.shape[:-1], weight.shape[1])


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows (M, N) to int8 by their largest magnitude; return them and each row's scale, fp32 (M, 1).

    The scale includes the factor 1 / 127 for the weights. If a row contains NaN or infinity, its scale and thus its
    results are not finite either. Values above about 2.68e36 silently become 0, because multiplying them by 127
    overflows fp32.
    """
    largest = torch.linalg.vector_norm(rows, math.inf, -1, keepdim=True, dtype=torch.float32)
    shifted = rows.new_empty(rows.shape, dtype=torch.float16)
    torch.addcdiv(rows.new_full((), _ROUNDING_OFFSET), rows, largest, value=_LARGEST, out=shifted)
    return shifted.view(torch.int8)[:, ::2].contiguous(), largest.mul_(1 / _LARGEST**2)


def _scaled(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values (M, N) times scales in ``dtype``, but in fp32 for fp16, whose range the products may exceed."""
    wide_dtype = torch.float32 if dtype == torch.float16 else dtype
    return torch.mul(values, scales, out=values.new_empty(values.shape, dtype=wide_dtype))


def _column_major(weight: Tensor) -> Tensor:
    """Return a temporary column-major copy of the weight, the only layout that cuBLAS accepts for the second matrix.

    With two row-major matrices, newer PyTorch versions raise an error, and some older ones returned wrong results
    (pytorch#106840, #169961).
    """
    return weight.t().contiguous().t()


def _flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


if torch.ops.aten._int_mm not in flop_registry:  # PyTorch 2.13 has no FLOP formula for it, so it would count as 0
    register_flop_formula(torch.ops.aten._int_mm)(_flops)


Quantization = Literal["int8", "int8_products", "nf4"]


class FrozenInt8Linear(Linear8bitLt):
    """Linear layer with int8 weights and one scale per row, dequantized to the input's dtype or used in int8 GEMMs.

    bitsandbytes' own forward on a GPU converts the inputs to fp16, quantizes them to int8, and logs a line each time.
    As a result, bf16 activations above 65504 become infinite, and the gradients do not match the outputs. Its function
    for CPUs has neither problem, but saves every input in a way that gradient checkpointing cannot drop: 1.8 GiB for
    SDXL at 1024 px.
    """

    directions = NEVER
    """When to use int8 GEMMs, which also quantize inputs and gradients (fit.quantize = "int8_products")."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., inputs) · Wᵀ + bias; only x receives a gradient."""
        # bitsandbytes moves weight and scales into `state` at the first forward; `input_gradient` reads them there.
        if cast(Int8Params, self.weight).CB is not None:
            self.init_8bit_state()  # type: ignore[no-untyped-call]
        product: Tensor = _Int8Product.apply(  # type: ignore[no-untyped-call]
            x, self.state.CB, self.state.SCB, self.bias, self.directions
        )
        return product

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of x, given the gradient of the output; only valid after a forward."""
        return input_gradient(gradient, cast(Tensor, self.state.CB), cast(Tensor, self.state.SCB), self.directions)

    def without_bias(self, x: Tensor) -> Tensor:
        """Return x (..., inputs) · Wᵀ; only valid after a forward."""
        product: Tensor = _Int8Product.apply(x, self.state.CB, self.state.SCB, None, self.directions)  # type: ignore[no-untyped-call]
        return product

    def dense_weight(self) -> Tensor:
        """Return the dequantized weight (outputs, inputs), fp32; valid before a forward too."""
        weight = cast(Int8Params, self.weight)
        moved = weight.CB is None
        stored, scales = (self.state.CB, self.state.SCB) if moved else (weight.CB, weight.SCB)
        return _dequantized(cast(Tensor, stored), cast(Tensor, scales), torch.float32)


class _Int8Product(torch.autograd.Function):
    """Autograd function for `quantized_linear`; saves no input, because the frozen weight needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, directions: Directions
    ) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.directions = directions
        return quantized_linear(x, weight, scales, bias, directions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, scales = ctx.saved_tensors
        return input_gradient(gradient, weight, scales, ctx.directions), None, None, None, None


def quantized_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, directions: Directions = NEVER
) -> Tensor:
    """Return x (..., inputs) · Wᵀ + bias in the dtype of x, for int8 weights (outputs, inputs) with row scales."""
    if has_enough_rows(x, directions.forward):
        return int8_linear(x, weight, scales, bias)
    return F.linear(x, _dequantized(weight, scales, x.dtype), bias)


def input_gradient(gradient: Tensor, weight: Tensor, scales: Tensor, directions: Directions = NEVER) -> Tensor:
    """Return the gradient of x (..., inputs), given the gradient (..., outputs) of `quantized_linear`'s output."""
    if has_enough_rows(gradient, directions.backward):
        return int8_input_gradient(gradient, weight, scales)
    return gradient @ _dequantized(weight, scales, gradient.dtype)


def _dequantized(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight, computed as in bitsandbytes, where each row's largest magnitude is 127."""
    return weight.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


class FrozenNF4Linear(Linear4bit):
    """Linear layer with NF4 weights and double-quantized scales, which computes in the input's dtype."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            inputs, outputs, bias, compute_dtype=dtype, compress_statistics=True, quant_type="nf4", device=device
        )
        # On CPUs with AVX512-BF16, a forward without gradients would repack the weights for a GEMM without a backward.
        # All later training steps would lose the gradients of the layers before this one.
        self.support_avx512bf16_for_cpu = False

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of x, given the gradient of the output."""
        return gradient @ self.dense_weight().to(gradient.dtype)

    def without_bias(self, x: Tensor) -> Tensor:
        """Return x (..., inputs) · Wᵀ; only x receives a gradient."""
        weight = cast(Params4bit, self.weight)
        product: Tensor = matmul_4bit(x, weight, bias=None, quant_state=weight.quant_state)
        return product

    def dense_weight(self) -> Tensor:
        """Return the dequantized weight (outputs, inputs) in the dtype that it was quantized from."""
        weight = cast(Params4bit, self.weight)
        return dequantize_4bit(weight, weight.quant_state)


def quantizable_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers inside transformer blocks, which are the ones that get quantized, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and _QUANTIZED_BLOCKS in name
    }


def quantize_linears(model: nn.Module, kind: Quantization, dtype: torch.dtype, device: torch.device) -> Placer:
    """Replace empty linear layers in transformer blocks with quantized ones; return a placer that quantizes weights.

    Also sets the attributes by which PEFT chooses its layers for quantized weights.
    """
    for name, linear in quantizable_linears(model).items():
        model.set_submodule(name, _empty(linear, kind, dtype))
    setattr(model, "is_loaded_in_4bit" if kind == "nf4" else "is_loaded_in_8bit", True)
    # bitsandbytes caches this map when it quantizes its first weight. If that one were on the meta device, as in a
    # forecast, the map would have no values, and all later weights would be wrong.
    name2qmap.setdefault("dynamic", create_dynamic_map())

    def place(module: nn.Module, leaf: str, tensor: Tensor) -> bool:
        if leaf != "weight" or not isinstance(module, (FrozenInt8Linear, FrozenNF4Linear)):
            return False
        # The weight is moved first and `_quantize` called explicitly. `.to(device)` would do both, but not on the meta
        # device, where forecasts trace this code.
        if isinstance(module, FrozenNF4Linear):
            linear = cast(Linear4bit, module)
            nf4 = Params4bit(
                tensor.to(device), requires_grad=False, compress_statistics=True, quant_type="nf4", module=linear
            )
            module.weight = nf4._quantize(device)
        else:
            int8 = Int8Params(tensor.to(device, torch.float16), requires_grad=False, has_fp16_weights=False)
            module.weight = int8._quantize(device)
        if device.type != "meta":
            _return_freed_memory()
        return True

    return place


def set_int8_directions(model: nn.Module, products: Sequence[Int8LayerConfig]) -> None:
    """Configure when each 8-bit layer uses int8 GEMMs, according to ``products``; leave the weights unchanged."""
    for module in model.modules():
        if isinstance(module, FrozenInt8Linear):
            module.directions = int8_directions(module.in_features, module.out_features, products)


def _return_freed_memory() -> None:
    """Return freed pages to the operating system if the C library would otherwise keep them.

    Small weights that stay allocated between large freed ones fragment the heap: without this call, glibc's heap grows
    to 2.5 times the memory in use. Takes 1 s in total for SDXL.
    """
    if _MALLOC_TRIM:
        _MALLOC_TRIM(0)


def _empty(linear: nn.Linear, kind: Quantization, dtype: torch.dtype) -> nn.Module:
    bias = linear.bias is not None
    if kind == "nf4":
        return FrozenNF4Linear(linear.in_features, linear.out_features, bias=bias, dtype=dtype, device="meta")
    return FrozenInt8Linear(
        linear.in_features, linear.out_features, bias, has_fp16_weights=False, device=torch.device("meta")
    )
