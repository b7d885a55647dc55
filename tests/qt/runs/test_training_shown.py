"""What trains is shown on every page, survives a restart of the window, and can be paused and kept from anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QSystemTrayIcon
from pytestqt.qtbot import QtBot

from app.core.session import Session
from app.qt.runs.notifier import Notifier
from app.qt.runs.page import RunsPage
from app.qt.window import Window
from tests.qt.runs.test_notifier import seen, watching
from tests.support.artist import shown_page
from tests.support.written_runs import RunWriter, held, new_run
from trainer.protocol import commands, locks
from trainer.protocol.queue import new_entry

__all__ = ["watching"]


def step(window: Window, qtbot: QtBot, engine: RunWriter, number: int) -> None:
    """Let the engine be at a step, and the window see it."""
    engine.stand("running", number, "train")
    qtbot.waitUntil(lambda: window.session.training.look() or f"{number} of" in window.status.training.words.text())


def test_what_trains_is_shown_on_every_page_and_in_the_title_until_it_ends(watching, qtbot, tmp_path):
    line, ring = watching.status.training, watching._ring
    assert not line.isVisible() and not ring.isVisible() and watching.windowTitle() == "Impasto"
    with held(new_run(tmp_path, "cats")) as engine:
        seen(watching, qtbot)
        step(watching, qtbot, engine, 250)
        for command in ("window.images", "window.train", "window.runs", "window.presets"):
            watching.commands[command].trigger()
            assert line.isVisible() and line.words.text() == "cats · Running · 250 of 1000"
            assert ring.isVisible() and ring.share == 0.25
        assert watching.windowTitle() == "25% · cats – Impasto"
        watching.show_images()
        qtbot.mouseClick(line.words, Qt.MouseButton.LeftButton)
        page = shown_page(watching, RunsPage)
        qtbot.waitUntil(lambda: page.run is not None and page.run.directory.path == engine.run.path)
        engine.stand("done", 1000)
    qtbot.waitUntil(lambda: watching.session.training.look() or not line.isVisible())
    assert not ring.isVisible() and watching.windowTitle() == "Impasto"


def test_a_pause_from_the_status_bar_can_be_taken_back_until_the_run_has_read_it(watching, qtbot, tmp_path):
    line = watching.status.training
    with held(new_run(tmp_path, "cats")) as engine:
        seen(watching, qtbot)
        step(watching, qtbot, engine, 10)
        qtbot.mouseClick(line.button, Qt.MouseButton.LeftButton)
        qtbot.waitUntil(lambda: len(commands.pending(engine.run.commands)) == 1)
        assert "Pausing…" in line.words.text() and line.button.text() == "Keep training"
        qtbot.mouseClick(line.button, Qt.MouseButton.LeftButton)
        qtbot.waitUntil(lambda: watching.session.training.look() or line.button.text() == "Pause")
        assert commands.pending(engine.run.commands) == [] and "Pausing…" not in line.words.text()
        qtbot.mouseClick(line.button, Qt.MouseButton.LeftButton)
        qtbot.waitUntil(lambda: len(commands.pending(engine.run.commands)) == 1)
        commands.accept(commands.pending(engine.run.commands)[0])
        qtbot.waitUntil(lambda: watching.session.training.look() or not line.button.isEnabled())
        assert "Pausing…" in line.words.text()
        engine.stand("paused", 10)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_window_that_is_opened_while_a_run_stops_goes_there_and_says_so(session, qtbot, tmp_path, accepted):
    """The command was given before: by a window that is closed now, or on the command line."""
    with held(new_run(tmp_path, "cats")) as engine:
        engine.stand("running", 10, "preview")
        commands.send(engine.run.commands, "stop")
        if accepted:
            commands.accept(commands.pending(engine.run.commands)[0])
        window = Window(session)
        qtbot.addWidget(window)
        window.show()
        page = shown_page(window, RunsPage)
        header = page.header
        qtbot.waitUntil(lambda: page.run is not None and page.run.alive and header.state.text() == "Stopping…")
        assert "Stopping…" in window.status.training.words.text()
        assert page.isVisible() and header.can_withdraw() is not accepted and not header.can_end()
        qtbot.waitUntil(lambda: header.buttons["runs.withdraw"].isEnabled() is not accepted)
        if not accepted:
            header.buttons["runs.withdraw"].click()
            qtbot.waitUntil(lambda: session.training.look() or page._read() or header.state.text() == "Running")
            assert commands.pending(engine.run.commands) == [] and header.can_end()
        engine.stand("stopped", 10)
        window.close()


def test_a_run_that_begins_later_does_not_turn_the_page(watching, qtbot, tmp_path):
    assert not watching._fresh
    with held(new_run(tmp_path, "cats")) as engine:
        seen(watching, qtbot)
        step(watching, qtbot, engine, 3)
        assert watching.pages.currentWidget() is watching.images
        engine.stand("paused", 3)


def test_what_was_started_is_shown_on_the_runs_page_at_once_and_its_run_when_there_is_one(
    watching, session, qtbot, tmp_path
):
    job, queue = tmp_path / "job.toml", session.queue.queue
    job.touch()
    queue.folder.mkdir(parents=True, exist_ok=True)
    with locks.hold_lock(queue.worker_lock, 0.0):  # somebody works on it
        entry = new_entry(job)
        session.navigator.entry.emit(entry.id)  # as the Train page does, before the queue's file is written
        page = shown_page(watching, RunsPage)
        assert page.isVisible() and page.run is None
        queue.put(entry)
        queue.change(entry.id, lambda now: replace(now, state="running"))
        qtbot.waitUntil(lambda: session.queue.look() or page.header.name.text() == entry.name)
        qtbot.waitUntil(lambda: page.header.state.text() == "Starting…")
        assert watching.status.training.words.text() == f"{entry.name} · Starting…"
        with held(new_run(tmp_path, "cats")) as engine:
            queue.change(entry.id, lambda now: replace(now, run=engine.run.path))
            qtbot.waitUntil(lambda: session.queue.look() or page.run is not None)
            assert page.run.directory.path == engine.run.path
            assert page.list.paths == [engine.run.path]
            engine.stand("done", 1000)
        queue.record_outcome(entry.id, "done")
    qtbot.waitUntil(lambda: session.queue.look() or not watching.status.training.isVisible())


class TrayIcon(QSystemTrayIcon):
    """The system's tray icon without a tray: the offscreen platform has none, and warns of each attempt."""

    shown = False

    @staticmethod
    def isSystemTrayAvailable() -> bool:  # noqa: N802
        return True

    def show(self) -> None:
        self.shown = True

    def hide(self) -> None:
        self.shown = False


def test_the_tray_says_what_trains_where_there_is_a_tray(watching, qtbot, tmp_path, monkeypatch):
    monkeypatch.setattr("app.qt.runs.notifier.QSystemTrayIcon", TrayIcon)
    notifier = watching.findChild(Notifier)
    with held(new_run(tmp_path, "cats")) as engine:
        seen(watching, qtbot)
        step(watching, qtbot, engine, 10)
        assert notifier._tray.toolTip() == "Impasto: cats · Running · 10 of 1000" and notifier._tray.shown
        watching.show_images()
        notifier._tray.activated.emit(QSystemTrayIcon.ActivationReason.Trigger)
        assert watching.pages.currentWidget() is watching.images, "no run has ended that it would show"
        engine.stand("paused", 10)
    qtbot.waitUntil(lambda: watching.session.training.look() or notifier._tray.toolTip() == "Impasto")


def test_only_the_first_close_says_that_training_continues(watching, session, qtbot, tmp_path):
    notifier = watching.findChild(Notifier)
    with held(new_run(tmp_path, "cats")) as engine:
        seen(watching, qtbot)
        watching.close()
        first = notifier.close_notice
        assert first.title.text() == "Training continues in the background."
        with qtbot.waitSignal(first.destroyed):
            first.close()
        notifier.close_notice = None
        watching.show()
        watching.close()
        assert notifier.close_notice is None
        engine.stand("done", 1000)
    again = Window(session)
    qtbot.addWidget(again)
    assert again._state["said.training"] == "yes", "the next start knows"


def test_where_nothing_trains_no_page_is_turned_and_nothing_is_shown(window: Window, session: Session, qtbot: QtBot):
    qtbot.waitUntil(lambda: session.runs.looked)
    assert window.pages.currentWidget() is window.images
    assert not window.status.training.isVisible() and window.windowTitle() == "Impasto"
    assert window.findChild(Notifier) is None or window.findChild(Notifier)._tray is None
