"""The two layers of a transformer block after its attentions, over diffusers' unchanged modules."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.adapter.lean.layers import through
from trainer.adapter.lean.products import Source


class LeanFeedForward(FeedForward):
    """diffusers' layers with GEGLU between them (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    Of what lies between the two layers backward finds what the first gave and no more; the rest is made again.
    """

    def forward(self, hidden_states: Tensor, source: Source | None = None, **kwargs: Any) -> Tensor:
        """(..., width) to the same; ``source`` says what `hidden_states` was made of, so that it need not be kept."""
        first, _, second = self.net
        wide = through(cast(nn.Module, first.proj), hidden_states, source)
        return through(second, gated(wide), Source(wide, _gated))


def lean_feed_forward(layers: FeedForward) -> None:
    """Let them compute so; with anything out of the ordinary they stay as they are."""
    kinds = [type(layer) for layer in layers.net]
    if type(layers) is FeedForward and kinds[:2] == [GEGLU, nn.Dropout] and len(kinds) == 3 and layers.net[1].p == 0.0:
        layers.__class__ = LeanFeedForward


def gated(x: Tensor) -> Tensor:
    """hidden · GELU(gate) of x (..., 2 n), whose first n are `hidden` and the others `gate`: (..., n)."""
    if torch.compiler.is_compiling():
        hidden, gate = x.chunk(2, dim=-1)
        return hidden * F.gelu(gate)
    result: Tensor = _Gated.apply(x)  # type: ignore[no-untyped-call]
    return result


def _gated(x: Tensor) -> Tensor:
    hidden, gate = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(hidden)


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gated(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        hidden, gate = x.chunk(2, dim=-1)
        of_x = torch.empty_like(x)
        of_hidden, of_gate = of_x.chunk(2, dim=-1)
        again = F.gelu(gate)
        torch.mul(gradient, again, out=of_hidden)
        torch.mul(gradient, hidden, out=again)
        torch.ops.aten.gelu_backward(again, gate, grad_input=of_gate)
        return of_x
