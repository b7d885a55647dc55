"""Lets the window's thread have a core, and Python's lock, before the threads that work behind it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter, sleep
from typing import TypeVar

_Each = TypeVar("_Each")

_NICE = 10
_TURN, _REST = 0.003, 0.0002
"""Seconds of work, and those after which whoever waits has woken up; on Linux they cost a tenth of the work's speed.

Where the clock has larger steps they cost more: Windows should rest for half a millisecond to one, by the timer
that Python takes there since 3.11. With rests of one the first thumbnail came no later on Linux, with fifteen half a
second.
"""
_PATIENCE, _BURST = 0.03, 0.01
"""Seconds that workers stand back for the window's thread at once, and for which they then work beside it.

One that paints without end, as on a large screen by a slow processor, rests too shortly for more than one piece of a
worker's work each time: without bursts thumbnails came at a fifth of their pace.
"""
_SHARE = 0.25
"""So much of the time that it worked is a rest in which workers got on: after it they stand back as long again."""
_STUCK = 0.1
"""Seconds after which that thread, if it has not come round, may itself be waiting for a worker."""
_WAIT = 0.001 if sys.platform == "win32" else 0.0002
"""Seconds after which who waits for Python's lock asks for it; Windows knows no parts of a millisecond there.

By Python's own 5 ms each of the dozen times that the window takes the lock in one event cost as much beside a busy
worker: at 100,000 pictures it waited up to 167 ms for one that counted tags. Workers are as fast as with those.
"""


def share_lock() -> None:
    """Let a thread of this program that wants Python's lock have it soon from one that goes on and on."""
    sys.setswitchinterval(_WAIT)


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


_rests = threading.Event()
_rests.set()
_begun = _woke = _rested = 0.0


def window_works() -> None:
    """Have workers stand back until `window_rests`; said by the window's thread when something has come up for it.

    Painting the grid, that thread gives Python's lock back dozens of times, as Qt does wherever it may take long, and
    beside a busy worker each cost it a switch interval: what takes 12 ms alone took 60. Of the pauses of scrolling at
    100,000 pictures some 150 were above 20 ms, now a few; headers and thumbnails come about as soon as before.
    """
    global _begun, _woke
    if _rests.is_set():
        now = perf_counter()
        if now - _rested > _SHARE * (_rested - _woke):
            _begun = now
        _woke = now
        _rests.clear()


def window_rests() -> None:
    """Let workers go on: the window's thread waits for what comes next."""
    global _rested
    if not _rests.is_set():
        _rested = perf_counter()
        _rests.set()


def stand_back() -> None:
    """Wait until the window's thread rests; for workers, between two small pieces of work, holding no lock."""
    if _rests.is_set():
        return
    now = perf_counter()
    patience = _PATIENCE - (now - _begun) % (_PATIENCE + _BURST)
    if now - _woke < _STUCK and patience > 0:
        _rests.wait(patience)


def in_turns(work: Iterable[_Each], alive: Callable[[], None] = lambda: None) -> Iterator[_Each]:
    """Go through many small things, on a worker, and stand back for the window's thread in between.

    Now and then it rests for a moment, too, for that thread to hear of what comes up at all, and `alive` is told that
    the disk answers.

    Each call that asks the disk gives Python's lock back for some microseconds and has it again before a thread that
    waits for it has woken up; that one begins to wait anew, without a word that it wants it.
    """
    end = perf_counter() + _TURN
    for each in work:
        yield each
        stand_back()
        if perf_counter() > end:
            sleep(_REST)
            alive()
            end = perf_counter() + _TURN
