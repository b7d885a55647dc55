"""Places on disk: where per-user files lie, and how much room is left."""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
from pathlib import Path

from trainer.errors import ImpastoError, RunError

# Room for one run of the largest kind (fit.cache_gigabytes) and for the leavings of some smaller ones.
_CACHE_GIGABYTES = 60.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WINDOWS_FULL = {39, 112}  # ERROR_HANDLE_DISK_FULL, ERROR_DISK_FULL
# What a file system refuses for a reason that the user can do something about.
_REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL,
    errno.EEXIST,  # a file where a folder should be made
}  # fmt: skip
_WINDOWS_PROTECTED = 19  # ERROR_WRITE_PROTECT
_LONGEST_TOLD = 300


def home() -> Path:
    """Return Impasto's per-user folder: $IMPASTO_HOME, else where the system keeps the data of programs."""
    chosen = _from_environment("IMPASTO_HOME")
    if chosen:
        return chosen
    if sys.platform == "win32":
        return (_from_environment("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "Impasto"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Impasto"
    return (_from_environment("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "impasto"


def cache_folder() -> Path:
    """Return where cached pictures and texts lie, shared between runs: $IMPASTO_CACHE, else within `home`."""
    return _from_environment("IMPASTO_CACHE") or home() / "cache"


def cache_limit() -> int:
    """Return the bytes that the cached pictures and texts of all runs may take: $IMPASTO_CACHE_GB, else 60 GB.

    Raises RunError when the variable holds no number.
    """
    text = os.environ.get("IMPASTO_CACHE_GB", "").strip()
    try:
        gigabytes = float(text) if text else _CACHE_GIGABYTES
    except ValueError:
        gigabytes = math.nan
    if not 0.0 <= gigabytes < math.inf:
        raise RunError(
            "cache.limit",
            f'The environment variable IMPASTO_CACHE_GB is "{text}", which is no number of gigabytes.',
            f"Set it to a number such as {_CACHE_GIGABYTES:g}, or remove it.",
        )
    return int(gigabytes * 1e9)


def models_folder() -> Path:
    """Return where downloaded bases lie."""
    return home() / "models"


def runs_list() -> Path:
    """Return the file that every start of a run is entered in, one JSON line each."""
    return home() / "runs.jsonl"


def free_bytes(path: Path) -> int:
    """Return the bytes that may still be written where `path` is or would be; raises OSError when its disk is gone."""
    return shutil.disk_usage(existing(path)).free


def existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists; on a drive that is not there, that drive."""
    place = path.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def unwritable(folder: Path) -> OSError | None:
    """Return the error that making a folder in `folder` would raise, where that is known without trying.

    `folder` itself need not exist. Windows reveals rights only when something is written.
    """
    place = existing(folder)
    try:
        if place.is_dir():
            free_to_write = os.access(place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
            code = errno.EROFS if _is_read_only(place) else errno.EACCES
            return None if free_to_write else OSError(code, f"{os.strerror(code)} in {place}")
        if place == place.parent:
            return OSError(errno.ENODEV, f"the drive {place} is not there")
        why = f"{place} is a file" if place.exists() else f"{place} leads nowhere"
        return OSError(errno.ENOTDIR, why)
    except OSError as error:
        return error


def _is_read_only(place: Path) -> bool:
    return hasattr(os, "statvfs") and bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def write_remedy(error: OSError) -> str:
    """Return what to do when something could not be written: making room helps on a full disk only."""
    if is_disk_full(error):
        return "Make room on that disk."
    if error.errno == errno.EROFS or getattr(error, "winerror", None) == _WINDOWS_PROTECTED:
        return "That disk is read-only: choose a folder on another one, or allow writing to it."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Allow writing to that folder, or choose another one."
    return "Check that the disk is connected and the path is right, or choose another folder."


def is_disk_full(error: OSError) -> bool:
    """Tell whether a write failed for want of room: full disk, used-up quota, or a size limit on files."""
    return error.errno in _FULL or getattr(error, "winerror", None) in _WINDOWS_FULL


def refusal(error: OSError) -> ImpastoError | None:
    """Return what a file system refused for a reason that the user can act on; None for any other failure."""
    where = f": {_cut(str(error.filename))}" if error.filename else ""
    if is_disk_full(error):
        return ImpastoError("file.disk_full", f"The disk is full{where}.", "Make room on it and start again.")
    if error.errno not in _REFUSALS:
        return None
    remedy = "Check that the path is right and that you may read and write there."
    if error.errno == errno.EROFS:
        remedy = write_remedy(error)
    return ImpastoError("file.refused", f"{error.strerror or error}{where}.", remedy)


def _cut(path: str) -> str:
    return path if len(path) <= _LONGEST_TOLD else path[:_LONGEST_TOLD] + "..."


def _from_environment(name: str) -> Path | None:
    value = os.environ.get(name, "")
    return Path(value).expanduser().absolute() if value else None
