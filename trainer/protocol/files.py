"""Writes files so that a reader, a kill or a full disk never meets half of one."""

from __future__ import annotations

import contextlib
import itertools
import json
import ntpath
import os
import re
import secrets
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

_Result = TypeVar("_Result")

# Windows refuses to replace or open a file while a virus scanner or an indexer has it open, seldom for long.
_WAITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.6)
_STRAY = re.compile(r"\.impasto-[0-9a-f]{16}\.tmp")
_LONG = 240  # Windows' limit is 260; names made beside the target, such as temporary ones, need the rest
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f-\x9f\u2028\u2029]+')
# Marks that reverse the direction of text make "gpj.exe" read as "exe.jpg"; characters without width or glyph make two
# names look alike (joiners stay: emoji and many scripts need them); lone surrogates cannot be written as UTF-8.
_INVISIBLE = re.compile(
    "[\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\u3164\ufeff\uffa0\ud800-\udfff]+"
)
# Windows' devices, whatever extension follows. https://learn.microsoft.com/windows/win32/fileio/naming-a-file
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|clock\$|com[0-9¹²³]|lpt[0-9¹²³])(\s*\..*)?", re.IGNORECASE)
LONGEST_NAME = 100
"""The most characters that the name of a job may have."""
_NUMBER_BYTES = 5  # " 9999" after a name that is taken
_MOST_BYTES = 120  # of UTF-8; leaves room for "-step00000500.safetensors" in the 255 that file systems take


def replace(source: Path, target: Path) -> None:
    """Rename `source` over `target` in one step; waits up to two seconds while another program holds either open.

    Raises PermissionError after that, and other OSErrors at once.
    """
    patiently(lambda: long_path(source).replace(long_path(target)))


def rename(source: Path, target: Path) -> None:
    """Rename, waiting as `replace` does; Windows replaces nothing and raises FileExistsError."""
    patiently(lambda: long_path(source).rename(long_path(target)))


@contextlib.contextmanager
def staged(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give a path beside `target` to write to; it becomes `target` when the block ends well, else it is removed.

    For writers that want a path of their own (safetensors, Pillow). `durable` waits until the disk has it, so that it
    survives a power cut too; a fraction of a millisecond on an SSD, up to 50 on a hard disk.
    """
    temporary = target.parent / f".impasto-{secrets.token_hex(8)}.tmp"
    try:
        yield long_path(temporary)
        if durable:
            sync_file(temporary)
        replace(temporary, target)
    except BaseException as error:
        _name_target(error, temporary, target)
        # The caller gets the first error; a temporary file that cannot be deleted is swept at the next start.
        with contextlib.suppress(OSError):
            long_path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(target.parent)


def _name_target(error: BaseException, temporary: Path, target: Path) -> None:
    """Let an error name the file that the user knows instead of the temporary one."""
    if isinstance(error, OSError) and error.filename is not None and Path(error.filename).name == temporary.name:
        error.filename, error.filename2 = str(target), None


def write_bytes(target: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a whole file in one step; on any error `target` is what it was before. `durable` as for `staged`."""
    with staged(target, durable=durable) as temporary:
        temporary.write_bytes(data)


def write_text(target: Path, text: str, *, durable: bool = True) -> None:
    r"""Write a whole UTF-8 file in one step, line ends as "\n" on every system."""
    write_bytes(target, text.encode("utf-8"), durable=durable)


def write_json(target: Path, value: object, *, durable: bool = True) -> None:
    """Write a whole JSON file in one step; raises ValueError for NaN and infinity, which JSON does not know."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(target, text + "\n", durable=durable)


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    # Windows flushes only through a handle that may write.
    with long_path(path).open("r+b") as file:
        os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Wait until a folder's entries are on the disk, so that a rename outlives a power cut; not on Windows."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_strays(folder: Path, *, idle: float = 0.0) -> None:
    """Delete what writers killed in mid-write left in `folder`, where it was not written to for `idle` seconds.

    Without that, call it only while nobody else writes there.
    """
    folder = long_path(folder)
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _STRAY.fullmatch(path.name) and (not idle or _is_idle(path, idle)):
            path.unlink(missing_ok=True)


def _is_idle(path: Path, seconds: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > seconds
    except FileNotFoundError:  # its writer has just put it in its place
        return False


def long_path(path: Path) -> Path:
    r"""Return the path in Windows' \\?\ form where it is too long for the common one, else unchanged."""
    return path if sys.platform != "win32" else Path(long_name(str(path)))


def long_name(text: str) -> str:
    """Return what `long_path` does of a path that is text."""
    return extended(text) if sys.platform == "win32" and len(text) >= _LONG else text


def extended(text: str) -> str:
    r"""Return a Windows path in its \\?\ form, which has no length limit; shares become \\?\UNC\server\share."""
    if text.startswith("\\\\?\\"):
        return text
    text = ntpath.abspath(text)  # this form is taken literally: no "..", no "/"
    return "\\\\?\\UNC\\" + text[2:] if text.startswith("\\\\") else "\\\\?\\" + text


def patiently(action: Callable[[], _Result]) -> _Result:
    """Return what `action` returns, tried again for two seconds while it raises PermissionError."""
    for wait in _WAITS:
        try:
            return action()
        except PermissionError:
            time.sleep(wait)
    return action()


def safe_name(text: str, otherwise: str = "unnamed") -> str:
    """Return `text` as one path component, letters of every script kept; `otherwise` when nothing of it is left."""
    name = _INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    name = _trimmed(_FORBIDDEN.sub("-", name))
    name = _trimmed(name.encode("utf-8")[:_MOST_BYTES].decode("utf-8", errors="ignore"))
    if _RESERVED.fullmatch(name):
        name = f"_{name}"
    return name or otherwise


def made_up_name(text: str, otherwise: str = "job") -> str:
    """Return `text` as a name that every job accepts; for names that come from a folder, a file or a title.

    It is short enough that a number still fits behind it, in a job and in the name of a folder.
    """
    name = " ".join(_INVISIBLE.sub("", unicodedata.normalize("NFC", text)).split())
    name = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "", name)[: LONGEST_NAME - _NUMBER_BYTES]
    name = name.encode("utf-8")[: _MOST_BYTES - _NUMBER_BYTES].decode("utf-8", errors="ignore").strip()
    return name if name.strip(" .") else otherwise


def numbered(name: str, between: str = "-") -> Iterator[str]:
    """Yield a name, then with 2, 3 ... behind it without end: the first that is free is the one to take."""
    yield name
    yield from (f"{name}{between}{number}" for number in itertools.count(2))


def step_ending(step: int) -> str:
    """Return how the name of a LoRA ends that was saved at a step; the run's result has no such ending."""
    return f"-step{step:06d}"


def _trimmed(name: str) -> str:
    # A leading dot hides a file, a leading dash looks like an option; Windows drops trailing dots and spaces.
    return name.strip().lstrip(".- ").rstrip(". ")
