"""The worker with engines of its own kind: processes that keep the protocol and train nothing."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainer import cli
from trainer import queue as devices
from trainer import queue as worker
from trainer.errors import RunError
from trainer.protocol import commands, locks
from trainer.protocol.queue import Queue
from trainer.protocol.run_directory import RunDirectory, Status
from trainer.queue import Worker, lanes_for, machine_lanes, settings_for

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)

ENGINE = """
import dataclasses, os, sys
from pathlib import Path
from trainer.protocol import commands
from trainer.protocol.queue import Queue
from trainer.protocol.run_directory import RunDirectory, Status

queue, name, where = Queue(), sys.argv[1], sys.argv[2]
with queue.engine(name):
    queue.change(name, lambda entry: dataclasses.replace(entry, state="running", lane="cpu", pid=os.getpid()))
    if where == "loads":
        print("ready", flush=True)
        sys.stdin.read()
    run = RunDirectory.create(Path(where), "style")
    queue.change(name, lambda entry: dataclasses.replace(entry, run=run.path))
    with run.hold():
        run.begin_attempt({})
        run.write_status(Status("running", "train", 1, 10, 1, 0.0))
        print("ready", flush=True)
        sys.stdin.readline()
        (command,) = commands.pending(run.commands)
        commands.finish(command, "done")
        run.write_status(Status("paused" if command.name == "pause" else "stopped", None, 1, 10, 1, 0.0))
"""


@pytest.fixture
def queue():
    return Queue()


@pytest.fixture
def said():
    return []


@pytest.fixture
def engine(queue, tmp_path):
    """Start an engine for an entry and wait until it is at work."""
    children = []

    def start(name, where=None):
        words = [sys.executable, "-c", ENGINE, name, str(where or tmp_path / "runs")]
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def add(queue, tmp_path, name, text="", **more):
    job = tmp_path / name / "job.toml"
    job.parent.mkdir()
    job.write_text(text, encoding="utf-8")
    return queue.add(job, **more)


def states(queue):
    return [entry.state for entry in queue.entries()]


def begun(queue, tmp_path, monkeypatch, lanes_there, *jobs, **more):
    """What a worker starts in one look, as (words, log), and the worker; nothing of it is really started."""
    started = []

    class Child:
        def poll(self):
            return None

    def launch(words, log):
        started.append(words)
        return Child()

    monkeypatch.setattr(worker, "launch", launch)
    for name, text in jobs:
        add(queue, tmp_path, name, text)
    one = Worker(queue, [].append, lanes_there)
    one.look()
    return started, one


def test_an_engine_that_lives_is_taken_over_and_hears_a_wish_once(queue, engine, said, tmp_path):
    name = add(queue, tmp_path, "a").id
    child = engine(name)
    queue.pause(name)
    one = Worker(queue, said.append, ["cpu"])
    assert one.look().entries[0].state == "running"
    one.look()
    run = RunDirectory(queue.get(name).run)
    assert [command.name for command in commands.pending(run.commands)] == ["pause"]
    child.communicate("look\n")
    assert one.look().entries[0].state == "paused"
    assert said == [f"style ({name}): paused"]


def test_a_wish_that_a_former_start_of_the_engine_did_not_read_is_sent_again(queue, engine, said, tmp_path):
    name = add(queue, tmp_path, "a").id
    engine(name)
    queue.stop(name)
    one = Worker(queue, said.append, ["cpu"])
    one.look()
    run = RunDirectory(queue.get(name).run)
    (first,) = commands.pending(run.commands)
    commands.void(run.commands, commands.unread(run.commands))
    one.look()
    (second,) = commands.pending(run.commands)
    assert (second.name, second.path == first.path) == ("stop", False)


def test_a_killed_engine_is_not_begun_again_by_itself(queue, engine, said, tmp_path, monkeypatch):
    name = add(queue, tmp_path, "a").id
    child = engine(name)
    child.send_signal(KILL)
    child.wait()
    monkeypatch.setattr(worker, "launch", None)  # would fail if it were called
    assert Worker(queue, said.append, ["cpu"]).run()
    entry = queue.get(name)
    assert (entry.state, "computer shut down" in entry.problem) == ("interrupted", True)
    assert Worker(queue, said.append, ["cpu"]).run()
    assert states(queue) == ["interrupted"]
    assert len(said) == 1


@pytest.mark.parametrize(("wish", "state"), [("pause", "paused"), ("stop", "stopped")])
def test_before_there_is_a_run_a_wish_ends_the_process(queue, engine, said, tmp_path, wish, state):
    name = add(queue, tmp_path, "a").id
    child = engine(name, "loads")
    getattr(queue, wish)(name)
    one = Worker(queue, said.append, ["cpu"])
    one.look()
    child.wait(60)
    assert one.look().entries[0].state == state


def test_a_stop_that_is_taken_back_is_withdrawn_from_the_run_and_a_later_one_counts(queue, engine, said, tmp_path):
    name = add(queue, tmp_path, "a").id
    engine(name)
    run = RunDirectory(queue.get(name).run)
    one = Worker(queue, said.append, ["cpu"])
    queue.stop(name)
    one.look()
    (sent,) = commands.pending(run.commands)
    assert queue.withdraw(name).wish is None
    assert commands.pending(run.commands) == [] and commands.answer(sent.path).outcome == "withdrawn"
    queue.stop(name)
    one.look()  # passes the second one on
    queue.change(name, lambda entry: dataclasses.replace(entry, wish=None))  # before this worker has looked again
    one.look()
    assert commands.pending(run.commands) == [], "what a worker passed on meanwhile is withdrawn too"
    queue.pause(name)
    one.look()
    assert [command.name for command in commands.pending(run.commands)] == ["pause"]
    commands.accept(commands.pending(run.commands)[0])
    with pytest.raises(RunError) as raised:
        queue.withdraw(name)
    assert raised.value.code == "queue.late"


def test_a_stop_that_is_withdrawn_by_the_runs_name_leaves_its_entry_and_may_be_given_again(
    queue, engine, said, tmp_path, capsys
):
    """The window would show "Stopping…" until the run's end, and the second stop never reach the run."""
    name = add(queue, tmp_path, "a").id
    engine(name)
    run = RunDirectory(queue.get(name).run)
    one = Worker(queue, said.append, ["cpu"])
    queue.stop(name)
    one.look()
    assert cli.main(["stop", str(run.path), "--withdraw"]) == 0
    assert queue.get(name).wish is None and commands.pending(run.commands) == []
    queue.stop(name)  # before the worker looks again
    one.look()
    assert [command.name for command in commands.pending(run.commands)] == ["stop"]
    assert "continues" in capsys.readouterr().out


def test_a_resumed_run_that_has_not_begun_its_attempt_is_ended_at_once(queue, engine, said, tmp_path):
    """It hashes its base and reads no commands yet."""
    former = RunDirectory.create(tmp_path / "runs", "style")
    former.begin_attempt({})
    former.write_status(Status("paused", None, 1, 10, 1, 0.0))
    name = add(queue, tmp_path, "a").id
    child = engine(name, "loads")
    queue.change(name, lambda entry: dataclasses.replace(entry, run=former.path, attempts=1))
    queue.stop(name)
    one = Worker(queue, said.append, ["cpu"])
    one.look()
    child.wait()
    one.look()
    assert states(queue) == ["stopped"] and commands.pending(former.commands) == []


def test_only_one_worker_works_at_a_time(queue, said):
    queue.folder.mkdir(parents=True)
    with locks.hold_lock(queue.worker_lock, 1.0):
        assert not Worker(queue, said.append, ["cpu"]).run()
    assert Worker(queue, said.append, ["cpu"]).run()


def test_who_adds_an_entry_while_the_worker_ends_sees_that_none_is_there(queue, said, tmp_path, monkeypatch):
    seen = []

    def add_late():
        add(queue, tmp_path, "late")
        seen.append(queue.worker_alive())

    def left_and_meanwhile(reading):
        answer = left(reading)
        calls.append(answer)
        if len(calls) == 2:  # the last look, after which the worker lets go
            adder.start()
            adder.join(0.3)
        return answer

    adder, calls, left = threading.Thread(target=add_late), [], worker._left
    monkeypatch.setattr(worker, "_left", left_and_meanwhile)
    assert Worker(queue, said.append, ["cpu"]).run()
    adder.join()
    assert calls == [False, False]
    assert seen == [False]
    assert states(queue) == ["waiting"]


def test_what_ended_well_a_day_ago_is_swept_out(queue, said, tmp_path):
    names = {(state, old): add(queue, tmp_path, f"{state} {old}").id for state in ("done", "failed") for old in (0, 1)}
    for (state, old), name in names.items():
        queue.record_outcome(name, state)
        past = time.time() - 90_000 * old
        os.utime(queue.folder / "entries" / f"{name}.json", (past, past))
    assert Worker(queue, said.append, ["cpu"]).run()
    assert [entry.name for entry in queue.entries()] == ["done 0", "failed 0", "failed 1"]


def test_each_lane_takes_one_entry_in_order(queue, tmp_path, monkeypatch):
    jobs = [(name, "") for name in "abc"]
    started, one = begun(queue, tmp_path, monkeypatch, ["cuda:0", "cuda:1"], *jobs)
    assert [words[1:4] for words in started] == [
        [str(tmp_path / "a" / "job.toml"), "--set", "fit.device=cuda:0"],
        [str(tmp_path / "b" / "job.toml"), "--set", "fit.device=cuda:1"],
    ]
    assert [(entry.state, entry.lane) for entry in queue.entries()] == [
        ("running", "cuda:0"), ("running", "cuda:1"), ("waiting", None),
    ]  # fmt: skip
    queue.record_outcome(queue.entries()[1].id, "done")
    one.look()
    assert started[-1][1:4] == [str(tmp_path / "c" / "job.toml"), "--set", "fit.device=cuda:1"]


def test_a_job_that_names_its_device_waits_for_that_lane_and_lets_others_by(queue, tmp_path, monkeypatch):
    first = '[fit]\ndevice = "cuda:1"'
    jobs = [("a", first), ("b", first), ("c", ""), ("d", '[fit]\ndevice = "cpu"')]
    started, _ = begun(queue, tmp_path, monkeypatch, ["cuda:0", "cuda:1"], *jobs)
    assert [words[1] for words in started] == [str(tmp_path / name / "job.toml") for name in "acd"]
    assert "--set" not in started[0]
    assert [entry.lane for entry in queue.entries()] == ["cuda:1", None, "cuda:0", "cpu"]


def test_a_lane_on_which_something_renders_is_left_alone(queue, tmp_path, monkeypatch):
    with locks.hold_lane("cpu"):
        started, one = begun(queue, tmp_path, monkeypatch, ["cpu"], ("a", ""))
        assert started == []
    one.look()
    assert len(started) == 1
    assert started[0][-2:] == ["--queued", queue.entries()[0].id]


def test_an_entry_waits_for_its_time_and_lets_others_by(queue, tmp_path, monkeypatch):
    add(queue, tmp_path, "late", after=time.time() + 3600)
    started, one = begun(queue, tmp_path, monkeypatch, ["cpu"], ("a", ""))
    assert [words[1] for words in started] == [str(tmp_path / "a" / "job.toml")]
    queue.record_outcome(queue.entries()[1].id, "done")
    one.look()
    assert len(started) == 1
    queue.start_after(queue.entries()[0].id, time.time() - 1)
    one.look()
    assert started[1][1] == str(tmp_path / "late" / "job.toml")


def test_a_held_queue_begins_nothing(queue, tmp_path, monkeypatch):
    queue.hold()
    started, one = begun(queue, tmp_path, monkeypatch, ["cpu"], ("a", ""))
    assert started == []
    assert one.run()  # and there is nothing to wait for
    queue.release()
    one.look()
    assert len(started) == 1


def test_an_engine_that_cannot_be_started_is_a_failure_in_words(queue, tmp_path, said, monkeypatch):
    def refuse(words, log):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "launch", refuse)
    add(queue, tmp_path, "a")
    assert Worker(queue, said.append, ["cpu"]).run()
    (entry,) = queue.entries()
    assert (entry.state, entry.problem) == ("failed", "Could not start the job: No space left on device.")


def test_a_run_is_gone_on_with_and_a_job_whose_run_never_began_starts_anew(queue, tmp_path, monkeypatch):
    began, never = (RunDirectory.create(tmp_path / "runs", name) for name in ("began", "never"))
    began.begin_attempt({})
    began.write_status(Status("paused", None, 3, 6, 1, 0.0))
    for run in (began, never):
        name = add(queue, tmp_path, run.name).id
        queue.change(name, lambda entry, run=run: dataclasses.replace(entry, run=run.path, steps=9))
    started, _ = begun(queue, tmp_path, monkeypatch, ["cuda:0", "cuda:1"])
    assert started[0][:4] == ["resume", str(began.path), "--steps", "9"]
    assert started[1][:2] == ["train", str(tmp_path / "never" / "job.toml")]
    assert queue.entries()[1].run is None


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["cuda:0", "cuda:1"]), ("1", ["cuda:0"]), ("", ["cpu"]), ("-1", ["cpu"]), ("0,1,2", ["cuda:0", "cuda:1"])],
)
def test_lanes_are_the_cards_that_programs_may_see(monkeypatch, visible, expected):
    monkeypatch.setattr(devices.gpu, "list_gpus", lambda: [object(), object()])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_lanes() == expected


def test_a_device_that_is_not_there_is_left_to_training_to_refuse(queue, tmp_path):
    entry = add(queue, tmp_path, "a", '[fit]\ndevice = "cuda:7"')
    assert lanes_for(entry, ["cuda:0"]) == ["cuda:0"]
    assert settings_for(entry, "cuda:0", ["cuda:0", "cuda:1"]) == []
    broken = add(queue, tmp_path, "b", "[fit")
    assert lanes_for(broken, ["cuda:0"]) == ["cuda:0"]


def test_a_job_goes_on_the_device_that_it_named_when_it_was_put_in(queue, tmp_path):
    entry = add(queue, tmp_path, "a", '[fit]\ndevice = "cuda:1"')
    entry.job.write_text('[fit]\ndevice = "cuda:0"', encoding="utf-8")
    there = ["cuda:0", "cuda:1"]
    assert lanes_for(entry, there) == ["cuda:1"]
    assert lanes_for(dataclasses.replace(entry, text=None), there) == ["cuda:0"]  # of an earlier version
    entry.job.unlink()
    assert lanes_for(entry, there) == ["cuda:1"]


def test_a_lane_is_held_by_one_and_marked_only_where_it_is_free():
    assert not locks.is_lane_held("cuda:0")
    with locks.try_hold_lane("cuda:0") as first:
        assert first
        assert locks.is_lane_held("cuda:0")
        assert locks.is_lane_held("cuda")  # as PyTorch names the first
        assert not locks.is_lane_held("cuda:1")
        with locks.try_hold_lane("cuda:0") as second:
            assert not second
        with pytest.raises(locks.LockBusyError), locks.hold_lane("cuda:0", patience=0.0):
            pass
    assert not locks.is_lane_held("cuda:0")
    assert [locks.lane_of(device) for device in (None, "cpu", "cuda", "cuda:1")] == ["cpu", "cpu", "cuda:0", "cuda:1"]
