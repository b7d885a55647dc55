"""Workers stand back from the moment at which something comes to the window until its thread waits again."""

import threading

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget

from app.core import tasks
from app.qt.main_thread import InputPriorityFilter, MainThreadQueue


class Canvas(QWidget):
    """Notes at each painting and press whether workers stand back."""

    def __init__(self):
        super().__init__()
        self.painted, self.pressed = [], []
        self.precedence = InputPriorityFilter(self)
        self.inner = Inner(self)


class Inner(QWidget):
    def paintEvent(self, event):  # noqa: N802
        self.parent().painted.append(tasks._window_idle.is_set())

    def mousePressEvent(self, event):  # noqa: N802
        self.parent().pressed.append(tasks._window_idle.is_set())


@pytest.fixture(autouse=True)
def rests(monkeypatch):
    """Whether the window's thread rests, of this test alone."""
    event = threading.Event()
    event.set()
    monkeypatch.setattr(tasks, "_window_idle", event)
    return event


@pytest.fixture
def canvas(qtbot):
    widget = Canvas()
    qtbot.addWidget(widget)
    with qtbot.waitExposed(widget):
        widget.show()
    qtbot.waitUntil(lambda: bool(widget.painted))
    return widget


def test_workers_stand_back_while_the_window_is_painted(qtbot, canvas, rests):
    qtbot.waitUntil(rests.is_set)
    canvas.painted.clear()
    canvas.inner.update()
    qtbot.waitUntil(lambda: bool(canvas.painted))
    assert canvas.painted and not any(canvas.painted)
    qtbot.waitUntil(rests.is_set)  # once it waits for what comes next


def test_workers_stand_back_while_a_press_is_answered(qtbot, canvas, rests):
    qtbot.waitUntil(rests.is_set)
    place = canvas.inner.mapTo(canvas, canvas.inner.rect().center())
    qtbot.mouseClick(canvas.windowHandle(), Qt.MouseButton.LeftButton, pos=place)
    assert canvas.pressed == [False]
    qtbot.waitUntil(rests.is_set)


def test_workers_stand_back_while_what_they_posted_is_taken(qtbot, canvas, rests):
    qtbot.waitUntil(rests.is_set)
    poster, seen = MainThreadQueue(), []
    poster.post(lambda: seen.append(rests.is_set()))
    qtbot.waitUntil(lambda: bool(seen))
    poster.close()
    assert seen == [False]
    qtbot.waitUntil(rests.is_set)
