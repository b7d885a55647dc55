"""PEFT's LoRA layers with our arithmetic in their forward: what PEFT injects, names and saves stays as it is.

The arithmetic of LoRA as autograd functions: y = base(x) + scale · up · down · x, added up in the base's output.

Rows are pictures times places. Every product is one operation of the library with the scale in it. Nothing is kept but
the input, the `rank` numbers a row between down and up, and the weights; where it is known what the input was made of,
that, which is kept anyway. Results and gradients have the input's dtype; each is rounded at most as often as with
PEFT's layers.
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


class QuantisedLinear(Protocol):
    """A frozen linear layer whose weight is kept in fewer bits than it computes with."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x (..., inputs) to (..., outputs) in the format of x, the bias added."""

    def input_gradient(self, gradient: Tensor, /) -> Tensor:
        """The gradient (..., outputs) of what it gave to that of x (..., inputs), in memory of its own."""


@dataclass(frozen=True)
class Source:
    """What an input was made of, with little arithmetic: it is made again in backward, instead of being kept."""

    x: Tensor
    """Kept by whatever made the input."""
    make: Callable[..., Tensor]
    """A frozen norm, for example."""


def linear_with_lora(
    x: Tensor, base: nn.Linear, down: Tensor, up: Tensor, scale: float, source: Source | None = None
) -> Tensor:
    """A frozen linear layer of full precision with its LoRA: (..., outputs).

    x (..., inputs), down (rank, inputs), up (outputs, rank). The gradient of x is computed only where somebody asks
    for it. `source` says where x came from.
    """
    if torch.compiler.is_compiling():
        return _plainly(base(x), x @ down.t(), up, scale)
    result: Tensor = _LinearWithLora.apply(x, down, up, scale, base, None, source)  # type: ignore[no-untyped-call]
    return result


def quantised_with_lora(
    x: Tensor, base: QuantisedLinear, down: Tensor, up: Tensor, scale: float, source: Source | None = None
) -> Tensor:
    """The same over a quantised layer, which computes both of its products itself."""
    if torch.compiler.is_compiling():
        return _plainly(base(x), x @ down.t(), up, scale)
    result: Tensor = _LinearWithLora.apply(x, down, up, scale, None, base, source)  # type: ignore[no-untyped-call]
    return result


def add_up(base: Tensor, hidden: Tensor, up: Tensor, scale: float, *, in_place: bool) -> Tensor:
    """Add scale · up · hidden to what a base layer gave; with `in_place` there, where its memory allows.

    base (..., outputs), hidden (..., rank), up (outputs, rank) for linear layers; base (B, outputs, h, w), hidden
    (B, rank, h, w), up (outputs, rank, 1, 1) for convolutions. With `in_place` whoever computed `base` must not need
    it any more.
    """
    if torch.compiler.is_compiling() and up.ndim == 2:
        return _plainly(base, hidden, up, scale)
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
    """k frozen linear layers without bias over the same x (..., inputs), with LoRAs of one shape: k (..., outputs).

    Each of `weights` is (outputs, inputs), of `downs` (rank, inputs), of `ups` (outputs, rank). The downs have to lie
    one after another in memory, and so the ups: each of the two is multiplied as one. `source` says where x came from.
    """
    results: Sequence[Tensor] = _ProjectionsWithLora.apply(x, scale, source, *weights, *downs, *ups)  # type: ignore[no-untyped-call]
    return results


def _plainly(base: Tensor, hidden: Tensor, up: Tensor, scale: float) -> Tensor:
    """For torch.compile, which fuses plain sums by itself and cannot follow results written into views."""
    return base + hidden @ up.t() * scale


class _LinearWithLora(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        scale: float,
        full: nn.Linear | None,
        quantised: QuantisedLinear | None,
        source: Source | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result = _product(x, rows, full) if full is not None else cast(QuantisedLinear, quantised)(x)
        out = result.view(-1, len(up))
        hidden = rows @ down.t()
        torch.addmm(out, hidden, up.t(), alpha=scale, out=out)
        _keep(ctx, source, rows, hidden, down, up)
        ctx.scale, ctx.shape, ctx.full, ctx.quantised = scale, x.shape, full, quantised
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, down, up = _kept(ctx)
        above = gradient.reshape(-1, gradient.shape[-1])
        of_hidden, of_up = _scaled(above, up, ctx.scale), _scaled(above.t(), hidden, ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = above @ ctx.full.weight if ctx.full is not None else ctx.quantised.input_gradient(above)
            torch.addmm(of_x, of_hidden, down, out=of_x)
            of_x = of_x.view(ctx.shape)
        return of_x, of_hidden.t() @ rows, of_up, *[None] * 4


class _AddUp(Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, hidden: Tensor, up: Tensor, scale: float, in_place: bool) -> Tensor:
        ctx.save_for_backward(hidden, up)
        ctx.scale = scale
        # What other functions give may be a view, which autograd lets nobody overwrite.
        in_place = in_place and base.is_contiguous() and not base._is_view()
        if in_place:
            ctx.mark_dirty(base)
        return (
            _with_conv(base, hidden, up, scale, in_place) if up.ndim == 4 else _with(base, hidden, up, scale, in_place)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, up = ctx.saved_tensors
        below = _conv_gradients if up.ndim == 4 else _gradients
        return gradient, *below(gradient, hidden, up, ctx.scale), None, None


class _ProjectionsWithLora(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, source: Source | None, *weights: Tensor) -> tuple[Tensor, ...]:
        count = len(weights) // 3
        frozen, down, up = weights[:count], weights[count], weights[-count]
        rows = x.reshape(-1, x.shape[-1])
        out = x.new_empty(count, *x.shape[:-1], len(up))
        flat = out.view(count, -1, len(up))
        for weight, part in zip(frozen, flat, strict=True):
            torch.mm(rows, weight.t(), out=part)
        hidden = _parts(rows @ _together(down, count).flatten(0, 1).t(), count)
        torch.baddbmm(flat, hidden, _together(up, count).transpose(1, 2), alpha=scale, out=flat)
        _keep(ctx, source, rows, hidden, down, up, *frozen)
        ctx.scale, ctx.shape = scale, x.shape
        return out.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, down, up, *frozen = _kept(ctx)
        count = len(frozen)
        downs = _together(down, count)
        above = torch.stack([gradient.reshape(len(rows), -1) for gradient in gradients])
        nothing = above.new_empty(())  # not read, as in _scaled
        of_hidden = above.new_empty(len(rows), count * len(down))
        of_parts = _parts(of_hidden, count)
        torch.baddbmm(nothing, above, _together(up, count), beta=0, alpha=ctx.scale, out=of_parts)
        of_ups = torch.baddbmm(nothing, above.transpose(1, 2), hidden, beta=0, alpha=ctx.scale)
        of_downs = (of_hidden.t() @ rows).view(downs.shape)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = above[0] @ frozen[0]
            for part, weight in zip(above[1:], frozen[1:], strict=True):
                torch.addmm(of_x, part, weight, out=of_x)
            torch.addmm(of_x, of_hidden, downs.flatten(0, 1), out=of_x)
            of_x = of_x.view(ctx.shape)
        return of_x, None, None, *[None] * count, *of_downs.unbind(), *of_ups.unbind()


def _keep(ctx: Any, source: Source | None, rows: Tensor, *others: Tensor) -> None:
    """For backward: the rows, or what they can be made of again."""
    ctx.make = None if source is None else source.make
    ctx.save_for_backward(rows if source is None else source.x, *others)


def _kept(ctx: Any) -> tuple[Tensor, ...]:
    """What `_keep` was given."""
    first, *others = ctx.saved_tensors
    rows = first if ctx.make is None else ctx.make(first).flatten(0, -2)
    return rows, *others


def _product(x: Tensor, rows: Tensor, base: nn.Linear) -> Tensor:
    """What a layer of full precision gives, in memory of its own, which no view of another result is."""
    result = x.new_empty(*x.shape[:-1], base.out_features)
    out = result.view(-1, base.out_features)
    if base.bias is None:
        torch.mm(rows, base.weight.t(), out=out)
    else:
        torch.addmm(base.bias, rows, base.weight.t(), out=out)
    return result


def _together(first: Tensor, count: int) -> Tensor:
    """The memory of `count` weights that lie one after another, from the first on: (count, *shape)."""
    return first.as_strided((count, *first.shape), (first.numel(), *first.stride()), first.storage_offset())


def _parts(rows: Tensor, count: int) -> Tensor:
    """(M, k · r) seen as (k, M, r)."""
    return rows.view(rows.shape[0], count, -1).transpose(0, 1)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale · left · right in one operation, rounded once."""
    # With beta = 0 the first argument is not read (documentation of torch.addmm).
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _with(base: Tensor, hidden: Tensor, up: Tensor, scale: float, in_place: bool) -> Tensor:
    rows, added = base.reshape(-1, base.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    if in_place:
        torch.addmm(rows, added, up.t(), alpha=scale, out=rows)
        return base
    return torch.addmm(rows, added, up.t(), alpha=scale).view(base.shape)


def _with_conv(base: Tensor, hidden: Tensor, up: Tensor, scale: float, in_place: bool) -> Tensor:
    maps, added = base.flatten(2), hidden.flatten(2)
    spread = up.flatten(1).expand(len(base), -1, -1)
    if in_place:
        torch.baddbmm(maps, spread, added, alpha=scale, out=maps)
        return base
    return torch.baddbmm(maps, spread, added, alpha=scale).view(base.shape)


def _gradients(gradient: Tensor, hidden: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    above, kept = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    return _scaled(above, up, scale).view(hidden.shape), _scaled(above.t(), kept, scale)


def _conv_gradients(gradient: Tensor, hidden: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    spread = up.flatten(1).t().expand(len(gradient), -1, -1)
    above = gradient.flatten(2)
    of_hidden = torch.baddbmm(above.new_empty(()), spread, above, beta=0, alpha=scale).view(hidden.shape)
    # A sum over pictures and places at once; the scale is rounded into hidden, over whose places that averages out.
    back = torch.ops.aten.convolution_backward
    _, of_up, _ = back(gradient, hidden * scale, up, None, *_CONV_1X1, [False, True, False])
    return of_hidden, of_up


class One(NamedTuple):
    """A layer's LoRA."""

    down: nn.Module
    """From inputs to rank."""
    up: Tensor
    """The weight from rank to outputs."""
    strength: float
    """alpha / rank."""


class _Lean(LoraLayer):
    """The base layer and down as modules, with up added into what the base gave; for any kind of base layer."""

    quantised = False
    """Whether the base layer is one of bitsandbytes'. What those give is now a view and now not, by rows and card, so
    that nothing is overwritten there: memory stays what was foreseen."""

    def forward(self, x: Tensor, *args: Any, source: Source | None = None, **kwargs: Any) -> Tensor:
        """What PEFT's layer gives; where more is asked than one LoRA in the base's dtype, PEFT gives it itself.

        ``source`` says what x was made of, so that it need not be kept; where dropouts act, it is kept all the same.
        """
        lora = None if args or kwargs else self.alone_on(x)
        if lora is None:
            found: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return found
        return self.with_lora(x, *lora, source)

    def alone_on(self, x: Tensor) -> One | None:
        """The one LoRA, where it acts in the format of x; asked for hundreds of times a step."""
        if self.disable_adapters or self.merged:
            return None
        (down,), (up,), (strength,) = self.lora_A.values(), self.lora_B.values(), self.scaling.values()
        weight = cast(Tensor, up.weight)
        return One(down, weight, strength) if x.dtype == weight.dtype else None

    def with_lora(self, x: Tensor, down: nn.Module, up: Tensor, scale: float, source: Source | None) -> Tensor:
        """The base's answer and the LoRA's together; `down` may carry hooks, which dropouts are."""
        return add_up(self.base_layer(x), down(x), up, scale, in_place=not self.quantised)


class LeanLinear(_Lean, layer.Linear):
    """A linear layer of full precision, whose LoRA may have dropouts."""


class LeanConv2d(_Lean, layer.Conv2d):
    """A convolution."""


class LeanInt8(_Lean, bnb.Linear8bitLt):
    """A linear layer kept in 8 bits, whose LoRA may have dropouts."""

    quantised = True


class LeanNF4(_Lean, bnb.Linear4bit):
    """A linear layer kept in 4 bits, whose LoRA may have dropouts."""

    quantised = True


class WholeLinear(_Lean, layer.Linear):
    """A linear layer of full precision and its LoRA as one function; the LoRA has no dropouts."""

    def with_lora(self, x: Tensor, down: nn.Module, up: Tensor, scale: float, source: Source | None) -> Tensor:
        """The same in one function, which does not call the modules."""
        return linear_with_lora(x, cast(nn.Linear, self.base_layer), cast(Tensor, down.weight), up, scale, source)


class _WholeQuantised(_Lean):
    """A quantised linear layer and its LoRA as one function; the LoRA has no dropouts."""

    def with_lora(self, x: Tensor, down: nn.Module, up: Tensor, scale: float, source: Source | None) -> Tensor:
        """The same in one function, which calls the base layer only."""
        base = cast(QuantisedLinear, self.base_layer)
        return quantised_with_lora(x, base, cast(Tensor, down.weight), up, scale, source)


class WholeInt8(_WholeQuantised, bnb.Linear8bitLt):
    """A linear layer kept in 8 bits."""


class WholeNF4(_WholeQuantised, bnb.Linear4bit):
    """A linear layer kept in 4 bits."""


def through(layer: nn.Module, x: Tensor, source: Source | None) -> Tensor:
    """What a layer, with a LoRA or without, makes of x; a frozen layer without keeps no input by itself."""
    result: Tensor = layer(x, source=source) if isinstance(layer, _Lean) else layer(x)
    return result


def register(config: LoraConfig, *, dropouts: bool) -> None:
    """Let PEFT put these layers in where `config` injects.

    The hook is private; tests/train/adapter/lean/test_layers.py guards what is used of it. The first kind that fits is
    taken, and bitsandbytes' layers are linear layers too, so they come first.
    """
    config._register_custom_module(
        {
            Linear8bitLt: LeanInt8 if dropouts else WholeInt8,
            Linear4bit: LeanNF4 if dropouts else WholeNF4,
            nn.Linear: LeanLinear if dropouts else WholeLinear,
            nn.Conv2d: LeanConv2d,
        }
    )
