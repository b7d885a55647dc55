"""Provide atomic file writes, long Windows paths and safe file names.

A reader never sees a half-written file, even if the writer is killed or the disk is full.
"""

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

_Result = TypeVar("_Result")

# Seconds between tries: Windows refuses to replace or open a file that a virus scanner or an indexer has open.
_WAITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.6)
_STRAY = re.compile(r"\.impasto-[0-9a-f]{16}\.tmp")
_LONG = 240  # the Windows limit is 260; temporary names next to the target need the rest
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f-\x9f\u2028\u2029]+')
# Direction marks make "gpj.exe" look like "exe.jpg"; characters without width or glyph make two names look alike
# (joiners stay, because emoji and many scripts need them); lone surrogates cannot be written as UTF-8.
_INVISIBLE = re.compile(
    "[\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\u3164\ufeff\uffa0\ud800-\udfff]+"
)
# Device names of Windows, with any extension. https://learn.microsoft.com/windows/win32/fileio/naming-a-file
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|clock\$|com[0-9¹²³]|lpt[0-9¹²³])(\s*\..*)?", re.IGNORECASE)
LONGEST_NAME = 100
"""Maximum length of a job's name in characters."""
_NUMBER_BYTES = 5  # " 9999" after a name that is taken
_MOST_BYTES = 120  # of UTF-8; leaves space for "-step00000500.safetensors" within the 255 that file systems allow


def replace(source: Path, target: Path) -> None:
    """Rename `source` to `target` atomically, replacing `target`; retry while a program has either file open.

    Raises PermissionError after two seconds, and any other OSError at once.
    """
    with_retries(lambda: long_path(source).replace(long_path(target)))


def rename(source: Path, target: Path) -> None:
    """Rename with the same retries as `replace`; on Windows, an existing target raises FileExistsError."""
    with_retries(lambda: long_path(source).rename(long_path(target)))


@contextlib.contextmanager
def staged(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `target`; it replaces `target` if the block succeeds, else it is deleted.

    Intended for writers that need a path (safetensors, Pillow). With `durable`, waits until the data is on the disk, so
    it survives a power outage; this takes a fraction of a millisecond on an SSD and up to 50 ms on a hard disk.
    """
    temporary = target.parent / f".impasto-{secrets.token_hex(8)}.tmp"
    try:
        yield long_path(temporary)
        if durable:
            sync_file(temporary)
        replace(temporary, target)
    except BaseException as error:
        _name_target(error, temporary, target)
        # Raise the first error; a temporary file that cannot be deleted now is removed at the next start.
        with contextlib.suppress(OSError):
            long_path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(target.parent)


def _name_target(error: BaseException, temporary: Path, target: Path) -> None:
    """Change an error's file name from the temporary file to `target`, which the user knows."""
    if isinstance(error, OSError) and error.filename is not None and Path(error.filename).name == temporary.name:
        error.filename, error.filename2 = str(target), None


def write_bytes(target: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically; on an error, `target` stays unchanged. See `staged` for `durable`."""
    with staged(target, durable=durable) as temporary:
        temporary.write_bytes(data)


def write_text(target: Path, text: str, *, durable: bool = True) -> None:
    r"""Write a UTF-8 file atomically, with "\n" line endings on every system."""
    write_bytes(target, text.encode("utf-8"), durable=durable)


def write_json(target: Path, value: object, *, durable: bool = True) -> None:
    """Write a JSON file atomically; raises ValueError for NaN and infinity, which JSON cannot represent."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(target, text + "\n", durable=durable)


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    # Windows flushes only through a writable handle.
    with long_path(path).open("r+b") as file:
        os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Wait until a folder's entries are on the disk, so a rename survives a power outage; no-op on Windows."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_temporary_files(folder: Path, *, idle: float = 0.0) -> None:
    """Delete temporary files that killed writers left in `folder`, if unchanged for `idle` seconds.

    With `idle` = 0, call this only while no other process writes to the folder.
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
    except FileNotFoundError:  # its writer has just renamed it to the target
        return False


def long_path(path: Path) -> Path:
    r"""Return the path in Windows' \\?\ form if it is too long for the usual form, else unchanged."""
    return path if sys.platform != "win32" else Path(long_name(str(path)))


def long_name(text: str) -> str:
    """Return a path, given as text, in the form that `long_path` returns."""
    return extended(text) if sys.platform == "win32" and len(text) >= _LONG else text


def extended(text: str) -> str:
    r"""Return a Windows path in its \\?\ form, which has no length limit; shares become \\?\UNC\server\share."""
    if text.startswith("\\\\?\\"):
        return text
    text = ntpath.abspath(text)  # this form is taken literally: no "..", no "/"
    return "\\\\?\\UNC\\" + text[2:] if text.startswith("\\\\") else "\\\\?\\" + text


def with_retries(action: Callable[[], _Result]) -> _Result:
    """Return the result of `action`, retrying for two seconds while it raises PermissionError."""
    for wait in _WAITS:
        try:
            return action()
        except PermissionError:
            time.sleep(wait)
    return action()


def safe_name(text: str, otherwise: str = "unnamed") -> str:
    """Return `text` as a path component, without unsafe characters; `otherwise` if no characters are left.

    Letters of all scripts are kept.
    """
    name = _INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    name = _trimmed(_FORBIDDEN.sub("-", name))
    name = _trimmed(name.encode("utf-8")[:_MOST_BYTES].decode("utf-8", errors="ignore"))
    if _RESERVED.fullmatch(name):
        name = f"_{name}"
    return name or otherwise


def valid_job_name(text: str, otherwise: str = "job") -> str:
    """Return `text` (a title, or a folder or file name) as a valid job name; `otherwise` if no characters are left.

    The result is short enough that a number can be appended in a job's name and in a folder's name.
    """
    name = " ".join(_INVISIBLE.sub("", unicodedata.normalize("NFC", text)).split())
    name = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "", name)[: LONGEST_NAME - _NUMBER_BYTES]
    name = name.encode("utf-8")[: _MOST_BYTES - _NUMBER_BYTES].decode("utf-8", errors="ignore").strip()
    return name if name.strip(" .") else otherwise


def numbered(name: str, between: str = "-") -> Iterator[str]:
    """Yield a name, then the name with 2, 3, … appended, endlessly; the caller takes the first free one."""
    yield name
    yield from (f"{name}{between}{number}" for number in itertools.count(2))


def step_ending(step: int) -> str:
    """Return the file name suffix of a LoRA saved at a step; the final LoRA has none."""
    return f"-step{step:06d}"


def _trimmed(name: str) -> str:
    # A leading dot hides a file, a leading dash looks like an option, and Windows drops trailing dots and spaces.
    return name.strip().lstrip(".- ").rstrip(". ")


class Links:
    """Guard against symbolic links that lead out of the folders that the user listed, which could expose private files.

    Folders are resolved to their real location. Hard links look like regular files and are read as such.
    """

    def __init__(self, folders: Iterable[str | Path]) -> None:
        self.refused: set[Path] = set()
        """Links to which access has been refused so far."""
        self._folders = tuple(_real(str(folder)) for folder in folders)

    def allow_file(self, path: Path) -> bool:
        """Return whether a file may be read: it is not a link, or it leads into an allowed folder. Costs one lstat."""
        return not path.is_symlink() or self.allow(path)

    def allow(self, path: Path) -> bool:
        """Return whether a link, or a folder that may be one (Windows junctions), leads into an allowed folder."""
        target = _real(str(path))
        if any(target == folder or target.startswith(folder.rstrip(os.sep) + os.sep) for folder in self._folders):
            return True
        self.refused.add(path)
        return False


def _real(path: str) -> str:
    return os.path.normcase(os.path.realpath(path))
