"""The process that traces what is foreseen: the same tapes and plans, and nothing lost where it fails or is ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tests.support.plans import device_state_with, small_workload
from trainer.config.fit import FitConfig
from trainer.memory.forecast.schedule import PhaseCounts
from trainer.memory.planner.planner import plan
from trainer.memory.trace.library import TraceLibrary, make_tracer
from trainer.memory.trace.prefetch import TracePrefetcher
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import TraceRequest

BUCKET = (64, 64)
# Asks for something that the other process computes without end, holding a semaphore as libraries do; it says on the
# output of both that it has begun. The first is ended once we are heard, the second outlives who asked. However busy
# the machine is, both may end in order.
ASKING = """
import sys
from pathlib import Path
from trainer.memory.trace import prefetch as module
from trainer.memory.trace.prefetch import TracePrefetcher
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.library import make_tracer

module.PATIENCE = 600.0

class Endless:
    key = ""
    def __reduce__(self):
        return exec, (
            "import multiprocessing as m; from trainer.memory.trace import prefetch; prefetch.PATIENCE = 600.0\\n"
            "held = m.get_context('spawn').Lock()\\n"
            "print('begun', flush=True)\\nwhile True: pass",
        )

with TracePrefetcher(TraceStore(Path(sys.argv[1])), make_tracer) as aside:
    aside.submit(Endless())
    sys.stdin.readline()
with TracePrefetcher(TraceStore(Path(sys.argv[1])), make_tracer) as aside:
    aside.submit(Endless()).result()
"""
AMPLE = 400 * 2**20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TraceStore:
    return TraceStore(tmp_path_factory.mktemp("aside ä"))


@pytest.fixture(scope="module")
def aside(store: TraceStore) -> Iterator[TracePrefetcher]:
    """One for all: it takes seconds to start."""
    with TracePrefetcher(store, make_tracer) as aside:
        yield aside


@dataclass(frozen=True)
class Stuck:
    """A wish that the other process does not come to an end with for a minute."""

    key: str

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("import threading; threading.Event().wait(60)",)


def steps_of(rank: int, bucket: tuple[int, int] = BUCKET) -> TraceRequest:
    return TraceRequest(small_workload(rank=rank), "micro", (bucket, 1))


def test_that_tapes_are_missing_is_told_before_what_makes_them_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("trainer.memory.trace.other_phases", raising=False)
    monkeypatch.setitem(sys.modules, "trainer.memory.trace.other_phases", None)  # cannot be imported
    calls: list[str] = []
    with pytest.raises(ImportError):
        TraceLibrary(TraceStore(tmp_path), lambda: calls.append("tracing")).read(steps_of(3))
    assert calls == ["tracing"]


@pytest.mark.slow
def test_its_tapes_are_those_that_are_traced_here(aside: TracePrefetcher, store: TraceStore, tmp_path: Path) -> None:
    """Also after a wish that cannot be fulfilled, which leaves nothing."""
    impossible, wish = steps_of(3, bucket=(7, 7)), steps_of(3)
    for done in [aside.submit(one) for one in (impossible, wish)]:
        done.result()
    assert store.load(impossible.key) is None
    found, here = store.load(wish.key), TraceLibrary(TraceStore(tmp_path))
    here.read(wish)
    assert found is not None
    for tape, own in zip(found, here.store.load(wish.key) or (), strict=True):
        assert (tape.storages, tape.work) == (own.storages, own.work)
        assert np.array_equal(tape.events, own.events)


@pytest.mark.slow
def test_a_plan_is_the_same_with_it(
    aside: TracePrefetcher, store: TraceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.memory.trace.library._is_large", lambda _: True
    )  # of tiny ones nothing is traced beside
    monkeypatch.setattr("trainer.memory.trace.library.usable_cores", lambda: 2)
    asked: list[TraceRequest] = []
    monkeypatch.setattr(aside, "submit", lambda wish, ask=aside.submit: asked.append(wish) or ask(wish))
    subject = small_workload(effective_batch=2)
    alone, helped = TraceLibrary(TraceStore(tmp_path)), TraceLibrary(store, aside=aside)
    plans = [
        plan(subject, FitConfig(), device_state_with(AMPLE), traces, PhaseCounts(previews=1))
        for traces in (alone, helped)
    ]
    assert plans[0] == plans[1]
    assert plans[0].pick is not None
    parts = [(wish.part, wish.workload.fit.stream, wish.workload.fit.gradient_checkpointing) for wish in asked]
    assert parts[:3] == [("micro", "none", "full"), ("micro", "full", "none"), ("micro", "full", "full")]
    # Then what the search has next in line, whatever it looks at.
    assert len({wish.workload.fit.micro_batch for wish in asked if wish.part == "micro"}) > 1


@pytest.mark.parametrize("rounds", [0, 1])
def test_previews_are_foreseen_only_where_any_are_drawn(
    store: TraceStore, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    traces = TraceLibrary(store)
    told: list[list[TraceRequest]] = []
    monkeypatch.setattr(traces, "set_prefetch", lambda wishes: told.append(wishes()))
    plan(small_workload(effective_batch=2), FitConfig(), device_state_with(AMPLE), traces, PhaseCounts(previews=rounds))
    foreseen = told[0]
    assert sum(wish.part == "preview" for wish in foreseen) == rounds
    assert len(foreseen) > 3


def test_a_process_that_stands_still_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, and what is missing is traced here."""
    store, wish, begun = TraceStore(tmp_path), steps_of(9), threading.Event()
    with TracePrefetcher(store, make_tracer) as aside:
        monkeypatch.setattr(aside, "_start", lambda start=aside._start: (begun.set(), start())[1])
        stuck, later = aside.submit(cast("TraceRequest", Stuck(wish.key))), aside.submit(steps_of(10))
        assert begun.wait(60)
        monkeypatch.setattr("trainer.memory.trace.prefetch.LONGEST", 0.0)
        traces = TraceLibrary(store, aside=aside)
        traces.read(wish)
        assert store.load(wish.key) is not None
        for asked in (stuck, later):
            asked.result()
    assert store.load(steps_of(10).key) is None


def test_help_ends_with_its_block(store: TraceStore) -> None:
    """Tapes that are asked for later are traced without it."""
    traces = TraceLibrary(store)
    with traces.with_prefetcher():
        first = traces.prefetcher
        assert first is not None
        traces.restart_prefetcher()
        assert traces.prefetcher not in (None, first)
    assert traces.prefetcher is None


def test_what_is_not_begun_is_taken_back(
    aside: TracePrefetcher, store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back = threading.Event()
    monkeypatch.setattr(aside, "_trace", lambda wish, trace=aside._trace: (taken_back.wait(), trace(wish)))
    first, second = (aside.submit(steps_of(rank)) for rank in (5, 6))
    aside.finish(steps_of(6).key)
    assert second.cancelled()
    taken_back.set()
    first.result()
    assert store.load(steps_of(5).key) is not None
    assert store.load(steps_of(6).key) is None


def test_what_is_wanted_now_comes_before_what_was_wanted_and_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    traced: list[TraceRequest] = []

    def trace(wish: TraceRequest) -> None:
        traced.append(wish)
        begun.set()
        go_on.wait()

    first, former, both, now = map(steps_of, (5, 6, 7, 8))
    with TracePrefetcher(TraceStore(tmp_path), make_tracer) as aside:
        monkeypatch.setattr(aside, "_trace", trace)
        aside.replace_requests([first, former, both])
        assert begun.wait(60)
        aside.replace_requests([now, both])
        go_on.set()
        aside.submit(both).result()
        assert traced == [first, now, both]
        aside.replace_requests([former])  # it was taken back, and is asked for anew
        aside.submit(former).result()
    assert traced == [first, now, both, former]


def test_ended_in_the_middle_it_leaves_what_it_was_at_to_others(tmp_path: Path) -> None:
    store, wish = TraceStore(tmp_path), steps_of(4)
    with TracePrefetcher(store, make_tracer) as aside:
        aside.submit(wish)
    aside.finish(wish.key)
    assert store.load(wish.key) is None
    traces = TraceLibrary(store)
    traces.read(wish)
    assert store.load(wish.key) is not None


def test_outlines_of_tapes_that_come_while_they_are_asked_for(tmp_path: Path) -> None:
    """Another process made them between the look for them and the trace."""
    store, wish = TraceStore(tmp_path), steps_of(7)
    with TracePrefetcher(store, make_tracer) as aside:
        traces = TraceLibrary(store, lambda: TraceLibrary(store).read(wish), aside)
        outlines = traces.step_summaries(wish.workload, BUCKET, 1)
    assert outlines == TraceLibrary(store).step_summaries(wish.workload, BUCKET, 1)


def test_where_no_process_can_be_started_plans_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: SpawnProcess) -> None:
        raise OSError("no memory is left")

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(refuse))
    with TracePrefetcher(TraceStore(tmp_path), make_tracer) as aside:
        aside.submit(steps_of(8)).result()
        aside.finish(steps_of(8).key)


@pytest.mark.skipif(sys.platform == "win32", reason="there a process does not write to the output of its parent")
def test_it_ends_in_the_middle_of_work_with_the_process_that_asked(tmp_path: Path) -> None:
    """The window reads the planner's output to its end when it closes: it must not wait for a trace.

    However it ends, Python has nothing to complain of, such as of semaphores that were left.
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", ASKING, str(tmp_path)], **pipes) as asking:
        assert asking.stdin is not None and asking.stdout is not None
        assert asking.stdout.readline() == b"begun\n"
        asking.stdin.write(b"\n")
        asking.stdin.flush()
        assert asking.stdout.readline() == b"begun\n"
        asking.kill()
        assert asking.communicate(timeout=240) == (b"", b"")  # once nobody can write there any more
