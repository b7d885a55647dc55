"""The header of a run: what it says of run directories, and what a real engine answers it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QObject, Qt, QUrl, Slot
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.runs.run import Run
from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.runs.header import RunHeader
from app.qt.runs.page import FailureBanner
from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from tests.support.written_runs import held, new_run
from trainer.protocol import commands, events
from trainer.protocol.run_directory import RunDirectory


@pytest.fixture
def header(qtbot: QtBot, session: Session) -> Iterator[RunHeader]:
    header = RunHeader(session, Commands())
    qtbot.addWidget(header)
    header.resize(1000, 140)
    with qtbot.waitExposed(header):
        header.show()
    yield header
    header.close()
    QApplication.processEvents()


def look(qtbot: QtBot, run: Run) -> None:
    """Read what is new, as the page's clock does."""
    heard: list[None] = []
    end = run.polled.connect(heard.append)
    run.read()
    qtbot.waitUntil(lambda: bool(heard))
    end()


def usable(header: RunHeader) -> set[str]:
    """The buttons that are seen and can be pressed."""
    header._commands.refresh_now()
    shown = {name.removeprefix("runs.") for name, one in header.buttons.items() if one.isVisible() and one.isEnabled()}
    return shown - {"folder"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A real engine that trains a tiny base for longer than any test waits."""
    base = tiny_base("sd15", tmp_path / "base", form="single", depth=1)
    job = write_job(tmp_path / "job ü", base, photographs(tmp_path / "pictures", count=4), name="asked")
    rare = ("validation.every", "previews.every", "saving.every_steps", "saving.checkpoint_every")
    settings = ["recipe.steps=5000", *(f"report.{rhythm}=5000" for rhythm in rare)]
    words = [word for setting in settings for word in ("--set", setting)]
    engine = subprocess.Popen(
        [sys.executable, "-m", "trainer", "train", str(job), *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    with engine:
        yield engine
        engine.kill()


def test_a_real_engine_is_asked_for_previews_saving_and_by_two_windows_for_a_pause(
    qtbot, session, another_session, header, engine, tmp_path
):
    folder = tmp_path / "job ü" / "runs" / "asked"
    qtbot.waitUntil(lambda: (folder / "run.json").is_file() or engine.poll() is not None)
    assert engine.poll() is None, engine.stderr.read()
    beside = RunHeader(another_session, Commands())
    qtbot.addWidget(beside)
    beside.show()
    run, same_run = session.runs.open(folder), another_session.runs.open(folder)
    said, said_beside = list[str](), list[str]()
    for one, its_run, heard in ((header, run, said), (beside, same_run, said_beside)):
        one.show_run(its_run)
        one.message_shown.connect(heard.append)
        one.notified.connect(lambda words, *_, heard=heard: heard.append(words))

    def until(reached: Callable[[], object]) -> None:
        def looked() -> bool:
            run.read()
            same_run.read()
            return bool(reached())

        qtbot.waitUntil(looked)

    until(lambda: run.progress.step is not None and header.can_preview())
    assert usable(header) == {"sample", "save", "pause", "stop"}
    qtbot.mouseClick(header.buttons["runs.sample"], Qt.MouseButton.LeftButton)
    assert not header.can_preview(), "it was asked already"
    qtbot.mouseClick(header.buttons["runs.save"], Qt.MouseButton.LeftButton)
    until(lambda: len(said) == 2 and len(run.previews) == 2 and run.saved)
    assert {words.split(" asked-")[0] for words in said} == {"asked has generated its previews.", "asked has saved"}
    drawn = run.previews[-1]
    assert (folder / drawn.file).is_file()
    assert drawn.step > 0, "the first is the baseline's"
    assert (folder / run.saved[-1].file).is_file()
    assert header.facts.text().startswith("Step ")
    assert "images/s" in header.facts.text()
    assert "% waiting for data" in header.facts.text()
    assert "on the CPU" in header.facts.text()

    until(lambda: all("pause" in usable(one) for one in (header, beside)))
    said.clear()
    said_beside.clear()
    qtbot.mouseClick(header.buttons["runs.pause"], Qt.MouseButton.LeftButton)
    assert usable(header) <= {"withdraw"}, "it may be withdrawn until the engine has read it"
    qtbot.mouseClick(beside.buttons["runs.pause"], Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: engine.poll() is not None)
    assert engine.returncode == 75, engine.stderr.read()
    until(lambda: all(one.state.text() == "Paused" and usable(one) == {"resume"} for one in (header, beside)))
    until(lambda: said and said_beside)
    assert said == said_beside == ["asked is paused and its GPU memory is free."]
    assert header.facts.text() == beside.facts.text()
    assert not header.phases.bars["train"].current


def test_what_can_be_asked_follows_how_the_run_stands(qtbot, session, header, tmp_path):
    assert usable(header) == set()
    assert header.name.text() == "No run"
    plain = new_run(tmp_path, "plain", prompts=())
    with held(plain) as engine:
        run = session.runs.open(plain.path)
        header.show_run(run)
        look(qtbot, run)
        assert usable(header) == {"pause", "stop"}, "it has not begun to train"
        engine.tell(events.PhaseStarted(phase="train", total=1000))
        look(qtbot, run)
        assert usable(header) == {"save", "pause", "stop"}, "its job has no prompts"
        engine.stand("done", 1000)
    look(qtbot, run)
    assert usable(header) == set()
    assert header.state.text() == "Done"


def test_an_engine_that_dies_leaves_the_order_undone_and_the_run_to_be_resumed(qtbot, session, header, tmp_path):
    cats = new_run(tmp_path, "cats")
    run = session.runs.open(cats.path)
    header.show_run(run)
    told: list[tuple[object, ...]] = []
    header.notified.connect(lambda *notice: told.append(notice))
    with held(cats) as engine:
        engine.tell(events.PhaseStarted(phase="train", total=1000))
        look(qtbot, run)
        header.preview_now()
        qtbot.waitUntil(lambda: bool(commands.pending(cats.commands)))
        look(qtbot, run)
        assert header.state.text() == "Running · preview requested"
    look(qtbot, run)
    qtbot.waitUntil(lambda: bool(told))
    assert told == [("cats ended before it received “Preview now”.", "warning", None)]
    assert header.state.text() == "Interrupted"
    assert usable(header) == {"resume"}


def test_resume_goes_through_the_queue_and_waits_for_its_turn(qtbot, session, header, tmp_path):
    with held(new_run(tmp_path, "cats")) as engine:
        engine.stand("paused", 30)
    run = session.runs.open(engine.run.path)
    header.show_run(run)
    look(qtbot, run)
    session.queue.queue.hold()  # nobody begins it here
    qtbot.mouseClick(header.buttons["runs.resume"], Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: bool(session.queue.entries))
    assert session.queue.entries[0].run == engine.run.path
    assert header.state.text() == "Paused · queued"
    assert usable(header) == set()


def test_why_a_run_had_to_pause_stands_above_it_until_it_goes_on(qtbot, session, tmp_path):
    trouble = FailureBanner()
    qtbot.addWidget(trouble)
    with held(new_run(tmp_path, "cats")) as engine:
        engine.tell(events.ErrorEvent(code="disk.full", sentence="No room.", remedy="Make some."))
        engine.stand("paused", 30)
    run = session.runs.open(engine.run.path)
    look(qtbot, run)
    trouble.show_run(run)
    assert not trouble.isHidden() and trouble.sentence.text() == "No room. Make some."
    with held(engine.run) as engine:
        engine.stand("paused", 40)
    look(qtbot, run)
    trouble.show_run(run)
    assert trouble.isHidden(), "somebody paused it"
    with held(engine.run):
        pass
    engine.run.console.write_text("step 40", encoding="utf-8")
    look(qtbot, run)
    trouble.show_run(run)
    assert "stopped unexpectedly" in trouble.sentence.text() and not trouble.last_words.isHidden()
    trouble.show_run(run, "No room. Make some.")  # as the queue was told, when the run's own disk took no word
    assert trouble.sentence.text() == "No room. Make some." and trouble.last_words.isHidden()


def test_between_resume_and_the_engine_s_first_step_it_says_that_it_starts(qtbot, session, header, tmp_path):
    """What worker and engine enter while the libraries are imported, which takes the engine some seconds."""
    with held(new_run(tmp_path, "cats")) as engine:
        engine.stand("paused", 30)
    run, queue = session.runs.open(engine.run.path), session.queue.queue
    header.show_run(run)
    entry = queue.add_run(engine.run.path)

    def said_when(**now: object) -> str:
        queue.change(entry.id, lambda entry: replace(entry, **now))
        qtbot.waitUntil(lambda: session.queue.look() or session.queue.entry(entry.id) == queue.get(entry.id))
        look(qtbot, run)
        return header.state.text()

    with queue.engine(entry.id):
        assert said_when(state="running", pid=None) == "Starting…"  # the worker has begun it
        assert usable(header) == set()
        assert said_when(pid=os.getpid(), attempts=1) == "Starting…"  # the engine has found its entry
        assert usable(header) == set()
        with held(engine.run):
            look(qtbot, run)
            assert header.state.text() == "Running"
        look(qtbot, run)
        assert header.state.text() == "Interrupted", "killed: it does not start any more"
        assert usable(header) == {"resume"}


def test_the_phases_of_a_run_have_names_amounts_and_bars(qtbot, session, header, tmp_path):
    with held(new_run(tmp_path, "cats")) as engine:
        engine.tell(
            events.PhaseStarted(phase="load", total=1),
            events.PhaseFinished(phase="load", seconds=75.0),
            events.PhaseStarted(phase="cache_pictures", total=40),
            events.PhaseProgress(phase="cache_pictures", done=10, total=40),
        )
        run = session.runs.open(engine.run.path)
        header.show_run(run)
        look(qtbot, run)
        bars = header.phases.bars
        assert [name for name, bar in bars.items() if bar.isVisible()] == ["load", "cache_pictures"]
        assert (bars["load"].amount, bars["load"].part, bars["load"].current) == ("75 s", 1.0, False)
        assert bars["cache_pictures"].amount == "10 / 40"
        assert bars["cache_pictures"].accessibleName() == "Images 25% 10 / 40"
        assert bars["cache_pictures"].current
        assert header.state.text() == "Running"
    shown = header.grab().toImage()
    assert not shown.isNull()


class Opened(QObject):
    """Stands for the system's file manager."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[QUrl] = []

    @Slot(QUrl)
    def open(self, url: QUrl) -> None:
        self.urls.append(url)


def test_the_folder_opens_in_the_systems_file_manager(qtbot, session, header, tmp_path):
    run = session.runs.open(new_run(tmp_path / "ein Ordner ü", "cats").path)
    header.show_run(run)
    opened = Opened()
    QDesktopServices.setUrlHandler("file", opened, "open")
    header.open_folder()
    QDesktopServices.unsetUrlHandler("file")
    assert [Path(url.toLocalFile()) for url in opened.urls] == [run.directory.path]


def test_a_long_name_leaves_room_for_the_buttons(qtbot, session, header, tmp_path):
    run = session.runs.open(new_run(tmp_path, "a very long name " * 6).path)
    header.show_run(run)
    look(qtbot, run)
    header.resize(500, 140)
    assert header.width() <= 520
    assert header.buttons["runs.folder"].geometry().right() <= header.width()


def test_a_run_of_another_directory_is_a_run(tmp_path):
    """The support's runs are what the protocol itself reads as runs."""
    run = new_run(tmp_path, "cats")
    assert RunDirectory.open(run.path).state() == "new"
