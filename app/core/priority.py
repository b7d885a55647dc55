"""Lets the window's thread have a core before the threads that work behind it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICE = 10


def step_back() -> None:
    """Let this thread have a core after the others of this program, and so each process that it starts.

    At 100,000 pictures on two cores the window waited up to 130 ms for one while thumbnails, headers and captions were
    read. Only on Linux: macOS knows this for whole processes only, and on Windows, where the more important thread
    always wins, a worker that holds Python's lock could be kept from its core by another program, and the window with
    it. Windows raises a window's thread by itself when something is typed or clicked. A sandbox may forbid it: then the
    thread works as it is.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))
