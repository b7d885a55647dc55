"""Replace or remove a file only if it still contains what was read, even if other programs write to it.

If a file were just checked and then replaced, a write by another program in the microseconds between would be lost.
Instead, the new file and the existing one swap names atomically, and the old file is checked afterward: if it is not
what was read, the two are swapped back. On Linux this uses renameat2. On Windows, and on file systems that cannot swap,
the existing file is renamed first, and then the new file gets its name, which fails if another program has taken it.
For a few microseconds, no file has the name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import DatasetError
from trainer.protocol.files import Links, rename, sync_directory
from trainer.protocol.files import long_name as _system
from trainer.protocol.places import is_disk_full
from trainer.protocol.reading import open_file, read_bytes

# ruff: noqa: PTH114, PTH118, PTH120, PTH108, PTH116, PTH105, PTH104
# Paths are strings passed to system calls here, because pathlib doubles the time per caption.

STRAY = re.compile(r"\.impasto-[0-9a-f]{16}\.tmp")
"""Pattern of temporary file names."""
SYNCS_FILE_SYSTEM = sys.platform != "win32"
"""Whether all files can be flushed to disk with one call; on Windows each file is flushed separately."""
_BINARY = getattr(os, "O_BINARY", 0)  # without it, Windows translates line endings
_SETTLED = 3_000_000_000  # nanoseconds; longer than any file system's timestamp resolution (FAT: two seconds)
_ABANDONED = 600.0  # seconds; a write takes milliseconds
_NO_REPLACE, _EXCHANGE = 1, 2  # flags of renameat2
_AT_FDCWD = -100  # paths are relative to the working directory
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK})


class ChangedMeanwhileError(Exception):
    """Raised when a file has changed since it was read."""


Mark = tuple[int, int, int, int]
"""Fingerprint of a file's state: inode, size, modification time and status change time."""


class FileSeen(NamedTuple):
    """Contents of a file when it was read."""

    data: bytes | None
    """None if the file did not exist."""
    mark: Mark | None = None
    """Fingerprint, or None if the last change was so recent that a later one could have the same timestamp."""


def look_at(file: str, most: int) -> FileSeen:
    """Read up to `most` bytes of a file; raises OSError, including FileNotFoundError."""
    with open_file(Path(file), "stream") as opened:
        about = os.fstat(opened.fileno())
        data = opened.read(most)
    settled = sys.platform != "win32" and time.time_ns() - about.st_mtime_ns > _SETTLED
    return FileSeen(data, _mark(about) if settled else None)


def replace_file(file: str, seen: FileSeen, data: bytes, *, durable: bool, within: str | None = None) -> None:
    """Replace a file atomically if it has not changed since it was read, and read the result back.

    If the file is a link, its target is written, but only if the target is in the folder `within` (by default the
    link's own folder); otherwise PermissionError is raised. Raises ChangedMeanwhileError and OSError, after which the
    file is unchanged unless the read-back failed. Without `durable`, a power failure may bring back the old contents or
    leave an empty file: ext4 flushes a file that is renamed over another, but not files that swap names, as here.
    Flushing costs 50 ms per file on a hard disk, so large edits call `sync_file_system` once for all files instead.
    """
    target = _target(file, within or os.path.dirname(file)) if os.path.islink(_system(file)) else file
    temporary = _beside(target)
    try:
        written = _write(temporary, data, durable)
        _check(target, seen)
        if seen.data is None:
            _place(temporary, target)
        else:
            _exchange(temporary, target, seen, data)
        _read_back(target, data, written)
    finally:
        # Do not hide an error from above; a temporary file that cannot be removed now is swept later.
        with contextlib.suppress(OSError):
            os.unlink(_system(temporary))
    if durable:
        sync_directory(Path(target).parent)


def _target(link: str, within: str) -> str:
    if not Links([within]).allow(Path(link)):
        raise PermissionError(errno.EPERM, "it is a link to outside the dataset", link)
    return os.path.realpath(link)


def remove_file(file: str, seen: FileSeen) -> None:
    """Remove a file if it has not changed since it was read; raises ChangedMeanwhileError and OSError."""
    _check(file, seen)
    if seen.data is None:
        return
    aside = _beside(file)
    try:
        _rename(file, aside)
    except FileNotFoundError:
        return
    if not _is(aside, seen):
        _give_back(aside, file)
        raise ChangedMeanwhileError(file)
    os.unlink(_system(aside))


def sync_file_system(folder: str) -> None:
    """Flush all files written to the file system of a folder; do nothing unless SYNCS_FILE_SYSTEM is set."""
    if not SYNCS_FILE_SYSTEM:
        return
    call = _libc_call("syncfs", ctypes.c_int)
    if call is None:
        os.sync()
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if call(handle) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), folder)
    finally:
        os.close(handle)


def sweep(folder: str, keep: Callable[[str, bytes], None]) -> None:
    """Remove temporary files of killed processes from a folder, recognized by name and age.

    `keep` is first called with the name and contents of each file, which may be the only copy of another program's text
    if the process was killed during a swap.
    """
    with contextlib.suppress(OSError), os.scandir(_system(folder)) as entries:
        for entry in entries:
            if STRAY.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED:
                keep(entry.name, read_bytes(Path(entry.path), "image"))
                os.unlink(entry.path)


def refusal(fault: OSError, place: Path) -> DatasetError:
    """Return the error to show when `place` cannot be written to; it says that the user's changes are kept."""
    reason = fault.strerror or str(fault)
    if is_disk_full(fault):
        return DatasetError(
            "save.disk_full",
            f"Could not save to {place}: the disk is full.",
            "Free some disk space. Your changes are kept, and will be saved as soon as there is enough.",
        )
    if isinstance(fault, PermissionError) or fault.errno == errno.EROFS:
        return DatasetError(
            "save.read_only",
            f"Could not save to {place}: {reason}.",
            "Make it writable, or close the program that has the files open. Your changes are kept until then.",
        )
    if isinstance(fault, FileNotFoundError | NotADirectoryError):
        return DatasetError(
            "save.folder_gone",
            f"Could not save to {place}: it no longer exists.",
            "Restore the folder or connect its drive. Your changes are kept until then.",
        )
    return DatasetError(
        "save.failed",
        f"Could not save to {place}: {reason}.",
        "Check its disk. Your changes are kept, and Impasto will keep trying to save them.",
    )


def _check(file: str, seen: FileSeen) -> None:
    """Raise ChangedMeanwhileError if a file has changed; this is cheaper than swapping and swapping back."""
    if not _is(file, seen):
        raise ChangedMeanwhileError(file)


def _is(file: str, seen: FileSeen) -> bool:
    """Return whether a file is unchanged since it was read; a rename, which alters only the ctime, is ignored."""
    try:
        if seen.mark and _mark(os.stat(_system(file)))[:3] == seen.mark[:3]:
            return True
        now = look_at(file, len(seen.data or b"") + 1).data
    except FileNotFoundError:
        now = None
    return now == seen.data


def _mark(about: os.stat_result) -> Mark:
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _beside(file: str) -> str:
    return os.path.join(os.path.dirname(file), f".impasto-{secrets.token_hex(8)}.tmp")


def _write(file: str, data: bytes, durable: bool) -> int:
    """Write a new file and return its inode."""
    handle = os.open(_system(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        left = memoryview(data)
        while left:  # a filling disk accepts a part before it fails
            left = left[os.write(handle, left) :]
        if durable:
            os.fsync(handle)
        return os.fstat(handle).st_ino
    finally:
        os.close(handle)


def _read_back(file: str, data: bytes, number: int) -> None:
    # Read back before flushing: what another program writes during the flush is not a disk fault.
    try:
        if look_at(file, len(data) + 1).data == data:
            return
        ours = os.stat(_system(file)).st_ino == number
    except FileNotFoundError:
        ours = False
    if not ours:
        raise ChangedMeanwhileError(file)
    raise OSError(errno.EIO, "the data read back differs from the data written", file)


def _exchange(temporary: str, target: str, seen: FileSeen, data: bytes) -> None:
    """Swap the names of a temporary file and the target; swap back and raise if the target has changed."""
    try:
        _swap(temporary, target)
    except FileNotFoundError as fault:
        raise ChangedMeanwhileError(target) from fault
    try:
        if _is(temporary, seen):
            return
        _exchange_back(temporary, target, data)
    except OSError:
        with contextlib.suppress(OSError):  # it may contain another program's text, so it must not be removed with ours
            os.rename(_system(temporary), _system(_beside(target)))
        raise
    raise ChangedMeanwhileError(target)


def _exchange_back(temporary: str, target: str, inside: bytes) -> None:
    """Swap another program's version of a file, now named `temporary`, back to the name `target`.

    The file that is swapped out should contain `inside`, the data swapped in before. If it does not, another program
    has written a newer version, so the two are swapped again.
    """
    with contextlib.suppress(FileNotFoundError):  # another program removed the target, so there is nothing to give back
        while True:
            goes_in = _content(temporary)
            _swap(temporary, target)
            if _content(temporary) == inside:
                return
            inside = goes_in


def _content(file: str) -> bytes:
    return read_bytes(Path(_system(file)), "image")  # masks too


def _swap(one: str, two: str) -> None:
    """Swap the names of two files, atomically if the system supports it."""
    if _renamed(one, two, _EXCHANGE):
        return
    aside = _beside(two)
    _rename(two, aside)
    try:
        _place(one, two)
    except ChangedMeanwhileError:
        # Another program has taken the name; its file is newer than the one moved aside.
        os.unlink(_system(aside))
        raise
    except BaseException:
        _give_back(aside, two)
        raise
    _rename(aside, one)


def _give_back(aside: str, file: str) -> None:
    """Rename the file `aside` back to its old name, or delete it if another program has taken that name."""
    try:
        _place(aside, file)
    except ChangedMeanwhileError:
        os.unlink(_system(aside))


def _place(source: str, target: str) -> None:
    """Rename a file without overwriting; raises ChangedMeanwhileError if the name is taken, and OSError."""
    try:
        if sys.platform == "win32":
            _rename(source, target)  # never overwrites on Windows
        elif not _renamed(source, target, _NO_REPLACE):
            _link(source, target)
    except FileExistsError as fault:
        raise ChangedMeanwhileError(target) from fault


def _link(source: str, target: str) -> None:
    """Rename a file without overwriting on systems without renameat2; raises FileExistsError."""
    try:
        os.link(source, target)
    except OSError as fault:
        if fault.errno not in _UNSUPPORTED:
            raise
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # reserves the name on file systems
        os.replace(source, target)  # without hard links
    else:
        os.unlink(source)


def _rename(source: str, target: str) -> None:
    try:
        os.rename(_system(source), _system(target))
    except PermissionError:  # on Windows, while another program briefly has it open
        rename(Path(source), Path(target))


def _renamed(source: str, target: str, flag: int) -> bool:
    """Rename with Linux's renameat2; return False if the system or file system does not support it."""
    call = _libc_call("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if call is None:
        return False
    sys.audit("os.rename", source, target, -1, -1)  # as Python's own calls do
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), source, None, target)


@cache
def _libc_call(name: str, *arguments: type[ctypes._SimpleCData[Any]]) -> Callable[..., int] | None:
    """Return a Linux-only C library function, or None if the system or its C library does not have it."""
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        call.argtypes, call.restype = arguments, ctypes.c_int
    return call
