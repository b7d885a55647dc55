"""Lets the window's thread have a core, and Python's lock, before the threads that work behind it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from time import perf_counter, sleep
from typing import TypeVar

_Each = TypeVar("_Each")

_NICE = 10
_TURN, _REST = 0.003, 0.0002
"""Seconds of work, and those after which whoever waits has woken up; on Linux they cost a tenth of the work's speed.

Where the clock has larger steps they cost more: Windows should rest for half a millisecond to one, by the timer
that Python takes there since 3.11. With rests of one the first thumbnail came no later on Linux, with fifteen half a
second. Nothing tells a worker cheaply whether somebody waits.
"""


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


def in_turns(work: Iterable[_Each]) -> Iterator[_Each]:
    """Go through what asks the disk for many small things, on a worker, and rest for a moment now and then.

    Each such call gives Python's lock back for some microseconds and has it again before a thread that waits for it has
    woken up; that one begins to wait anew, without a word that it wants it. The window waited up to 60 ms for headers.
    """
    end = perf_counter() + _TURN
    for each in work:
        yield each
        if perf_counter() > end:
            sleep(_REST)
            end = perf_counter() + _TURN
