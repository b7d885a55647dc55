"""Out-of-memory errors: detection, location and wording, and a memory cap that raises them in time."""

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

# Parts of out-of-memory messages that PyTorch, cuBLAS, cuDNN and the CUDA runtime raise as other errors; lower case.
_MESSAGES = (
    "not enough memory",
    "can't allocate memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "device_allocation_failed",
    "host_allocation_failed",
)
# PyTorch tries cuDNN's engines in turn and drops the reason why each failed. The message is the same whether no engine
# exists for a convolution or none could allocate its workspace.
_NO_ENGINE = ("unable to find an engine", "unable to find a valid cudnn algorithm")
_WORKSPACE_BYTES = 1 << 30
"""If fewer bytes are free, a convolution for which no engine is found counts as out of memory."""
_REQUESTED = re.compile(r"ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_ALLOCATED = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) is allocated by PyTorch")
_CACHED = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# The stages of a step, by the code object of the function that runs them, to find them in a traceback.
_STAGES: Mapping[CodeType, str] = {
    training_step.__code__: "forward",
    torch.autograd.backward.__code__: "backward",
    MasterWeights.accumulate.__code__: "accumulate",
    measure.__code__: "measure",
    clip.__code__: "clip",
    inspect.unwrap(MasterWeights.refresh).__code__: "refresh",  # the wrapper's code is shared by all no_grad functions
}
MIB = 1 << 20
# Kept out of the cap. CUDA loads kernels at their first use, outside PyTorch's allocator: a context of 274 MiB when
# idle grows to about 512 MiB while training.
SPARE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class OomDetails:
    """Details of an out-of-memory error."""

    requested: int | None
    """Bytes that could not be allocated; None if the error does not state them."""
    stage: str
    """Stage of the training step; "" outside a step."""
    module: str
    """Dotted path of the module that was running; "" if none was, as in most of backward."""
    allocated: int | None
    """Bytes that PyTorch had allocated, to about 10 MiB; None if the error does not state them."""
    reserved: int | None
    """Bytes that PyTorch had reserved from the driver, to about 10 MiB; None if the error does not state them."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that GPU memory or main memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    if any(part in message for part in _MESSAGES):
        return True
    return any(part in message for part in _NO_ENGINE) and _available_on_gpu() < _WORKSPACE_BYTES


def _available_on_gpu() -> float:
    """Return how many more bytes PyTorch may reserve on the current GPU; infinity without a GPU."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return math.inf
    free, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.get_per_process_memory_fraction() * total
    return min(free, allowed - torch.cuda.memory_reserved())


def gpu_of(error: BaseException) -> int | None:
    """Return the index of the GPU whose memory ran out, or None if the error does not name it."""
    match = re.search(r"\bGPU (\d+)\b", str(error))
    return int(match[1]) if match else None


def concerns_gpu(error: BaseException) -> bool:
    """Return whether an out-of-memory error is about GPU memory rather than main memory."""
    return not isinstance(error, MemoryError) and re.search("cuda|cublas|cudnn|GPU", str(error), re.I) is not None


def requested_bytes(error: BaseException) -> int | None:
    """Return the bytes that could not be allocated, or None if the error does not state them."""
    return _bytes(_REQUESTED, str(error))


def oom_details(error: BaseException, models: Mapping[str, nn.Module]) -> OomDetails:
    """Return the details of an out-of-memory error, with the module's path starting at a name in ``models``.

    The stage and the module come from the local variables of the traceback's frames. The result keeps no frames, and
    therefore no tensors, alive.
    """
    message = str(error)
    requested, allocated, cached = (_bytes(pattern, message) for pattern in (_REQUESTED, _ALLOCATED, _CACHED))
    reserved = None if allocated is None or cached is None else allocated + cached
    names = {
        id(module): f"{root}.{path}".rstrip(".")
        for root, model in models.items()
        for path, module in model.named_modules()
    }
    stage = module = ""
    # From the outermost frame inward, so that the innermost stage and module win. Modules outside ``models``, such as
    # those of libraries, are named by their class unless an outer module has a path.
    for frame in _ended_frames(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            stage = "optimizer"
        found = _STAGES.get(frame.f_code, stage)
        if stage or found != "backward":  # probing an attention kernel runs a backward too, outside of a step
            stage = found
        if isinstance(owner, nn.Module):
            module = names.get(id(owner), module or type(owner).__name__)
    return OomDetails(requested, stage, module, allocated, reserved)


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def _ended_frames(trace: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames of a traceback that have ended, outermost first.

    Frames that are still running are left out: on Python 3.11 and 3.12, reading ``f_locals`` of a running frame creates
    a mapping that the frame keeps until it returns. Our caller's mapping would reference the error, and with it
    everything that the failed work had allocated, so the retry would run out of memory as well.
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
    """Turn an out-of-memory error inside the block into an error for users.

    ``action`` completes "Could not ...". Wrap it around everything that touches a GPU: on a full GPU the first tensor
    fails, wherever it is created, and even probing a kernel fails. Once a run has started, it recovers from most of
    these errors itself (trainer.training.recovery).
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise oom_error(error, action) from error


def oom_error(error: BaseException, action: str) -> ImpastoError:
    """Return the error to show users for an out-of-memory error; it names the programs that use the memory."""
    requested = requested_bytes(error)
    more = f"{size(requested)} more requested" if requested else ""
    if not concerns_gpu(error):
        details = f" ({more})" if more else ""
        return ImpastoError(
            "memory.full",
            f"Could not {action}: there is not enough free main memory{details}.",
            "Close other programs, then try again.",
        )
    full_gpu = _full_gpu(gpu_of(error))
    free = f"{size(full_gpu.free_bytes)} of {size(full_gpu.total_bytes)} free" if full_gpu else ""
    details = ", ".join(filter(None, (free, more)))
    return ImpastoError(
        "memory.full",
        f"Could not {action}: {full_gpu.name if full_gpu else 'the GPU'} does not have enough free memory"
        f"{f' ({details})' if details else ''}.",
        f"{close_programs_advice(full_gpu)}, then try again.",
    )


def close_programs_advice(gpu_info: gpu.Gpu | None) -> str:
    """Return the advice to close other programs that use a GPU, with their names if known."""
    others = gpu.other_processes_text(gpu_info, os.getpid()) if gpu_info else ""
    return f"Close other programs that use the GPU{f' ({others})' if others else ''}"


def current_gpu_info(device: torch.device) -> gpu.Gpu | None:
    """Return the current state of the run's GPU; None on the CPU or if the driver does not answer."""
    if device.type == "cuda":
        with suppress(ImpastoError, RuntimeError):
            return gpu_info(device.index or 0)
    return None


def _full_gpu(index: int | None) -> gpu.Gpu | None:
    """Return the state of PyTorch's GPU ``index``, or of the GPU with the least free memory if ``index`` is None."""
    if index is not None:
        return current_gpu_info(torch.device("cuda", index))
    found: list[gpu.Gpu] = []
    with suppress(ImpastoError):
        found = gpu.list_gpus()
    return min(found, key=lambda one: one.free_bytes, default=None)


def cap_memory(device: torch.device) -> int | None:
    """Cap PyTorch's memory slightly below what is free on the GPU now, and return the cap in bytes.

    Without a cap, the Windows driver spills into main memory when the GPU is full, and a step takes minutes. With one,
    PyTorch raises OutOfMemoryError, from which a run can recover. Call this before anything is timed, and again when
    training starts. Returns None on the CPU, and if the environment selects another allocator, which cannot be capped.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    free, total = torch.cuda.mem_get_info(device)
    cap = max(0, torch.cuda.memory_reserved(device) + free - SPARE_BYTES)
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    return cap


def gpu_info(index: int) -> gpu.Gpu:
    """Return PyTorch's GPU ``index`` as described by the driver, or by PyTorch if the driver does not answer.

    Asking the driver takes no memory; asking PyTorch for the free memory creates a CUDA context of hundreds of MiB.
    """
    properties = torch.cuda.get_device_properties(index)
    found: list[gpu.Gpu] = []
    with suppress(ImpastoError):  # PyTorch can use the GPU, so training works without NVML's figures
        found = gpu.list_gpus()
    listed = gpu.gpu_with_uuid(str(properties.uuid), found)
    if listed is not None:
        return listed
    free, total = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    return gpu.Gpu(index, str(properties.uuid), properties.name, total, free, "unknown", (0, 0), capability, uses=())
