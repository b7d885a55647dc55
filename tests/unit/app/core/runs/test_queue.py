"""The window's side of the queue, with real workers; a lane that the test holds keeps them from training."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.core.runs.queue import QueueManager, QueueState
from app.core.runs.summary import RunSummary
from tests.support.waiting import until
from trainer.errors import ImpastoError
from trainer.protocol import locks
from trainer.protocol.queue import Entry, Queue, QueueSnapshot

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


class Desk:
    """The owner's thread: what is posted is done while it waits for something."""

    def __init__(self) -> None:
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.keeper = QueueManager(self._posted.put)
        self.failures: list[ImpastoError] = []
        self.keeper.failed.connect(self.failures.append)

    def watch(self, reached: Callable[[], object]) -> None:
        """Look at the queue again and again, as a visible panel does."""
        deadline = time.monotonic() + 120
        while not reached():
            assert time.monotonic() < deadline, (self.keeper.now, self.keeper._worker, self.failures)
            self.keeper.look()
            self._posted.get(timeout=60)()

    def states(self) -> list[str]:
        return [entry.state for entry in self.keeper.entries]

    @property
    def working(self) -> bool:
        return self.keeper.now.working


@pytest.fixture
def desk() -> Iterator[Desk]:
    """What is left in the queue at the end is taken out, so that its worker ends."""
    lane = contextlib.ExitStack()
    for one in {"cpu", *_lanes()}:
        lane.enter_context(locks.hold_lane(one))
    with lane:
        desk = Desk()
        yield desk
        desk.keeper.close()
        for entry in Queue().entries():
            Queue().record_outcome(entry.id, "stopped")
        until(lambda: not Queue().worker_alive())


def _lanes() -> list[str]:
    from trainer.queue import machine_lanes

    return machine_lanes()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "Auftrag ü" / "job.toml"
    path.parent.mkdir()
    path.write_text("", encoding="utf-8")
    return path


def test_starting_a_job_brings_a_worker_and_the_worker_s_death_is_told(desk: Desk, job: Path) -> None:
    name = desk.keeper.start(job)
    desk.watch(lambda: desk.working and Queue().worker_alive())
    assert [entry.id for entry in desk.keeper.entries] == [name]
    assert desk.keeper.now.stuck_count == 0
    worker = desk.keeper._worker
    assert worker is not None
    desk.keeper.start(job)
    desk.watch(lambda: len(desk.keeper.entries) == 2)
    assert desk.keeper._worker is worker  # one is enough

    worker.send_signal(KILL)
    desk.watch(lambda: not desk.working)
    assert desk.keeper.now.died == ""
    assert (desk.states(), desk.keeper.now.stuck_count) == (["waiting", "waiting"], 2)
    desk.keeper.resume_queue()
    desk.watch(lambda: desk.working and Queue().worker_alive())
    assert desk.keeper.now.died is None


def test_what_is_asked_is_done_though_the_window_closes_at_once(desk: Desk, job: Path) -> None:
    names = [desk.keeper.start(job) for _ in range(3)]
    desk.keeper.move(names[2], names[0])
    desk.keeper.pause(names[1])
    desk.keeper.close()
    assert [(entry.id, entry.state) for entry in Queue().entries()] == [
        (names[2], "waiting"), (names[0], "waiting"), (names[1], "paused"),
    ]  # fmt: skip
    until(Queue().worker_alive)  # it goes on without the window


def test_after_a_restart_of_the_computer_going_on_is_offered_and_not_begun(desk: Desk, job: Path) -> None:
    for state in ("running", "waiting"):
        entry = Queue().add(job)
        Queue().change(entry.id, lambda one, state=state: dataclasses.replace(one, state=state, lane="cpu"))
    desk.watch(lambda: desk.keeper.entries)
    assert desk.states() == ["interrupted", "waiting"]
    assert "computer shut down" in desk.keeper.entries[0].problem
    assert (desk.keeper.now.stuck_count, desk.working, desk.keeper.now.died) == (2, False, None)
    desk.keeper.remove(desk.keeper.entries[1].id)
    desk.watch(lambda: len(desk.keeper.entries) == 1)
    assert not desk.working
    desk.keeper.resume_queue()
    desk.watch(lambda: desk.working and desk.states() == ["waiting"])


def test_a_held_queue_takes_a_job_and_starts_nobody(desk: Desk, job: Path) -> None:
    desk.keeper.hold()
    desk.keeper.start(job)
    desk.watch(lambda: desk.keeper.entries)
    assert desk.keeper.now.reading.held
    assert (desk.working, desk.keeper.now.stuck_count) == (False, 0)


def test_a_job_is_trained_as_it_was_when_it_was_started(desk: Desk, job: Path) -> None:
    desk.keeper.hold()
    first = desk.keeper.start(job, text='name = "now"')
    job.write_text('name = "later"', encoding="utf-8")
    desk.watch(lambda: desk.keeper.entries)
    desk.keeper.duplicate(first)
    desk.watch(lambda: [entry.text for entry in desk.keeper.entries] == ['name = "now"', 'name = "later"'])
    job.unlink()
    desk.keeper.start(job)
    desk.keeper.duplicate(first)
    desk.watch(lambda: [failure.code for failure in desk.failures] == ["job.unreadable"] * 2)
    assert "no such file" in desk.failures[0].sentence and len(desk.keeper.entries) == 2


def test_a_worker_that_cannot_be_started_is_told_and_the_job_stays(
    desk: Desk, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(job.parent / "no python"))
    desk.keeper.start(job)
    desk.watch(lambda: desk.failures)
    assert desk.failures[0].code == "queue.worker"
    assert "Could not start the queue" in desk.failures[0].sentence
    desk.watch(lambda: desk.states() == ["waiting"])
    assert desk.keeper.now.stuck_count == 1


def test_a_worker_that_dies_of_a_fault_is_told_with_its_last_words(
    desk: Desk, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Queue().folder.mkdir(parents=True)
    Queue().worker_log.write_text("words of an earlier worker\n", encoding="utf-8")
    (tmp_path / "trainer.py").write_text("raise SystemExit('the installation is broken')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # found before the engine itself
    desk.keeper.start(job)
    desk.watch(lambda: desk.keeper.now.died is not None)
    assert desk.keeper.now.died == "the installation is broken"
    assert desk.keeper.now.stuck_count == 1


def test_what_cannot_be_done_is_told_and_a_run_is_not_queued_twice(desk: Desk, job: Path, tmp_path: Path) -> None:
    desk.keeper.remove("00000000")
    desk.keeper.pause("00000000")
    desk.watch(lambda: desk.failures)
    assert desk.failures[0].code == "queue.none"
    desk.keeper.resume(tmp_path / "runs" / "style", steps=90)
    desk.keeper.resume(tmp_path / "runs" / "style")
    desk.watch(lambda: desk.keeper.entries)
    (entry,) = desk.keeper.entries
    assert (entry.run, entry.steps) == (tmp_path / "runs" / "style", 90)
    desk.keeper.duplicate(entry.id)  # has no job of its own
    desk.keeper.clear()
    desk.watch(lambda: desk.working)
    assert len(desk.keeper.entries) == 1


def test_a_queue_that_cannot_be_read_is_told_and_the_last_view_stays(desk: Desk, job: Path) -> None:
    Queue().folder.parent.mkdir(exist_ok=True)
    Queue().folder.write_text("a file where the folder should be", encoding="utf-8")
    desk.keeper.start(job)
    desk.watch(lambda: desk.failures)
    assert desk.failures[0].code == "queue.unwritable"
    assert "Could not use the queue" in desk.failures[0].sentence
    Queue().folder.unlink()
    Queue().folder.mkdir()
    Queue().worker_lock.mkdir()  # no lock can be had there
    desk.watch(lambda: desk.keeper.now.problem)
    assert "Could not use the queue" in desk.keeper.now.problem
    Queue().worker_lock.rmdir()
    desk.watch(lambda: not desk.keeper.now.problem)


class Compared(type(Path())):  # type: ignore[misc]
    """Counts how often such paths are compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return bool(super().__eq__(other))

    __hash__ = Path.__hash__


def test_a_long_list_of_runs_is_compared_only_with_what_runs() -> None:
    """The window's thread asks of each run in the list, for a queue that keeps what has ended."""
    ended = [Entry(str(number), None, Compared(f"run {number}"), "done") for number in range(30)]
    running = Entry("now", None, Compared("run 7"), "running")
    keeper = QueueManager(lambda work: None)
    keeper.now = QueueState(QueueSnapshot((*ended, running)))
    runs = [RunSummary(Path(f"run {number}"), f"run {number}", "done") for number in range(20)]
    assert [run.name for run in runs if keeper.is_starting(run)] == ["run 7"]
    assert Compared.times == 20
    keeper.close()
