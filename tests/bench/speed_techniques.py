"""What might make a step quicker or smaller and is not in the trainer: switches, until a card says what they are worth.

- `norms`: a GroupNorm and the SiLU after it as one function that keeps only its input.
- `channels_last`: all maps laid out channel by channel at each place, as tensor cores want them.
- `channels_last_norms`: with norms that keep this layout; PyTorch's own on a card copy it away and back.
- `compiled`: torch.compile fuses the transformer blocks as with `fit.compile = true` (trainer.training.compiled).
- `graphs`: steps are recorded and replayed as with `fit.graphs = true` (trainer.training.graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.support.replaying import Replayer
from trainer.training import layout
from trainer.training.compiled import CompiledBlocks
from trainer.training.graphs import RECORDERS, RecordedSteps
from trainer.training.layout import Kernels, SiluElsewhere
from trainer.training.loop import Engine

Technique = Literal["none", "norms", "channels_last", "channels_last_norms", "compiled", "graphs"]


@contextmanager
def applied(technique: Technique, engine: Engine) -> Iterator[None]:
    """Inside, the engine learns with a technique; it is as before at the end. A compiler may be missing for one."""
    unet = cast(nn.Module, engine.models.unet)
    with ExitStack() as stack:
        if technique.startswith("channels_last"):
            unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            stack.callback(unet.to, memory_format=torch.contiguous_format)
        if technique.endswith("norms"):
            kernels = Kernels.of(engine.device)
            lean = partial(layout.NormAndSilu, kernels=kernels) if technique != "norms" else NormAndSilu
            stack.enter_context(_with_norms(unet, lean))
        if technique == "compiled":
            stack.enter_context(_compiled(engine))
        if technique == "graphs":
            stack.enter_context(_with_graphs(engine))
        yield


class NormAndSilu(nn.Module):
    """A frozen GroupNorm with the SiLU after it, for maps as they usually lie: keeps its input only."""

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
        return F.silu(normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        normed = _norm(x, weight, bias, ctx.groups, ctx.eps)[0]
        above = torch.ops.aten.silu_backward(gradient, normed)
        sizes = (len(x), x.shape[1], x.shape[2] * x.shape[3], ctx.groups)
        below = torch.ops.aten.native_group_norm_backward
        return below(above.contiguous(), x, mean, rstd, weight, *sizes, [True, False, False])[0], *[None] * 4


def _norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (len(x), x.shape[1], x.shape[2] * x.shape[3], groups)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_group_norm(x.contiguous(), weight, bias, *sizes, eps)
    return found


@contextmanager
def _with_norms(unet: nn.Module, made_of: Callable[[nn.GroupNorm], nn.Module]) -> Iterator[None]:
    """Inside, the norms of a UNet's residual blocks, and the last of all, are one function with their SiLU."""
    with ExitStack() as stack:

        def exchange(owner: nn.Module, name: str, module: nn.Module) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, module)

        for block in [module for module in unet.modules() if isinstance(module, ResnetBlock2D)]:
            for name in ("norm1", "norm2"):
                exchange(block, name, made_of(getattr(block, name)))
            exchange(block, "nonlinearity", SiluElsewhere())
        exchange(unet, "conv_norm_out", made_of(cast(nn.GroupNorm, unet.conv_norm_out)))
        exchange(unet, "conv_act", SiluElsewhere())
        yield


@contextmanager
def _compiled(engine: Engine) -> Iterator[None]:
    """Inside, the engine learns with compiled blocks as with fit.compile; what hinders that is raised."""
    unet = cast(nn.Module, engine.models.unet)
    engine.compiled = blocks = CompiledBlocks(_raise)
    blocks.install(unet)
    try:
        yield
    finally:
        engine.compiled = None
        for block in unet.modules():
            if isinstance(block, BasicTransformerBlock):
                vars(block).pop("forward", None)
        torch.compiler.reset()


@contextmanager
def _with_graphs(engine: Engine) -> Iterator[None]:
    """Inside, the engine replays its steps as with fit.graphs; what hinders that is raised, for the row to tell."""
    recorders = {"cpu": Replayer, **RECORDERS}
    engine.graphs = RecordedSteps(lambda: recorders[engine.device.type](engine.device), _raise)
    try:
        yield
    finally:
        engine.graphs.forget()
        engine.graphs = None


def _raise(code: str, sentence: str) -> None:
    """For the row to tell."""
    raise RuntimeError(sentence)
