"""What might make a step quicker or smaller and is not in the trainer: switches, until a card says what they are worth.

- `norms`: a GroupNorm and the SiLU after it as one function that keeps only its input.
- `channels_last`: all maps laid out channel by channel at each place, as tensor cores want them.
- `channels_last_norms`: with norms that keep this layout; PyTorch's own on a card copy it away and back.
- `compiled`: torch.compile fuses the transformer blocks, over PEFT's layers only: over ours, which write into memory
  that they made, it fails.
- `graphs`: forward and backward are recorded as a CUDA graph, and replayed with one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.base.text import TextConditioning
from trainer.training.loop import Engine
from trainer.training.step import MicroBatch, training_step

Technique = Literal["none", "norms", "channels_last", "channels_last_norms", "compiled", "graphs"]
ForwardBackward = Callable[[], Tensor]
WARM_UP = 3
"""Steps before a graph is recorded, as PyTorch's documentation asks for."""


@contextmanager
def applied(technique: Technique, engine: Engine, micro: MicroBatch) -> Iterator[ForwardBackward]:
    """Gives what does forward and backward of ``micro`` with a technique; the model is as before at the end.

    Raises what hinders it: a compiler or a card that is missing, an operation that cannot be recorded.
    """
    unet = cast(nn.Module, engine.models.unet)
    with ExitStack() as stack:
        if technique.startswith("channels_last"):
            unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            stack.callback(unet.to, memory_format=torch.contiguous_format)
        if technique.endswith("norms"):
            stack.enter_context(_with_lean_norms(unet))
        if technique == "compiled":
            stack.enter_context(_compiled(unet))
        if technique == "graphs":
            yield _recorded(engine, micro)
        else:
            yield lambda: engine.micro_step(micro)


class NormAndSilu(nn.Module):
    """A frozen GroupNorm with the SiLU after it: maps (B, C, h, w) in either layout to the same."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """What the two modules give, one after the other."""
        norm = self.norm
        result: Tensor = _NormAndSilu.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps)  # type: ignore[no-untyped-call]
        return result


class _NormAndSilu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        normed, mean, rstd = _norm(x, weight, bias, groups, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.groups, ctx.eps = groups, eps
        return F.silu(normed).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        if not _is_channels_last(x):
            normed = _norm(x, weight, bias, ctx.groups, ctx.eps)[0]
            above = torch.ops.aten.silu_backward(gradient, normed)
            places = x.shape[2] * x.shape[3]
            sizes = (len(x), x.shape[1], places, ctx.groups)
            below = torch.ops.aten.native_group_norm_backward
            return below(above.contiguous(), x, mean, rstd, weight, *sizes, [True, False, False])[0], *[None] * 4
        unit = (_grouped(x, ctx.groups) - mean) * rstd
        scale, shift = (_grouped(row.expand(len(x), -1)[..., None, None], ctx.groups) for row in (weight, bias))
        above = (
            torch.ops.aten.silu_backward(_grouped(gradient, ctx.groups).to(unit.dtype), unit * scale + shift) * scale
        )
        common = above.mean((1, 3), keepdim=True) + unit * (above * unit).mean((1, 3), keepdim=True)
        return _maps((above - common) * rstd, x).to(x.dtype), *[None] * 4


def _norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm in the layout of x, with mean and 1 / deviation of each group; fp32 where it is channels last."""
    if not _is_channels_last(x):
        sizes = (len(x), x.shape[1], x.shape[2] * x.shape[3], groups)
        return torch.ops.aten.native_group_norm(x.contiguous(), weight, bias, *sizes, eps)
    parts = _grouped(x, groups).to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(parts, (1, 3), correction=0, keepdim=True)
    rstd = (variance + eps).rsqrt()
    scale, shift = (_grouped(row.expand(len(x), -1)[..., None, None], groups) for row in (weight, bias))
    return _maps((parts - mean) * rstd * scale + shift, x), mean, rstd


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(B, C, h, w) that is channels last seen as (B, places, groups, C / groups)."""
    return x.permute(0, 2, 3, 1).flatten(1, 2).unflatten(2, (groups, -1))


def _maps(parts: Tensor, like: Tensor) -> Tensor:
    """The way back."""
    return parts.flatten(2).unflatten(1, like.shape[2:]).permute(0, 3, 1, 2)


class _SiluElsewhere(nn.Module):
    """SiLU of a block's embedding; to its maps :class:`NormAndSilu` has applied it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.ndim == 4 else F.silu(x)


@contextmanager
def _with_lean_norms(unet: nn.Module) -> Iterator[None]:
    """Inside, the norms of a UNet's residual blocks, and the last of all, are one function with their SiLU."""
    with ExitStack() as stack:

        def exchange(owner: nn.Module, name: str, module: nn.Module) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, module)

        for block in [module for module in unet.modules() if isinstance(module, ResnetBlock2D)]:
            for name in ("norm1", "norm2"):
                exchange(block, name, NormAndSilu(getattr(block, name)))
            exchange(block, "nonlinearity", _SiluElsewhere())
        exchange(unet, "conv_norm_out", NormAndSilu(cast(nn.GroupNorm, unet.conv_norm_out)))
        exchange(unet, "conv_act", _SiluElsewhere())
        yield


@contextmanager
def _compiled(unet: nn.Module) -> Iterator[None]:
    """Inside, transformer blocks are compiled, each of their kinds once."""
    blocks = [module for module in unet.modules() if type(module).__name__ == "BasicTransformerBlock"]
    try:
        for block in blocks:
            block.compile(dynamic=False)
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch.compiler.reset()


def _recorded(engine: Engine, micro: MicroBatch) -> ForwardBackward:
    """Forward and backward as one CUDA graph over memory of its own, into which each micro-batch is copied first.

    As PyTorch's notes on CUDA semantics have it ("Whole-network capture"): a few steps on another stream, gradients
    dropped so that they are born in the graph's memory, then the same recorded. There they lie at the same place after
    every replay, so they are handed to the working weights again each time. Nothing random is in it: noise comes with
    the micro-batch. Never run until a card can be had.
    """
    if engine.device.type != "cuda":
        raise RuntimeError("graphs are recorded on CUDA cards only")
    weights = engine.masters.working
    still = micro.to(engine.device)

    def step() -> Tensor:
        return training_step(
            engine.models, engine.noise_schedule, engine.job.recipe.objective, still, engine.loss_scale
        )

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            step()
            engine.masters.zero_grad()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    gradients = {key: weight.grad for key, weight in weights.items()}

    def replayed() -> Tensor:
        for kept, given in zip(_tensors(still), _tensors(micro), strict=True):
            kept.copy_(given, non_blocking=True)
        graph.replay()
        for key, gradient in gradients.items():
            weights[key].grad = gradient
        return loss

    return replayed


def _tensors(micro: MicroBatch) -> Iterator[Tensor]:
    """All that a micro-batch holds, in one order."""
    for field in fields(micro):
        value = getattr(micro, field.name)
        parts = (value.hidden, value.pooled) if isinstance(value, TextConditioning) else value
        yield from (part for part in (parts if isinstance(parts, tuple) else (parts,)) if part is not None)
