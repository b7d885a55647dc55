"""Locks that the operating system frees when their holder dies, however it dies."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_POLL = 0.05

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


class LockBusyError(Exception):
    """Somebody else holds the lock."""


@contextlib.contextmanager
def held(path: Path, patience: float) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created when missing) for the length of the block.

    Raises LockBusyError when another holder does not let go within `patience` seconds, OSError when the file cannot be
    opened or its disk knows no locks.
    """
    with path.open("ab") as file:
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

    Asking takes the lock for a moment: whoever wants it meanwhile needs a little patience.
    """
    try:
        with path.open("rb") as file:
            if not _try_lock(file):
                return True
            _unlock(file)
            return False
    except FileNotFoundError:
        return False
