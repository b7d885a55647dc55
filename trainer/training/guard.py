"""Keep a run within the GPU's memory: a cap, an error that says who holds the memory, and a watch on slow steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.protocol.sizes import size
from trainer.training.machine import card_of
from trainer.training.reporter import Reporter
from trainer.training.shortage import concerns_gpu, gpu_of, is_out_of_memory, requested_bytes

MIB = 1 << 20
# CUDA loads kernels when they are first used, outside PyTorch's allocator: an idle context of 274 MiB grows to about
# half a GiB while training.
SPARE_BYTES = 256 * MIB


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


def warn_of_allocator(device: torch.device, reporter: Reporter) -> None:
    """Report an allocator that has no cap and that no forecast describes."""
    if device.type == "cuda" and torch.cuda.get_allocator_backend() != "native":
        reporter.notice(
            "memory.allocator",
            "PYTORCH_CUDA_ALLOC_CONF chooses another allocator than PyTorch's own: forecasts do not hold for it, and "
            "the run cannot be kept from spilling into main memory. Remove backend: from that variable.",
        )
