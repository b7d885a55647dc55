"""How much main memory this process has for itself; standard library only."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_KIB = 1024
# Anonymous pages in memory and swapped out: not files that are mapped, such as weights being read.
_LINUX_FIELDS = ("RssAnon:", "VmSwap:")


class _Counters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS_EX of psapi.h."""

    _fields_ = [
        ("cb", ctypes.c_uint32),
        ("page_faults", ctypes.c_uint32),
        *((f"size_{index}", ctypes.c_size_t) for index in range(8)),
        ("private_usage", ctypes.c_size_t),
    ]


def private_bytes() -> int | None:
    """Return the private main memory of this process, what Windows counts against its commit limit; None elsewhere."""
    if sys.platform == "win32":
        return _on_windows()
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) * _KIB for line in lines if line.startswith(_LINUX_FIELDS))
    return None


def _on_windows() -> int | None:
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
    counters = _Counters()
    counters.cb = ctypes.sizeof(counters)
    told = kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb)
    return int(counters.private_usage) if told else None
