"""A three-stage pipeline: threads prepare items in advance, the caller computes, one thread writes.

The caller's thread computes in the order of the items, so the results are the same as in a plain loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Generic, TypeVar

from trainer.host import usable_cores
from trainer.training.data.workers import PoolSize, WorkerPool

READER_THREADS = min(8, usable_cores())
"""Maximum number of threads that prepare items unless the job sets it; one is started whenever the caller waits."""
MAX_PENDING_WRITES = 8
"""Maximum number of results waiting to be written."""

Item = TypeVar("Item")
Ready = TypeVar("Ready")
Result = TypeVar("Result")
T = TypeVar("T")


@dataclass(frozen=True)
class PipelineSpeed:
    """Throughput of a pipeline, and the items per second that each stage would reach if it never had to wait."""

    count: int
    seconds: float
    ready: float
    compute: float
    keep: float

    def of_parts(self, parts: int) -> PipelineSpeed:
        """Return the speed counted in parts instead of items; ``parts`` is the total number of parts."""
        share = parts / self.count
        return PipelineSpeed(parts, self.seconds, self.ready * share, self.compute * share, self.keep * share)


@dataclass(frozen=True)
class Pipeline(Generic[Item, Ready, Result]):
    """A pipeline of three stages: ``prepare`` an item, ``compute`` its result, ``write`` the result."""

    prepare: Callable[[Item], Ready]
    compute: Callable[[Ready], Result]
    write: Callable[[Item, Result], object]
    readers: int | None = None
    """Number of threads that prepare items; None for as many as are needed, up to READER_THREADS."""
    describe: Callable[[Item], str] = str
    """Returns an item's name for error messages."""
    check: Callable[[], object] = lambda: None
    """Function called while the caller waits for an item; it may raise to interrupt the pipeline."""

    def run(self, items: Iterable[Item], on_written: Callable[[int], object]) -> PipelineSpeed:
        """Pass all ``items`` through the stages in order and return the speed.

        ``on_written`` is called in the caller's thread after each written result, with the number written so far. An
        error in a stage is raised when its item's turn comes; results computed before it are still written.
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
            closing(self._prefetched(items)) as prefetched,
        ):
            for item, (ready, seconds) in prefetched:
                ready_seconds += seconds
                result, seconds = _timed(self.compute, ready)
                compute_seconds += seconds
                writing.append(writer.submit(_timed, self.write, item, result))
                # Waiting here limits the results in main memory if the disk is slower than the device.
                while writing and (writing[0].done() or len(writing) > MAX_PENDING_WRITES):
                    finish_oldest()
            while writing:
                finish_oldest()
        return PipelineSpeed(
            count,
            time.perf_counter() - started,
            ready=_rate(min(self.readers or READER_THREADS, count) * count, ready_seconds),
            compute=_rate(count, compute_seconds),
            keep=_rate(count, keep_seconds),
        )

    def _prefetched(self, items: Iterable[Item]) -> Generator[tuple[Item, tuple[Ready, float]], None, None]:
        """Yield each item, in order, with its prepared input and the seconds that took; each thread works ahead."""
        prepare: Callable[[Item], tuple[Ready, float]] = partial(_timed, self.prepare)
        return in_advance(prepare, items, self.readers, describe=self.describe, check=self.check)


def in_advance(
    work: Callable[[Item], Ready],
    items: Iterable[Item],
    threads: int | None,
    *,
    describe: Callable[[Item], str] = str,
    check: Callable[[], object] = lambda: None,
) -> Generator[tuple[Item, Ready], None, None]:
    """Yield each item, in order, with the result of ``work``; each thread works one item ahead.

    Without ``threads`` there is one at first, and another one whenever the caller had to wait, up to READER_THREADS.
    """
    most = threads or READER_THREADS
    pool = WorkerPool(
        work, PoolSize(threads or 1, threads or 1, most, most), name="reader", describe=describe, check=check
    )
    left = iter(items)
    try:
        pool.fill(left)
        while (item := pool.first) is not None:
            ready = pool.take()
            pool.fill(left)
            yield item, ready
    finally:
        # After an error or an interrupt, wait only for the items that have started.
        pool.close()


def _timed(work: Callable[..., T], *args: object) -> tuple[T, float]:
    started = time.perf_counter()
    result = work(*args)
    return result, time.perf_counter() - started


def _rate(count: int, seconds: float) -> float:
    return count / max(seconds, 1e-9)  # the time may be too short to measure


class MemoryLimiter:
    """Limits the total amount that threads use at the same time, such as pixels of images being decoded."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._available = limit
        self._changed = Condition()

    @contextmanager
    def hold(self, amount: float) -> Iterator[None]:
        """Reserve ``amount``, but at most the limit, inside the block; waits until that much is available."""
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
