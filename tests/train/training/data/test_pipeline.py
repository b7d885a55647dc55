"""Three stages at once: all in order, each in its thread, none waiting for more than it needs, nothing lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from trainer.training.data import pipeline
from trainer.training.data.pipeline import MAX_PENDING_WRITES, READER_THREADS, MemoryLimiter, Pipeline, PipelineSpeed

PATIENCE = 60.0


def quiet(count: int) -> None:
    """Nobody watches."""


def test_all_pass_in_order_each_stage_in_its_threads() -> None:
    threads: dict[str, set[str]] = {"ready": set(), "compute": set(), "keep": set()}
    kept: list[tuple[int, int]] = []
    told: list[int] = []

    def here(stage: str) -> None:
        threads[stage].add(threading.current_thread().name.partition("_")[0])

    def ready(item: int) -> int:
        here("ready")
        return 10 * item

    def compute(given: int) -> int:
        here("compute")
        return given + 1

    def keep(item: int, result: int) -> None:
        here("keep")
        kept.append((item, result))

    pace = Pipeline(ready, compute, keep).run(range(20), told.append)
    assert kept == [(item, 10 * item + 1) for item in range(20)]
    assert told == list(range(1, 21)) and pace.count == 20
    assert threads == {"ready": {"reader"}, "compute": {threading.current_thread().name}, "keep": {"keeper"}}


def test_the_next_is_made_ready_and_the_last_kept_while_one_is_computed() -> None:
    """Each waits until the others have begun: done one after another, this would never end."""
    begun = {item: threading.Event() for item in range(3)}
    computing, keeping = threading.Event(), threading.Event()

    def ready(item: int) -> int:
        begun[item].set()
        return item

    def compute(item: int) -> int:
        if item == 0:
            assert begun[1].wait(PATIENCE)
        if item == 1:
            computing.set()
            assert keeping.wait(PATIENCE)
        return item

    def keep(item: int, result: int) -> None:
        if item == 0:
            assert computing.wait(PATIENCE)
            keeping.set()

    assert Pipeline(ready, compute, keep).run(range(3), quiet).count == 3


def test_no_more_are_made_ready_than_there_are_threads() -> None:
    made: list[int] = []
    ahead: list[int] = []

    def compute(item: int) -> int:
        ahead.append(len(made) - item)
        return item

    def ready(item: int) -> int:
        made.append(item)
        return item

    Pipeline(ready, compute, lambda *_: None).run(range(40), quiet)
    assert 0 < max(ahead) <= READER_THREADS + 1


def test_no_more_wait_to_be_kept_than_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none may wait, each is kept before the next is computed."""
    monkeypatch.setattr(pipeline, "MAX_PENDING_WRITES", 0)
    kept: list[int] = []
    waiting: list[int] = []

    def compute(item: int) -> int:
        waiting.append(item - len(kept))
        return item

    Pipeline(lambda item: item, compute, lambda item, _: kept.append(item)).run(range(40), quiet)
    assert waiting == [0] * 40


@pytest.mark.parametrize("stage", ["ready", "compute", "keep", "kept"])
def test_what_fails_is_raised_and_what_was_computed_before_is_kept(stage: str) -> None:
    kept: list[int] = []

    def failing(where: str) -> Callable[..., int]:
        def work(item: int, *_: object) -> int:
            if where == stage and item == 5:
                raise OSError(stage)
            if where == "keep":
                kept.append(item)
            return item

        return work

    with pytest.raises(OSError, match=stage):
        Pipeline(failing("ready"), failing("compute"), failing("keep")).run(range(40), failing("kept"))
    assert kept[:5] == [0, 1, 2, 3, 4] and len(kept) <= 5 + MAX_PENDING_WRITES + 1
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("reader", "keeper"))]


def test_the_pace_of_a_stage_is_what_it_would_come_to_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each stage moves, of one thread each."""
    now = [0.0]
    monkeypatch.setattr(pipeline, "READER_THREADS", 1)
    monkeypatch.setattr(pipeline, "_timed", lambda work, *args: (work(*args), 2.0))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def compute(item: int) -> int:
        now[0] += 4.0
        return item

    pace = Pipeline(int, compute, lambda item, result: None).run(range(10), quiet)
    assert (pace.seconds, pace.ready, pace.compute, pace.keep) == (40.0, 0.5, 0.5, 0.5)
    assert pace.of_parts(75) == PipelineSpeed(75, 40.0, ready=3.75, compute=3.75, keep=3.75)


def test_threads_hold_no_more_together_than_there_is_and_as_much() -> None:
    """Two of five hold room at once, as they wait for each other in it; more than the whole takes all of it."""
    room, pairs, lock = MemoryLimiter(10), threading.Barrier(2), threading.Lock()
    held = [0.0]
    most: list[float] = []

    def hold(amount: float) -> None:
        with room.hold(amount):
            with lock:
                held[0] += min(amount, 10)
                most.append(held[0])
            if amount == 5:
                pairs.wait(PATIENCE)
            with lock:
                held[0] -= min(amount, 10)

    threads = [threading.Thread(target=hold, args=(amount,)) for amount in (5, 25, 5, 5, 10, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not pairs.broken and max(most) == 10 and held[0] == 0 and len(most) == len(threads)
