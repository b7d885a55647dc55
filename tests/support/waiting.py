"""Waits for what other processes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Nobody ever sets it: what others do to files and locks wakes nobody, so that they are asked again and again.
_AGAIN = threading.Event()


def until(reached: Callable[[], object], seconds: float = 180.0) -> None:
    """Return when something is so; AssertionError when that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not so after {seconds:.0f} s"
        _AGAIN.wait(0.02)
