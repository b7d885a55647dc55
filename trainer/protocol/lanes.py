"""Who works on a graphics card: one lock a card, which training holds for its length and rendering asks for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from trainer.protocol import locks, places
from trainer.protocol.naming import safe_name


def lane_of(device: str | None) -> str:
    """Return the lane of a job's device: "cuda:0" for "cuda", "cpu" for None."""
    return {"cuda": "cuda:0", None: "cpu"}.get(device, device or "cpu")


def gpu_held(lane: str) -> bool:
    """Tell whether a program of Impasto works on a lane ("cuda:0", "cpu"), this process included."""
    try:
        return locks.is_held(_lock(lane))
    except OSError:  # a disk that knows no locks: nobody can hold one
        return False


@contextlib.contextmanager
def occupied(lane: str, patience: float = math.inf) -> Iterator[None]:
    """Hold a lane for the length of the block, waiting until whoever has it lets go.

    Raises locks.LockBusyError after `patience` seconds, OSError when the lock's file cannot be used.
    """
    lock = _lock(lane)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locks.held(lock, patience):
        yield


@contextlib.contextmanager
def marked(lane: str) -> Iterator[bool]:
    """Hold a lane for the length of the block where it is free, else go on without; gives whether it is held."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(occupied(lane, locks.ASKED))
        except (locks.LockBusyError, OSError):
            yield False
            return
        yield True


def _lock(lane: str) -> Path:
    return places.home() / "lanes" / f"{safe_name(lane_of(lane).replace(':', '-'), 'lane')}.lock"
