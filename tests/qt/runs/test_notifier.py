"""The window tells of runs that end, whatever it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt, QTimer
from PySide6.QtWidgets import QApplication, QPushButton
from pytestqt.qtbot import QtBot

from app.core.runs.summary import RunSummary
from app.core.runs.watcher import Ended
from app.core.settings.preferences import NotificationPreferences
from app.qt.runs.notifier import Notifier
from app.qt.window import Window
from tests.support.written_runs import RunWriter, held, new_run
from trainer.protocol import events, locks
from trainer.protocol.queue import new_entry


@pytest.fixture
def beeps(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The system's sound, which cannot be heard here."""
    heard: list[None] = []
    monkeypatch.setattr(QApplication, "beep", lambda: heard.append(None))
    return heard


def clock(window: Window) -> QTimer:
    notifier = window.findChild(Notifier)
    return notifier.findChild(QTimer)


@pytest.fixture
def watching(window: Window, qtbot: QtBot) -> Window:
    """The window once it has looked for what runs."""
    qtbot.waitUntil(lambda: window.findChild(Notifier) is not None and window.session.runs.looked)
    return window


def seen(window: Window, qtbot: QtBot) -> None:
    """Let the window see which runs live, as when the user comes back to it; a look under way is not begun anew."""
    qtbot.waitUntil(lambda: window.session.runs.refresh() or window.session.run_watcher.watching)


def end(engine: RunWriter) -> None:
    engine.tell(events.ErrorEvent(code="a", sentence="The loss is gone.", remedy="Lower the rate."))
    engine.stand("failed", 12)


def test_a_run_that_fails_while_pictures_are_looked_at_is_told_with_a_way_to_it(watching, qtbot, tmp_path, beeps):
    watching.show_images()
    assert not clock(watching).isActive(), "nothing runs"
    with held(new_run(tmp_path, "cats")) as engine:
        seen(watching, qtbot)
        assert clock(watching).isActive()
        end(engine)
    words = "cats failed at step 12. The loss is gone. Lower the rate."
    qtbot.waitUntil(lambda: words in watching.notices.sentences())
    assert len(beeps) == 1
    assert not clock(watching).isActive()
    shown: list[Path] = []
    watching.session.navigator.run.connect(shown.append)
    button = next(one for one in watching.notices.findChildren(QPushButton) if one.text() == "Show")
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert shown == [engine.run.path]


def test_that_a_run_ended_is_said_no_longer_when_it_goes_on(watching, qtbot, tmp_path, beeps):
    run = new_run(tmp_path, "cats")
    with held(run) as engine:
        seen(watching, qtbot)
        engine.stand("running", 7, "train")
    words = "cats stopped unexpectedly at step 7; it can be resumed."
    qtbot.waitUntil(lambda: words in watching.notices.sentences())
    watching.session.runs.refresh()  # shows the old start at most
    with held(run) as engine:
        seen(watching, qtbot)
        qtbot.waitUntil(lambda: words not in watching.notices.sentences())
        engine.stand("running", 9, "train")
    qtbot.waitUntil(lambda: words.replace("7", "9") in watching.notices.sentences())


def test_a_run_that_had_to_pause_is_told_with_the_reason(watching, tmp_path, beeps):
    paused = RunSummary(tmp_path / "cats", "cats", "paused", step=12)
    watching.session.run_watcher.ended.emit(Ended(paused, "No room. Make some."))
    assert watching.notices.sentences() == ["cats had to pause at step 12. No room. Make some."]


@pytest.mark.parametrize(("notify", "sound"), [(False, True), (True, False)])
def test_notice_and_sound_can_each_be_switched_off(watching, qtbot, tmp_path, beeps, notify, sound):
    settings = watching.session.settings
    settings.change(
        settings.preferences.model_copy(update={"telling": NotificationPreferences(notify=notify, sound=sound)})
    )
    told: list[object] = []
    watching.session.run_watcher.ended.connect(told.append)
    with held(new_run(tmp_path, "cats")) as engine:
        seen(watching, qtbot)
        engine.stand("done", 1000)
    qtbot.waitUntil(lambda: bool(told))
    assert bool(beeps) == sound
    assert watching.notices.sentences() == (["cats finished after 1000 steps."] if notify else [])


def test_what_ended_while_the_window_was_closed_is_told_without_a_sound(watching, tmp_path, beeps):
    done = RunSummary(tmp_path / "cats", "cats", "done", step=1000)
    watching.session.run_watcher.ended.emit(Ended(done, earlier=True))
    assert watching.notices.sentences() == ["While Impasto was closed: cats finished after 1000 steps."]
    assert beeps == []


def test_a_window_that_is_closed_looks_no_more(watching, qtbot, tmp_path):
    with held(new_run(tmp_path, "cats")):
        seen(watching, qtbot)
        assert clock(watching).isActive()
        watching.close()
        assert not clock(watching).isActive()
        watching.session.run_watcher.changed.emit(None)
        assert not clock(watching).isActive()


def test_closing_the_window_says_what_goes_on_training_or_a_queue_that_waits(watching, qtbot, tmp_path):
    watching.close()
    assert watching.findChild(Notifier).close_notice is None, "nothing trains"
    watching.show()
    (tmp_path / "job.toml").touch()
    queue = watching.session.queue.queue
    queue.put(new_entry(tmp_path / "job.toml"))
    with locks.hold_lock(queue.worker_lock, 0.0):  # somebody works on it
        qtbot.waitUntil(lambda: watching.session.queue.look() or watching.session.run_watcher.watching)
        watching.close()
        waits = watching.findChild(Notifier).close_notice
        assert waits.isVisible() and waits.title.text() == "The queue continues in the background."
        watching.show()
        with qtbot.waitSignal(waits.destroyed):
            waits.close()
    qtbot.waitUntil(lambda: watching.session.queue.look() or not watching.session.run_watcher.watching)
    with held(new_run(tmp_path, "cats")):
        seen(watching, qtbot)
        watching.close()
        farewell = watching.findChild(Notifier).close_notice
        assert farewell.isVisible() and farewell.title.text() == "Training continues in the background."
        assert farewell.testAttribute(Qt.WidgetAttribute.WA_QuitOnClose), "the app must not end before it is read"
        assert watching.frameGeometry().contains(farewell.frameGeometry())
        watching.come_forward([])  # started again meanwhile: the second start hands over to this one
        assert watching.isVisible() and clock(watching).isActive()
        assert farewell.timer.isActive()
        with qtbot.waitSignal(farewell.destroyed):
            farewell.timer.timeout.emit()  # it goes by itself
