"""The queue as it is used: real jobs, a real worker, real engines, and kills in between."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from tests.support.waiting import until
from trainer.config.load import load_job
from trainer.protocol.locks import is_lane_held
from trainer.protocol.processes import command
from trainer.protocol.queue import Entry, Queue
from trainer.protocol.run_directory import RunDirectory

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows' SIGTERM ends a process as hard

# Queues three jobs, starts the worker as the app does, and then only waits: to be killed.
APP = """
import sys
from pathlib import Path
from trainer.protocol.processes import launch, stop_tracking
from trainer.protocol.queue import Queue

queue = Queue()
for job in sys.argv[1:]:
    queue.add(Path(job))
worker = launch(["queue"], queue.worker_log)
stop_tracking(worker)
print(worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Write a job of so many steps; one whose name begins with "bad" has no base."""
    folder = tmp_path_factory.mktemp("queue ü")
    base = tiny_base("sd15", folder / "base", form="single", depth=1)
    pictures = photographs(folder / "pictures", count=3)

    def write(name: str, steps: int) -> Path:
        job = write_job(folder / name, base if not name.startswith("bad") else folder / "none", pictures, name=name)
        text = job.read_text(encoding="utf-8").replace("steps = 6\n", f"steps = {steps}\n", 1)
        rare = "[report]\nvalidation = {every = 5000, timesteps = [500]}\n"
        job.write_text(text.partition("[report]")[0] + rare, encoding="utf-8")
        return job

    return write


@pytest.fixture
def queue() -> Iterator[Queue]:
    """The user's queue; what still runs in it is killed after the test."""
    queue = Queue()
    yield queue
    for entry in queue.entries():
        if queue.engine_alive(entry.id) and entry.pid:
            os.kill(entry.pid, KILL)


def while_it_works(worker: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    """Wait for what a worker does; it must not end before."""

    def reached() -> bool:
        assert worker.poll() is None, "the worker ended"
        return is_so()

    until(reached)


def trains(queue: Queue, name: str, attempt: int = 1) -> Callable[[], bool]:
    """Tell whether an entry's engine has done its first step of this attempt."""

    def has_stepped() -> bool:
        run = queue.get(name).run
        status = RunDirectory(run).read_status() if run else None
        return status is not None and status.attempt == attempt and status.phase == "train" and status.step > 0

    return has_stepped


def by_name(queue: Queue) -> dict[str, Entry]:
    return {entry.job.parent.name: entry for entry in queue.entries() if entry.job}


@pytest.mark.slow
def test_three_jobs_are_done_though_whoever_queued_them_and_the_worker_are_killed(jobs, queue):
    paths = [jobs("first", 5000), jobs("bad", 2), jobs("third", 2)]
    with subprocess.Popen(
        [sys.executable, "-c", APP, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as app:
        worker = int(app.stdout.readline())
        until(lambda: len(queue.entries()) == 3)
        first = by_name(queue)["first"].id
        edited = paths[2].read_text(encoding="utf-8").replace("steps = 2\n", "steps = 3\n", 1)
        paths[2].write_text(edited, encoding="utf-8")
        until(trains(queue, first))
        app.kill()
    assert queue.worker_alive()
    os.kill(worker, KILL)
    until(lambda: not queue.worker_alive())
    assert queue.engine_alive(first)
    assert is_lane_held("cpu")

    with subprocess.Popen(command(["queue"]), stdout=subprocess.PIPE, text=True, encoding="utf-8") as second:
        while_it_works(second, queue.worker_alive)
        queue.pause(first)
        while_it_works(second, lambda: queue.get(first).state == "paused")
        run = RunDirectory(queue.get(first).run)
        paused_at = run.read_status()
        assert (paused_at.state, paused_at.attempt) == ("paused", 1)  # taken over, not begun again
        resumed = queue.add_run(run.path, steps=paused_at.step + 2)
        assert (resumed.id, resumed.state) == (first, "waiting")
        assert [entry.name for entry in queue.entries()] == ["first", "bad", "third"]
        said = second.communicate(timeout=180)[0]
    assert second.returncode == 0
    entries = by_name(queue)
    assert {name: entry.state for name, entry in entries.items()} == {"first": "done", "bad": "failed", "third": "done"}
    assert "does not exist" in entries["bad"].problem
    assert entries["bad"].run is None
    assert (entries["first"].run / "output" / "first.safetensors").is_file()
    assert (entries["third"].run / "output" / "third.safetensors").is_file()
    assert load_job(RunDirectory(entries["third"].run).job).recipe.steps == 2  # as when it was put in
    assert load_job(paths[2]).recipe.steps == 3
    assert entries["third"].run.parent == paths[2].parent / "runs"
    assert [len(RunDirectory(entries[name].run).attempts()) for name in ("first", "third")] == [2, 1]
    assert f"bad ({entries['bad'].id}): failed. {entries['bad'].problem}" in said
    assert not is_lane_held("cpu")
