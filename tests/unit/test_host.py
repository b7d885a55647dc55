import ctypes
import sys

import psutil
import pytest

from trainer import host

KIB = 1024
MEMINFO = """MemTotal:       32768000 kB
MemFree:         1024000 kB
MemAvailable:   16384000 kB
CommitLimit:    20480000 kB
Committed_AS:   {committed} kB
HugePages_Total:       0
"""


def test_a_linux_that_promises_freely_has_no_limit():
    memory = host._from_meminfo(MEMINFO.format(committed=1), strict=False)
    assert memory == host.MainMemory(32768000 * KIB, 16384000 * KIB, None, None)


@pytest.mark.parametrize(("committed", "free"), [(480000, 20000000), (30000000, 0)])
def test_a_strict_linux_has_what_is_left_of_its_limit(committed, free):
    memory = host._from_meminfo(MEMINFO.format(committed=committed), strict=True)
    assert (memory.commit_limit, memory.commit_free) == (20480000 * KIB, free * KIB)


@pytest.mark.parametrize(
    ("total", "available", "commit_free", "windows", "expected"),
    [(32, 20, None, False, 19), (32, 20, 6, False, 5), (32, 20, 30, True, 16), (16, 0.5, None, False, 0)],
)
def test_pinned_memory_leaves_some_to_others(total, available, commit_free, windows, expected):
    gib = 1 << 30
    free = None if commit_free is None else commit_free * gib
    memory = host.MainMemory(total * gib, int(available * gib), free, free)
    assert host.pinnable_bytes(memory, windows=windows) == expected * gib


def test_what_windows_fills_in_is_read_by_its_places():
    """MEMORYSTATUSEX is 64 bytes: two numbers of four, then seven of eight."""
    assert ctypes.sizeof(host._MemoryStatus) == 64
    data = (64).to_bytes(4, "little") + (40).to_bytes(4, "little")
    data += b"".join((number << 30).to_bytes(8, "little") for number in (32, 16, 40, 8, 131072, 131000, 0))
    memory = host.from_status(host._MemoryStatus.from_buffer_copy(data))
    assert memory == host.MainMemory(32 << 30, 16 << 30, 40 << 30, 8 << 30)


@pytest.mark.skipif(sys.platform not in ("linux", "win32"), reason="other systems are not asked")
def test_this_machine_is_as_psutil_sees_it():
    memory, other = host.main_memory(), psutil.virtual_memory()
    assert memory.total == other.total
    assert memory.available == pytest.approx(other.available, rel=0.2, abs=1 << 28)
    assert memory.commit_free is None or memory.commit_free <= memory.commit_limit
