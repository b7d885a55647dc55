"""The welcome and the tour: real checks, real tools, and the demo's job in the real window."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog
from pytestqt.qtbot import QtBot

from app.core.session import Session
from app.qt import application
from app.qt.first_run.tour import STEPS, Tour
from app.qt.first_run.welcome import Welcome
from app.qt.runs.page import RunsPage
from app.qt.window import Window
from tests.support import tool_homes
from tests.support.artist import shown_page
from trainer.protocol import places

LEFT = Qt.MouseButton.LeftButton


def test_the_welcome_tells_of_this_pc_and_its_models(
    qtbot: QtBot, window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPASTO_LOOK_IN", str(tmp_path / "home"))
    webui = tool_homes.a1111(tmp_path / "home")
    models = window.session.models
    window.commands["window.welcome"].trigger()
    (welcome,) = window.findChildren(Welcome)
    qtbot.waitUntil(lambda: webui in welcome.tools.boxes and not models.is_searching)
    assert "1 base" in welcome.tools.boxes[webui].text()
    assert str(webui) in welcome.tools.boxes[webui].accessibleName()
    qtbot.keyClick(welcome.tools.boxes[webui], Qt.Key.Key_Space)
    assert [one.name for one in models.bases] == ["Demo"]
    own = tool_homes.sdxl(tmp_path / "mine" / "own.safetensors")
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(own.parent))
    qtbot.mouseClick(welcome.tools.folder, LEFT)
    qtbot.waitUntil(lambda: own.parent in welcome.tools.boxes)
    qtbot.waitUntil(lambda: welcome.machine.done)
    assert welcome.machine.check.words.text() == "Training works on this PC."
    assert "NVIDIA" in welcome.machine.gpu.words.text()
    assert str(places.home()) in welcome.machine.disk.words.text()
    window.commands["window.welcome"].trigger()
    assert window.findChildren(Welcome) == [welcome]


def test_a_welcome_that_is_closed_ends_its_check(qtbot: QtBot, window: Window) -> None:
    window.show_welcome()
    (welcome,) = window.findChildren(Welcome)
    child = welcome.machine._check_up._process
    assert child._process is not None
    welcome.close()
    assert child._process is None


def test_it_greets_the_first_time_only_and_never_without_a_screen(
    qtbot: QtBot, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    application._show_welcome_once(window)
    assert window.findChildren(Welcome) == []
    monkeypatch.setattr(QGuiApplication, "platformName", lambda: "windows")
    application._show_welcome_once(window)
    (welcome,) = window.findChildren(Welcome)
    welcome.close()
    qtbot.waitUntil(lambda: window.findChildren(Welcome) == [])
    application._show_welcome_once(window)
    assert window.findChildren(Welcome) == []


def test_the_tour_from_pictures_to_the_job(qtbot: QtBot, window: Window, session: Session) -> None:
    gone: list[Path] = []
    session.navigator.job.connect(gone.append)
    window.commands["window.tour"].trigger()
    (tour,) = window.findChildren(Tour)
    coach = tour.coach
    qtbot.waitUntil(lambda: coach.isVisible() and coach.next.hasFocus())
    assert not coach.back_button.isEnabled()
    qtbot.keyClick(coach.next, Qt.Key.Key_Space)  # perhaps before there are any pictures
    qtbot.waitUntil(lambda: len(session.view.ids) == 18)
    assert session.view.current is not None
    assert session.library.images[session.view.current].path.parent == places.home() / "demo" / "pictures"
    qtbot.mouseClick(coach.next, LEFT)
    qtbot.waitUntil(lambda: bool(gone))
    (job,) = gone
    assert job == places.home() / "jobs" / "neon" / "job.toml"
    assert not coach.act.isVisible()
    qtbot.mouseClick(coach.next, LEFT)
    assert coach.act.isVisible()
    assert coach.title.text() == "Start"
    qtbot.mouseClick(coach.back_button, LEFT)
    assert gone == [job] * 3
    for _ in range(3):
        qtbot.mouseClick(coach.next, LEFT)
    assert coach.next.text() == "Done"
    assert shown_page(window, RunsPage).after.isVisible()
    qtbot.mouseClick(coach.next, LEFT)
    qtbot.waitUntil(lambda: window.findChildren(Tour) == [])
    assert session.queue.entries == ()  # only its button starts


def test_the_tour_starts_the_demo_once(
    qtbot: QtBot, window: Window, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[object] = []
    monkeypatch.setattr(
        "app.core.runs.queue.launch", lambda *words: launched.append(words)
    )  # no training: the queue is real
    window.show_tour()
    (tour,) = window.findChildren(Tour)
    for _ in range(3):
        qtbot.mouseClick(tour.coach.next, LEFT)
    assert STEPS[3].act
    qtbot.mouseClick(tour.coach.act, LEFT)
    qtbot.waitUntil(lambda: tour.coach.title.text() == "Watch the training")  # when the job is written
    assert len(list((places.home() / "jobs").glob("*/job.toml"))) == 1
    qtbot.waitUntil(lambda: len(session.datasets.folders) == 1)  # images that come late leave the page as it is
    assert window.pages.currentWidget() is not window.images
    qtbot.waitUntil(lambda: isinstance(window.pages.currentWidget(), RunsPage))
    qtbot.waitUntil(lambda: session.queue.look() or len(session.queue.entries) == 1)
    qtbot.mouseClick(tour.coach.back_button, LEFT)
    assert not tour.coach.act.isVisible()
    qtbot.mouseClick(tour.coach.closing, LEFT)
    assert not window.findChildren(Tour)
    window.show_tour()
    assert len(window.findChildren(Tour)) == 1
