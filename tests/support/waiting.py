"""Wait for what other processes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# This event is never set: other processes' changes to files and locks wake no thread, so the condition is polled.
_AGAIN = threading.Event()


def until(reached: Callable[[], object], seconds: float = 180.0) -> None:
    """Return once a condition holds; raise AssertionError if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not so after {seconds:.0f} s"
        _AGAIN.wait(0.02)
