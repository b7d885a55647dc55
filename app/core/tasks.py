"""Does slow work away from the thread that owns the library, and brings what came of it back there."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar, cast

from app.core.priority import step_back

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")
_Fault = TypeVar("_Fault", bound=BaseException)

Post = Callable[[Callable[[], None]], None]
"""Calls a function soon on the thread that owns the library; may be called from any thread."""

_LONG = 5.0
"""Seconds after which work that nobody has taken gets a worker of its own."""
_MORE = 12
"""Workers more than are wanted, at most: so many may be stuck at disks that do not answer."""
_PATIENCE = 2.0
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
            self._change.wait_for(lambda: not self._running, _PATIENCE)
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
