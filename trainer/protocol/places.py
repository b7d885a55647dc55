"""Provide per-user folders, free disk space, and error messages for failed file access."""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
from pathlib import Path

from trainer.errors import ImpastoError, RunError

# Enough for one run of the largest size (fit.cache_gigabytes) and the remains of some smaller ones.
_CACHE_GIGABYTES = 60.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WINDOWS_FULL = {39, 112}  # ERROR_HANDLE_DISK_FULL, ERROR_DISK_FULL
# Errors of a file system whose cause the user can fix.
_REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL,
    errno.EEXIST,  # a file where a folder should be made
}  # fmt: skip
_WINDOWS_PROTECTED = 19  # ERROR_WRITE_PROTECT
_LONGEST_PATH = 300


def home() -> Path:
    """Return Impasto's per-user folder: $IMPASTO_HOME, else one in the system's application data folder."""
    chosen = _from_environment("IMPASTO_HOME")
    if chosen:
        return chosen
    if sys.platform == "win32":
        return (_from_environment("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "Impasto"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Impasto"
    return (_from_environment("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "impasto"


def cache_folder() -> Path:
    """Return the folder of encoded images and texts, shared by all runs: $IMPASTO_CACHE, else a folder in `home`."""
    return _from_environment("IMPASTO_CACHE") or home() / "cache"


def cache_limit() -> int:
    """Return the size limit of the shared cache in bytes: $IMPASTO_CACHE_GB, else 60 GB.

    Raises RunError if the variable is not a number.
    """
    text = os.environ.get("IMPASTO_CACHE_GB", "").strip()
    try:
        gigabytes = float(text) if text else _CACHE_GIGABYTES
    except ValueError:
        gigabytes = math.nan
    if not 0.0 <= gigabytes < math.inf:
        raise RunError(
            "cache.limit",
            f'Could not read the environment variable IMPASTO_CACHE_GB: "{text}" is not a number of gigabytes.',
            f"Set it to a number such as {_CACHE_GIGABYTES:g}, or remove it.",
        )
    return int(gigabytes * 1e9)


def models_folder() -> Path:
    """Return the folder of downloaded bases."""
    return home() / "models"


def runs_list() -> Path:
    """Return the file that lists every start of a run, one JSON line each."""
    return home() / "runs.jsonl"


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, which need not exist; raises OSError if the disk is missing."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """Return `path` or its nearest existing parent; the drive itself if the drive is missing."""
    place = path.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def unwritable(folder: Path) -> OSError | None:
    """Return the error that creating a folder in `folder` would probably raise, without trying it.

    Returns None if none is expected. `folder` itself need not exist. On Windows, missing permissions are noticed only
    when something is written.
    """
    place = nearest_existing(folder)
    try:
        if place.is_dir():
            free_to_write = os.access(place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
            code = errno.EROFS if _is_read_only(place) else errno.EACCES
            return None if free_to_write else OSError(code, f"{os.strerror(code)} in {place}")
        if place == place.parent:
            return OSError(errno.ENODEV, f"there is no drive {place}")
        why = f"{place} is a file" if place.exists() else f"{place} is a broken link"
        return OSError(errno.ENOTDIR, why)
    except OSError as error:
        return error


def _is_read_only(place: Path) -> bool:
    return hasattr(os, "statvfs") and bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def write_remedy(error: OSError) -> str:
    """Return advice for the user on a failed write, depending on its cause."""
    if is_disk_full(error):
        return "Free up disk space there."
    if error.errno == errno.EROFS or getattr(error, "winerror", None) == _WINDOWS_PROTECTED:
        return "The disk is read-only: choose a folder on another disk, or allow writing to it."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Allow writing to that folder, or choose another one."
    return "Check that the disk is connected and the path is correct, or choose another folder."


def is_disk_full(error: OSError) -> bool:
    """Return whether a write failed for lack of space: full disk, exceeded quota, or a file size limit."""
    return error.errno in _FULL or getattr(error, "winerror", None) in _WINDOWS_FULL


def user_error_of(error: OSError) -> ImpastoError | None:
    """Return an error with advice for a file system error that the user can fix; None for any other error."""
    where = f": {_cut(str(error.filename))}" if error.filename else ""
    if is_disk_full(error):
        return ImpastoError("file.disk_full", f"The disk is full{where}.", "Free up disk space there and try again.")
    if error.errno not in _REFUSALS:
        return None
    remedy = "Check that the path is correct and that you have permission to read and write there."
    if error.errno == errno.EROFS:
        remedy = write_remedy(error)
    return ImpastoError("file.refused", f"{error.strerror or error}{where}.", remedy)


def _cut(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else path[:_LONGEST_PATH] + "..."


def _from_environment(name: str) -> Path | None:
    value = os.environ.get(name, "")
    return Path(value).expanduser().absolute() if value else None
