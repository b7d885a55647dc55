"""The resident child that the app talks to in JSON lines."""

import queue
import sys

import pytest

from app.core import engine
from app.core.engine import ServedProcess

PATIENCE = 120
# Says what it was sent only after somebody tells it to begin by making a file: until then its pipe fills.
CHILD = """
import json, pathlib, sys, time
gate = pathlib.Path(sys.argv[1])
while not gate.exists():
    time.sleep(0.01)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("end"):
        sys.exit("no more")
    print(json.dumps({"id": asked["id"], "length": len(line)}), flush=True)
"""


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """A child whose `gate` is shut: it reads nothing yet."""
    path = tmp_path / "gate"
    monkeypatch.setattr(engine, "command", lambda words: [sys.executable, "-c", CHILD, str(path)])
    return path


@pytest.fixture
def posted():
    return queue.Queue()


@pytest.fixture
def child(gate, posted):
    child = ServedProcess(["plan", "--serve"], posted.put)
    child.answers, child.ends = [], []
    child.answered.connect(child.answers.append)
    child.ended.connect(child.ends.append)
    yield child
    child.close()


def until(posted, so):
    while not so():
        posted.get(timeout=PATIENCE)()


def test_a_request_longer_than_a_pipe_holds_waits_for_nobody(child, gate, posted):
    child.send({"id": 1, "words": "x" * 1_000_000})
    child.send({"id": 2})
    assert child.answers == []  # and yet here we are: the child has read nothing
    gate.touch()
    until(posted, lambda: len(child.answers) == 2)
    assert [answer["id"] for answer in child.answers] == [1, 2]
    assert child.answers[0]["length"] > 1_000_000


def test_a_child_that_never_reads_can_be_ended(child):
    child.send({"id": 1, "words": "x" * 1_000_000})
    threads = child._threads
    child.close()
    assert not any(thread.is_alive() for thread in threads)
    assert child.ends == []


def test_leaving_a_child_does_not_wait_for_its_end(child, monkeypatch):
    child.send({"id": 1})
    left, threads = child._process, child._threads
    with monkeypatch.context() as patched:
        patched.setattr(left, "kill", lambda: None)  # one that takes its time to end
        child.stop()
        assert left.poll() is None
        child.send({"id": 2})
    assert child._process is not left
    left.kill()
    child.close()
    assert left.returncode
    assert not any(thread.is_alive() for thread in (*threads, *child._threads))
    assert child.ends == []


def test_a_child_that_died_is_told_once_and_started_anew_by_the_next_request(child, gate, posted):
    gate.touch()
    child.send({"id": 1, "end": True})
    until(posted, lambda: child.ends)
    assert child.ends == ["no more"]
    child.send({"id": 2})
    until(posted, lambda: child.answers)
    assert child.answers[0]["id"] == 2
    first = child._process
    first.kill()
    first.wait(PATIENCE)
    child.send({"id": 3})  # before anybody was told
    until(posted, lambda: len(child.answers) == 2)
    assert child.answers[1]["id"] == 3
    assert child._process is not first
    assert len(child.ends) == 1
