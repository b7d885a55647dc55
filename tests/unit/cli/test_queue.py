import json
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from trainer import cli
from trainer.cli.jobs import handling_sigusr1
from trainer.cli.queue import moment
from trainer.protocol import locks
from trainer.protocol.queue import Queue
from trainer.protocol.run_directory import RunDirectory


@pytest.fixture
def job(tmp_path):
    """Make a job file by name."""

    def make(name):
        path = tmp_path / name / "job.toml"
        path.parent.mkdir()
        path.write_text("", encoding="utf-8")
        return str(path)

    return make


def do(*words):
    assert cli.main(["queue", *words]) == 0


def test_entries_are_put_in_listed_moved_and_taken_out(job, capsys):
    do("list")
    assert "is empty" in capsys.readouterr().err
    for name in ("cat", "dog", "emu"):
        do("add", job(name))
    told = capsys.readouterr()
    ids = [line.split()[0] for line in told.out.splitlines()]
    assert "The queue is not running" in told.err
    do("move", "emu", "--before", ids[0])
    do("pause", ids[1][:6])
    do("after", "cat", "+2h")
    do("list")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        [ids[2], "waiting", "emu"], [ids[0], "waiting", "cat"], [ids[1], "paused", "dog"],
    ]  # fmt: skip
    assert rows[1][4] == "after"
    do("stop", "dog")
    do("clear")
    do("remove", "cat")
    do("list", "--json")
    listed = json.loads(capsys.readouterr().out)
    assert [(entry["id"], entry["state"]) for entry in listed["entries"]] == [(ids[2], "waiting")]
    assert (listed["worker"], listed["held"]) == (False, False)


def test_a_run_is_put_in_by_its_name(tmp_path, job, capsys):
    run = RunDirectory.create(tmp_path / "runs", "style")
    do("add", job("cat"))
    capsys.readouterr()
    do("add", "style", "--steps", "90", "--before", Queue().entries()[0].id, "--json")
    added = json.loads(capsys.readouterr().out)
    assert (added["run"], added["steps"], added["state"]) == (str(run.path), 90, "waiting")
    assert [entry.name for entry in Queue().entries()] == ["style", "cat"]
    assert cli.main(["queue", "add", "nobody"]) == 2
    assert cli.main(["queue", "add", job("dog"), "--steps", "3"]) == 2
    assert cli.main(["queue", "add", "style", "--set", "recipe.rank=4"]) == 2
    assert len(Queue().entries()) == 2


def test_a_job_that_cannot_be_read_is_refused_in_words_at_once(tmp_path, capsys):
    missing, binary = tmp_path / "no ü.toml", tmp_path / "job.toml"
    binary.write_bytes(b"\x89PNG\xff")
    for path, why in ((missing, "there is no such file"), (binary, "is not UTF-8 text")):
        assert cli.main(["queue", "add", str(path)]) == 2
        told = capsys.readouterr().err
        assert path.name in told
        assert why in told
    assert Queue().entries() == []


def test_holding_is_told_with_its_reason(job, capsys):
    do("add", job("cat"))
    do("on-failure", "hold")
    entry = Queue().entries()[0]
    Queue().record_outcome(entry.id, "failed", "The base is gone.")
    do("add", job("dog"))
    capsys.readouterr()
    do("run")  # has nothing to do
    assert "The queue is on hold: no new jobs start. cat: The base is gone." in capsys.readouterr().err
    do("on-failure", "continue")
    do("resume")
    assert not Queue().read().held
    do("hold")
    do("list")
    assert "`queue resume`" in capsys.readouterr().err


def test_a_second_worker_leaves_it_to_the_first(capsys):
    queue = Queue()
    queue.folder.mkdir(parents=True)
    with locks.hold_lock(queue.worker_lock, 1.0):
        do()
    assert "The queue is already running" in capsys.readouterr().err


def test_a_name_that_means_several_or_none_is_refused(tmp_path, job, capsys):
    do("add", job("cat"))
    (tmp_path / "more").mkdir()
    do("add", str(tmp_path / "cat" / "job.toml"))
    assert cli.main(["queue", "remove", "cat"]) == 2
    assert all(entry.id in capsys.readouterr().err for entry in Queue().entries()[:1])
    assert cli.main(["queue", "pause", "zebra"]) == 2
    assert len(Queue().entries()) == 2


def test_a_damaged_entry_is_told_with_the_way_to_be_rid_of_it(job, capsys):
    do("add", job("cat"))
    entry = Queue().entries()[0]
    (Queue().folder / "entries" / f"{entry.id}.json").write_text("{", encoding="utf-8")
    capsys.readouterr()
    do("list")
    assert f"Remove it with `queue remove {entry.id}`." in capsys.readouterr().err
    do("remove", entry.id)
    assert Queue().read().faults == ()


def test_times_are_read_as_people_write_them():
    now = datetime.now().astimezone()
    assert abs(moment("+1h30m") - (time.time() + 5400)) < 60
    assert abs(moment("+45m") - (time.time() + 2700)) < 60
    assert abs(moment("now") - time.time()) < 60
    assert moment("2030-01-02T03:04") == datetime(2030, 1, 2, 3, 4).astimezone().timestamp()
    later = now + timedelta(minutes=5)
    assert 0 < moment(f"{later:%H:%M}") - time.time() <= 300 + 5
    past = now - timedelta(minutes=5)
    assert (
        abs(moment(f"{past:%H:%M}") - (past.replace(second=0, microsecond=0) + timedelta(days=1)).timestamp()) <= 3600
    )


@pytest.mark.parametrize("text", ["soon", "25:00", "+", "", "2030-13-01"])
def test_what_is_no_time_is_refused(text, job, capsys):
    with pytest.raises(SystemExit):
        cli.main(["queue", "add", job("cat"), "--after", text])
    assert "is not a time" in capsys.readouterr().err
    assert Queue().entries() == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGUSR1")
def test_sigusr1_ends_no_worker_and_interrupts_a_run_that_has_not_started(job):
    """By default the signal kills the process. SLURM sends it before its time limit, which a run answers by pausing."""
    queue = Queue()
    entry = queue.add(Path(job("cat")), after=time.time() + 3600)
    with subprocess.Popen([sys.executable, "-m", "trainer", "queue"]) as worker:
        while not queue.worker_alive():
            assert worker.poll() is None
        worker.send_signal(signal.SIGUSR1)
        queue.remove(entry.id)
    assert worker.returncode == 0

    former = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt), handling_sigusr1(signal.default_int_handler):
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == former


def test_settings_are_changed_in_the_snapshot_only(tmp_path, capsys):
    path = tmp_path / "job.toml"
    text = 'schema = 1\nname = "a"\nbase = {model = "own/er"}\ndataset = {folders = [{path = "p"}]}\n'
    text += "[recipe]\nrank = 8 # small\n"
    path.write_text(text, encoding="utf-8")
    do("add", str(path), "--set", "network_dim=32", "--set", "name=b")
    (entry,) = Queue().entries()
    assert entry.name == "b" and "rank = 32 # small" in (entry.text or "")
    assert path.read_text(encoding="utf-8") == text
    assert cli.main(["queue", "add", str(path), "--set", "recipe.rank=-1"]) == 2
    assert "recipe.rank: must be a whole number" in capsys.readouterr().err
    assert len(Queue().entries()) == 1
