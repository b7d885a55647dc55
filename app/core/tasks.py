"""Does slow work away from the thread that owns the library, and brings what came of it back there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from app.core.priority import step_back

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")
_Fault = TypeVar("_Fault", bound=BaseException)

Post = Callable[[Callable[[], None]], None]
"""Calls a function soon on the thread that owns the library; may be called from any thread."""


class Tasks:
    """Worker threads. `post` is the way home: the window gives one that goes through Qt's event loop.

    Those `behind` get a core after the window's thread, and so do all processes that they start.
    """

    def __init__(self, post: Post, threads: int = 2, *, behind: bool = False) -> None:
        self.post = post
        self._closed = False
        first = step_back if behind else None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="app-worker", initializer=first)

    def run(
        self,
        work: Callable[[], _Result],
        done: Callable[[_Result], None],
        failed: Callable[[BaseException], None],
    ) -> Future[_Result]:
        """Run `work` on a worker; then call `done` with its result, or `failed`, on the owner's thread.

        After `close` nothing begins any more: what is still asked for then is dropped, as what waits is.
        """

        def deliver(future: Future[_Result]) -> None:
            if future.cancelled():
                return
            fault = future.exception()
            self.post((lambda: failed(fault)) if fault else (lambda: done(future.result())))

        if self._closed:
            dropped: Future[_Result] = Future()
            dropped.cancel()
            return dropped
        future = self._pool.submit(work)
        future.add_done_callback(deliver)
        return future

    def close(self) -> None:
        """Let running work end, drop what has not begun."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)


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
        self._tasks.run(work, partial(over, done), partial(over, failed))
