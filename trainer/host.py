"""This PC's cores, main memory and library versions, and a way to keep it awake. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Flags of SetThreadExecutionState (winbase.h); a state lasts until the next call or the end of the thread.
_CONTINUOUS = 0x80000000
_SYSTEM_REQUIRED = 0x00000001

# Each tool holds its inhibitor while its command runs. `cat` exits at the end of its input, which closes when this
# process ends, even if it is killed.
_HOLDERS = (
    ("systemd-inhibit", "--what=idle:sleep", "--mode=block", "--who=Impasto", "--why={why}", "cat"),
    ("gnome-session-inhibit", "--inhibit", "suspend", "--app-id", "Impasto", "--reason", "{why}", "cat"),
)
UNPINNED_BYTES = 1 << 30
"""Main memory that is left to other programs when memory is pinned."""
_KIB = 1024
# Anonymous pages in memory and swapped out: not files that are mapped, such as weights being read.
_LINUX_FIELDS = ("RssAnon:", "VmSwap:")
LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "safetensors",
    "numpy",
    "pillow",
)


@contextlib.contextmanager
def keep_awake(why: str) -> Iterator[None]:
    """Keep the computer from going to sleep automatically during the block; the screen may still turn off.

    Has no effect if the system does not support this. On Windows, it applies to the calling thread, so the
    same thread must leave the block.
    """
    if sys.platform == "win32":
        set_execution_state(_CONTINUOUS | _SYSTEM_REQUIRED)
        try:
            yield
        finally:
            set_execution_state(_CONTINUOUS)
        return
    holders = _held(why) if sys.platform == "linux" else []
    try:
        yield
    finally:
        for holder in holders:
            _release(holder)


def set_execution_state(state: int) -> int:
    """Set the thread's execution state and return the previous one, or 0 if Windows rejected it."""
    set_state = ctypes.WinDLL("kernel32").SetThreadExecutionState  # type: ignore[attr-defined,unused-ignore]
    set_state.argtypes, set_state.restype = [ctypes.c_uint32], ctypes.c_uint32
    return int(set_state(state))


def _held(why: str) -> list[subprocess.Popen[bytes]]:
    holders = []
    for name, *words in _HOLDERS:
        program = shutil.which(name)
        if program is None:
            continue
        with contextlib.suppress(OSError):
            holders.append(
                subprocess.Popen(
                    [program, *(word.format(why=why) for word in words)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C must reach only the training, which then ends this
                )
            )
    return holders


def _release(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    with contextlib.suppress(OSError):
        holder.stdin.close()
    try:
        holder.wait(2.0)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


def usable_cores() -> int:
    """Return the number of cores that this process may use, as limited by `taskset` or a container's cpuset.

    Limits on CPU time (`docker run --cpus`) are not taken into account.
    """
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS; Python 3.13 has os.process_cpu_count for all
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Snapshot of this PC's main memory, in bytes."""

    total: int
    available: int
    """Bytes that programs can allocate without swapping."""
    commit_limit: int | None = None
    """Bytes that all programs may commit (main memory plus page files); None if the system has no such limit."""
    commit_free: int | None = None
    """Bytes that may still be committed. On Windows, GPU memory counts against the limit too."""


def pinnable_bytes(memory: MainMemory, *, windows: bool = sys.platform == "win32") -> int:
    """Return how many bytes of main memory may be pinned for the GPU at present.

    Pinned memory is never swapped out, so some is left to other programs. On Windows, it counts as committed and as the
    GPU's shared memory, which is limited to half of main memory. RLIMIT_MEMLOCK does not apply, because NVIDIA's driver
    locks pages itself. The driver may refuse earlier, so this is an upper limit.
    """
    limits = [memory.available - UNPINNED_BYTES]
    if memory.commit_free is not None:
        limits.append(memory.commit_free - UNPINNED_BYTES)
    if windows:
        limits.append(memory.total // 2)
    return max(0, min(limits))


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX structure from sysinfoapi.h."""

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
    """Return the current state of this PC's main memory; None on systems other than Windows and Linux."""
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
    """Return main memory from a structure filled in by Windows, in which "page file" means the commit limit."""
    return MainMemory(
        total=status.total_physical,
        available=status.available_physical,
        commit_limit=status.total_page_file,
        commit_free=status.available_page_file,
    )


def _from_meminfo(text: str, strict: bool) -> MainMemory:
    """Parse the text of /proc/meminfo; include the commit limit only if the kernel enforces it (``strict``)."""
    known = {name: int(rest.split()[0]) * _KIB for name, _, rest in (line.partition(":") for line in text.splitlines())}
    limit = known["CommitLimit"] if strict else None
    free = max(0, limit - known["Committed_AS"]) if limit is not None else None
    return MainMemory(known["MemTotal"], known["MemAvailable"], limit, free)


def _is_strict() -> bool:
    setting = Path("/proc/sys/vm/overcommit_memory")
    return setting.exists() and setting.read_text(encoding="utf-8").strip() == "2"


class _Counters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS_EX structure from psapi.h."""

    _fields_ = [
        ("cb", ctypes.c_uint32),
        ("page_faults", ctypes.c_uint32),
        *((f"size_{index}", ctypes.c_size_t) for index in range(8)),
        ("private_usage", ctypes.c_size_t),
    ]


def private_bytes() -> int | None:
    """Return this process's private main memory in bytes; None on systems other than Windows and Linux.

    Windows counts private memory against its commit limit.
    """
    if sys.platform == "win32":
        return _private_on_windows()
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) * _KIB for line in lines if line.startswith(_LINUX_FIELDS))
    return None


def _private_on_windows() -> int | None:
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
    counters = _Counters()
    counters.cb = ctypes.sizeof(counters)
    succeeded = kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb)
    return int(counters.private_usage) if succeeded else None


def versions() -> dict[str, str]:
    """Return the versions of Python and each library; "missing" for a library that is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) or "missing" for name in LIBRARIES}}


def version_of(library: str) -> str | None:
    """Return a library's installed version without importing the library; None if it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
