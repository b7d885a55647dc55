"""Techniques that might make a step faster or smaller and are off by default, until a GPU shows what they are worth.

- `channels_last`: feature maps have the layout of `fit.channels_last = true`
  (trainer.training.acceleration.channels_last).
- `compiled`: torch.compile fuses the transformer blocks as with `fit.compile = true`
  (trainer.training.acceleration.compile).
- `fp16_accumulation`: products in fp16 accumulate in fp16 as with `fit.fp16_accumulation = true`.
- `graphs`: steps are captured and replayed as with `fit.cuda_graphs` (trainer.training.acceleration.cuda_graphs).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, cast
from unittest.mock import patch

import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import nn

from tests.support.replaying import Replayer
from trainer.adapter.lean.residual import NormAndSilu
from trainer.training.acceleration import channels_last
from trainer.training.acceleration.channels_last import Kernels
from trainer.training.acceleration.compile import CompiledBlocks
from trainer.training.acceleration.cuda_graphs import RECORDERS, GraphedSteps
from trainer.training.engine import Engine

Technique = Literal["none", "channels_last", "compiled", "fp16_accumulation", "graphs"]


@contextmanager
def applied(technique: Technique, engine: Engine) -> Iterator[None]:
    """Apply a technique to the engine while the block runs; raise if its compiler is missing."""
    unet = cast(nn.Module, engine.models.unet)
    with ExitStack() as stack:
        if technique == "channels_last":
            stack.enter_context(_channels_last(unet, engine.device))
        if technique == "compiled":
            stack.enter_context(_compiled(engine))
        if technique == "fp16_accumulation":
            stack.enter_context(patch.object(torch.backends.cuda.matmul, "allow_fp16_accumulation", new=True))
        if technique == "graphs":
            stack.enter_context(_with_graphs(engine))
        yield


@contextmanager
def _channels_last(unet: nn.Module, device: torch.device) -> Iterator[None]:
    """Use the channels-last layout as with fit.channels_last, except for the trained layers."""
    channels_last.convert_to_channels_last(unet, Kernels.of(device))
    try:
        yield
    finally:
        unet.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        for module in unet.modules():
            if isinstance(module, channels_last.ChannelsLastNormAndSilu):
                module.__class__ = NormAndSilu


@contextmanager
def _compiled(engine: Engine) -> Iterator[None]:
    """Compile the blocks as with fit.compile; raise what prevents that."""
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
    """Replay the steps of the engine as with fit.cuda_graphs; raise what prevents that."""
    recorders = {"cpu": Replayer, **RECORDERS}
    engine.graphs = GraphedSteps(lambda: recorders[engine.device.type](engine.device), _raise)
    try:
        yield
    finally:
        engine.graphs.forget()
        engine.graphs = None


def _raise(code: str, sentence: str) -> None:
    """Raise a notice as an error, which the row then shows."""
    raise RuntimeError(sentence)
