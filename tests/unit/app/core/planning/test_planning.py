"""The app's side of the planner: real questions to a real `python -m trainer plan --serve`, its end and its errors."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.core.planning.answer import preflight
from app.core.planning.forecaster import Forecaster, ForecastRequest
from app.core.tasks import Tasks
from tests.support.drafts import opened
from tests.support.forecasts import known_job
from trainer.errors import ImpastoError


class Desk:
    """The owner's thread: what is posted is done while it waits for something."""

    def __init__(self) -> None:
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.tasks = Tasks(self._posted.put)
        self.forecaster = Forecaster(self.tasks, self._posted.put)
        self.states: list[str] = []
        self.forecaster.changed.connect(lambda _: self.states.append(self.forecaster.state))

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            self._posted.get(timeout=60)()

    def ended(self) -> bool:
        return self.forecaster.state in ("done", "failed")

    def child(self) -> int:
        process = self.forecaster._served._process
        assert process is not None
        return process.pid


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.forecaster.close()
    desk.tasks.close()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return known_job(tmp_path / "Auftrag ü", "sd15")


def test_the_pick_comes_before_the_whole_and_an_error_in_words(desk: Desk, job: Path) -> None:
    forecaster = desk.forecaster
    forecaster.ask(ForecastRequest(job, "8GB"))
    desk.wait(desk.ended)
    assert desk.states == ["asked", "picked", "done"]
    answer = forecaster.answer
    assert answer and answer.whole and answer.pick and answer.smaller and not forecaster.stale
    assert answer.pick.forecast.seconds > 60 and answer.pick.decisive.peaks
    assert answer.pick.keys["fit.micro_batch"] >= 1
    forecaster.ask(ForecastRequest(job, "RTX 9999"))
    assert forecaster.stale and forecaster.answer is answer
    desk.wait(desk.ended)
    assert forecaster.error is not None and "RTX 9999" in forecaster.error.sentence and forecaster.error.remedy
    assert forecaster.stale and forecaster.answer is answer  # kept, as it says what was


def test_settings_that_do_not_suit_the_base_are_problems_of_their_own_keys(desk: Desk, job: Path) -> None:
    text = job.read_text(encoding="utf-8").replace("[recipe.images]\n", "[recipe.images]\nbucket_min = 768\n")
    job.write_text(text, encoding="utf-8")
    draft = opened(job, desk.tasks)
    desk.forecaster.ask(ForecastRequest(job, "8GB"))
    desk.wait(desk.ended)
    checks = preflight(draft, None, desk.forecaster.error)
    assert [check.key for check in checks] == ["recipe.images.bucket_min"]
    assert checks[0].severity == "error"
    assert checks[0].sentence == "Is 768, more than the resolution of 512; no bucket is left."


def test_what_stands_in_the_way_is_said_in_words_of_the_app(desk: Desk, job: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with job.open("a", encoding="utf-8") as file:
        file.write("\n[output]\nruns = '../file'\n")
    draft = opened(job, desk.tasks)
    desk.forecaster.ask(ForecastRequest(job, "8GB"))
    desk.wait(desk.ended)
    (runs,) = [check for check in preflight(draft, desk.forecaster.answer, None) if check.key == "output.runs"]
    assert runs.severity == "error" and "is a file" in runs.sentence
    for code in ("run.folder", "run.room", "gpu.none", "job.invalid", "job.toml", "job.unreadable"):
        error = ImpastoError(code, "It is so.", "See `python -m trainer doctor`, or --set output.runs.")
        told = next(check for check in preflight(draft, None, error) if check.sentence == "It is so.")
        assert told.remedy and not [word for word in ("trainer", "--set", "output.runs") if word in told.remedy]
        assert (told.key == "output.runs") == code.startswith("run.")


def test_findings_and_remarks_cross_the_process_as_codes_and_are_worded_here(desk: Desk, job: Path) -> None:
    (job.parent / "pictures").mkdir()
    (job.parent / "pictures" / "Kätzchen.png").write_bytes(b"")
    desk.forecaster.ask(ForecastRequest(job, "8GB"))
    desk.wait(desk.ended)
    answer = desk.forecaster.answer
    assert answer is not None and [found.code for found in answer.findings] == ["image.empty", "caption.missing"]
    checks = preflight(opened(job, desk.tasks), answer, None)
    (empty,) = [check for check in checks if check.sentence.endswith("Kätzchen.png is empty (0 bytes).")]
    assert (empty.severity, empty.remedy) == ("error", "Copy the image again, or remove it.")
    codes = {check.remark.code: check.remark.values for check in checks if check.remark}
    assert codes["dataset.empty"] == {"images": 20} and codes["base.assumed"] == {"family": "sd15"}


def test_the_newest_question_is_answered_alone(desk: Desk, job: Path) -> None:
    for card in ("6GB", "8GB", "24GB"):
        desk.forecaster.ask(ForecastRequest(job, card))
    desk.wait(desk.ended)
    assert desk.states == ["asked", "asked", "asked", "picked", "done"]
    assert desk.forecaster.answer is not None and "24GB" in desk.forecaster.answer.gpu.name


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill with SIGKILL")
def test_a_killed_planner_is_started_again_and_one_that_dies_again_is_told(desk: Desk, job: Path) -> None:
    desk.forecaster.ask(ForecastRequest(job, "8GB"))
    first = desk.child()
    os.kill(first, signal.SIGKILL)
    desk.wait(desk.ended)
    assert desk.forecaster.state == "done" and desk.child() != first
    desk.forecaster.ask(ForecastRequest(job, "12GB"))
    for _ in range(2):
        child = desk.child()
        os.kill(child, signal.SIGKILL)
        desk.wait(lambda child=child: desk.forecaster.state == "failed" or desk.child() != child)  # type: ignore[misc]
    assert desk.forecaster.error is not None and "stopped unexpectedly" in desk.forecaster.error.sentence
    desk.forecaster.ask(ForecastRequest(job, "12GB"))  # and the next question finds a new one
    desk.wait(desk.ended)
    assert desk.forecaster.state == "done"


def test_at_rest_no_process_is_left_and_what_was_asked_is_given_up(desk: Desk, job: Path) -> None:
    desk.forecaster.ask(ForecastRequest(job, "8GB"))
    process = desk.forecaster._served._process
    desk.forecaster.stop()
    assert desk.forecaster.state == "idle" and not desk.forecaster.waiting
    assert process is not None and process.wait(60) != 0


def test_the_cards_of_this_machine_are_looked_at(desk: Desk) -> None:
    seen: list[None] = []
    desk.forecaster.gpus_read.connect(seen.append)
    desk.forecaster.read_gpus()
    desk.wait(lambda: bool(seen))
    assert desk.forecaster.gpus is not None
