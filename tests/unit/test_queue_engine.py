"""What an engine enters for itself; the work it does is given by each test."""

import signal
import subprocess
import sys

import pytest

from trainer.errors import JobError, ResumableError, RunError
from trainer.protocol import commands
from trainer.protocol.lanes import gpu_held
from trainer.protocol.queue import Queue
from trainer.protocol.rundir import RunDirectory, Status
from trainer.queue.engine import carried_out

# An engine that turns the system's request to end into a pause, as training does.
PAUSING = """
import signal, sys
from pathlib import Path
from trainer.protocol.rundir import RunDirectory, Status
from trainer.queue.engine import carried_out

def work(made):
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    run = RunDirectory.create(Path(sys.argv[2]), "style")
    made(run.path)
    run.begin_attempt({})
    try:
        print("ready", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    run.write_status(Status("paused", None, 1, 10, 1, 0.0))
    return 75

sys.exit(carried_out(sys.argv[1], work))
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
        assert gpu_held("cpu")
        made(run.path)
        assert queue.get(name).run == run.path
        with pytest.raises(RunError, match="Another process"):
            carried_out(name, lambda _: 0)
        return 0

    assert carried_out(name, work) == 0
    entry = queue.get(name)
    assert (entry.state, entry.problem, entry.pid, entry.run) == ("done", "", None, run.path)
    assert not queue.engine_alive(name)
    assert not gpu_held("cpu")


def test_an_entry_that_is_damaged_meanwhile_ends_no_training(queue, name, tmp_path):
    def work(made):
        (queue.folder / "entries" / f"{name}.json").write_text("{", encoding="utf-8")
        made(tmp_path / "runs" / "style")
        return 75

    assert carried_out(name, work) == 75
    assert [fault.id for fault in queue.read().faults] == [name]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (JobError("job.key", "A key is wrong.", "Correct it.", ("rank: too small",)),
         "A key is wrong. rank: too small Correct it."),
        (ResumableError("disk.full", "The disk is full.", "Make room."), "The disk is full. Make room."),
        (ZeroDivisionError("by 0"), "Something in Impasto went wrong: ZeroDivisionError: by 0"),
    ],
)  # fmt: skip
def test_an_error_is_a_failure_in_words_and_goes_on_up(queue, name, error, problem):
    def work(made):
        raise error

    with pytest.raises(type(error)):
        carried_out(name, work)
    entry = queue.get(name)
    assert (entry.state, entry.problem) == ("failed", problem)


@pytest.mark.parametrize(("asked", "state"), [("pause", "paused"), ("stop", "stopped")])
def test_an_end_that_somebody_asked_for_in_the_run_s_folder(queue, name, tmp_path, asked, state):
    run = RunDirectory.create(tmp_path / "runs", "style")

    def work(made):
        made(run.path)
        run.begin_attempt({})
        commands.send(run, asked)
        commands.finish(commands.pending(run)[0], "done")
        run.write_status(Status(state, None, 1, 10, 1, 0.0))
        return 75

    assert carried_out(name, work) == 75
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
    assert ("computer was shut down" in queue.get(name).problem) == (wish is None)
