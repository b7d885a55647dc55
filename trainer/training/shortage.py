"""What an error tells of memory that ran out: whether it is that, how much was asked for, what for, and where."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

import torch
from torch import nn

from trainer.training.masters import MasterWeights, clip, measure
from trainer.training.step import training_step

# What PyTorch, cuBLAS, cuDNN and the CUDA runtime say where they raise no OutOfMemoryError; lower case.
_WORDS = (
    "not enough memory",
    "can't allocate memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "device_allocation_failed",
    "host_allocation_failed",
)
_ASKED = re.compile(r"ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# A step's stages by the functions that they are.
_STAGES: Mapping[CodeType, str] = {
    training_step.__code__: "forward",
    torch.autograd.backward.__code__: "backward",
    MasterWeights.accumulate.__code__: "accumulate",
    measure.__code__: "measure",
    clip.__code__: "clip",
    inspect.unwrap(MasterWeights.refresh).__code__: "refresh",  # else that of every function under no_grad
}


@dataclass(frozen=True, slots=True)
class Shortage:
    """What was asked for when memory ran out."""

    requested: int | None
    """Bytes; None where the error does not say."""
    stage: str
    """What the step was doing, "" outside of one."""
    module: str
    """Dotted path of the module that was computing, "" where none was, as in most of backward."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory of the card or of the machine ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def shortage_of(error: BaseException, models: Mapping[str, nn.Module]) -> Shortage:
    """What ``error`` tells, with the place by the names of ``models``; keeps nothing of the error alive."""
    asked = _ASKED.search(str(error))
    requested = round(float(asked[1]) * _UNITS[asked[2]]) if asked else None
    names = {
        id(module): f"{root}.{path}".rstrip(".")
        for root, model in models.items()
        for path, module in model.named_modules()
    }
    stage = module = ""
    for frame in _frames(error.__traceback__):
        actor = frame.f_locals.get("self")
        if isinstance(actor, torch.optim.Optimizer):
            stage = "optimizer"
        stage = _STAGES.get(frame.f_code, stage)
        if isinstance(actor, nn.Module):
            module = names.get(id(actor), module or type(actor).__name__)
    return Shortage(requested, stage, module)


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    """The frames that an error passed through, the outermost first."""
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
