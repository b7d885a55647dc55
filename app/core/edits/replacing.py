"""Replaces or removes a file only if it still is what was looked at, and says in words why it cannot be done."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from trainer.errors import DatasetError
from trainer.protocol.atomic import long_path, staged, sync_directory, sync_file
from trainer.protocol.places import is_disk_full


class ChangedMeanwhileError(Exception):
    """A file is not what it was when it was looked at."""


def replace_file(file: Path, seen: bytes | None, data: bytes, *, durable: bool) -> None:
    """Write a file in one step in place of the bytes that were seen, and read it back; a link's target is written.

    Raises ChangedMeanwhileError, and OSError; unless it did not read back, the file is then what it was.
    """
    target = Path(os.path.realpath(file)) if os.path.islink(file) else file  # noqa: PTH114 (five times as fast)
    with staged(target, durable=False) as temporary:
        temporary.write_bytes(data)
        if durable:
            sync_file(temporary)
        _check(target, seen)
    if durable:
        sync_directory(target.parent)
    if _bytes(target) != data:
        raise OSError(errno.EIO, "it reads differently from what was written", str(file))


def remove_file(file: Path, seen: bytes | None) -> None:
    """Remove a file that still holds the bytes that were seen; raises ChangedMeanwhileError and OSError."""
    _check(file, seen)
    long_path(file).unlink(missing_ok=True)


def refusal(fault: OSError, place: Path) -> DatasetError:
    """Return in words why nothing can be written at a place; what was to be written waits."""
    reason = fault.strerror or str(fault)
    if is_disk_full(fault):
        return DatasetError(
            "save.disk_full",
            f"There is no room left on the disk of {place}.",
            "Free some room: what you changed is kept and written as soon as there is some.",
        )
    if isinstance(fault, PermissionError) or fault.errno == errno.EROFS:
        return DatasetError(
            "save.read_only",
            f"{place} may not be written to ({reason}).",
            "Allow writing there, or close the program that holds its files: what you changed is kept until then.",
        )
    if isinstance(fault, FileNotFoundError | NotADirectoryError):
        return DatasetError(
            "save.folder_gone",
            f"{place} is not there any more.",
            "Bring the folder back, or connect its drive: what you changed is kept until then.",
        )
    return DatasetError(
        "save.failed",
        f"{place} cannot be written to: {reason}.",
        "Look at its disk: what you changed is kept and tried again.",
    )


def _check(file: Path, seen: bytes | None) -> None:
    # Microseconds before the file is replaced: the last moment at which another program's words can be spared.
    try:
        now = _bytes(file)
    except FileNotFoundError:
        now = None
    if now != seen:
        raise ChangedMeanwhileError(file)


def _bytes(file: Path) -> bytes:
    with long_path(file).open("rb", buffering=0) as opened:
        return opened.read()
