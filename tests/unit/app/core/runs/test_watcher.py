"""Being told that runs have ended, with real run directories, a real queue's folder and the threads of the app."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.runs.queue import QueueManager
from app.core.runs.runs import Runs
from app.core.runs.summary import summarize
from app.core.runs.watcher import Ended, RunWatcher
from tests.support.desk import Desk, a_desk
from tests.support.written_runs import held, new_run
from trainer.protocol import events, locks
from trainer.protocol.queue import Queue, new_entry


class Watcher:
    """The app's telling, with what was heard of it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.runs, self.queue = Runs(desk.post), QueueManager(desk.post)
        self.run_watcher = RunWatcher(self.runs, self.queue, desk.tasks)
        self.ended: list[Ended] = []
        self.run_watcher.ended.connect(self.ended.append)

    def close(self) -> None:
        """End as the app does."""
        self.queue.close()
        self.runs.close()
        self.desk.tasks.close()
        self.run_watcher.close()

    def until(self, reached: Callable[[], object]) -> None:
        """Look as the window does, until something is so."""

        def looked() -> bool:
            self.run_watcher.look()
            self.desk.post(lambda: None)  # a look that finds nothing posts nothing
            return bool(reached())

        self.desk.until(looked)

    def learn(self) -> None:
        """Read the list of runs once."""
        heard: list[None] = []
        end = self.runs.changed.connect(heard.append)
        self.runs.refresh()
        self.desk.until(lambda: heard)
        end()


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    with a_desk() as desk:
        watcher = Watcher(desk)
        yield watcher
        watcher.close()


def test_a_run_that_is_done_is_told_once(watcher, tmp_path):
    run = new_run(tmp_path, "cats")
    with held(run) as engine:
        watcher.learn()
        assert watcher.run_watcher.watching
        watcher.until(lambda: True)
        assert not watcher.ended
        engine.tell(events.Finished(outcome="done", step=1000, file=None))
        engine.stand("done", 1000)
    watcher.until(lambda: watcher.ended)
    assert [(one.summary.name, one.summary.state, one.summary.step) for one in watcher.ended] == [
        ("cats", "done", 1000)
    ]
    watcher.learn()
    watcher.until(lambda: not watcher.run_watcher.watching)
    assert len(watcher.ended) == 1


def test_a_run_that_failed_is_told_with_its_reason(watcher, tmp_path):
    run = new_run(tmp_path, "cats")
    with held(run) as engine:
        watcher.learn()
        engine.tell(*(events.Notice(code="n", sentence="x" * 500) for _ in range(500)))
        engine.tell(events.ErrorEvent(code="a", sentence="The loss is gone.", remedy="Lower the rate."))
        with run.events.open("a", encoding="utf-8") as file:
            file.write("a line of a version that is still to come\n")  # it names no attempt
        engine.stand("failed", 12)
    watcher.until(lambda: watcher.ended)
    assert watcher.ended[0].summary.state == "failed"
    assert watcher.ended[0].why == "The loss is gone. Lower the rate."


def test_an_engine_that_was_killed_is_told(watcher, tmp_path):
    with held(new_run(tmp_path, "cats")) as engine:
        watcher.learn()
        engine.stand("running", 7, "train")
    watcher.until(lambda: watcher.ended)
    assert (watcher.ended[0].summary.state, watcher.ended[0].summary.step) == ("interrupted", 7)


@pytest.mark.parametrize("state", ["paused", "stopped"])
def test_who_ends_a_run_needs_not_be_told(watcher, tmp_path, state):
    with held(new_run(tmp_path, "cats")) as engine:
        watcher.learn()
        engine.stand(state, 7)
    watcher.until(lambda: not watcher.run_watcher.watching)
    assert watcher.ended == []


def test_a_run_that_a_full_disk_paused_is_told_and_one_that_is_paused_later_on_is_not(watcher, tmp_path):
    run = new_run(tmp_path, "cats")
    for full in (True, False):
        with held(run) as engine:
            watcher.learn()
            watcher.until(lambda: watcher.run_watcher.watching)
            if full:
                engine.tell(events.ErrorEvent(code="disk.full", sentence="No room.", remedy="Make some."))
            engine.stand("paused", 12)
        watcher.until(lambda: not watcher.run_watcher.watching)
        (told,) = watcher.ended
        assert (told.summary.state, told.why) == ("paused", "No room. Make some.")


def test_runs_that_had_ended_before_are_not_told(watcher, tmp_path):
    with held(new_run(tmp_path, "cats")) as engine:
        engine.stand("done", 1000)
    watcher.learn()
    assert not watcher.run_watcher.watching
    assert watcher.ended == []


def test_a_list_that_is_read_by_the_page_tells_too_and_not_twice(watcher, tmp_path):
    run = new_run(tmp_path, "cats")
    with held(run) as engine:
        watcher.learn()
        engine.stand("done", 1000)
    watcher.learn()  # as the Runs page does
    watcher.desk.until(lambda: watcher.ended)
    watcher.until(lambda: not watcher.run_watcher.watching)
    assert len(watcher.ended) == 1
    with held(run) as engine:  # trained longer: another start, another end
        watcher.learn()
        engine.stand("done", 2000)
    watcher.until(lambda: len(watcher.ended) == 2)


def change(queue: Queue, name: str, **fields: object) -> None:
    """Let an entry of the queue stand otherwise, as the worker does."""
    queue.change(name, lambda entry: replace(entry, **fields))


def read(watcher: Watcher) -> None:
    """Read the queue once more, after which it differs."""
    heard: list[None] = []
    end = watcher.queue.changed.connect(heard.append)
    watcher.queue.look()
    watcher.desk.until(lambda: heard)
    end()


def job_file(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    job = folder / "job.toml"
    job.write_text("", encoding="utf-8")
    return job


def test_a_run_of_the_queue_that_came_and_went_between_two_looks_is_told(watcher, tmp_path):
    queue = watcher.queue.queue
    entry = queue.put(new_entry(job_file(tmp_path)))
    read(watcher)
    run = new_run(tmp_path, "cats")
    with held(run) as engine:
        engine.stand("done", 1000)
    change(queue, entry.id, state="done", run=run.path)
    read(watcher)
    watcher.desk.until(lambda: watcher.ended)
    assert [one.summary.name for one in watcher.ended] == ["cats"]


def test_a_job_that_never_became_a_run_is_told(watcher, tmp_path):
    queue = watcher.queue.queue
    job = job_file(tmp_path / "mine")
    entry = queue.put(new_entry(job))
    read(watcher)
    change(queue, entry.id, state="failed", problem="There is no base at base.safetensors.")
    read(watcher)
    assert [(one.summary.name, one.why, one.job) for one in watcher.ended] == [
        ("mine", "There is no base at base.safetensors.", Path(job))
    ]


def test_a_queue_in_which_something_only_waits_goes_on_and_trains_nothing(watcher, tmp_path):
    queue = watcher.queue.queue
    entry = queue.put(new_entry(job_file(tmp_path)))
    read(watcher)
    assert watcher.run_watcher.continuing is None, "nobody works on it"
    with locks.hold_lock(queue.worker_lock, 0.0):
        read(watcher)
        assert watcher.run_watcher.continuing == "queue"
        change(queue, entry.id, state="running")
        read(watcher)
        assert watcher.run_watcher.continuing == "training"


def test_a_run_of_the_queue_is_told_once_although_run_and_entry_both_end(watcher, tmp_path):
    queue, run = watcher.queue.queue, new_run(tmp_path, "cats")
    entry = queue.put(replace(new_entry(job_file(tmp_path)), state="running", run=run.path))
    with locks.hold_lock(queue.worker_lock, 0.0):  # somebody works on it
        with held(run) as engine:
            watcher.learn()
            read(watcher)
            assert watcher.run_watcher.watching and watcher.run_watcher.continuing == "training"
            engine.stand("done", 1000)
        watcher.until(lambda: watcher.ended)
        change(queue, entry.id, state="done")
        watcher.queue.look()
        watcher.until(lambda: watcher.queue.entries[0].state == "done" and not watcher.run_watcher.watching)
    assert len(watcher.ended) == 1


def test_why_a_run_ended_is_told_though_a_full_disk_took_no_word_of_it(watcher, tmp_path):
    queue, run = watcher.queue.queue, new_run(tmp_path, "cats")
    entry = queue.put(replace(new_entry(job_file(tmp_path)), state="running", run=run.path))
    with locks.hold_lock(queue.worker_lock, 0.0):  # somebody works on it
        with held(run):
            watcher.learn()
            read(watcher)
        looks: list[None] = []
        watcher.run_watcher.changed.connect(lambda _: looks.append(None))
        watcher.until(lambda: len(looks) > 3)
        assert watcher.ended == [], "what became of it is still to be entered"
        change(queue, entry.id, state="failed", problem="No room. Make some.")
        watcher.until(lambda: watcher.ended)
    (told,) = watcher.ended
    assert (told.summary.state, told.why) == ("interrupted", "No room. Make some.")
    with held(run):
        pass
    assert watcher.queue.failure_of(summarize(run.path)) == "", "it was started since, by somebody else"


def test_what_ended_while_the_app_was_closed_is_told_once_at_the_next_start(watcher, tmp_path):
    queue, job = watcher.queue.queue, job_file(tmp_path / "mine")
    first, second, third = (queue.put(new_entry(job)) for _ in range(3))
    begun, later, still = (new_run(tmp_path, name) for name in ("begun", "later", "still"))
    with held(still) as goes_on:
        with held(begun) as engine:
            watcher.learn()
            read(watcher)
            watcher.close()
            engine.stand("done", 1000)
        with held(later) as engine:
            engine.stand("interrupted", 7)
        change(queue, first.id, state="done", run=later.path)
        change(queue, second.id, state="failed", problem="There is no base.")
        with a_desk() as desk:
            again = Watcher(desk)
            assert again.run_watcher.watching and again.run_watcher.continuing is None, (
                "of the last time, and not seen yet"
            )
            again.learn()
            assert again.run_watcher.continuing == "training"
            read(again)
            again.until(lambda: len(again.ended) == 3)
            goes_on.stand("done", 5)
            again.close()
    assert sorted((one.summary.name, one.why, one.earlier) for one in again.ended) == [
        ("begun", "", True),
        ("later", "", True),
        ("mine", "There is no base.", True),
    ]
    with a_desk() as desk:
        last = Watcher(desk)
        last.learn()
        read(last)
        last.until(lambda: last.ended)
        change(queue, third.id, state="failed", problem="There is none yet.")
        read(last)
        last.close()
    assert [(one.summary.name, one.earlier) for one in last.ended] == [("still", True), ("mine", False)]
