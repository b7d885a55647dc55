"""PEFT's LoRA layers with our arithmetic in their forward: what PEFT injects, names and saves stays as it is."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from peft import LoraConfig
from peft.tuners.lora import LoraLayer, bnb, layer
from torch import Tensor, nn

from trainer.adapter.lean.products import QuantisedLinear, Source, add_up, linear_with_lora, quantised_with_lora


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

    The hook is private; tests/train/test_lean_layers.py guards what is used of it. The first kind that fits is taken,
    and bitsandbytes' layers are linear layers too, so they come first.
    """
    config._register_custom_module(
        {
            Linear8bitLt: LeanInt8 if dropouts else WholeInt8,
            Linear4bit: LeanNF4 if dropouts else WholeNF4,
            nn.Linear: LeanLinear if dropouts else WholeLinear,
            nn.Conv2d: LeanConv2d,
        }
    )
