"""How much main memory this machine has and may still promise to programs; standard library only."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Bytes of this machine's main memory at one moment."""

    total: int
    available: int
    """That programs can have without others being swapped out."""
    commit_limit: int | None = None
    """What the system promises to all programs at most, main memory and page files; None where it does not count."""
    commit_free: int | None = None
    """What it may still promise. Windows counts memory of graphics cards against it too, so it bounds both."""


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of sysinfoapi.h."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("available_physical", ctypes.c_uint64),
        ("total_page_file", ctypes.c_uint64),
        ("available_page_file", ctypes.c_uint64),
        ("total_virtual", ctypes.c_uint64),
        ("available_virtual", ctypes.c_uint64),
        ("available_extended_virtual", ctypes.c_uint64),
    ]


def main_memory() -> MainMemory | None:
    """Return this machine's main memory as it is now; None on systems other than Windows and Linux."""
    if sys.platform == "win32":
        return _on_windows()
    if sys.platform == "linux":
        return _from_meminfo(Path("/proc/meminfo").read_text(encoding="utf-8"), _is_strict())
    return None


def _on_windows() -> MainMemory | None:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    return from_status(status) if kernel.GlobalMemoryStatusEx(ctypes.byref(status)) else None


def from_status(status: _MemoryStatus) -> MainMemory:
    """Read what Windows filled in; its "page file" means the limit of promises, not the file."""
    return MainMemory(
        total=status.total_physical,
        available=status.available_physical,
        commit_limit=status.total_page_file,
        commit_free=status.available_page_file,
    )


def _from_meminfo(text: str, strict: bool) -> MainMemory:
    """Read what Linux tells in /proc/meminfo; only a ``strict`` one refuses promises past its limit."""
    known = {name: int(rest.split()[0]) * _KIB for name, _, rest in (line.partition(":") for line in text.splitlines())}
    limit = known["CommitLimit"] if strict else None
    free = max(0, limit - known["Committed_AS"]) if limit is not None else None
    return MainMemory(known["MemTotal"], known["MemAvailable"], limit, free)


def _is_strict() -> bool:
    setting = Path("/proc/sys/vm/overcommit_memory")
    return setting.exists() and setting.read_text(encoding="utf-8").strip() == "2"
