import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainer.errors import RunError
from trainer.protocol import commands, events, files, locks, places
from trainer.protocol.run_directory import RunDirectory, Status, find_run, known_runs, newest_run

HOLDER = (
    "import sys\nfrom pathlib import Path\nfrom trainer.protocol.run_directory import RunDirectory\n"
    "with RunDirectory.open(Path(sys.argv[1])).hold():\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "größe style")


@pytest.fixture
def holder(run):
    """Another process that holds the run until it is told to end or killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


def code_of(action) -> str:
    with pytest.raises(RunError) as caught:
        action()
    assert caught.value.sentence
    assert caught.value.remedy
    return caught.value.code


def enter(run):
    with run.hold():
        pass


def test_the_newest_run_of_a_job_is_the_last_that_an_engine_started(tmp_path, monkeypatch):
    assert newest_run(tmp_path / "nowhere", "cat") is None
    now = iter(range(100, 200))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    runs = [RunDirectory.create(tmp_path, name) for name in ("cat", "cat", "cat 2", "cat", "dog")]
    for run, name in zip(runs, ("cat", "cat", "cat 2", "cat", "dog"), strict=True):
        run.job.write_text(f'name = "{name}"\n', encoding="utf-8")
    for run in (*runs[:3], runs[4]):  # not the third of the cat
        run.begin_attempt({})
    assert newest_run(tmp_path, "cat").path == runs[1].path  # type: ignore[union-attr]
    runs[1].job.write_text("unreadable [", encoding="utf-8")
    assert newest_run(tmp_path, "cat").path == runs[0].path  # type: ignore[union-attr]
    assert newest_run(tmp_path, "bird") is None


def test_a_new_run_has_its_folders_and_is_in_the_list(run, tmp_path):
    assert run.path == tmp_path / "runs" / "größe style"
    assert all(folder.is_dir() for folder in (run.commands / "done", run.checkpoints, run.samples, run.output))
    assert known_runs() == [run.path]
    assert run.attempts() == []
    assert run.read_status() is None
    assert not run.is_alive()


def test_taken_names_are_numbered_and_unsafe_ones_made_safe(tmp_path):
    names = [RunDirectory.create(tmp_path, name).name for name in ("style", "style", "style", "CON", "a/b:c")]
    assert names == ["style", "style-2", "style-3", "_CON", "a-b-c"]


def test_many_starts_at_once_get_a_folder_and_a_line_each(tmp_path):
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(RunDirectory.create(tmp_path, "style").path)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8
    assert set(known_runs()) == set(made)


def test_a_run_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    assert code_of(lambda: RunDirectory.create(tmp_path / "file", "style")) == "run.folder"
    monkeypatch.setenv("IMPASTO_HOME", str(tmp_path / "file" / "home"))
    assert code_of(lambda: RunDirectory.create(tmp_path / "runs", "style")) == "run.list"
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_is_no_run_is_not_opened(tmp_path):
    assert code_of(lambda: RunDirectory.open(tmp_path / "missing")) == "run.none"
    assert code_of(lambda: RunDirectory.open(tmp_path)) == "run.none"


def test_a_held_run_is_busy_for_others_and_alive(run, holder):
    assert run.is_alive()
    assert code_of(lambda: enter(run)) == "run.busy"
    holder.stdin.close()
    holder.wait()
    assert not run.is_alive()
    enter(run)


def test_a_killed_holder_leaves_the_lock_free(run, holder):
    holder.kill()
    holder.wait()
    assert run.lock.exists()
    assert not run.is_alive()
    enter(run)


def test_the_same_process_meets_its_own_lock(run):
    with run.hold():
        assert run.is_alive()
        assert code_of(lambda: enter(run)) == "run.busy"
    assert not run.is_alive()


def test_asking_whether_a_run_lives_never_keeps_an_engine_out(run, monkeypatch):
    with contextlib.ExitStack() as asking:
        asking.enter_context(locks.hold_lock(run.lock, 0))
        monkeypatch.setattr(locks.time, "sleep", lambda _: asking.close())
        enter(run)


def test_a_lock_that_cannot_be_made_is_told(run):
    run.lock.unlink(missing_ok=True)
    run.lock.mkdir()
    assert code_of(lambda: enter(run)) == "run.lock"


def test_a_fault_is_kept_in_the_console_log_and_a_users_error_is_not(run):
    with pytest.raises(ZeroDivisionError) as caught, run.hold():
        _ = 1 / 0
    assert "ZeroDivisionError" in run.console.read_text(encoding="utf-8")
    assert str(run.console) in vars(caught.value)["traceback_kept"]
    run.console.unlink()
    with pytest.raises(RunError), run.hold():
        raise RunError("a", "b", "c")
    assert not run.console.exists()


def test_each_start_is_a_numbered_attempt_and_cleans_up_what_a_kill_left(run):
    with run.hold():
        assert run.begin_attempt({"device": "cpu", "versions": {"torch": "2.13"}}) == 1
        with events.EventWriter(run.events, 1) as writer:
            event = writer.write(events.Skipped(1, "loss"))
    with run.events.open("ab") as file:
        file.write(b'{"type": "step", "st')
    left = commands.send(run.commands, "stop")
    stray = run.output / ".impasto-0123456789abcdef.tmp"
    stray.write_bytes(b"half")
    with run.hold():
        assert run.begin_attempt({"device": "cuda:0"}) == 2
    first, second = run.attempts()
    assert (first["number"], first["device"], first["pid"], first["versions"]) == (
        1, "cpu", os.getpid(), {"torch": "2.13"},
    )  # fmt: skip
    assert (second["number"], second["device"]) == (2, "cuda:0")
    assert isinstance(first["host"], str)
    assert abs(first["started"] - time.time()) < 60
    assert events.read_events(run.events) == ([event], run.events.stat().st_size)
    assert commands.pending(run.commands) == []
    assert commands.answer(left).outcome == "void"
    assert not stray.exists()
    assert json.loads(run.run.read_text(encoding="utf-8"))["name"] == run.name


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_a_damaged_record_is_an_error_with_a_remedy(run, text):
    run.run.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    assert code_of(lambda: run.begin_attempt({})) == "run.damaged"
    assert code_of(run.attempts) == "run.damaged"


def test_the_status_is_what_was_written_last(run):
    for step in (1, 2):
        status = Status(state="running", phase="train", step=step, steps=10, attempt=1, heartbeat=time.time())
        assert run.write_status(status)
    assert run.read_status() == status
    with RunDirectory.open(run.path).hold():
        assert RunDirectory.open(run.path).read_status() == status


def test_how_a_run_stands_follows_lock_and_status(run):
    def status(state: str) -> Status:
        return Status(state=state, phase=None, step=1, steps=10, attempt=1, heartbeat=0.0)

    assert run.state() == "new"
    with run.hold():
        run.begin_attempt({})
        assert run.state() == "running"
    assert run.state() == "interrupted"  # it died before its first status
    run.write_status(status("running"))
    assert run.state() == "interrupted"
    run.write_status(status("paused"))
    assert run.state() == "paused"
    with run.hold():
        assert run.state() == "running"


@pytest.mark.parametrize("text", ["", '{"state": "running"}', "[1]", "{"])
def test_a_damaged_status_is_none(run, text):
    run.status.write_text(text, encoding="utf-8")
    assert run.read_status() is None


def test_a_heartbeat_that_fails_ends_nothing(run, monkeypatch):
    status = Status(state="running", phase=None, step=0, steps=10, attempt=1, heartbeat=0.0)
    monkeypatch.setattr(files, "write_json", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert not run.write_status(status)


def test_the_latest_started_run_is_listed_first_and_deleted_ones_not_at_all(tmp_path):
    first, second, third, fourth = (RunDirectory.create(tmp_path, name) for name in ("a", "b", "c", "d"))
    with second.hold():
        second.begin_attempt({})
    fourth.run.unlink()
    with places.runs_list().open("a", encoding="utf-8") as file:
        file.write("damaged\n[]\n")
    assert known_runs() == [second.path, third.path, first.path]


def test_runs_are_found_by_path_by_name_beside_and_by_name_in_the_list(tmp_path, monkeypatch):
    listed = RunDirectory.create(tmp_path / "elsewhere", "my-style")
    assert find_run(str(listed.path)).path == listed.path
    assert find_run("my-style").path == listed.path
    monkeypatch.chdir(tmp_path)
    beside = RunDirectory.create(tmp_path / "runs", "my-style")
    assert find_run("my-style").path == beside.path


def test_a_run_that_is_not_found_brings_near_names(tmp_path):
    RunDirectory.create(tmp_path, "my-style")
    with pytest.raises(RunError, match='no run called "my-stile"') as caught:
        find_run("my-stile")
    assert "my-style" in caught.value.remedy
    assert code_of(lambda: find_run("")) == "run.unknown"


def test_a_name_that_several_runs_have_asks_for_a_path(tmp_path):
    runs = [RunDirectory.create(tmp_path / folder, "style") for folder in ("a", "b")]
    with pytest.raises(RunError) as caught:
        find_run("style")
    assert caught.value.code == "run.ambiguous"
    assert all(str(run.path) in caught.value.sentence for run in runs)


def test_without_a_list_no_run_is_known():
    assert known_runs() == []


def test_a_waiting_lock_is_had_when_the_holder_goes(tmp_path):
    holding, go = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.hold_lock(tmp_path / "lock", 0):
            holding.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    with pytest.raises(locks.LockBusyError), locks.hold_lock(tmp_path / "lock", 0):
        pass
    go.set()
    with locks.hold_lock(tmp_path / "lock", 30):
        thread.join()
    assert not locks.is_held(tmp_path / "missing")


def test_who_asks_whether_a_lock_is_held_does_not_take_another_who_asks_for_its_holder(tmp_path, monkeypatch):
    lock, answers, unlock = tmp_path / "lock", [], locks._unlock
    lock.touch()

    def ask_meanwhile(file) -> None:
        """The first is about to let go: the second asks now, and where it must ask again the first has gone."""
        with contextlib.ExitStack() as first:
            first.callback(unlock, file)
            monkeypatch.setattr(locks, "_unlock", unlock)
            monkeypatch.setattr(locks.time, "sleep", lambda _: first.close())
            answers.append(locks.is_held(lock))

    monkeypatch.setattr(locks, "_unlock", ask_meanwhile)
    answers.append(locks.is_held(lock))
    assert answers == [False, False]
    with locks.hold_lock(lock, 0):
        assert locks.is_held(lock)
