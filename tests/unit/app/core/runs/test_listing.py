"""The list of all runs: what comes, goes, is forgotten and is looked at again."""

import json
import shutil
import threading
import time

import pytest

from app.core import tasks
from app.core.runs import run as run_module
from app.core.runs import runs as runs_module
from app.core.runs.run import Run
from app.core.runs.runs import Runs
from app.core.runs.summary import summarize
from tests.support.runs import write_run
from tests.unit.app.core.runs.test_runs import desk
from trainer.protocol import locks, places, run_directory
from trainer.protocol.run_directory import RunDirectory, _enter_in_list, known_runs

__all__ = ["desk"]


@pytest.fixture
def runs(desk):
    runs = Runs(desk.posted.put)
    yield runs
    runs.close()


def look(runs, desk):
    runs.refresh()
    desk.until(lambda: not runs._looking.busy)


def test_all_runs_are_listed_the_latest_first(tmp_path, desk, runs, per_user_folder):
    first = write_run(tmp_path, "first", 10)
    second = write_run(per_user_folder / "jobs" / "katze" / "runs", "second", 10)
    (per_user_folder / "runs.jsonl").unlink()  # a list that was lost names nobody
    third = write_run(tmp_path, "third", 10, state="paused", done=4)
    look(runs, desk)
    assert [run.name for run in runs.all] == ["third", "second"]
    runs.open(first.path)
    look(runs, desk)
    assert [(run.path, run.state) for run in runs.all] == [
        (third.path, "paused"),
        (second.path, "done"),
        (first.path, "done"),
    ]


def test_a_run_that_vanishes_stays_listed_with_words_until_it_is_forgotten(tmp_path, desk, runs):
    one, other = write_run(tmp_path, "one", 10), write_run(tmp_path, "other", 10)
    look(runs, desk)
    shutil.rmtree(one.path)
    look(runs, desk)
    gone = next(run for run in runs.all if run.path == one.path)
    assert gone.state == "unknown"
    assert "gone" in gone.problem
    runs.forget(one.path)
    look(runs, desk)
    assert [run.path for run in runs.all] == [other.path]
    runs.forget(other.path)
    look(runs, desk)
    assert runs.all == []
    assert known_runs() == []
    assert other.run.is_file()


def test_a_forgotten_run_of_a_job_stays_away_until_it_is_started_again(per_user_folder, desk, runs):
    one = write_run(per_user_folder / "jobs" / "katze" / "runs", "one", 10)
    look(runs, desk)
    runs.refresh()
    arrives = desk.posted.get(timeout=120)  # it was read while it was still listed
    runs.forget(one.path)
    arrives()
    assert runs.all == []
    look(runs, desk)
    assert runs.all == []
    _enter_in_list(one.path)
    look(runs, desk)
    assert [run.path for run in runs.all] == [one.path]


def test_a_list_that_somebody_holds_keeps_nobody_waiting_and_a_run_that_stays_in_it_comes_back(
    tmp_path, desk, runs, monkeypatch
):
    one = write_run(tmp_path, "one", 10)
    look(runs, desk)
    told = []
    runs.failed.connect(told.append)
    monkeypatch.setattr(run_directory, "_LIST_PATIENCE", 0.01)
    with locks.hold_lock(places.runs_list().with_suffix(".lock"), 0):
        runs.forget(one.path)
        assert runs.all == []
        desk.until(lambda: told)
    assert told[0].code == "run.list"
    desk.until(lambda: [run.path for run in runs.all] == [one.path])
    runs.forget(one.path)
    runs.close()  # what was asked is done
    assert known_runs() == []


def test_a_fault_that_nobody_expects_does_not_end_the_watching(tmp_path, desk, runs, monkeypatch):
    directory = write_run(tmp_path, "one", 10)
    run = Run(directory.path, desk.tasks)
    with monkeypatch.context() as broken:
        broken.setattr(run_module, "read_snapshot", lambda *_: 1 // 0)
        broken.setattr(runs_module, "known_runs", lambda: 1 // 0)
        run.read()
        with pytest.raises(ZeroDivisionError):
            desk.posted.get(timeout=120)()
        runs.refresh()
        with pytest.raises(ZeroDivisionError):
            desk.posted.get(timeout=120)()
    desk.read(run)
    assert run.loaded
    look(runs, desk)
    assert [one.path for one in runs.all] == [directory.path]


def test_a_run_that_ended_is_not_read_twice_but_one_that_begins_again_is(tmp_path, desk, runs, monkeypatch):
    directory = write_run(tmp_path, "one", 10, state="paused", done=5)
    look(runs, desk)
    reads = []
    original = RunDirectory.read_status
    monkeypatch.setattr(RunDirectory, "read_status", lambda self: reads.append(1) or original(self))
    look(runs, desk)
    assert reads == []
    with directory.hold():
        look(runs, desk)
        assert runs.all[0].state == "running"
    look(runs, desk)
    assert runs.all[0].state == "paused"


def test_five_hundred_finished_runs_are_listed_in_a_second(tmp_path, desk, runs):
    one = write_run(tmp_path / "runs", "run-0", 5)
    listed = []
    for number in range(1, 500):
        path = tmp_path / "runs" / f"run-{number}"
        shutil.copytree(one.path, path)
        listed.append(json.dumps({"path": str(path), "time": 0.0}))
    with places.runs_list().open("a", encoding="utf-8") as file:
        file.write("\n".join(listed) + "\n")
    start = time.process_time()
    look(runs, desk)
    assert len(runs.all) == 500
    assert time.process_time() - start < 1.0


def test_the_end_waits_for_no_look_at_a_disk_that_is_silent(tmp_path, desk, monkeypatch):
    monkeypatch.setattr(tasks, "_CLOSE_SECONDS", 0.0)
    path = write_run(tmp_path, "run", 10).path
    asked, answer = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(runs_module, "known_runs", lambda: asked.release() or (answer.wait() and []))
    monkeypatch.setattr(run_module, "summarize", lambda path: asked.release() or (answer.wait() and summarize(path)))
    left = []
    for begin in (Runs.refresh, lambda runs: runs.open(path).read()):
        runs = Runs(desk.posted.put)
        begin(runs)
        assert asked.acquire(timeout=60)
        end = threading.Thread(target=runs.close, daemon=True)
        end.start()
        end.join(60)
        left.append(end.is_alive())
    answer.set()
    assert left == [False, False]


def test_what_is_being_forgotten_does_not_come_back_meanwhile(tmp_path, desk, monkeypatch, runs):
    monkeypatch.setattr(tasks, "_STUCK_AFTER", 0.0)
    path, answer = write_run(tmp_path, "run", 10).path, threading.Event()
    _enter_in_list(path)
    look(runs, desk)
    original = runs_module.forget_run
    monkeypatch.setattr(runs_module, "forget_run", lambda path: answer.wait(60) and original(path))
    runs.forget(path)
    look(runs, desk)
    assert runs.all == []
    answer.set()
