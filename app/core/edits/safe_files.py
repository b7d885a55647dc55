"""Replace or remove a file only if it is still what was read, whatever other programs write at that moment.

A check before a rename leaves some microseconds in which another program's words would be overwritten unseen. So the
new file and the one in its place exchange their names in one step, and only what comes out is judged: if that is not
what was read, the two exchange their names back. Linux does it with renameat2. Windows, and file systems that cannot
exchange, first rename the existing file and then give its name to the new one, which fails if the name is taken again;
for some microseconds there is no file then.
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

from trainer.dataset.links import Links
from trainer.errors import DatasetError
from trainer.protocol.files import long_name as _system
from trainer.protocol.files import rename, sync_directory
from trainer.protocol.places import is_disk_full
from trainer.protocol.reading import open_file, read_bytes

# ruff: noqa: PTH114, PTH118, PTH120, PTH108, PTH116, PTH105, PTH104
# Paths are strings here, and the system's own calls are used: with pathlib a caption takes twice as long.

STRAY = re.compile(r"\.impasto-[0-9a-f]{16}\.tmp")
"""Names of temporary files."""
SYNCS_FILE_SYSTEM = sys.platform != "win32"
"""Whether the system can wait for all files at once. Windows cannot: there each file is waited for by itself."""
_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it
_SETTLED = 3_000_000_000  # nanoseconds; longer than the step of any file system's clock (FAT: two seconds)
_ABANDONED = 600.0  # seconds; a write takes milliseconds
_NO_REPLACE, _EXCHANGE = 1, 2  # flags of renameat2
_AT_FDCWD = -100  # paths are relative to the working directory
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK})


class ChangedMeanwhileError(Exception):
    """A file is not what it was when it was read."""


Mark = tuple[int, int, int, int]
"""By which the system tells one state of a file from another: number, size, times of the last changes."""


class FileSeen(NamedTuple):
    """What a file held."""

    data: bytes | None
    """None: there was no file."""
    mark: Mark | None = None
    """If that tells a later change for sure: not where the last one was so recent that another has the same time."""


def look_at(file: str, most: int) -> FileSeen:
    """Read a file, at most so many bytes; raises OSError, FileNotFoundError among them."""
    with open_file(Path(file), "stream") as opened:
        about = os.fstat(opened.fileno())
        data = opened.read(most)
    settled = sys.platform != "win32" and time.time_ns() - about.st_mtime_ns > _SETTLED
    return FileSeen(data, _mark(about) if settled else None)


def replace_file(file: str, seen: FileSeen, data: bytes, *, durable: bool, within: str | None = None) -> None:
    """Write a file in one step in place of what was seen, and read it back.

    A link's target is written if it is in the folder `within`, by default the link's own; else PermissionError.
    Raises ChangedMeanwhileError, and OSError; unless it did not read back, the file is then what it was. Without
    `durable` a power cut may bring back what was seen, or leave an empty file (ext4 does not flush a file whose name is
    exchanged, as it does one that replaces another). So of a large edit no file is waited for, which on a hard disk
    would cost 50 ms each, but `sync_file_system` is called for all of them before anything relies on them.
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
        # What goes wrong above is what the caller needs to know; a temporary file that resists is swept later.
        with contextlib.suppress(OSError):
            os.unlink(_system(temporary))
    if durable:
        sync_directory(Path(target).parent)


def _target(link: str, within: str) -> str:
    if not Links([within]).allow(Path(link)):
        raise PermissionError(errno.EPERM, "it is a link that leads out of the dataset", link)
    return os.path.realpath(link)


def remove_file(file: str, seen: FileSeen) -> None:
    """Remove a file that still is what was seen; raises ChangedMeanwhileError and OSError."""
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
    """Wait until all files written to a file system are on the disk; does nothing unless SYNCS_FILE_SYSTEM."""
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
    """Remove the temporary files of killed writers from a folder: only those named as ours, and older than any write.

    `keep` takes the name and content of each first: a kill in the middle of an exchange may have left the only copy of
    another program's words there.
    """
    with contextlib.suppress(OSError), os.scandir(_system(folder)) as entries:
        for entry in entries:
            if STRAY.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED:
                keep(entry.name, read_bytes(Path(entry.path), "image"))
                os.unlink(entry.path)


def refusal(fault: OSError, place: Path) -> DatasetError:
    """Return the error for a place that cannot be written to; the changes are kept and tried again."""
    reason = fault.strerror or str(fault)
    if is_disk_full(fault):
        return DatasetError(
            "save.disk_full",
            f"The disk of {place} is full.",
            "Free some disk space: your changes are kept and saved as soon as there is enough.",
        )
    if isinstance(fault, PermissionError) or fault.errno == errno.EROFS:
        return DatasetError(
            "save.read_only",
            f"{place} cannot be written to ({reason}).",
            "Allow writing there, or close the program that has the files open. Your changes are kept until then.",
        )
    if isinstance(fault, FileNotFoundError | NotADirectoryError):
        return DatasetError(
            "save.folder_gone",
            f"{place} no longer exists.",
            "Restore the folder or connect its drive. Your changes are kept until then.",
        )
    return DatasetError(
        "save.failed",
        f"{place} cannot be written to: {reason}.",
        "Check its disk. Your changes are kept, and saving is tried again.",
    )


def _check(file: str, seen: FileSeen) -> None:
    """Raise ChangedMeanwhileError if a file is not what was seen: cheaper than an exchange and its way back."""
    if not _is(file, seen):
        raise ChangedMeanwhileError(file)


def _is(file: str, seen: FileSeen) -> bool:
    """Return whether a file is what was seen, also under another name: renaming changes only the fourth mark."""
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
    """Write a new file; return the number by which its file system knows it."""
    handle = os.open(_system(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        left = memoryview(data)
        while left:  # a full disk takes a part first, then nothing
            left = left[os.write(handle, left) :]
        if durable:
            os.fsync(handle)
        return os.fstat(handle).st_ino
    finally:
        os.close(handle)


def _read_back(file: str, data: bytes, number: int) -> None:
    # At once: what another program writes while the disk is waited for comes later, and is no fault of the disk.
    try:
        if look_at(file, len(data) + 1).data == data:
            return
        ours = os.stat(_system(file)).st_ino == number
    except FileNotFoundError:
        ours = False
    if not ours:
        raise ChangedMeanwhileError(file)
    raise OSError(errno.EIO, "it reads differently from what was written", file)


def _exchange(temporary: str, target: str, seen: FileSeen, data: bytes) -> None:
    """Give a temporary file the target's name, and it that of the temporary, provided that it is what was seen."""
    try:
        _swap(temporary, target)
    except FileNotFoundError as fault:
        raise ChangedMeanwhileError(target) from fault
    try:
        if _is(temporary, seen):
            return
        _exchange_back(temporary, target, data)
    except OSError:
        with contextlib.suppress(OSError):  # it may hold another program's words, and is not to be removed with ours
            os.rename(_system(temporary), _system(_beside(target)))
        raise
    raise ChangedMeanwhileError(target)


def _exchange_back(temporary: str, target: str, inside: bytes) -> None:
    """Give what another program wrote since the check its name back.

    What comes out has to be `inside`, what went in before; else it is a third version, the newest, and the two exchange
    their names in turn.
    """
    with contextlib.suppress(FileNotFoundError):  # the target was removed, which ends it whoever wrote it
        while True:
            goes_in = _content(temporary)
            _swap(temporary, target)
            if _content(temporary) == inside:
                return
            inside = goes_in


def _content(file: str) -> bytes:
    return read_bytes(Path(_system(file)), "image")  # masks too


def _swap(one: str, two: str) -> None:
    """Let two files exchange their names, in one step where the system can."""
    if _renamed(one, two, _EXCHANGE):
        return
    aside = _beside(two)
    _rename(two, aside)
    try:
        _place(one, two)
    except ChangedMeanwhileError:
        # The name was taken in between, by something newer than what was moved aside.
        os.unlink(_system(aside))
        raise
    except BaseException:
        _give_back(aside, two)
        raise
    _rename(aside, one)


def _give_back(aside: str, file: str) -> None:
    """Give a file that was moved aside its name again, unless another program wrote there since."""
    try:
        _place(aside, file)
    except ChangedMeanwhileError:
        os.unlink(_system(aside))


def _place(source: str, target: str) -> None:
    """Give a file a name that no file may have; raises ChangedMeanwhileError where one has it, and OSError."""
    try:
        if sys.platform == "win32":
            _rename(source, target)  # replaces nothing there
        elif not _renamed(source, target, _NO_REPLACE):
            _link(source, target)
    except FileExistsError as fault:
        raise ChangedMeanwhileError(target) from fault


def _link(source: str, target: str) -> None:
    """Give a file another name on systems without renameat2; raises FileExistsError."""
    try:
        os.link(source, target)
    except OSError as fault:
        if fault.errno not in _UNSUPPORTED:
            raise
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # holds the name, for file systems
        os.replace(source, target)  # without hard links
    else:
        os.unlink(source)


def _rename(source: str, target: str) -> None:
    try:
        os.rename(_system(source), _system(target))
    except PermissionError:  # on Windows while another program has it open, seldom for long
        rename(Path(source), Path(target))


def _renamed(source: str, target: str, flag: int) -> bool:
    """Rename by Linux' renameat2; return False where the system or the file system has no such thing."""
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
    """Return one of Linux' own calls, or None elsewhere and where the C library is too old to have it."""
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        call.argtypes, call.restype = arguments, ctypes.c_int
    return call
