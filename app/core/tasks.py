"""Run slow work on worker threads, deliver results to the owner's thread, and share the GIL with the window."""

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
_WORK_SECONDS, _REST_SECONDS = 0.003, 0.0002
"""Seconds that a worker works between two rests, and seconds of each rest, which lets a waiting thread wake up.

On Linux, the rests cost 10 % of a worker's speed. A coarser clock makes them longer: on Windows, a rest should take
0.5 to 1 ms with the timer that Python has used there since 3.11. On Linux, rests of 1 ms did not delay the first
thumbnail; rests of 15 ms delayed it by half a second.
"""
_MAX_YIELD, _BURST = 0.03, 0.01
"""Seconds that workers yield to the busy window thread, and seconds that they then run concurrently with it.

The pauses of a window that keeps painting (large screen, slow CPU) are too short for more than one item of work:
without these bursts, thumbnails loaded at a fifth of the usual speed.
"""
_IDLE_RATIO = 0.25
"""Fraction of its last busy time that the window thread must be idle before a new yield period can start."""
_YIELD_TIMEOUT = 0.1
"""Seconds after which workers stop yielding to a busy window thread, which may itself be waiting for a worker."""
_SWITCH_INTERVAL = 0.001 if sys.platform == "win32" else 0.0002
"""Switch interval: seconds until a waiting thread requests the GIL. On Windows, the smallest step is 1 ms.

The window acquires the GIL a dozen times per event. With Python's default of 5 ms, each time cost 5 ms while a worker
was busy: with 100,000 images, the window waited up to 167 ms for a worker that counted tags. The shorter interval does
not slow down workers.
"""
_STUCK_AFTER = 5.0
"""Seconds after which waiting work gets an extra worker because all workers seem stuck."""
_MAX_EXTRA = 12
"""Maximum number of extra workers, started while others are stuck on disks that do not respond."""


def shorten_switch_interval() -> None:
    """Shorten the switch interval, which lets a waiting thread get the GIL from a busy one sooner."""
    sys.setswitchinterval(_SWITCH_INTERVAL)


def lower_priority() -> None:
    """Lower the CPU priority of this thread and of the processes that it starts (Linux only).

    With 100,000 images on two cores, the window waited up to 130 ms for a core while thumbnails, headers and captions
    were read. macOS supports this only for whole processes. On Windows, where a higher priority always wins, another
    program could preempt a worker that holds the GIL, and the window would have to wait; Windows already boosts the
    thread of a window on input. If a sandbox forbids the change, the priority stays unchanged.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


_window_idle = threading.Event()
_window_idle.set()
_yield_start = _busy_since = _idle_since = 0.0


def set_window_busy() -> None:
    """Make workers yield until `set_window_idle`. The window's thread calls it when it has an event to handle.

    While painting the grid, this thread releases the GIL dozens of times, since Qt does so around slow calls. If a
    worker is busy, each release costs a switch interval: a paint of 12 ms took 60 ms. Yielding reduced the number of
    pauses above 20 ms while scrolling through 100,000 images from about 150 to a few; headers and thumbnails load about
    as fast as before.
    """
    global _yield_start, _busy_since
    if _window_idle.is_set():
        now = perf_counter()
        if now - _idle_since > _IDLE_RATIO * (_idle_since - _busy_since):
            _yield_start = now
        _busy_since = now
        _window_idle.clear()


def set_window_idle() -> None:
    """Let workers run again: the window's thread is idle."""
    global _idle_since
    if not _window_idle.is_set():
        _idle_since = perf_counter()
        _window_idle.set()


def yield_to_window() -> None:
    """Wait briefly until the window's thread is idle. Workers call it between items of work, holding no locks."""
    if _window_idle.is_set():
        return
    now = perf_counter()
    timeout = _MAX_YIELD - (now - _yield_start) % (_MAX_YIELD + _BURST)
    if now - _busy_since < _YIELD_TIMEOUT and timeout > 0:
        _window_idle.wait(timeout)


def iterate_yielding(work: Iterable[_Each], alive: Callable[[], None] = lambda: None) -> Iterator[_Each]:
    """Yield small items of work on a worker, giving way to the window's thread between them.

    Every few milliseconds, sleep briefly to let the window's thread start handling an event, and call `alive` to report
    that the disk responds. The sleep is needed because a disk access releases the GIL for only a few microseconds: the
    worker gets it back before a waiting thread wakes up, and that thread's wait starts over without a request to
    switch.
    """
    end = perf_counter() + _WORK_SECONDS
    for each in work:
        yield each
        yield_to_window()
        if perf_counter() > end:
            sleep(_REST_SECONDS)
            alive()
            end = perf_counter() + _WORK_SECONDS


_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")
_Fault = TypeVar("_Fault", bound=BaseException)

Post = Callable[[Callable[[], None]], None]
"""Function that schedules a call on the thread that owns the library; may be called from any thread."""

_CLOSE_SECONDS = 2.0
"""Maximum seconds that `close` waits for running work that may be abandoned."""


class _Job(NamedTuple):
    """Work for a worker, and the future of its result."""

    work: Callable[[], object]
    future: Future[object]
    kept: bool
    """Whether the app must not exit before this work is done."""


class Tasks:
    """Pool of worker threads. `post` delivers results; in the window, it uses Qt's event loop.

    With `behind`, the workers and the processes that they start have a lower CPU priority than the window. If all
    workers are stuck on a disk that does not respond, extra workers are started. With `in_order`, a single worker does
    everything in order.
    """

    def __init__(self, post: Post, threads: int = 2, *, behind: bool = False, in_order: bool = False) -> None:
        self.post = post
        self._wanted, self._max_threads = (1, 1) if in_order else (threads, threads + _MAX_EXTRA)
        self._low_priority = behind
        self._closed = False
        self._change = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: dict[threading.Thread, tuple[_Job, float]] = {}
        """Job of each busy thread, and the monotonic time when the job was taken."""
        self._taken_at = 0.0
        """Monotonic time when a job was last taken, or when the queue last became non-empty."""
        self._all_threads: list[threading.Thread] = []
        self._idle_count = self._thread_count = 0
        self._has_spare = False

    def run(
        self,
        work: Callable[[], _Result],
        done: Callable[[_Result], None],
        failed: Callable[[BaseException], None],
        *,
        kept: bool = True,
    ) -> Future[_Result]:
        """Run `work` on a worker; then call `done` with its result or `failed` with its error on the owner's thread.

        `close` drops waiting work and all later requests, but waits for running work that is `kept`. Pass
        `kept=False` for work that can simply be repeated, such as reading from disk.
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
            self._taken_at = self._taken_at if self._waiting else time.monotonic()
            self._waiting.append(_Job(work, cast("Future[object]", future), kept))
            self._ensure_worker()
        return future

    def close(self) -> None:
        """Drop waiting work and wait for running work, but only briefly if the work is not `kept`."""
        with self._change:
            self._closed = True
            for job in self._waiting:
                job.future.cancel()
            self._waiting.clear()
            self._change.notify_all()
            # Work to keep, such as a write, has no time limit; anything else may hang on a disk and is abandoned.
            self._change.wait_for(lambda: not any(job.kept for job, _ in self._running.values()))
            self._change.wait_for(lambda: not self._running, _CLOSE_SECONDS)
            ending = [thread for thread in self._all_threads if thread not in self._running]
        for thread in ending:
            thread.join()

    def _ensure_worker(self) -> None:
        """Wake or start a worker for the waiting work, or start a spare worker in case all others are stuck."""
        if self._idle_count >= len(self._waiting):
            self._change.notify()
        elif self._thread_count < self._wanted:
            self._start_thread(self._work)
        elif not self._has_spare and self._thread_count < self._max_threads:
            self._has_spare = True
            self._start_thread(self._wait_as_spare)

    def _start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"app-worker_{self._thread_count}", daemon=True)
        self._all_threads = [*filter(threading.Thread.is_alive, self._all_threads), thread]
        self._thread_count += 1
        thread.start()

    # On the threads

    def _wait_as_spare(self) -> None:
        """Become a worker if no job has been taken for `_STUCK_AFTER` seconds; exit if no job is waiting."""
        with self._change:
            while self._waiting:
                timeout = self._taken_at + _STUCK_AFTER - time.monotonic()
                if timeout <= 0:
                    break
                self._change.wait(timeout)
            self._has_spare = False
            if not self._waiting:
                self._thread_count -= 1
                return
        self._work()

    def _work(self) -> None:
        if self._low_priority:
            lower_priority()
        while job := self._next():
            _run_job(job)
            del job  # free what it references while this thread waits

    def _next(self) -> _Job | None:
        """Wait for a job and return it; None if the pool is closed or has more threads than it needs."""
        me = threading.current_thread()
        with self._change:
            self._running.pop(me, None)
            self._change.notify_all()
            while not self._closed:
                while self._waiting:
                    job = self._waiting.popleft()
                    if job.future.set_running_or_notify_cancel():
                        self._taken_at = time.monotonic()
                        self._running[me] = job, self._taken_at
                        if self._waiting:
                            self._ensure_worker()
                        return job
                # Stuck workers do not count: each was replaced, and one of the two ends when the disk responds.
                if self._thread_count > self._wanted + self._stuck_count():
                    break
                self._idle_count += 1
                self._change.wait()
                self._idle_count -= 1
            self._thread_count -= 1
            self._change.notify_all()
            return None

    def _stuck_count(self) -> int:
        """Return the number of threads that are not available for work.

        These are the workers busy for at least `_STUCK_AFTER` seconds and the spare worker, if there is one.
        """
        return sum(taken + _STUCK_AFTER <= time.monotonic() for _, taken in self._running.values()) + self._has_spare


def _run_job(job: _Job) -> None:
    try:
        result = job.work()
    except BaseException as fault:  # noqa: BLE001 - every error goes to `failed`
        job.future.set_exception(fault)
    else:
        job.future.set_result(result)


def reraise(fault: BaseException) -> None:
    """Raise an unexpected error on the owner's thread. Pass this function as `failed` to `Tasks.run`."""
    raise fault


def handle_only(
    kinds: type[_Fault] | tuple[type[_Fault], ...], then: Callable[[_Fault], None]
) -> Callable[[BaseException], None]:
    """Return a `failed` callback that passes errors of these types to `then` and raises all others."""

    def failed(fault: BaseException) -> None:
        if not isinstance(fault, kinds):
            raise fault
        then(fault)

    return failed


class ExclusiveTask:
    """Work that never runs more than once at a time. Use it only on the thread that created it."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.busy = False
        """Whether the work is queued or running."""

    def run(
        self,
        work: Callable[[], _Result],
        done: Callable[[_Result], None],
        failed: Callable[[BaseException], None] = reraise,
        *,
        kept: bool = True,
    ) -> None:
        """Run work as `Tasks.run` does; do nothing while `busy`.

        `busy` is False again before `done` or `failed` is called, so an error raised there does not block later runs.
        """
        if self.busy:
            return

        def finish(then: Callable[[_Answer], None], answer: _Answer) -> None:
            self.busy = False
            then(answer)

        self.busy = True
        self._tasks.run(work, partial(finish, done), partial(finish, failed), kept=kept)
