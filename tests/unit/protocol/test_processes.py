import subprocess
import sys
import time

import pytest

from tests.support.waiting import until
from trainer.protocol import locks
from trainer.protocol.processes import command, last_words, launch, stop_tracking
from trainer.protocol.queue import Queue

PARENT = """
import sys
from pathlib import Path
from trainer.protocol.processes import launch, stop_tracking

stop_tracking(launch(["queue"], Path(sys.argv[1])))
print("started", flush=True)
sys.stdin.read()
"""


def test_a_child_says_everything_into_its_log_and_takes_no_input(tmp_path):
    log = tmp_path / "neu ü" / "worker.log"
    for _ in range(2):
        assert launch(["--version"], log).wait(60) == 0
    assert launch(["queue", "move", "nothing"], log).wait(60) == 2
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[0] == lines[1]
    assert lines[0].startswith("Impasto ")
    assert lines[2] == 'Error: There is no entry "nothing" in the queue.'
    assert last_words(log, lines=1) == "What to do: Specify the ID of an entry; `queue list` shows them."
    assert last_words(log, since=log.stat().st_size) == ""
    assert last_words(tmp_path / "none.log") == ""


def test_a_child_has_the_environment_it_is_given(tmp_path):
    queue = Queue(tmp_path / "elsewhere" / "queue")
    (tmp_path / "style").mkdir()
    (tmp_path / "style" / "job.toml").write_text("", encoding="utf-8")
    queue.add(tmp_path / "style" / "job.toml")
    log = tmp_path / "list.log"
    assert launch(["queue", "list"], log, {"IMPASTO_HOME": str(tmp_path / "elsewhere")}).wait(60) == 0
    assert "style" in log.read_text(encoding="utf-8")


def test_a_child_goes_on_when_its_parent_is_killed(tmp_path):
    queue = Queue()
    (tmp_path / "job.toml").write_text("", encoding="utf-8")
    entry = queue.add(tmp_path / "job.toml", after=time.time() + 3600)
    words = [sys.executable, "-c", PARENT, str(queue.worker_log)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "started\n"
        until(queue.worker_alive)
        parent.kill()
    assert queue.worker_alive()
    queue.remove(entry.id)  # and with nothing left to do it ends
    with locks.hold_lock(queue.worker_lock, 60.0):
        pass


def test_a_start_that_fails_is_an_os_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match="file"):
        launch(["--version"], tmp_path / "file" / "worker.log")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    assert command(["queue"])[0] == str(tmp_path / "no python")
    with pytest.raises(OSError, match="no python"):
        launch(["--version"], tmp_path / "worker.log")


def test_letting_go_of_an_ended_child_keeps_its_exit_code(tmp_path):
    child = launch(["queue", "move", "nothing"], tmp_path / "log")
    child.wait(60)
    stop_tracking(child)
    assert child.returncode == 2
