"""Provide lock files; the operating system releases a lock when its holder exits or is killed."""

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

CHECK_PATIENCE = 1.0
"""Seconds to wait for a lock that should be free; a process that only checks it releases it within microseconds."""
_POLL = 0.05  # seconds; neither system can wait for a file lock with a timeout
_RETRY_SECONDS = (0.001, 0.002, 0.005, 0.01)  # what a check on Windows costs while the lock is held

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
        """Return whether the lock is free; retries, because Windows has no shared lock and checks can collide."""
        for wait in _RETRY_SECONDS:
            if _try_lock(file):
                _unlock(file)
                return True
            time.sleep(wait)
        return False

else:
    import fcntl

    # flock, not lockf: its lock belongs to the open file, so it also excludes a second open in the same process.
    def _try_lock(file: BinaryIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

    def _is_free(file: BinaryIO) -> bool:
        """Return whether the lock is free; a shared lock conflicts only with a holder, not with other checks."""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _unlock(file)
        return True


class LockBusyError(Exception):
    """Error for a lock that is already held."""


@contextlib.contextmanager
def hold_lock(path: Path, patience: float) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if missing) during the block.

    Raises LockBusyError if another holder does not release it within `patience` seconds, and OSError if the file cannot
    be opened or its file system has no locks.
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
    """Return whether any process, this one included, holds the lock on `path`; False if the file is missing.

    Any number of processes may check at once. A check takes the lock for a moment, so `hold_lock` with a `patience` of
    0 may fail because of it.
    """
    if not long_path(path).is_file():  # a folder or pipe holds no lock, and opening a pipe would block
        return False
    try:
        with long_path(path).open("rb") as file:
            return not _is_free(file)
    except FileNotFoundError:
        return False


def require_file(path: Path) -> None:
    """Raise OSError if the lock's path exists but is not a file, because opening a pipe would block."""
    if long_path(path).exists() and not long_path(path).is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))


def lane_of(device: str | None) -> str:
    """Return the lane (a device that one run uses at a time) of a job's device: "cuda:0" for "cuda", "cpu" for None."""
    return {"cuda": "cuda:0", None: "cpu"}.get(device, device or "cpu")


def is_lane_held(lane: str) -> bool:
    """Return whether an Impasto process, this one included, uses a lane ("cuda:0" or "cpu")."""
    try:
        return is_held(_lock(lane))
    except OSError:  # the file system has no locks, so no process can hold one
        return False


@contextlib.contextmanager
def hold_lane(lane: str, patience: float = math.inf) -> Iterator[None]:
    """Hold a lane during the block, waiting until it is free.

    Raises LockBusyError if it is not free within `patience` seconds, and OSError if the lock file cannot be used.
    """
    lock = _lock(lane)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(lock, patience):
        yield


@contextlib.contextmanager
def try_hold_lane(lane: str) -> Iterator[bool]:
    """Hold a lane during the block if it is free, else run the block without it; yield whether it is held."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lane(lane, CHECK_PATIENCE))
        except (LockBusyError, OSError):
            yield False
            return
        yield True


def _lock(lane: str) -> Path:
    return places.home() / "lanes" / f"{safe_name(lane_of(lane).replace(':', '-'), 'lane')}.lock"
