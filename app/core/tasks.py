"""Does slow work away from the thread that owns the library, and brings what came of it back there."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from time import perf_counter, sleep
from typing import NamedTuple, TypeVar, cast

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
_LONG = 5.0
"""Seconds after which work that nobody has taken gets a worker of its own."""
_MORE = 12
"""Workers more than are wanted, at most: so many may be stuck at disks that do not answer."""


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


_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")
_Fault = TypeVar("_Fault", bound=BaseException)

Post = Callable[[Callable[[], None]], None]
"""Calls a function soon on the thread that owns the library; may be called from any thread."""

_CLOSE_SECONDS = 2.0
"""Seconds that the end waits for work that may be left."""


class _Job(NamedTuple):
    """Something for a worker to do."""

    work: Callable[[], object]
    future: Future[object]
    kept: bool
    """Whether the app may not end before this does."""


class Tasks:
    """Worker threads. `post` is the way home: the window gives one that goes through Qt's event loop.

    Those `behind` get a core after the window's thread, and so do all processes that they start. Where all are stuck,
    at a disk that does not answer, another one takes what waits; not where all is to be done `in_order`, by one.
    """

    def __init__(self, post: Post, threads: int = 2, *, behind: bool = False, in_order: bool = False) -> None:
        self.post = post
        self._count, self._most = (1, 1) if in_order else (threads, threads + _MORE)
        self._behind = behind
        self._closed = False
        self._change = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: dict[threading.Thread, tuple[_Job, float]] = {}
        """With when each was taken, by the monotonic clock."""
        self._taken = 0.0
        """When one was taken last, or could have been."""
        self._hired: list[threading.Thread] = []
        self._free = self._threads = 0
        self._spare = False

    def run(
        self,
        work: Callable[[], _Result],
        done: Callable[[_Result], None],
        failed: Callable[[BaseException], None],
        *,
        kept: bool = True,
    ) -> Future[_Result]:
        """Run `work` on a worker; then call `done` with its result, or `failed`, on the owner's thread.

        After `close` nothing begins any more: what is still asked for then is dropped, as what waits is. It waits for
        what is `kept`; looking at a disk for what can be looked at again is not.
        """

        def deliver(future: Future[_Result]) -> None:
            if future.cancelled():
                return
            fault = future.exception()
            self.post((lambda: failed(fault)) if fault else (lambda: done(future.result())))

        future: Future[_Result] = Future()
        with self._change:
            if self._closed:
                future.cancel()
                return future
            future.add_done_callback(deliver)
            self._taken = self._taken if self._waiting else time.monotonic()
            self._waiting.append(_Job(work, cast("Future[object]", future), kept))
            self._staff()
        return future

    def close(self) -> None:
        """Let running work end, for a moment only where it may be left; drop what has not begun."""
        with self._change:
            self._closed = True
            for job in self._waiting:
                job.future.cancel()
            self._waiting.clear()
            self._change.notify_all()
            self._change.wait_for(lambda: not any(job.kept for job, _ in self._running.values()))
            self._change.wait_for(lambda: not self._running, _CLOSE_SECONDS)
            ending = [thread for thread in self._hired if thread not in self._running]
        for thread in ending:
            thread.join()

    def _staff(self) -> None:
        """See to it that somebody takes what waits, now or when all have been stuck for long."""
        if self._free >= len(self._waiting):
            self._change.notify()
        elif self._threads < self._count:
            self._hire(self._labour)
        elif not self._spare and self._threads < self._most:
            self._spare = True
            self._hire(self._wait_aside)

    def _hire(self, life: Callable[[], None]) -> None:
        thread = threading.Thread(target=life, name=f"app-worker_{self._threads}", daemon=True)
        self._hired = [*filter(threading.Thread.is_alive, self._hired), thread]
        self._threads += 1
        thread.start()

    # On the threads

    def _wait_aside(self) -> None:
        """Become a worker when nobody has taken for long what waits; end when nothing does."""
        with self._change:
            while self._waiting:
                patience = self._taken + _LONG - time.monotonic()
                if patience <= 0:
                    break
                self._change.wait(patience)
            self._spare = False
            if not self._waiting:
                self._threads -= 1
                return
        self._labour()

    def _labour(self) -> None:
        if self._behind:
            step_back()
        while job := self._next():
            _do(job)
            del job  # and what it holds, while this thread waits

    def _next(self) -> _Job | None:
        """Wait for work; None when there will be none, or none waits and others are enough for what comes."""
        me = threading.current_thread()
        with self._change:
            self._running.pop(me, None)
            self._change.notify_all()
            while not self._closed:
                while self._waiting:
                    job = self._waiting.popleft()
                    if job.future.set_running_or_notify_cancel():
                        self._taken = time.monotonic()
                        self._running[me] = job, self._taken
                        if self._waiting:
                            self._staff()
                        return job
                if self._threads > self._count + self._stuck():
                    break
                self._free += 1
                self._change.wait()
                self._free -= 1
            self._threads -= 1
            self._change.notify_all()
            return None

    def _stuck(self) -> int:
        """Return how many are at their work for long."""
        return sum(taken + _LONG <= time.monotonic() for _, taken in self._running.values()) + self._spare


def _do(job: _Job) -> None:
    try:
        result = job.work()
    except BaseException as fault:  # noqa: BLE001 - whatever it is, `failed` gets it
        job.future.set_exception(fault)
    else:
        job.future.set_result(result)


def raise_again(fault: BaseException) -> None:
    """Let a fault that nobody expects be seen on the owner's thread: a `failed` for `Tasks.run`."""
    raise fault


def only(
    kinds: type[_Fault] | tuple[type[_Fault], ...], then: Callable[[_Fault], None]
) -> Callable[[BaseException], None]:
    """Return a `failed` for `Tasks.run` that gives `then` faults of these kinds; others are raised again."""

    def failed(fault: BaseException) -> None:
        if not isinstance(fault, kinds):
            raise fault
        then(fault)

    return failed


class Single:
    """Work that is done again and again, and never twice at a time; belongs to the thread that makes it."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.busy = False
        """Whether it is on its way."""

    def run(
        self,
        work: Callable[[], _Result],
        done: Callable[[_Result], None],
        failed: Callable[[BaseException], None] = raise_again,
        *,
        kept: bool = True,
    ) -> None:
        """Run it as `Tasks.run` does; nothing while it is on its way.

        When `done` or `failed` is called it no longer is: a fault that nobody expects ends this time, not all to come.
        """
        if self.busy:
            return

        def over(then: Callable[[_Answer], None], answer: _Answer) -> None:
            self.busy = False
            then(answer)

        self.busy = True
        self._tasks.run(work, partial(over, done), partial(over, failed), kept=kept)
