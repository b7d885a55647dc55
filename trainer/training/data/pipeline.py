"""Passes many things through three stages at once: threads make ready ahead, the caller computes, a thread keeps.

What is computed, in which order and thread, is as if one thing were done after the other: nothing of it changes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Generic, TypeVar

from trainer.host import usable_cores

READERS = min(4, usable_cores())
"""Threads that make ready; more would gain little and take more memory."""
MOST_KEPT = 8
"""Results that may wait for the thread that keeps them."""

Item = TypeVar("Item")
Ready = TypeVar("Ready")
Result = TypeVar("Result")
T = TypeVar("T")


@dataclass(frozen=True)
class Pace:
    """How fast things went through, and how many a second each stage would come to if it waited for no other."""

    count: int
    seconds: float
    ready: float
    compute: float
    keep: float

    def of_parts(self, parts: int) -> Pace:
        """The same of ``parts`` that were passed through several at once."""
        share = parts / self.count
        return Pace(parts, self.seconds, self.ready * share, self.compute * share, self.keep * share)


@dataclass(frozen=True)
class Pipeline(Generic[Item, Ready, Result]):
    """What is done with a thing in each stage."""

    ready: Callable[[Item], Ready]
    compute: Callable[[Ready], Result]
    keep: Callable[[Item, Result], object]

    def run(self, items: Iterable[Item], kept: Callable[[int], object]) -> Pace:
        """Takes all ``items`` through, in order; ``kept`` is called here with how many are kept, for each of them.

        What fails in a stage is raised here, when its turn comes; what was computed before is kept all the same.
        """
        started = time.perf_counter()
        ready_seconds = compute_seconds = keep_seconds = 0.0
        count = 0
        keeping: deque[Future[tuple[object, float]]] = deque()

        def settle() -> None:
            nonlocal count, keep_seconds
            keep_seconds += keeping.popleft().result()[1]
            count += 1
            kept(count)

        with ThreadPoolExecutor(1, thread_name_prefix="keeper") as keeper, closing(_ahead(self.ready, items)) as ahead:
            for item, (ready, seconds) in ahead:
                ready_seconds += seconds
                result, seconds = _timed(self.compute, ready)
                compute_seconds += seconds
                keeping.append(keeper.submit(_timed, self.keep, item, result))
                while keeping and (keeping[0].done() or len(keeping) > MOST_KEPT):
                    settle()
            while keeping:
                settle()
        return Pace(
            count,
            time.perf_counter() - started,
            ready=_rate(min(READERS, count) * count, ready_seconds),
            compute=_rate(count, compute_seconds),
            keep=_rate(count, keep_seconds),
        )


def _ahead(
    work: Callable[[Item], Ready], items: Iterable[Item]
) -> Generator[tuple[Item, tuple[Ready, float]], None, None]:
    """Each item with what ``work`` makes of it and its seconds, in order; as many are begun as there are threads."""
    begun: deque[tuple[Item, Future[tuple[Ready, float]]]] = deque()
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
    try:
        for item in items:
            begun.append((item, pool.submit(_timed, work, item)))
            if len(begun) > READERS:
                first, ready = begun.popleft()
                yield first, ready.result()
        while begun:
            first, ready = begun.popleft()
            yield first, ready.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _timed(work: Callable[..., T], *args: object) -> tuple[T, float]:
    started = time.perf_counter()
    result = work(*args)
    return result, time.perf_counter() - started


def _rate(count: int, seconds: float) -> float:
    return count / max(seconds, 1e-9)  # what takes no time that can be measured


class MemoryLimiter:
    """So much of something that threads may hold together, such as the pixels of pictures being decoded."""

    def __init__(self, whole: float) -> None:
        self.whole = whole
        self._left = whole
        self._changed = Condition()

    @contextmanager
    def hold(self, amount: float) -> Iterator[None]:
        """Waits until there is room for ``amount``; what is more than the whole takes all of it."""
        amount = min(amount, self.whole)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= amount)
            self._left -= amount
        try:
            yield
        finally:
            with self._changed:
                self._left += amount
                self._changed.notify_all()
