"""The pool of threads: results in order, a size that follows the need, and an end even if a disk never answers."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest

from trainer.errors import ResumableError
from trainer.training.data import workers
from trainer.training.data.workers import PoolSize, WorkerPool
from trainer.training.reporting.reporter import Interrupted

PATIENCE = 60.0
STUCK = """
import sys, threading
from trainer.training.data import workers
workers.CLOSE_SECONDS = 0.01
started = threading.Event()
pool = workers.WorkerPool(lambda _: (started.set(), threading.Event().wait()), workers.PoolSize(1, 1, 1, 1), name="x")
pool.start("image.png")
started.wait()
pool.close()
print("closed")
"""


def pool_of(
    work: Callable[[int], Any],
    size: tuple[int, int, int, int] = (2, 4, 2, 4),
    check: Callable[[], object] = lambda: None,
) -> WorkerPool[int, Any]:
    return WorkerPool(work, PoolSize(*size), name="test", describe=lambda item: f"image {item}.png", check=check)


def test_results_come_in_order_whichever_thread_is_first() -> None:
    """Of four items, one that is started later is ready earlier."""
    later = {item: threading.Event() for item in range(41)}
    order = random.Random(3)
    waits = {item: item % 4 != 3 and order.random() < 0.7 for item in range(40)}

    def work(item: int) -> int:
        if waits[item]:  # for the next item, which another thread works on
            assert later[item + 1].wait(PATIENCE)
        later[item].set()
        return item * item

    pool = pool_of(work, (4, 4, 4, 4))
    found = []
    for start in range(0, 40, 4):
        pool.fill(iter(range(start, start + 4)))
        found += [pool.take() for _ in range(4)]
    pool.close()
    assert found == [item * item for item in range(40)]


def grown(monkeypatch: pytest.MonkeyPatch, work_seconds: float, use_seconds: float) -> tuple[int, int]:
    """Return the workers and items of a pool after 30 items, by a clock that only waiting and using move."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pool = pool_of(lambda item: item, (1, 2, 8, 16))

    def waited(pending: list[futures.Future[int]], timeout: float) -> Any:
        result = futures.wait(pending, PATIENCE)
        # As many items as there are workers are worked on at once, while the caller uses the ones before.
        now[0] += max(0.0, work_seconds / pool.workers - use_seconds)
        return result

    monkeypatch.setattr(workers, "wait", waited)
    items = iter(range(30))
    pool.fill(items)
    while pool.first is not None:
        pool.take()
        now[0] += use_seconds
        pool.fill(items)
    pool.close()
    return pool.workers, pool.items


@pytest.mark.parametrize(
    ("work_seconds", "use_seconds", "expected"),
    [(0.01, 1.0, (1, 2)), (2.5, 1.0, (3, 4)), (100.0, 1.0, (8, 16))],
)
def test_more_threads_start_only_while_the_caller_waits(
    monkeypatch: pytest.MonkeyPatch, work_seconds: float, use_seconds: float, expected: tuple[int, int]
) -> None:
    """One thread if work is faster than use, as many as keep up if it is slower, and never more than allowed."""
    assert grown(monkeypatch, work_seconds, use_seconds) == expected


def test_a_wait_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause during a read that never ends is noticed."""
    monkeypatch.setattr(workers, "CHECK_SECONDS", 0.001)
    monkeypatch.setattr(workers, "CLOSE_SECONDS", 0.001)
    stuck = threading.Event()

    def check() -> None:
        raise Interrupted("pause")

    pool = pool_of(lambda _: stuck.wait(PATIENCE), check=check)
    pool.start(7)
    with pytest.raises(Interrupted):
        pool.take()
    pool.close()
    stuck.set()


def test_a_disk_that_never_answers_ends_with_the_name_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECK_SECONDS", 0.001)
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(workers, "CLOSE_SECONDS", 0.001)
    stuck = threading.Event()
    pool = pool_of(lambda _: stuck.wait(PATIENCE))
    pool.start(7)
    with pytest.raises(ResumableError, match=r"image 7\.png") as raised:
        pool.take()
    assert raised.value.code == "data.slow"
    pool.close()
    stuck.set()


def test_a_stuck_thread_does_not_keep_the_process_alive() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "closed\n" and done.stderr == ""


@pytest.mark.parametrize("error", [OSError("bad sector"), TimeoutError("share"), MemoryError()])
def test_an_error_is_raised_in_its_turn_and_the_pool_stays_usable(error: Exception) -> None:
    def work(item: int) -> int:
        if item == 1:
            raise error
        return item

    pool = pool_of(work)
    pool.fill(iter(range(3)))
    assert pool.take() == 0
    with pytest.raises(type(error)) as raised:
        pool.take()
    assert raised.value is error and pool.take() == 2
    pool.close()


def test_cleared_items_are_not_returned_and_closing_ends_the_threads() -> None:
    pool = pool_of(lambda item: item)
    pool.fill(iter(range(4)))
    pool.clear()
    pool.start(9)
    assert pool.first == 9 and pool.take() == 9 and pool.first is None
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]
