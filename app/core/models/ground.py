"""Where on this PC other tools are looked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.models.tools import library_of_stability_matrix

_DRIVE_FIXED = 3  # Windows' GetDriveTypeW
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs", "fuse.rclone", "davfs", "autofs"}


@dataclass(frozen=True, slots=True)
class Ground:
    """`searched` are walked some levels deep, `asked` are looked at themselves, `hubs` are caches of the Hub."""

    searched: tuple[Path, ...] = ()
    asked: tuple[Path, ...] = ()
    hubs: tuple[Path, ...] = ()


def this_pc() -> Ground:
    """Return what to look at here: the home folder and the drives, and where tools keep their settings.

    $IMPASTO_LOOK_IN names other folders instead, separated as in PATH; empty, it forbids to look anywhere.
    """
    chosen = os.environ.get("IMPASTO_LOOK_IN")
    if chosen is not None:
        return Ground(searched=tuple(Path(one) for one in chosen.split(os.pathsep) if one))
    home = Path.home()
    return ground(home, os.environ, _drives(home))


def ground(home: Path, environment: Mapping[str, str], drives: tuple[Path, ...] = ()) -> Ground:
    """Return what to look at for one home folder, one set of environment variables, and these drives."""
    settings = _settings_folder(home, environment)
    library = library_of_stability_matrix(settings / "StabilityMatrix")
    invoke = environment.get("INVOKEAI_ROOT", "")
    asked = [settings / "ComfyUI", settings / "StabilityMatrix", home / "Documents" / "ComfyUI"]
    asked += [path for path in (library, Path(invoke) if invoke else None) if path]
    return Ground((home, *drives), tuple(asked), tuple(_hubs(home, environment)))


def _settings_folder(home: Path, environment: Mapping[str, str]) -> Path:
    """Where desktop programs keep their settings; Electron and .NET agree on it."""
    if sys.platform == "darwin":
        return home / "Library" / "Application Support"
    named = environment.get("APPDATA") if sys.platform == "win32" else environment.get("XDG_CONFIG_HOME")
    fallback = home / "AppData" / "Roaming" if sys.platform == "win32" else home / ".config"
    return Path(named) if named else fallback


def _hubs(home: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """As huggingface_hub finds its cache, without loading it."""
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    root = Path(environment.get("HF_HOME") or cache / "huggingface")
    yield Path(environment.get("HF_HUB_CACHE") or root / "hub").expanduser()


def _drives(home: Path) -> tuple[Path, ...]:
    """The other disks of this PC; not those of the network, which may hang."""
    if sys.platform == "win32":
        import ctypes

        letters = (Path(f"{letter}:\\") for letter in "CDEFGHIJKLMNOPQRSTUVWXYZ")
        return tuple(one for one in letters if ctypes.windll.kernel32.GetDriveTypeW(str(one)) == _DRIVE_FIXED)
    if sys.platform == "darwin":
        return (Path("/Volumes"),)
    return tuple(mount for mount in _mounts() if mount not in home.parents)


def _mounts() -> Iterator[Path]:
    """Disks that Linux has where people mount theirs."""
    usual = (Path("/mnt"), Path("/media"), Path("/run/media"), Path("/data"), Path("/opt"))
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for _, where, kind, *_ in (line.split() for line in lines):
        place = Path(where.replace("\\040", " "))
        if kind not in _REMOTE and any(one == place or one in place.parents for one in usual):
            yield place
