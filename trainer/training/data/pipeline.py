"""A three-stage pipeline: threads prepare items ahead, the caller computes, one thread writes.

Computation runs in the caller's thread and in the order of the items, so its results are those of a plain loop.
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

READER_THREADS = min(4, usable_cores())
"""Threads that prepare items; more would gain little and take more memory."""
MAX_PENDING_WRITES = 8
"""Number of results that may wait to be written."""

Item = TypeVar("Item")
Ready = TypeVar("Ready")
Result = TypeVar("Result")
T = TypeVar("T")


@dataclass(frozen=True)
class PipelineSpeed:
    """Throughput of a pipeline, and items per second of each stage if it waited for no other."""

    count: int
    seconds: float
    ready: float
    compute: float
    keep: float

    def of_parts(self, parts: int) -> PipelineSpeed:
        """Return the pace in ``parts``, where each item of the pipeline held several of them."""
        share = parts / self.count
        return PipelineSpeed(parts, self.seconds, self.ready * share, self.compute * share, self.keep * share)


@dataclass(frozen=True)
class Pipeline(Generic[Item, Ready, Result]):
    """The stages: ``ready`` prepares an item, ``compute`` computes, ``keep`` writes the result."""

    prepare: Callable[[Item], Ready]
    compute: Callable[[Ready], Result]
    write: Callable[[Item, Result], object]

    def run(self, items: Iterable[Item], on_written: Callable[[int], object]) -> PipelineSpeed:
        """Pass all ``items`` through the stages in order and return the pace.

        ``on_written`` is called in this thread with the number of written results, once for each. An error in a stage
        is raised here when its item's turn comes; results computed before are still written.
        """
        started = time.perf_counter()
        ready_seconds = compute_seconds = keep_seconds = 0.0
        count = 0
        writing: deque[Future[tuple[object, float]]] = deque()

        def finish_oldest() -> None:
            nonlocal count, keep_seconds
            keep_seconds += writing.popleft().result()[1]
            count += 1
            on_written(count)

        with (
            ThreadPoolExecutor(1, thread_name_prefix="keeper") as writer,
            closing(_prefetched(self.prepare, items)) as prefetched,
        ):
            for item, (ready, seconds) in prefetched:
                ready_seconds += seconds
                result, seconds = _timed(self.compute, ready)
                compute_seconds += seconds
                writing.append(writer.submit(_timed, self.write, item, result))
                # Waiting here bounds the results in main memory if the disk is slower than the device.
                while writing and (writing[0].done() or len(writing) > MAX_PENDING_WRITES):
                    finish_oldest()
            while writing:
                finish_oldest()
        return PipelineSpeed(
            count,
            time.perf_counter() - started,
            ready=_rate(min(READER_THREADS, count) * count, ready_seconds),
            compute=_rate(count, compute_seconds),
            keep=_rate(count, keep_seconds),
        )


def _prefetched(
    work: Callable[[Item], Ready], items: Iterable[Item]
) -> Generator[tuple[Item, tuple[Ready, float]], None, None]:
    """Yield each item with the result of ``work`` and its seconds, in order; one per thread is started."""
    started: deque[tuple[Item, Future[tuple[Ready, float]]]] = deque()
    pool = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="reader")
    try:
        for item in items:
            started.append((item, pool.submit(_timed, work, item)))
            if len(started) > READER_THREADS:
                first, ready = started.popleft()
                yield first, ready.result()
        while started:
            first, ready = started.popleft()
            yield first, ready.result()
    finally:
        # After an error or an interrupt only the items that have started are waited for.
        pool.shutdown(cancel_futures=True)


def _timed(work: Callable[..., T], *args: object) -> tuple[T, float]:
    started = time.perf_counter()
    result = work(*args)
    return result, time.perf_counter() - started


def _rate(count: int, seconds: float) -> float:
    return count / max(seconds, 1e-9)  # the time may be too short to measure


class MemoryLimiter:
    """A limit on the sum of what threads hold at once, such as the pixels of images being decoded."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._available = limit
        self._changed = Condition()

    @contextmanager
    def hold(self, amount: float) -> Iterator[None]:
        """Wait until ``amount`` fits and hold it inside the block; more than the limit counts as the limit."""
        amount = min(amount, self.limit)
        with self._changed:
            self._changed.wait_for(lambda: self._available >= amount)
            self._available -= amount
        try:
            yield
        finally:
            with self._changed:
                self._available += amount
                self._changed.notify_all()
