"""Keep a run within the GPU's memory: a cap, an error that says who holds the memory, and a watch on slow steps."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

import torch
from torch import nn

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.protocol.text import size
from trainer.training.optim.master_weights import MasterWeights, clip, measure
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
# PyTorch tries cuDNN's engines one after the other and forgets why each failed: it says the same when no engine exists
# for a convolution and when none found memory for its workspace.
_NO_ENGINE = ("unable to find an engine", "unable to find a valid cudnn algorithm")
_WORKSPACE_BYTES = 1 << 30
"""With less left than this, a convolution without an engine is taken for one without memory."""
_REQUESTED = re.compile(r"ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_ALLOCATED = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) is allocated by PyTorch")
_CACHED = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) is reserved by PyTorch but unallocated")
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
MIB = 1 << 20
# CUDA loads kernels when they are first used, outside PyTorch's allocator: an idle context of 274 MiB grows to about
# half a GiB while training.
SPARE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class Shortage:
    """What was asked for when memory ran out."""

    requested: int | None
    """Bytes; None where the error does not say."""
    stage: str
    """What the step was doing, "" outside of one."""
    module: str
    """Dotted path of the module that was computing, "" where none was, as in most of backward."""
    allocated: int | None
    """Bytes in use at that moment, to about 10 MiB; None where the error does not say."""
    reserved: int | None
    """Bytes that PyTorch had taken from the driver; likewise."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory of the GPU or of the machine ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    if any(words in message for words in _WORDS):
        return True
    return any(words in message for words in _NO_ENGINE) and _left_on_gpu() < _WORKSPACE_BYTES


def _left_on_gpu() -> float:
    """Return the bytes that PyTorch may still take of the current GPU; infinite where none is in use."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return math.inf
    free, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.get_per_process_memory_fraction() * total
    return min(free, allowed - torch.cuda.memory_reserved())


def gpu_of(error: BaseException) -> int | None:
    """Return the number of the GPU whose memory ran out where the error names it; None where it does not."""
    named = re.search(r"\bGPU (\d+)\b", str(error))
    return int(named[1]) if named else None


def concerns_gpu(error: BaseException) -> bool:
    """Return whether a shortage is one of a GPU's memory, not of main memory."""
    return not isinstance(error, MemoryError) and re.search("cuda|cublas|cudnn|GPU", str(error), re.I) is not None


def requested_bytes(error: BaseException) -> int | None:
    """Return how much memory was asked for in vain, where the error says so."""
    return _bytes(_REQUESTED, str(error))


def shortage_of(error: BaseException, models: Mapping[str, nn.Module]) -> Shortage:
    """Return what ``error`` says, with the place by the names of ``models``; keeps nothing of the error alive."""
    message = str(error)
    requested, allocated, cached = (_bytes(pattern, message) for pattern in (_REQUESTED, _ALLOCATED, _CACHED))
    reserved = None if allocated is None or cached is None else allocated + cached
    names = {
        id(module): f"{root}.{path}".rstrip(".")
        for root, model in models.items()
        for path, module in model.named_modules()
    }
    stage = module = ""
    for frame in _ended_frames(error.__traceback__):
        actor = frame.f_locals.get("self")
        if isinstance(actor, torch.optim.Optimizer):
            stage = "optimizer"
        stage = _STAGES.get(frame.f_code, stage)
        if isinstance(actor, nn.Module):
            module = names.get(id(actor), module or type(actor).__name__)
    return Shortage(requested, stage, module, allocated, reserved)


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def _ended_frames(trace: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames that an error passed through and that have ended, the outermost first.

    Reading ``f_locals`` of a frame that is still running is not free on Python 3.11 and 3.12: the frame keeps the
    mapping until it returns. That of our caller holds the error, and so everything that the failed work had allocated.
    """
    running: set[FrameType] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    while trace is not None:
        if trace.tb_frame not in running:
            yield trace.tb_frame
        trace = trace.tb_next


@contextmanager
def gpu_guard(action: str) -> Iterator[None]:
    """Turn a shortage of memory inside into an error for users; ``action`` completes "Could not ...".

    Wrap it around everything that touches a GPU: on a full one the first tensor fails, wherever that is, and a kernel
    that is only tried. A run that has started answers most shortages itself (trainer.training.recovery).
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise memory_full(error, action) from error


def memory_full(error: BaseException, action: str) -> ImpastoError:
    """Return a shortage as an error for users, which names the programs that hold the memory."""
    requested = requested_bytes(error)
    more = f"{size(requested)} more requested" if requested else ""
    if not concerns_gpu(error):
        details = f" ({more})" if more else ""
        return ImpastoError(
            "memory.full",
            f"Could not {action}: there is not enough free main memory{details}.",
            "Close other programs, then try again.",
        )
    card = _card_short_of_memory(gpu_of(error))
    free = f"{size(card.free_bytes)} of {size(card.total_bytes)} free" if card else ""
    details = ", ".join(filter(None, (free, more)))
    return ImpastoError(
        "memory.full",
        f"Could not {action}: {card.name if card else 'the GPU'} does not have enough free memory"
        f"{f' ({details})' if details else ''}.",
        f"{closing(card)}, then try again.",
    )


def closing(card: gpu.Card | None) -> str:
    """Return the advice to close the programs that hold memory of a GPU, by name where they are known."""
    others = gpu.others_named(card, os.getpid()) if card else ""
    return f"Close other programs that use the GPU{f' ({others})' if others else ''}"


def card_in_use(device: torch.device) -> gpu.Card | None:
    """Return the run's GPU as it is now; None on the CPU and where the driver does not answer."""
    if device.type == "cuda":
        with suppress(ImpastoError, RuntimeError):
            return card_of(device.index or 0)
    return None


def _card_short_of_memory(index: int | None) -> gpu.Card | None:
    """Return GPU ``index`` of PyTorch's, else the one that the driver says is fullest."""
    if index is not None:
        return card_in_use(torch.device("cuda", index))
    found: list[gpu.Card] = []
    with suppress(ImpastoError):
        found = gpu.cards()
    return min(found, key=lambda card: card.free_bytes, default=None)


def cap_memory(device: torch.device) -> int | None:
    """Let PyTorch take no more than just under what is free on the GPU now; return the cap in bytes.

    Without it the Windows driver continues in main memory when the GPU is full, and a step takes minutes; with it
    PyTorch raises OutOfMemoryError, which a run can answer. Call it before anything is timed, and again when training
    starts. None on the CPU, and where the environment chooses another allocator, which has no such cap.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    free, total = torch.cuda.mem_get_info(device)
    cap = max(0, torch.cuda.memory_reserved(device) + free - SPARE_BYTES)
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    return cap


def card_of(index: int) -> gpu.Card:
    """PyTorch's card ``index`` as the driver describes it, or as PyTorch does where the driver lists it not.

    Asking the driver takes no memory; asking PyTorch for what is free makes a CUDA context of hundreds of MiB.
    """
    properties = torch.cuda.get_device_properties(index)
    found: list[gpu.Card] = []
    with suppress(ImpastoError):  # PyTorch speaks to the card, so training can do without what NVML tells
        found = gpu.cards()
    card = gpu.card_with_uuid(str(properties.uuid), found)
    if card is not None:
        return card
    free, total = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    return gpu.Card(index, str(properties.uuid), properties.name, total, free, "unknown", (0, 0), capability, uses=())
