"""Freeing GPU memory by returning cached memory to the driver and moving idle models to main memory."""

from __future__ import annotations

import ctypes
import logging
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from trainer.protocol.forecast import ReleasePoint

_LOG = logging.getLogger(__name__)


def empty_cache(device: torch.device) -> None:
    """Return cached memory to the driver, so that this phase's blocks do not fragment the next phase's memory.

    Call it between phases, not between steps: allocating the memory again costs some milliseconds.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def release_at(point: ReleasePoint, device: torch.device) -> None:
    """Return cached memory to the driver at a point of a run that the forecast also models.

    Use this at points that every run passes, and :func:`empty_cache` after something has gone wrong.
    """
    _LOG.debug("Returning cached memory after %s", point)
    empty_cache(device)


def trim_host_memory() -> None:
    """Return freed main memory to the operating system; takes some milliseconds.

    Only glibc on Linux needs this: it keeps freed memory for each thread, 180 MiB after one large photo.
    """
    if malloc_trim := _trimmer():
        malloc_trim(0)


@cache
def _trimmer() -> Callable[[int], object] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@contextmanager
def offloaded(model: nn.Module) -> Iterator[None]:
    """Offload the model's weights to main memory inside the block, and bring them back after it.

    The storages are resized in place, so that other references to the tensors (the adapter's working weights, the
    state of int8 layers) stay valid. Takes one to two seconds each way for SDXL.
    """
    # By address, because tied weights share a storage.
    storages = {storage.data_ptr(): storage for storage in _storages(model) if storage.resizable()}
    copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
    try:
        for storage in storages.values():
            copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            copies.append((storage, copy.copy_(storage)))
            storage.resize_(0)
        yield
    except BaseException as error:
        # The failed frames still reference tensors, which must be freed, or the weights may not fit again.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        for storage, copy in copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)


def free_weights(model: nn.Module) -> None:
    """Free the memory of a model's weights even if they are referenced; the model becomes unusable."""
    for storage in _storages(model):
        if storage.resizable():
            storage.resize_(0)


def is_emptied(model: nn.Module, streamed: Collection[nn.Parameter] = ()) -> bool:
    """Return whether any weight that is not in ``streamed`` has no memory.

    This happens if it was freed, or if `offloaded` could not restore it.
    """
    known = set(map(id, streamed))
    return any(
        weight.numel() and not weight.untyped_storage().nbytes() and id(weight) not in known
        for weight in model.parameters()
    )


def _storages(model: nn.Module) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a model's tensors; check `resizable` first, because torch does not own all CPU storages."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.untyped_storage()
