import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.errors import JobError, RunError
from trainer.protocol import locks
from trainer.protocol.queue import Entry, Queue, new_entry, outcome
from trainer.protocol.run_directory import RunDirectory, Status

WRITER = """
import sys
from pathlib import Path
from trainer.protocol.queue import Queue

queue, name = Queue(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for number in range(25):
    job = queue.folder.parent / name / str(number) / "job.toml"
    job.parent.mkdir(parents=True)
    job.write_text("", encoding="utf-8")
    entry = queue.add(job)
    queue.move(entry.id, queue.read().entries[0].id)
    queue.pause(entry.id)
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Queue(tmp_path / "die Schlange 列")


def job_file(name, text=""):
    path = Path(name) / "job.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def add(queue, *names):
    return [queue.add(job_file(name)).id for name in names]


def names(queue):
    return [entry.name for entry in queue.entries()]


def file_of(queue, name):
    return queue.folder / "entries" / f"{name}.json"


def running(queue, name, **more):
    return queue.change(name, lambda entry: dataclasses.replace(entry, state="running", lane="cpu", **more))


def test_what_is_put_in_is_read_as_it_was(queue, tmp_path):
    assert queue.read().entries == ()
    entry = new_entry(tmp_path / job_file("ein Bild", 'name = "ü"\r\n'), after=1795300000.5, hold=True)
    queue.put(entry)
    assert queue.entries() == [entry]
    assert entry.name == "ü"
    assert [
        dataclasses.replace(entry, text=text).name for text in (None, "", "name = 7", 'name = " "', "= broken")
    ] == ["ein Bild"] * 5
    resumed = queue.add_run(tmp_path / "runs" / "style", steps=300)
    assert (resumed.run, resumed.steps, resumed.job, resumed.name) == (tmp_path / "runs" / "style", 300, None, "style")
    assert Queue(queue.folder).entries() == [entry, resumed]


def test_order_is_that_of_adding_until_something_is_moved(queue):
    a, b, c, d = add(queue, "a", "b", "c", "d")
    assert names(queue) == ["a", "b", "c", "d"]
    queue.move(d, before=b)
    assert names(queue) == ["a", "d", "b", "c"]
    queue.move(a, before=None)
    assert names(queue) == ["d", "b", "c", "a"]
    add(queue, "e")
    assert names(queue) == ["d", "b", "c", "a", "e"]
    queue.move(a, before=a)
    queue.remove(b)
    assert names(queue) == ["d", "c", "a", "e"]
    assert queue.add(job_file("f"), before=c).name == "f"
    assert names(queue) == ["d", "f", "c", "a", "e"]


def test_order_is_that_of_adding_though_the_clock_stands_or_goes_back(queue, monkeypatch):
    for clock in (1e9, 1e9, 1e9, 5e8):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        add(queue, *"abcdefgh")
    assert names(queue) == [*"abcdefgh"] * 4


def test_two_programs_edit_at_once_and_nothing_is_lost(queue):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(queue.folder), name], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    reading = queue.read()
    assert reading.faults == ()
    assert sorted((entry.job.parts[-3], int(entry.name)) for entry in reading.entries) == sorted(
        (name, number) for name in ("one", "two") for number in range(25)
    )
    assert {entry.state for entry in reading.entries} == {"paused"}
    for writer in ("one", "two"):  # each put its own always to the front
        own = [int(entry.name) for entry in reading.entries if entry.job.parts[-3] == writer]
        assert own == sorted(own, reverse=True)


def test_a_torn_entry_is_told_and_the_others_stay(queue):
    whole, torn = add(queue, "whole", "torn")
    text = file_of(queue, torn).read_bytes()
    for length in range(len(text) - 2):
        file_of(queue, torn).write_bytes(text[:length])
        reading = queue.read()
        assert [entry.id for entry in reading.entries] == [whole]
        assert [fault.id for fault in reading.faults] == [torn]
        assert "Could not read the queue entry" in reading.faults[0].sentence
    with pytest.raises(RunError, match="Could not read the queue entry"):
        queue.pause(torn)
    queue.remove(torn)
    assert queue.read().faults == ()


@pytest.mark.parametrize(
    "changes",
    [{"state": "flying"}, {"job": None}, {"job": 3}, {"after": "soon"}, {"wish": "sleep"}, {"version": "1"},
     {"steps": True}, {"added": None}, {"text": 3}],
)  # fmt: skip
def test_values_that_cannot_be_are_damage(queue, changes):
    (name,) = add(queue, "a")
    fields = json.loads(file_of(queue, name).read_text(encoding="utf-8"))
    file_of(queue, name).write_text(json.dumps(fields | changes), encoding="utf-8")
    assert [fault.id for fault in queue.read().faults] == [name]


def test_an_entry_of_a_newer_version_is_refused_kindly_and_not_touched(queue):
    (name,) = add(queue, "a")
    newer = '{"version": 2, "what": "nobody knows"}'
    file_of(queue, name).write_text(newer, encoding="utf-8")
    assert "newer version of Impasto" in queue.read().faults[0].sentence
    with pytest.raises(RunError, match="newer version"):
        queue.resume(name)
    assert file_of(queue, name).read_text(encoding="utf-8") == newer


def test_a_queue_of_a_newer_version_begins_nothing_and_is_not_touched(queue):
    a, b = add(queue, "a", "b")
    queue.settings.write_text('{"version": 2}', encoding="utf-8")
    reading = queue.read()
    assert reading.held
    assert "Update Impasto" in reading.reason
    with pytest.raises(RunError, match="newer version"):
        queue.move(b, a)
    assert queue.settings.read_text(encoding="utf-8") == '{"version": 2}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1, "order": [1]}', '{"version": 1}'])
def test_a_damaged_order_is_told_and_the_time_of_adding_holds(queue, text):
    a, b = add(queue, "a", "b")
    queue.move(b, a)
    queue.settings.write_text(text, encoding="utf-8")
    reading = queue.read()
    assert [entry.id for entry in reading.entries] == [a, b]
    assert "damaged" in reading.faults[0].sentence
    queue.move(b, a)
    assert names(queue) == ["b", "a"]
    assert queue.read().faults == ()


def test_a_file_that_is_no_entry_is_passed_over(queue):
    add(queue, "a")
    for name in (".impasto-0123456789abcdef.tmp", "notes.json", "desktop.ini"):
        (queue.folder / "entries" / name).write_text("x", encoding="utf-8")
    assert names(queue) == ["a"]
    assert queue.read().faults == ()


def test_pausing_keeps_the_place_and_stopping_leaves_the_queue(queue):
    a, b, c = add(queue, "a", "b", "c")
    queue.pause(a)
    queue.stop(b)
    assert [(entry.name, entry.state) for entry in queue.entries()] == [
        ("a", "paused"), ("b", "stopped"), ("c", "waiting"),
    ]  # fmt: skip
    assert queue.resume(a).state == "waiting"
    assert names(queue) == ["a", "b", "c"]
    assert queue.resume(b).state == "waiting"
    running(queue, c)
    assert queue.pause(c).wish == "pause"
    assert queue.stop(c).wish == "stop"
    assert queue.get(c).state == "running"
    for name, edit in ((c, queue.resume), (queue.record_outcome(c, "done").id, queue.stop)):
        with pytest.raises(RunError):
            edit(name)
    queue.stop(a)
    queue.clear()
    assert names(queue) == ["b"]


def test_a_job_is_frozen_with_its_entry_and_taken_out_with_it(queue):
    job = job_file("a", "\ufeffsteps = 1 # ü")
    first = queue.add(job)
    job.write_text("steps = 2", encoding="utf-8")
    second = queue.add(job)
    job.unlink()
    assert [queue.get(entry.id).text for entry in (first, second)] == ["steps = 1 # ü", "steps = 2"]
    queue.pause(first.id)
    assert queue.resume(first.id).text == "steps = 1 # ü"
    queue.remove(first.id)
    assert [path.name for path in (queue.folder / "entries").iterdir()] == [f"{second.id}.json"]


def test_an_entry_whose_log_is_in_use_stays_until_it_can_be_removed_whole(queue):
    (name,) = add(queue, "a")
    queue.log(name).mkdir()  # cannot be deleted as a file, as one that another program has open on Windows
    with pytest.raises(RunError, match="Could not use the queue"):
        queue.remove(name)
    assert names(queue) == ["a"]
    queue.log(name).rmdir()
    queue.remove(name)
    assert list((queue.folder / "entries").iterdir()) == []


def test_an_entry_of_an_earlier_version_holds_no_job(queue):
    (name,) = add(queue, "a")
    fields = json.loads(file_of(queue, name).read_text(encoding="utf-8"))
    del fields["text"]
    file_of(queue, name).write_text(json.dumps(fields), encoding="utf-8")
    assert queue.pause(name).text is None


@pytest.mark.parametrize("has_run", [False, True])
def test_a_job_that_failed_before_its_run_is_taken_as_it_was_corrected(queue, run, has_run):
    job = job_file("a", "rank = 0")
    name = queue.add(job).id
    running(queue, name, run=run.path if has_run else None)
    queue.record_outcome(name, "failed", "rank: too small")
    job.write_text("rank = 8", encoding="utf-8")
    assert queue.resume(name).text == ("rank = 0" if has_run else "rank = 8")
    queue.record_outcome(name, "failed", "rank: too large")
    job.unlink()
    assert queue.resume(name).text == ("rank = 0" if has_run else "rank = 8")


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (lambda path: None, "job.unreadable"),
        (lambda path: path.mkdir(), "job.unreadable"),
        (lambda path: path.write_bytes(b"name = '\xff'"), "job.encoding"),
        (lambda path: path.write_bytes(b"#" * (1024 * 1024 + 1)), "job.large"),
    ],
)
def test_a_job_that_cannot_be_read_is_refused_at_once_and_in_words(queue, tmp_path, made, code):
    job = tmp_path / "ein ü.toml"
    made(job)
    with pytest.raises(JobError) as caught:
        queue.add(job)
    assert (caught.value.code, str(job) in caught.value.sentence) == (code, True)
    assert queue.entries() == []


def test_a_run_that_stands_in_the_queue_is_not_put_in_twice(queue, tmp_path):
    run = tmp_path / "runs" / "a"
    first, _ = add(queue, "a", "b")
    running(queue, first, run=run)
    assert queue.add_run(run).state == "running"
    queue.record_outcome(first, "paused")
    resumed = queue.add_run(run, steps=50)
    assert (resumed.id, resumed.state, resumed.steps) == (first, "waiting", 50)
    assert names(queue) == ["a", "b"]
    queue.record_outcome(first, "done")
    longer = queue.add_run(run, steps=90)
    assert longer.id != first
    assert len(queue.entries()) == 3


def test_what_is_done_by_an_engine_is_neither_removed_nor_done_twice(queue):
    (name,) = add(queue, "a")
    with queue.engine(name):
        assert queue.engine_alive(name)
        with pytest.raises(RunError, match="is running"):
            queue.remove(name)
        with pytest.raises(RunError, match="Another process"), queue.engine(name):
            pass
    assert not queue.engine_alive(name)
    queue.remove(name)
    assert queue.entries() == []
    assert list((queue.folder / "entries").iterdir()) == []


def test_what_began_while_a_time_was_chosen_for_it_is_given_none(queue):
    (name,) = add(queue, "a")
    assert queue.start_after(name, 7e9).after == 7e9
    running(queue, name, after=None)
    with pytest.raises(RunError) as told:
        queue.start_after(name, 7e9)
    assert (told.value.code, queue.get(name).after) == ("queue.state", None)


@pytest.mark.parametrize("asked", ["of the queue", "of the entry", "by nobody"])
def test_a_failure_holds_the_queue_only_when_asked(queue, asked):
    (name,) = add(queue, "a")
    queue.set_hold_on_failure(asked == "of the queue")
    running(queue, name, hold=asked == "of the entry")
    queue.record_outcome(name, "failed", "The base is gone.")
    reading = queue.read()
    assert reading.held == (asked != "by nobody")
    assert ("The base is gone." in reading.reason) == reading.held
    queue.release()
    reading = queue.read()
    assert (reading.held, reading.reason, reading.entries[0].state) == (False, "", "failed")


def test_going_on_takes_up_what_was_interrupted(queue):
    first, second = add(queue, "a", "b")
    queue.hold()
    queue.record_outcome(first, "interrupted", "Broken off.")
    queue.pause(second)
    queue.release()
    assert [(entry.state, entry.problem) for entry in queue.entries()] == [("waiting", ""), ("paused", "")]


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "style")


def begun(queue, run, **more) -> Entry:
    (name,) = add(queue, "style")
    return running(queue, name, run=run.path, **more)


@pytest.mark.parametrize("state", ["done", "paused", "stopped", "failed"])
def test_an_engine_that_could_not_say_how_it_ended_is_read_from_its_run(queue, run, state):
    entry = begun(queue, run)
    run.begin_attempt({})
    run.write_status(Status(state, None, 3, 6, 1, 0.0))
    assert outcome(queue, entry)[0] == state
    (settled,) = queue.record_dead_engines(lambda one: outcome(queue, one))
    assert settled.state == state
    assert queue.record_dead_engines(lambda one: outcome(queue, one)) == []


def test_a_run_that_broke_off_is_interrupted_whatever_its_earlier_starts_said(queue, run):
    assert outcome(queue, begun(queue, run))[0] == "interrupted"  # never came to an attempt
    run.begin_attempt({})
    run.write_status(Status("paused", None, 3, 6, 1, 0.0))
    assert outcome(queue, begun(queue, run, attempts=1))[0] == "interrupted"
    run.begin_attempt({})
    run.write_status(Status("running", "train", 4, 6, 2, 0.0))
    state, problem = outcome(queue, begun(queue, run, attempts=1))
    assert state == "interrupted"
    assert "computer shut down" in problem


def test_an_engine_that_ended_before_there_was_a_run(queue):
    (name,) = add(queue, "a")
    entry = running(queue, name)
    queue.log(name).write_text("No module named torch\n", encoding="utf-8")
    assert outcome(queue, entry, 1) == ("failed", "No module named torch")
    assert outcome(queue, entry, -9)[0] == "interrupted"
    assert outcome(queue, entry)[0] == "interrupted"
    assert outcome(queue, dataclasses.replace(entry, wish="pause"), -15)[0] == "paused"
    assert outcome(queue, dataclasses.replace(entry, wish="stop"))[0] == "stopped"


def test_what_lives_is_not_settled(queue):
    first, second = add(queue, "a", "b")
    running(queue, first)
    running(queue, second)
    with queue.engine(first):
        assert queue.record_dead_engines(lambda one: ("failed", ""), alive=[second]) == []
    assert [entry.state for entry in queue.entries()] == ["running", "running"]


def test_a_queue_that_another_holds_too_long_says_so(queue, monkeypatch):
    add(queue, "a")
    monkeypatch.setattr("trainer.protocol.queue._PATIENCE", 0.0)
    with locks.hold_lock(queue.folder / "lock", 1.0), pytest.raises(RunError, match="too long"):
        add(queue, "b")


def test_a_queue_where_nothing_can_be_written_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue").write_text("a file where the folder should be", encoding="utf-8")
    queue = Queue(tmp_path / "queue")
    with pytest.raises(RunError, match="Could not use the queue"):
        add(queue, "a")
