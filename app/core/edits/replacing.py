"""Replaces or removes a file only if it still is what was looked at, and says in words why it cannot be done."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import sys
import time
from pathlib import Path
from typing import NamedTuple

from trainer.errors import DatasetError
from trainer.protocol.atomic import long_name as _system
from trainer.protocol.atomic import replace, sync_directory
from trainer.protocol.places import is_disk_full

# ruff: noqa: PTH114, PTH118, PTH120, PTH108, PTH116, PTH105
# Paths are strings here, and the system's own calls are used: with pathlib a caption takes twice as long.

_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it
_STRAY = re.compile(r"\.impasto-[0-9a-f]{16}\.tmp")
_SETTLED = 3_000_000_000  # nanoseconds; longer than the step of any file system's clock (FAT: two seconds)
_ABANDONED = 600.0  # seconds; a write takes milliseconds


class ChangedMeanwhileError(Exception):
    """A file is not what it was when it was looked at."""


Mark = tuple[int, int, int, int]
"""By which the system tells one state of a file from another: number, size, times of the last changes."""


class Seen(NamedTuple):
    """What a file held."""

    data: bytes | None
    """None: there was no file."""
    mark: Mark | None = None
    """If that tells a later change for sure: not where the last one was so recent that another has the same time."""


def look_at(file: str, most: int) -> Seen:
    """Read a file, at most so many bytes; raises OSError, FileNotFoundError among them."""
    handle = os.open(_system(file), os.O_RDONLY | _BINARY)
    try:
        about = os.fstat(handle)
        data = os.read(handle, most)
        while len(data) < most and (more := os.read(handle, most - len(data))):
            data += more
    finally:
        os.close(handle)
    settled = sys.platform != "win32" and time.time_ns() - about.st_mtime_ns > _SETTLED
    return Seen(data, _mark(about) if settled else None)


def replace_file(file: str, seen: Seen, data: bytes, *, durable: bool) -> None:
    """Write a file in one step in place of what was seen, and read it back; a link's target is written.

    Raises ChangedMeanwhileError, and OSError; unless it did not read back, the file is then what it was. Without
    `durable` a power cut may bring back what was seen: the journal holds the rest until its own wait for the disk,
    `Journal.sync` before each batch, and the next start compares every file with it. So of a large edit no file and no
    folder is waited for, which on a hard disk would cost 50 ms each.
    """
    target = os.path.realpath(file) if os.path.islink(file) else file
    temporary = os.path.join(os.path.dirname(target), f".impasto-{secrets.token_hex(8)}.tmp")
    try:
        _write(_system(temporary), data, durable)
        _check(target, seen)
        _rename(temporary, target)
    except BaseException:
        # Whatever went wrong is what the caller hears of; a temporary file that resists is swept later.
        with contextlib.suppress(OSError):
            os.unlink(_system(temporary))
        raise
    # At once: what another program writes while the disk is waited for comes after this, and is no fault of the disk.
    if look_at(target, len(data) + 1).data != data:
        raise OSError(errno.EIO, "it reads differently from what was written", file)
    if durable:
        sync_directory(Path(target).parent)


def remove_file(file: str, seen: Seen) -> None:
    """Remove a file that still is what was seen; raises ChangedMeanwhileError and OSError."""
    _check(file, seen)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_system(file))


def sweep(folder: str) -> None:
    """Remove what writers that were killed left in a folder: only files named as ours are, and older than any write."""
    with contextlib.suppress(OSError), os.scandir(_system(folder)) as entries:
        for entry in entries:
            if _STRAY.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED:
                os.unlink(entry.path)


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


def _check(file: str, seen: Seen) -> None:
    # Microseconds before the file is replaced: the last moment at which another program's words can be spared.
    try:
        if seen.mark and _mark(os.stat(_system(file))) == seen.mark:
            return
        now = look_at(file, len(seen.data or b"") + 1).data
    except FileNotFoundError:
        now = None
    if now != seen.data:
        raise ChangedMeanwhileError(file)


def _mark(about: os.stat_result) -> Mark:
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _write(file: str, data: bytes, durable: bool) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        left = memoryview(data)
        while left:  # a full disk takes a part first, then nothing
            left = left[os.write(handle, left) :]
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def _rename(source: str, target: str) -> None:
    try:
        os.replace(_system(source), _system(target))
    except PermissionError:  # on Windows while another program has it open, seldom for long
        replace(Path(source), Path(target))
