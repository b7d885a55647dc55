"""Pages are loaded and made in pieces, between which the window answers."""

import importlib
import threading

from PySide6.QtCore import QCoreApplication, QEvent, QTimer
from PySide6.QtWidgets import QApplication
from shiboken6 import isValid

from app.qt import rooms
from app.qt.page import Page
from app.qt.window import Window


def test_pages_are_loaded_part_by_part_and_what_is_none_of_qt_s_by_a_worker(session, qtbot, monkeypatch):
    loaded: list[tuple[str, threading.Thread, int]] = []
    turns = 0
    load = importlib.import_module

    def record(name: str, package: str | None = None) -> object:
        if not any(name == known for known, _, _ in loaded):  # making a page asks for its module again
            loaded.append((name, threading.current_thread(), turns))
        return load(name, package)

    def turn() -> None:
        nonlocal turns
        turns += 1

    monkeypatch.setattr(importlib, "import_module", record)
    window = Window(session)
    qtbot.addWidget(window)
    beats = QTimer(window)
    beats.timeout.connect(turn)
    beats.start(0)
    window.show()
    qtbot.waitUntil(lambda: all(isinstance(window.pages.widget(place), Page) for place in range(1, 4)))
    beats.stop()
    ours = [
        (name, at) for name, thread, at in loaded if thread is threading.main_thread() and name.startswith("app.qt")
    ]
    each = [(*room.parts, room.module) for room in (rooms.TRAIN, rooms.RUNS, rooms.PRESETS)]
    assert [name for name, _ in ours] == [name for names in each for name in names]
    assert len({at for _, at in ours}) == len(ours)  # each in a turn of its own
    beside = [name for name, thread, _ in loaded if thread is not threading.main_thread()]
    assert set(rooms.BESIDE) <= set(beside)
    assert all(name.startswith("app.core.") for name in beside)  # which no import of Qt is allowed in


def test_a_page_asked_for_earlier_is_there_at_once_and_made_once(window):
    window.show_presets()
    page = window.pages.currentWidget()
    assert isinstance(page, Page)
    turns = window._make_all()
    while next(turns, turns) is not turns:
        QApplication.processEvents()
    assert window.pages.currentWidget() is page
    assert sum(isinstance(window.pages.widget(place), type(page)) for place in range(4)) == 1


def test_a_window_that_ends_takes_along_what_is_half_made(session):
    window = Window(session)
    turns = window._make_all()
    while not (half := window._workshop.findChildren(Page)):
        next(turns)
    window.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    assert [page for page in half if isValid(page)] == []
