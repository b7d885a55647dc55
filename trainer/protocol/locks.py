"""Locks that the operating system frees when their holder dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.protocol import places
from trainer.protocol.files import long_path, safe_name

ASKED = 1.0
"""Seconds of patience with a lock that nobody should hold: whoever only asks has it for microseconds."""
_POLL = 0.05  # seconds: no system has a lock that can be waited for with an end to it
_ASK_AGAIN = (0.001, 0.002, 0.005, 0.01)  # seconds; what a question on Windows costs where the lock is held

if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: BinaryIO) -> bool:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _unlock(file: BinaryIO) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

    def _is_free(file: BinaryIO) -> bool:
        """Tell whether nobody holds the lock; there is no shared one, so who meets another who asks asks again."""
        for wait in _ASK_AGAIN:
            if _try_lock(file):
                _unlock(file)
                return True
            time.sleep(wait)
        return False

else:
    import fcntl

    # flock, not lockf: its lock belongs to the open file, so that a second opening in the same process meets it too.
    def _try_lock(file: BinaryIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

    def _is_free(file: BinaryIO) -> bool:
        """Tell whether nobody holds the lock; a shared one meets only a holder, not others who ask."""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _unlock(file)
        return True


class LockBusyError(Exception):
    """Somebody else holds the lock."""


@contextlib.contextmanager
def held(path: Path, patience: float) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created when missing) for the length of the block.

    Raises LockBusyError when another holder does not let go within `patience` seconds, OSError when the file cannot be
    opened or its disk knows no locks.
    """
    require_file(path)
    with long_path(path).open("ab") as file:
        deadline = time.monotonic() + patience
        while not _try_lock(file):
            if time.monotonic() >= deadline:
                raise LockBusyError(path)
            time.sleep(_POLL)
        try:
            yield
        finally:
            _unlock(file)


def is_held(path: Path) -> bool:
    """Tell whether somebody holds the lock on `path`, this process included; False when there is no such file.

    Any number may ask at once. Asking takes the lock for a moment: whoever wants to hold it meanwhile needs a little
    patience.
    """
    if not long_path(path).is_file():  # a folder or pipe holds no lock, and opening a pipe would block
        return False
    try:
        with long_path(path).open("rb") as file:
            return not _is_free(file)
    except FileNotFoundError:
        return False


def require_file(path: Path) -> None:
    """Raise OSError where something other than a file is in the lock's place: opening a pipe would block."""
    if long_path(path).exists() and not long_path(path).is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))


def lane_of(device: str | None) -> str:
    """Return the lane of a job's device: "cuda:0" for "cuda", "cpu" for None."""
    return {"cuda": "cuda:0", None: "cpu"}.get(device, device or "cpu")


def gpu_held(lane: str) -> bool:
    """Tell whether a program of Impasto works on a lane ("cuda:0", "cpu"), this process included."""
    try:
        return is_held(_lock(lane))
    except OSError:  # a disk that knows no locks: nobody can hold one
        return False


@contextlib.contextmanager
def occupied(lane: str, patience: float = math.inf) -> Iterator[None]:
    """Hold a lane for the length of the block, waiting until whoever has it lets go.

    Raises LockBusyError after `patience` seconds, OSError when the lock's file cannot be used.
    """
    lock = _lock(lane)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with held(lock, patience):
        yield


@contextlib.contextmanager
def marked(lane: str) -> Iterator[bool]:
    """Hold a lane for the length of the block where it is free, else go on without; gives whether it is held."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(occupied(lane, ASKED))
        except (LockBusyError, OSError):
            yield False
            return
        yield True


def _lock(lane: str) -> Path:
    return places.home() / "lanes" / f"{safe_name(lane_of(lane).replace(':', '-'), 'lane')}.lock"
