"""Keeps the computer from falling asleep while it works; standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator

# SetThreadExecutionState of winbase.h: it lasts until it is set anew, or the thread ends.
_CONTINUOUS = 0x80000000
_SYSTEM_REQUIRED = 0x00000001

# Each holds its inhibitor while its own command runs: `cat` ends with its input, which ends with us, however we end.
_HOLDERS = (
    ("systemd-inhibit", "--what=idle:sleep", "--mode=block", "--who=Impasto", "--why={why}", "cat"),
    ("gnome-session-inhibit", "--inhibit", "suspend", "--app-id", "Impasto", "--reason", "{why}", "cat"),
)


@contextlib.contextmanager
def kept_awake(why: str) -> Iterator[None]:
    """Let the computer not go to sleep by itself for the length of the block; the screen may go dark.

    Quietly nothing where the system offers no way. On Windows it holds for the calling thread, which must leave the
    block too.
    """
    if sys.platform == "win32":
        ask_windows(_CONTINUOUS | _SYSTEM_REQUIRED)
        try:
            yield
        finally:
            ask_windows(_CONTINUOUS)
        return
    holders = _held(why) if sys.platform == "linux" else []
    try:
        yield
    finally:
        for holder in holders:
            _release(holder)


def ask_windows(state: int) -> int:
    """Set the thread's execution state; returns the one before, 0 where Windows refused."""
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
                    start_new_session=True,  # Ctrl-C is for the training, which ends this one in its time
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
