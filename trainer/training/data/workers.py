"""A pool of threads that works on items in advance and returns the results in order.

The results depend only on the items, so the number of threads and of items in advance changes speed and memory alone.
Threads suit this work: reading files, hashing, drawing random numbers, decoding images and copying tensors all release
the interpreter lock, and nothing is serialized between processes (docs/decisions/0025).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from trainer.errors import ResumableError

STARVED = 0.01
"""Share of the time between two items; if the caller waits longer for an item, the pool works on more in advance."""
CHECK_SECONDS = 1.0
"""Seconds between two checks for an interrupt while the caller waits."""
PATIENCE_SECONDS = 600.0
"""Seconds to wait for one item before giving up: far longer than a disk takes to spin up or a share to reconnect."""
CLOSE_SECONDS = 5.0
"""Seconds to wait for threads when a pool is closed; a thread that is stuck in a read is abandoned."""

Item = TypeVar("Item")
Ready = TypeVar("Ready")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Number of threads, and of items that are ready or being worked on in advance: at first and at most."""

    workers: int
    items: int
    max_workers: int
    max_items: int


class WorkerPool(Generic[Item, Ready]):
    """Works on items in advance, on more of them whenever the caller had to wait for one, up to a limit.

    The threads are daemons: one that is stuck in a read from a dead disk does not keep the process alive.
    """

    def __init__(
        self,
        work: Callable[[Item], Ready],
        size: PoolSize,
        *,
        name: str,
        describe: Callable[[Item], str] = str,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Create a pool without threads, which are started when they are needed.

        ``describe`` names an item in errors; ``check`` is called while the caller waits and may raise to interrupt it.
        """
        self.work = work
        self.size = size
        self.workers, self.items = size.workers, size.items
        self._name = name
        self._describe = describe
        self._check = check
        self._tasks: SimpleQueue[tuple[Item, Future[Ready]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pending: deque[tuple[Item, Future[Ready]]] = deque()
        self._asked: float | None = None

    @property
    def first(self) -> Item | None:
        """Return the item whose result `take` returns next, or None if there is none."""
        return self._pending[0][0] if self._pending else None

    def fill(self, items: Iterator[Item]) -> None:
        """Start the next of ``items`` until as many as intended are in progress."""
        while len(self._pending) < self.items:
            item = next(items, None)
            if item is None:
                return
            self.start(item)

    def start(self, item: Item) -> None:
        """Start working on an item, after those already started."""
        future: Future[Ready] = Future()
        self._pending.append((item, future))
        self._tasks.put((item, future))
        if len(self._threads) < min(self.workers, len(self._pending)):
            thread = threading.Thread(target=self._serve, name=f"{self._name}_{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)  # only now: a signal may end the run here, and `close` joins what is listed

    def take(self) -> Ready:
        """Return the result for the first item, or raise its error; waits until it is ready.

        Raises ResumableError if that takes longer than any working disk would.
        """
        item, future = self._pending.popleft()
        started = time.monotonic()
        while not wait([future], CHECK_SECONDS).done:
            self._check()
            if time.monotonic() - started > PATIENCE_SECONDS:
                raise ResumableError(
                    "data.slow",
                    f"Could not load {self._describe(item)}: the disk did not answer for "
                    f"{PATIENCE_SECONDS / 60:g} minutes.",
                    "Check the disk or network drive with the images and the cache, then resume the run.",
                )
        self._adapt(started, time.monotonic())
        return future.result()

    def _adapt(self, started: float, now: float) -> None:
        """Work on more items in advance if the caller waited too long; the first item of all cannot be in advance."""
        asked, self._asked = self._asked, now
        if asked is None or now - started <= STARVED * (now - asked):
            return
        self.workers = min(self.workers + 1, self.size.max_workers)
        self.items = min(max(self.items, self.workers) + 1, self.size.max_items)

    def clear(self) -> None:
        """Drop all items; those being worked on are finished and their results discarded."""
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()
        self._asked = None

    def close(self) -> None:
        """Drop all items and end the threads; the pool must not be used afterwards."""
        self.clear()
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _serve(self) -> None:
        """Work on items until the pool is closed; this runs in the threads."""
        while (task := self._tasks.get()) is not None:
            item, future = task
            del task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self.work(item))
            except BaseException as error:  # noqa: BLE001  # raised in the thread that takes the result
                future.set_exception(error)
            # Otherwise the thread would keep the last result, pinned memory for example, until the next one.
            del item, future
