"""Makes room on the card: freed memory goes back to the driver, a model that must wait does so in main memory."""

from __future__ import annotations

import ctypes
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from trainer.training.device.release_points import ReleasePoint

_LOG = logging.getLogger(__name__)


def release(device: torch.device) -> None:
    """Gives what was freed back to the driver, so that the next phase does not find it in pieces of other sizes.

    Call it between phases, not between steps: asking for the memory again costs some milliseconds.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def release_at(point: ReleasePoint, device: torch.device) -> None:
    """Return cached memory to the driver at a point of a run that forecasts know too.

    Use this for whatever every run passes, and :func:`release` for what only happens when something goes wrong.
    """
    _LOG.debug("Returning cached memory after %s", point)
    release(device)


def trim() -> None:
    """Gives freed main memory back to the system; takes some milliseconds.

    Linux' C library keeps it for each thread that asked for it: a large photograph is 180 MiB. Others keep none.
    """
    if give := _trimmer():
        give(0)


@cache
def _trimmer() -> Callable[[int], object] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@contextmanager
def away(model: nn.Module) -> Iterator[None]:
    """Inside, the model's weights lie in main memory and their place on the card is free; after, all is as before.

    Memory is emptied beneath the tensors, so that what else refers to them (the adapter's working weights, the int8
    layers' state) stays right. Takes a second or two each way for SDXL.
    """
    storages = {storage.data_ptr(): storage for storage in _storages(model) if storage.resizable()}
    waiting: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
    try:
        for storage in storages.values():
            copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            waiting.append((storage, copy.copy_(storage)))
            storage.resize_(0)
        yield
    except BaseException as error:
        # Frames that failed for want of memory hold what they were computing: it has to go before the weights return.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        for storage, copy in waiting:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)


def discard(model: nn.Module) -> None:
    """Frees the memory beneath a model's weights, whoever refers to them; it can do nothing but be thrown away then."""
    for storage in _storages(model):
        if storage.resizable():
            storage.resize_(0)


def is_emptied(model: nn.Module) -> bool:
    """Whether weights of a model lost their memory: it was discarded, or found no room to come back."""
    return any(weight.numel() and not weight.untyped_storage().nbytes() for weight in model.parameters())


def _storages(model: nn.Module) -> Iterator[torch.UntypedStorage]:
    """What the model's tensors lie in; on the CPU some are not torch's own and cannot be resized, on a card all are."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.untyped_storage()
