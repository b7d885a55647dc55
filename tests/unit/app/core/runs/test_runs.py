"""One run as it is watched: it grows, is resumed, damaged, moved or of a newer version."""

import json
import queue
import shutil
import time

import pytest

from app.core.after.run_jobs import differences
from app.core.runs import run as run_module
from app.core.runs.run import Run, gpu_of
from app.core.runs.summary import summarize
from app.core.tasks import Tasks
from tests.support.runs import step_event, write_checkpoint, write_events, write_run
from trainer.config.load import load_job
from trainer.gpu import Gpu, GpuProcess
from trainer.protocol import events
from trainer.protocol.events import EventWriter, latest_steps, read_events
from trainer.protocol.run_directory import Status


class Desk:
    """Does what is posted home, as the window's event loop does."""

    def __init__(self):
        self.posted = queue.Queue()
        self.tasks = Tasks(self.posted.put, threads=1)

    def until(self, so):
        while not so():
            self.posted.get(timeout=120)()

    def read(self, run):
        run.read()
        self.until(lambda: not run._reading.busy)


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.tasks.close()


def opened(path, desk):
    run = Run(path, desk.tasks)
    desk.read(run)
    return run


# --- one run


def test_a_run_is_told_whole(tmp_path, desk):
    directory = write_run(tmp_path, "läufe und mehr", 40)
    run = opened(directory.path, desk)
    assert run.loaded
    expected = latest_steps(read_events(directory.events)[0])
    assert list(run.series.loss.steps) == list(expected)
    assert list(run.series.loss.values) == [event.loss for event in expected.values()]
    assert list(run.series.rates["text_encoder"].values) == [
        e.learning_rates["text_encoder"] for e in expected.values()
    ]
    assert len(run.previews) == 10
    assert [saved.step for saved in run.saved] == [8, 16, 24, 32, 40]
    assert run.summary.state == "done"
    assert (run.summary.step, run.summary.steps) == (40, 40)
    assert run.job.recipe.rank == 16
    assert run.forecast.gpu == "RTX 3060 12GB"
    held = {event.step: event.loss for event in run.validations}
    assert run.series.best_step() == min(held, key=held.get)


def test_what_is_written_later_is_read_without_what_was_read(tmp_path, desk, monkeypatch):
    directory = write_run(tmp_path, "run", 100, done=10, state="running")
    run = opened(directory.path, desk)
    asked = []
    original = events.read_lines
    monkeypatch.setattr(events, "read_lines", lambda *words: asked.append(words[1]) or original(*words))
    arrived = []
    run.events_arrived.connect(arrived.extend)
    size = directory.events.stat().st_size
    write_events(directory, [step_event(11, 100), step_event(12, 100)])
    desk.read(run)
    assert asked[0] == size
    assert [event.step for event in arrived] == [11, 12]
    assert run.series.loss.steps[-1] == 12


def test_a_line_that_is_half_written_waits_for_its_end(tmp_path, desk):
    directory = write_run(tmp_path, "run", 100, done=10, state="running")
    line = events.to_line(step_event(11, 100)).encode() + b"\n"
    with directory.events.open("ab") as file:
        file.write(line[:50])
    run = opened(directory.path, desk)
    assert run.loaded
    assert run.series.loss.steps[-1] == 10
    with directory.events.open("ab") as file:
        file.write(line[50:])
    desk.read(run)
    assert run.series.loss.steps[-1] == 11
    assert run.unknown == 0


def test_a_long_run_comes_in_portions_that_lose_nothing(tmp_path, desk, monkeypatch):
    monkeypatch.setattr(run_module, "_PORTION", 1000)  # a few lines, and some lines' middle
    directory = write_run(tmp_path, "run", 200)
    run = Run(directory.path, desk.tasks)
    portions = []
    run.events_arrived.connect(lambda new: portions.append(len(new)))
    run.read()
    desk.until(lambda: run.loaded)
    told, _ = read_events(directory.events)
    assert sum(portions) == len(told)
    assert len(portions) > 50
    assert list(run.series.loss.steps) == list(range(1, 201))


def test_a_resumed_attempt_replaces_the_steps_that_were_lost(tmp_path, desk):
    directory = write_run(tmp_path, "run", 100, done=60, state="running")
    told = [step_event(step, 100, seed=9) for step in range(51, 71)]
    write_events(directory, [events.AttemptStarted(pid=2, device="cpu"), *told], attempt=2)
    run = opened(directory.path, desk)
    assert list(run.series.loss.steps) == list(range(1, 71))
    assert list(run.series.loss.values)[50:] == [event.loss for event in told]
    expected = latest_steps(read_events(directory.events)[0])
    assert list(run.series.loss.values) == [event.loss for event in expected.values()]
    assert [mark.step for mark in run.series.marks if mark.kind == "resumed"] == [60]


def test_a_run_made_anew_in_the_same_place_is_told_anew(tmp_path, desk):
    directory = write_run(tmp_path, "run", 100)
    run = opened(directory.path, desk)
    told = []
    run.events_arrived.connect(told.append)
    shutil.rmtree(directory.path)
    write_run(tmp_path, "run", 5)
    desk.read(run)
    assert told[0] == []
    assert list(run.series.loss.steps) == [1, 2, 3, 4, 5]


def test_an_engine_that_died_is_seen_with_its_last_words(tmp_path, desk):
    directory = write_run(tmp_path, "run", 100, done=10, state="running")
    directory.console.write_bytes(b"old\n" * 9000 + b"step 1\rstep 2\rstep 3\r\nTraceback: caf\xe9\n\n")
    with directory.hold():
        run = opened(directory.path, desk)
        assert (run.alive, run.last_words) == (True, "")
        assert run.seconds_left() is not None
    changed = []
    run.changed.connect(changed.append)
    desk.read(run)
    assert changed
    assert run.summary.state == "interrupted"
    assert run.resumable
    assert run.seconds_left() is None
    assert run.last_words.splitlines()[-2:] == ["step 3", "Traceback: caf\ufffd"]
    assert len(run.last_words.splitlines()) == 12


def test_the_time_left_does_not_follow_a_clock_that_jumps(tmp_path, desk, monkeypatch):
    directory = write_run(tmp_path, "run", 100, done=60, state="running")
    with directory.hold():
        run = opened(directory.path, desk)
        before = run.seconds_left()
        monkeypatch.setattr(time, "time", lambda: 9e9)
        assert run.alive
        assert run.seconds_left() == pytest.approx(before, rel=0.01)
    each = sum(run.series.seconds.values[-50:]) + 5 * 1.5
    assert before == pytest.approx(40 * each / 55 + 0.4 * 80.0, rel=1e-6)


@pytest.mark.parametrize(("foreseen", "left"), [(1.5, 30.0 + 1.5 * 100 + 80.0), (None, None)])
def test_the_time_left_while_pictures_are_encoded_is_that_of_the_whole_run(tmp_path, desk, foreseen, left):
    directory = write_run(tmp_path, "run", 100, done=0, state="running")
    directory.events.unlink()
    begun = [
        events.AttemptStarted(pid=1, device="cuda:0", step_seconds=foreseen),
        events.PhaseStarted(phase="cache_pictures", total=40),
        events.PhaseProgress(phase="cache_pictures", done=10, total=40),
    ]
    write_events(directory, begun)
    with directory.hold():
        run = opened(directory.path, desk)
        run.progress.phases["cache_pictures"].started = run.now() - 10.0
        assert run.seconds_left() == (left if left is None else pytest.approx(left, rel=0.02))


def test_a_newer_version_s_events_and_job_are_told_in_words(tmp_path, desk):
    directory = write_run(tmp_path, "run", 20)
    with directory.events.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"type": "dreamed", "of": "sheep"}) + "\n")
    text = directory.job.read_text(encoding="utf-8").replace("schema = 3", "schema = 99")
    directory.job.write_text(text, encoding="utf-8")
    run = opened(directory.path, desk)
    assert len(run.series.loss) == 20
    assert run.job is None
    assert "newer Impasto" in run.problem
    assert "schema 99" in run.problem


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda run: run.run.write_text("{", encoding="utf-8"), "Could not read the run's history"),
        (lambda run: run.run.write_bytes(b"\xff\xfe\x00"), "Could not read the run's history"),
        (lambda run: run.run.write_text("[]", encoding="utf-8"), "Could not read the run's history"),
        (lambda run: run.run.unlink(), "no longer a run"),
        (lambda run: run.path.rename(run.path.with_name("elsewhere")), "moved, renamed or deleted"),
        (lambda run: shutil.rmtree(run.path.parent), "Could not reach"),
    ],
)
def test_a_folder_that_is_damaged_or_gone_has_words(tmp_path, desk, harm, words):
    directory = write_run(tmp_path / "runs", "run", 20)
    run = opened(directory.path, desk)
    harm(directory)
    desk.read(run)
    assert run.summary.state == "unknown"
    assert words in run.problem
    assert len(run.series.loss) == 20  # what was known stays


@pytest.mark.parametrize("text", ["", "{", "null", '{"state": "done"}', "\x00" * 40])
def test_a_damaged_status_is_no_reason_to_fail(tmp_path, text):
    directory = write_run(tmp_path, "run", 20)
    directory.status.write_text(text, encoding="utf-8")
    assert summarize(directory.path).state == "interrupted"


def test_without_a_status_a_run_still_has_its_checkpoints(tmp_path):
    directory = write_run(tmp_path, "run", 20, done=12)
    write_checkpoint(directory, 10)
    (directory.checkpoints / "step-00000011").write_bytes(b"no checkpoint")
    directory.status.unlink()
    assert (summarize(directory.path).step, summarize(directory.path).kept) == (12, 10)


def test_a_killed_run_stands_at_the_last_step_that_it_told_of(tmp_path):
    directory = write_run(tmp_path, "run", 600, done=340, state="running")
    directory.write_status(Status("running", "train", 337, 600, 1, 1.0))
    assert (summarize(directory.path).step, summarize(directory.path).kept) == (340, None)
    for step in (200, 300):
        write_checkpoint(directory, step)
    (directory.checkpoints / ".step-00000340.77").mkdir()  # one that was being written
    assert summarize(directory.path).kept == 300
    directory.write_status(Status("running", "train", 300, 600, 2, 1.0))
    write_events(directory, [events.AttemptStarted(pid=1, device="cuda:0")], attempt=2)
    assert summarize(directory.path).step == 300  # killed again before its first step
    directory.write_status(Status("stopped", None, 337, 600, 1, 1.0))
    assert summarize(directory.path).step == 337  # who ended in order knows best


@pytest.mark.parametrize(
    "harm",
    [
        lambda newest: (newest / "state.json").unlink(),
        lambda newest: (newest / "state.json").write_bytes(b"{"),
        lambda newest: (newest / "manifest.json").unlink(),
        lambda newest: (newest / "manifest.json").write_bytes(b"\x00\x00"),
        lambda newest: (newest / "manifest.json").write_text('{"files": ["state.json"]}', encoding="utf-8"),
        shutil.rmtree,
    ],
)
def test_a_killed_run_goes_on_from_the_newest_checkpoint_that_nothing_is_missing_of(tmp_path, harm):
    directory = write_run(tmp_path, "run", 600, done=340, state="running")
    for step in (200, 300):
        newest = write_checkpoint(directory, step)
    harm(newest)
    assert summarize(directory.path).kept == 200


def test_noise_in_the_events_is_passed_over(tmp_path, desk):
    directory = write_run(tmp_path, "run", 20, done=10)
    with directory.events.open("ab") as file:
        file.write(b"\xff\xfe garbage\n{}\n[]\nnull\n\n")
    write_events(directory, [step_event(11, 20)])
    run = opened(directory.path, desk)
    assert len(run.series.loss) == 11
    assert run.unknown == 5


def test_a_run_on_a_disk_that_only_reads_is_read(tmp_path, desk):
    directory = write_run(tmp_path, "run", 20)
    for path in (*directory.path.rglob("*"), directory.path):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        run = opened(directory.path, desk)
        assert (run.summary.state, len(run.series.loss), run.problem) == ("done", 20, "")
    finally:
        for path in (directory.path, *directory.path.rglob("*")):
            path.chmod(0o755)


def test_nothing_is_taken_in_after_the_close(tmp_path, desk):
    directory = write_run(tmp_path, "run", 20)
    run = Run(directory.path, desk.tasks)
    run.read()
    run.close()
    desk.posted.get(timeout=120)()
    assert len(run.series.loss) == 0
    run.read()
    assert not run._reading.busy


# --- the list


def test_two_windows_watch_one_run(tmp_path, desk):
    directory = write_run(tmp_path, "one", 10, done=5, state="running")
    with directory.hold():
        both = [opened(directory.path, desk), opened(directory.path, desk)]
        with EventWriter(directory.events, 1) as writer:
            writer.write(step_event(6, 10))
        for run in both:
            desk.read(run)
            assert run.alive
            assert run.series.loss.steps[-1] == 6


def test_jobs_differ_in_the_keys_that_differ(tmp_path):
    jobs = [load_job(write_run(tmp_path, name, 10, **more).job) for name, more in (("a", {}), ("b", {"rank": 32}))]
    found = differences(jobs)
    assert [(each.key, each.values) for each in found] == [("recipe.rank", (16, 32))]
    assert differences([jobs[0], jobs[0]]) == []


def test_the_card_of_a_run_is_the_one_where_its_process_is(tmp_path, desk):
    run = opened(write_run(tmp_path, "run", 10).path, desk)
    run.progress.pid = 77
    plain = Gpu(0, "a", "A", 1, 1, "", (12, 0), (8, 6), ())
    used = Gpu(1, "b", "B", 1, 1, "", (12, 0), (8, 6), (GpuProcess(77, "python", None),))
    named = Gpu(2, "c", "RTX 3060 12GB", 1, 1, "", (12, 0), (8, 6), ())
    assert gpu_of(run, [plain, used, named]) is used
    assert gpu_of(run, [plain, named]) is named
    assert gpu_of(run, [plain]) is plain
    assert gpu_of(run, [plain, plain]) is None
    assert gpu_of(run, []) is None


# --- disks that do not answer
