"""What an engine enters for itself; the work it does is given by each test."""

import os
import signal
import subprocess
import sys

import pytest

from trainer.errors import JobError, ResumableError, RunError
from trainer.protocol import commands
from trainer.protocol.locks import is_lane_held
from trainer.protocol.queue import Queue
from trainer.protocol.run_directory import RunDirectory, Status
from trainer.queue import run_entry

# An engine that turns the system's request to end into a pause, as training does.
PAUSING = """
import signal, sys, threading
from pathlib import Path
from trainer.protocol.run_directory import RunDirectory, Status
from trainer.queue import run_entry

def work(made):
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    run = RunDirectory.create(Path(sys.argv[2]), "style")
    made(run.path)
    run.begin_attempt({})
    try:
        print("ready", flush=True)
        while True:
            threading.Event().wait(0.1)  # a signal that comes just before a wait does not end it
    except KeyboardInterrupt:
        pass
    run.write_status(Status("paused", None, 1, 10, 1, 0.0))
    return 75

sys.exit(run_entry(sys.argv[1], work))
"""

# An engine that prints, as do the libraries below Python, before and after there is a run.
PRINTING = """
import os, sys
from pathlib import Path
from trainer.protocol.run_directory import RunDirectory
from trainer.queue import run_entry

def work(made):
    print("planning ü")
    made(Path(sys.argv[2])) if sys.argv[2:] else None
    print("training")
    os.write(2, b"a driver's complaint\\n")
    os._exit(9)  # as one that is killed: nothing is said, and nothing that Python still holds is written

run_entry(sys.argv[1], work)
"""

# What was printed does not fit where it is to be moved: the system writes a part of it.
LIMITED = """
import resource, signal, sys
from pathlib import Path
from trainer.protocol.processes import redirect_output

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
print("x" * 5000, end="")
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
try:
    redirect_output(Path(sys.argv[1]), Path(sys.argv[2]))
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    print("refused", end="")
"""


@pytest.fixture
def queue():
    return Queue()


@pytest.fixture
def name(queue, tmp_path):
    job = tmp_path / "style.toml"
    job.write_text("", encoding="utf-8")
    return queue.add(job).id


def test_what_runs_is_seen_while_it_runs_and_done_after(queue, name, tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "style")

    def work(made):
        assert (queue.get(name).state, queue.get(name).run) == ("running", None)
        assert queue.engine_alive(name)
        assert is_lane_held("cpu")
        made(run.path)
        assert queue.get(name).run == run.path
        with pytest.raises(RunError, match="Another process"):
            run_entry(name, lambda _: 0)
        return 0

    assert run_entry(name, work) == 0
    entry = queue.get(name)
    assert (entry.state, entry.problem, entry.pid, entry.run) == ("done", "", None, run.path)
    assert not queue.engine_alive(name)
    assert not is_lane_held("cpu")


def test_an_entry_that_is_damaged_meanwhile_ends_no_training(queue, name, tmp_path):
    def work(made):
        (queue.folder / "entries" / f"{name}.json").write_text("{", encoding="utf-8")
        made(tmp_path / "runs" / "style")
        return 75

    assert run_entry(name, work) == 75
    assert [fault.id for fault in queue.read().faults] == [name]


def printed(queue, name, *words):
    """Start a printing engine as the worker does."""
    command = [sys.executable, "-X", "utf8", "-u", "-c", PRINTING, name, *words]
    with queue.log(name).open("ab") as log:
        assert subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 9


def test_all_that_an_engine_prints_lies_with_its_run(queue, name, tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "style")
    printed(queue, name, str(run.path))
    assert run.console.read_text(encoding="utf-8") == "planning ü\ntraining\na driver's complaint\n"
    queue.record_outcome(name, "interrupted")
    printed(queue, name, str(run.path))  # goes on with it
    whole = 2 * "planning ü\ntraining\na driver's complaint\n"
    assert run.console.read_text(encoding="utf-8") == whole
    assert queue.log(name).read_bytes() == b""
    queue.record_outcome(name, "interrupted")
    printed(queue, name)  # and ends before the run is its own: another engine may be printing there
    assert run.console.read_text(encoding="utf-8") == whole
    assert queue.log(name).read_text(encoding="utf-8") == "planning ü\ntraining\na driver's complaint\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no file can be limited there; a full disk would take a whole disk")
def test_what_a_full_disk_takes_in_part_stays_whole_with_the_entry(tmp_path):
    log, before = tmp_path / "console.log", tmp_path / "entry.log"
    log.write_text("an earlier start\n", encoding="utf-8")
    with before.open("ab") as out:
        words = [sys.executable, "-u", "-c", LIMITED, str(log), str(before)]
        assert subprocess.run(words, stdout=out, stderr=subprocess.DEVNULL, check=False).returncode == 0
    assert before.read_text(encoding="utf-8") == "x" * 5000 + "refused"
    assert log.read_text(encoding="utf-8") == "an earlier start\n"


def test_output_that_goes_elsewhere_is_left_alone(queue, name, tmp_path, capfd):
    run = RunDirectory.create(tmp_path / "runs", "style")
    queue.log(name).write_text("of an earlier start\n", encoding="utf-8")

    def work(made):
        made(run.path)
        os.write(1, b"training\n")
        return 0

    assert run_entry(name, work) == 0
    assert capfd.readouterr().out == "training\n"
    assert queue.log(name).read_text(encoding="utf-8") == "of an earlier start\n"


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (JobError("job.key", "A key is wrong.", "Correct it.", ("rank: too small",)),
         "A key is wrong. rank: too small. Correct it."),
        (JobError("job.invalid", "job.toml: rank: too small", "Correct it.", ("rank: too small",)),
         "job.toml: rank: too small. Correct it."),
        (ResumableError("disk.full", "The disk is full.", "Make room."), "The disk is full. Make room."),
        (ZeroDivisionError("by 0"), "Something in Impasto went wrong: by 0"),
    ],
)  # fmt: skip
def test_an_error_is_a_failure_in_words_and_goes_on_up(queue, name, error, problem):
    def work(made):
        raise error

    with pytest.raises(type(error)):
        run_entry(name, work)
    entry = queue.get(name)
    assert (entry.state, entry.problem) == ("failed", problem)


@pytest.mark.parametrize(("asked", "state"), [("pause", "paused"), ("stop", "stopped")])
def test_an_end_that_somebody_asked_for_in_the_run_s_folder(queue, name, tmp_path, asked, state):
    run = RunDirectory.create(tmp_path / "runs", "style")

    def work(made):
        made(run.path)
        run.begin_attempt({})
        commands.send(run.commands, asked)
        commands.finish(commands.pending(run.commands)[0], "done")
        run.write_status(Status(state, None, 1, 10, 1, 0.0))
        return 75

    assert run_entry(name, work) == 75
    assert queue.get(name).state == state


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes without asking")
@pytest.mark.parametrize(("wish", "state"), [(None, "interrupted"), ("pause", "paused"), ("stop", "stopped")])
def test_an_end_that_the_system_asked_for_is_one_to_be_gone_on_with(queue, name, tmp_path, wish, state):
    words = [sys.executable, "-c", PAUSING, name, str(tmp_path / "runs")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout.readline() == "ready\n"
        if wish:
            getattr(queue, wish)(name)
        engine.send_signal(signal.SIGTERM)
    assert engine.returncode == 75
    assert queue.get(name).state == state
    assert ("during shutdown" in queue.get(name).problem) == (wish is None)
