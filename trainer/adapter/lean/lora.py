"""PEFT's LoRA layers with our own forward; how PEFT injects, names and saves them is unchanged.

Autograd functions compute y = base(x) + scale · up · down · x, accumulating into the base layer's output.

Rows are the tokens of all images. The scale is the `alpha` of a GEMM, never a separate operation. Only the input, the
`rank` values per row between down and up, and the weights are saved for backward. If the input can be recomputed
cheaply from a tensor that is saved anyway (`Source`), that tensor is saved instead. Results and gradients have the
dtype of the input and are rounded no more often than with PEFT's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from peft import LoraConfig
from peft.tuners.lora import LoraLayer, bnb, layer
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_CONV_1X1 = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, output padding, groups


class QuantizedLinear(Protocol):
    """Frozen linear layer that stores its weight in fewer bits than it computes in."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return the output (..., outputs) in the dtype of x (..., inputs), with the bias added."""

    def input_gradient(self, gradient: Tensor, /) -> Tensor:
        """Return the gradient of x (..., inputs), newly allocated, given the gradient of the output (..., outputs)."""


@dataclass(frozen=True)
class Source:
    """How to recompute a layer's input in backward instead of saving it; the computation must be cheap."""

    x: Tensor
    """Tensor to compute the input from; the function that produced the input saves it anyway."""
    make: Callable[..., Tensor]
    """Function that computes the input from `x`, for example a frozen norm."""


def linear_with_lora(
    x: Tensor, base: nn.Linear, down: Tensor, up: Tensor, scale: float, source: Source | None = None
) -> Tensor:
    """Return the output (..., outputs) of a frozen, unquantized linear layer and its LoRA.

    Shapes: x (..., inputs), down (rank, inputs), up (outputs, rank). The gradient of x is computed only if x requires
    one. `source` says how backward recomputes x.
    """
    if torch.compiler.is_compiling():
        return _plain_sum(base(x), x @ down.t(), up, scale)
    result: Tensor = _LinearWithLora.apply(x, down, up, scale, base, None, source)  # type: ignore[no-untyped-call]
    return result


def quantized_with_lora(
    x: Tensor, base: QuantizedLinear, down: Tensor, up: Tensor, scale: float, source: Source | None = None
) -> Tensor:
    """Return the output of a quantized linear layer and its LoRA, as `linear_with_lora` does for unquantized ones."""
    if torch.compiler.is_compiling():
        return _plain_sum(base(x), x @ down.t(), up, scale)
    result: Tensor = _LinearWithLora.apply(x, down, up, scale, None, base, source)  # type: ignore[no-untyped-call]
    return result


def add_lora(base: Tensor, hidden: Tensor, up: Tensor, scale: float, *, in_place: bool) -> Tensor:
    """Return base + scale · up · hidden; `in_place` writes it into `base` if that is contiguous and not a view.

    Shapes: base (..., outputs), hidden (..., rank) and up (outputs, rank) for linear layers; base (B, outputs, h, w),
    hidden (B, rank, h, w) and up (outputs, rank, 1, 1) for convolutions. With `in_place`, no other backward may need
    `base`.
    """
    if torch.compiler.is_compiling() and up.ndim == 2:
        return _plain_sum(base, hidden, up, scale)
    result: Tensor = _AddUp.apply(base, hidden, up, scale, in_place)  # type: ignore[no-untyped-call]
    return result


def projections_with_lora(
    x: Tensor,
    weights: Sequence[Tensor],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    scale: float,
    source: Source | None = None,
) -> Sequence[Tensor]:
    """Return the outputs (..., outputs) of k frozen linear layers without bias, each with its LoRA, for the same x.

    Shapes: x (..., inputs), each weight (outputs, inputs), each down (rank, inputs), each up (outputs, rank). All
    `downs` must be consecutive in memory, and so must all `ups`, because each group is read as one stacked matrix.
    `source` says how backward recomputes x.
    """
    results: Sequence[Tensor] = _ProjectionsWithLora.apply(x, scale, source, *weights, *downs, *ups)  # type: ignore[no-untyped-call]
    return results


def _plain_sum(base: Tensor, hidden: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return base + scale · up · hidden for torch.compile, which fuses plain operations and rejects writes to views."""
    return base + hidden @ up.t() * scale


class _LinearWithLora(Function):
    """Autograd function of one linear layer and its LoRA; exactly one of `full` and `quantized` is its base layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        scale: float,
        full: nn.Linear | None,
        quantized: QuantizedLinear | None,
        source: Source | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        # Grad mode is off in here, so a quantized layer's own autograd function records and saves nothing.
        result = _product(x, rows, full) if full is not None else cast(QuantizedLinear, quantized)(x)
        out = result.view(-1, len(up))
        hidden = rows @ down.t()
        # Adds into the base's output: no second tensor of its size, and no separate kernels to scale and add.
        torch.addmm(out, hidden, up.t(), alpha=scale, out=out)
        _save(ctx, source, rows, hidden, down, up)
        ctx.scale, ctx.shape, ctx.full, ctx.quantized = scale, x.shape, full, quantized
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, down, up = _saved(ctx)
        grad_output = gradient.reshape(-1, gradient.shape[-1])
        grad_hidden, grad_up = _scaled(grad_output, up, ctx.scale), _scaled(grad_output.t(), hidden, ctx.scale)
        grad_x = None
        # False for the projections of the text if no text encoder is trained, and before the first trained layer.
        if ctx.needs_input_grad[0]:
            grad_x = (
                grad_output @ ctx.full.weight if ctx.full is not None else ctx.quantized.input_gradient(grad_output)
            )
            torch.addmm(grad_x, grad_hidden, down, out=grad_x)
            grad_x = grad_x.view(ctx.shape)
        return grad_x, grad_hidden.t() @ rows, grad_up, *[None] * 4


class _AddUp(Function):
    """Autograd function for `add_lora`; saves only `hidden` and `up` for backward."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, hidden: Tensor, up: Tensor, scale: float, in_place: bool) -> Tensor:
        ctx.save_for_backward(hidden, up)
        ctx.scale = scale
        # A base layer may return a view from another autograd function; overwriting one raises an error.
        in_place = in_place and base.is_contiguous() and not base._is_view()
        if in_place:
            ctx.mark_dirty(base)
        return (
            _add_conv(base, hidden, up, scale, in_place)
            if up.ndim == 4
            else _add_linear(base, hidden, up, scale, in_place)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, up = ctx.saved_tensors
        gradients_of = _conv_gradients if up.ndim == 4 else _linear_gradients
        return gradient, *gradients_of(gradient, hidden, up, ctx.scale), None, None


class _ProjectionsWithLora(Function):
    """Several projections of one input: one GEMM for all downs, one batched GEMM for all ups; x is saved once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, source: Source | None, *weights: Tensor) -> tuple[Tensor, ...]:
        count = len(weights) // 3
        # Only the first down and the first up: `_together` reads the others from the memory behind them.
        frozen, down, up = weights[:count], weights[count], weights[-count]
        rows = x.reshape(-1, x.shape[-1])
        out = x.new_empty(count, *x.shape[:-1], len(up))
        flat = out.view(count, -1, len(up))
        for weight, piece in zip(frozen, flat, strict=True):
            torch.mm(rows, weight.t(), out=piece)
        # One GEMM of width count · rank: each of rank alone would be too narrow to use the GPU well.
        hidden = _parts(rows @ _together(down, count).flatten(0, 1).t(), count)
        torch.baddbmm(flat, hidden, _together(up, count).transpose(1, 2), alpha=scale, out=flat)
        _save(ctx, source, rows, hidden, down, up, *frozen)
        ctx.scale, ctx.shape = scale, x.shape
        return out.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, down, up, *frozen = _saved(ctx)
        count = len(frozen)
        downs = _together(down, count)
        # One copy of the gradients, so that one batched GEMM replaces `count` small ones for hidden and for ups.
        grad_outputs = torch.stack([gradient.reshape(len(rows), -1) for gradient in gradients])
        unused = grad_outputs.new_empty(())  # placeholder that is never read, as in _scaled
        grad_hidden = grad_outputs.new_empty(len(rows), count * len(down))
        grad_parts = _parts(grad_hidden, count)  # a view, so that the batched GEMM fills the layout of the next two
        torch.baddbmm(unused, grad_outputs, _together(up, count), beta=0, alpha=ctx.scale, out=grad_parts)
        grad_ups = torch.baddbmm(unused, grad_outputs.transpose(1, 2), hidden, beta=0, alpha=ctx.scale)
        grad_downs = (grad_hidden.t() @ rows).view(downs.shape)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_outputs[0] @ frozen[0]
            for piece, weight in zip(grad_outputs[1:], frozen[1:], strict=True):
                torch.addmm(grad_x, piece, weight, out=grad_x)
            torch.addmm(grad_x, grad_hidden, downs.flatten(0, 1), out=grad_x)
            grad_x = grad_x.view(ctx.shape)
        return grad_x, None, None, *[None] * count, *grad_downs.unbind(), *grad_ups.unbind()


def _save(ctx: Any, source: Source | None, rows: Tensor, *others: Tensor) -> None:
    """Save tensors for backward: first `rows` or the tensor to recompute them from, then the others."""
    ctx.make = None if source is None else source.make
    ctx.save_for_backward(rows if source is None else source.x, *others)


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    """Return the tensors given to `_save`, recomputing the rows if they were not saved."""
    first, *others = ctx.saved_tensors
    rows = first if ctx.make is None else ctx.make(first).flatten(0, -2)
    return rows, *others


def _product(x: Tensor, rows: Tensor, base: nn.Linear) -> Tensor:
    """Return an unquantized linear layer's output in newly allocated memory, not as a view of another tensor."""
    result = x.new_empty(*x.shape[:-1], base.out_features)
    out = result.view(-1, base.out_features)
    if base.bias is None:
        torch.mm(rows, base.weight.t(), out=out)
    else:
        torch.addmm(base.bias, rows, base.weight.t(), out=out)
    return result


def _together(first: Tensor, count: int) -> Tensor:
    """Return a view (count, *shape) of `count` equally shaped weights that follow each other in memory from `first`.

    Nothing is copied. If a weight has moved, the view shows other memory; callers check this first
    (transformer._are_consecutive).
    """
    return first.as_strided((count, *first.shape), (first.numel(), *first.stride()), first.storage_offset())


def _parts(rows: Tensor, count: int) -> Tensor:
    """Return a view (k, M, r) of rows (M, k · r), where k is `count`."""
    return rows.view(rows.shape[0], count, -1).transpose(0, 1)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale · left · right, computed in one kernel and rounded once."""
    # With beta = 0 torch.addmm ignores its first argument, even NaN or uninitialized memory (its documentation).
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _add_linear(base: Tensor, hidden: Tensor, up: Tensor, scale: float, in_place: bool) -> Tensor:
    rows, low_rank = base.reshape(-1, base.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    if in_place:
        torch.addmm(rows, low_rank, up.t(), alpha=scale, out=rows)
        return base
    return torch.addmm(rows, low_rank, up.t(), alpha=scale).view(base.shape)


def _add_conv(base: Tensor, hidden: Tensor, up: Tensor, scale: float, in_place: bool) -> Tensor:
    maps, low_rank = base.flatten(2), hidden.flatten(2)
    batched_up = up.flatten(1).expand(len(base), -1, -1)
    if in_place:
        torch.baddbmm(maps, batched_up, low_rank, alpha=scale, out=maps)
        return base
    return torch.baddbmm(maps, batched_up, low_rank, alpha=scale).view(base.shape)


def _linear_gradients(gradient: Tensor, hidden: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    grad_rows, hidden_rows = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    return _scaled(grad_rows, up, scale).view(hidden.shape), _scaled(grad_rows.t(), hidden_rows, scale)


def _conv_gradients(gradient: Tensor, hidden: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batched_up = up.flatten(1).t().expand(len(gradient), -1, -1)
    grad_maps = gradient.flatten(2)
    grad_hidden = torch.baddbmm(grad_maps.new_empty(()), batched_up, grad_maps, beta=0, alpha=scale).view(hidden.shape)
    # Sums over images and pixels in one kernel, which takes no scale: it is multiplied into hidden, and the rounding
    # errors average out over the pixels.
    convolution_backward = torch.ops.aten.convolution_backward
    _, grad_up, _ = convolution_backward(gradient, hidden * scale, up, None, *_CONV_1X1, [False, True, False])
    return grad_hidden, grad_up


class ActiveLora(NamedTuple):
    """The LoRA of one layer."""

    down: nn.Module
    """Module that maps inputs to `rank` values."""
    up: Tensor
    """Weight that maps `rank` values to outputs."""
    scale: float
    """Scale of the LoRA: alpha / rank."""


class _Lean(LoraLayer):
    """LoRA layer for any base layer; calls the base layer and `down` as modules, then adds the LoRA's output."""

    is_quantized = False
    """Whether the base layer comes from bitsandbytes.

    Whether such a layer's output is a view depends on the number of rows and the GPU. The output is never overwritten,
    so memory use does not depend on this and matches the forecast."""

    def forward(self, x: Tensor, *args: Any, source: Source | None = None, **kwargs: Any) -> Tensor:
        """Return the layer's output; call PEFT's own forward for other arguments or if `active_lora` returns None.

        ``source`` says how backward recomputes x instead of saving it; layers with dropout save x anyway.
        """
        lora = None if args or kwargs else self.active_lora(x)
        if lora is None:
            found: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return found
        return self.with_lora(x, *lora, source)

    def active_lora(self, x: Tensor) -> ActiveLora | None:
        """Return the layer's LoRA if it is active in the dtype of x, else None. Called hundreds of times per step."""
        if self.disable_adapters or self.merged:
            return None
        (down,), (up,), (strength,) = self.lora_A.values(), self.lora_B.values(), self.scaling.values()
        weight = cast(Tensor, up.weight)
        return ActiveLora(down, weight, strength) if x.dtype == weight.dtype else None

    def with_lora(self, x: Tensor, down: nn.Module, up: Tensor, scale: float, source: Source | None) -> Tensor:
        """Return the output for x with the LoRA; call `down` as a module, because its forward hooks apply dropout."""
        return add_lora(self.base_layer(x), down(x), up, scale, in_place=not self.is_quantized)


class LeanLinear(_Lean, layer.Linear):
    """Unquantized linear layer whose LoRA may have dropout."""


class LeanConv2d(_Lean, layer.Conv2d):
    """Convolution with a LoRA."""


class LeanInt8(_Lean, bnb.Linear8bitLt):
    """8-bit linear layer whose LoRA may have dropout."""

    is_quantized = True


class LeanNF4(_Lean, bnb.Linear4bit):
    """4-bit linear layer whose LoRA may have dropout."""

    is_quantized = True


class FusedLinear(_Lean, layer.Linear):
    """Unquantized linear layer and its LoRA as one autograd function, without dropout."""

    def with_lora(self, x: Tensor, down: nn.Module, up: Tensor, scale: float, source: Source | None) -> Tensor:
        """Return the output for x with the LoRA, computed from the weights without calling the modules."""
        return linear_with_lora(x, cast(nn.Linear, self.base_layer), cast(Tensor, down.weight), up, scale, source)


class _WholeQuantized(_Lean):
    """Quantized linear layer and its LoRA as one autograd function, without dropout."""

    def with_lora(self, x: Tensor, down: nn.Module, up: Tensor, scale: float, source: Source | None) -> Tensor:
        """Return the output for x with the LoRA; call the base module, but use only the weight of `down`."""
        base = cast(QuantizedLinear, self.base_layer)
        return quantized_with_lora(x, base, cast(Tensor, down.weight), up, scale, source)


class FusedInt8(_WholeQuantized, bnb.Linear8bitLt):
    """8-bit linear layer and its LoRA as one autograd function."""


class FusedNF4(_WholeQuantized, bnb.Linear4bit):
    """4-bit linear layer and its LoRA as one autograd function."""


def call_layer(layer: nn.Module, x: Tensor, source: Source | None) -> Tensor:
    """Call a layer with or without a LoRA; pass `source` only to lean layers, because frozen ones save no input."""
    result: Tensor = layer(x, source=source) if isinstance(layer, _Lean) else layer(x)
    return result


def register(config: LoraConfig, *, hooked: bool) -> None:
    """Make PEFT inject these layers instead of its own wherever `config` applies.

    `hooked` says whether the down layers get forward hooks, which the fused layers would not call.

    PEFT's hook for this is private; tests/train/adapter/lean/test_layers.py checks that it works as used here. PEFT
    takes the first entry that matches, so bitsandbytes' layers, which are subclasses of nn.Linear, come before it.
    """
    config._register_custom_module(
        {
            Linear8bitLt: LeanInt8 if hooked else FusedInt8,
            Linear4bit: LeanNF4 if hooked else FusedNF4,
            nn.Linear: LeanLinear if hooked else FusedLinear,
            nn.Conv2d: LeanConv2d,
        }
    )
