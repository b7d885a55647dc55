"""Pages are loaded and made in pieces, between which the window answers."""

import importlib
import threading

from PySide6.QtCore import QCoreApplication, QEvent, Qt, QTimer
from shiboken6 import isValid

from app.qt import rooms
from app.qt.page import Page
from app.qt.runs import page as runs_page
from app.qt.runs.page import RunsPage
from app.qt.window import Window
from tests.support.artist import shown_page


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


def test_a_page_asked_for_earlier_is_named_at_once_and_made_before_the_others(window, qtbot, tmp_path):
    order = []
    window._workshop.make_all()  # as it does when it was painted
    window._workshop.made.connect(lambda number, _: order.append(number))
    used = []
    window.show_runs(lambda page: used.append((page, window.pages.currentWidget())))
    place = window.pages.currentWidget()
    assert (place.title.text(), place.words.text()) == ("Runs", "Opening…")
    assert not place.button.isVisible()
    window.session.going.run.emit(tmp_path)
    assert order == used == []
    page = shown_page(window, RunsPage)
    assert used == [(page, page)]
    assert tmp_path in window.session.runs._open  # what was asked for meanwhile is done
    qtbot.waitUntil(lambda: all(isinstance(window.pages.widget(at), Page) for at in range(1, 4)))
    assert sorted(order) == [1, 2, 3]  # each once
    assert order.index(2) == 0
    assert window.pages.currentWidget() is page


def test_the_window_answers_between_the_parts_of_a_page_that_is_awaited(window, qtbot):
    """No two of its parts are made in one turn, nor the page in that of the click."""
    turns, parts = [], []
    room = window._workshop._parts

    def watched(number):
        for part in room(number):
            parts.append(len(turns))
            yield part

    window._workshop._parts = watched
    beats = QTimer(window)
    beats.timeout.connect(lambda: turns.append(1))
    beats.start(0)
    window.show_runs()
    assert parts == []
    shown_page(window, RunsPage)
    beats.stop()
    assert len(set(parts)) == len(parts) > 15


def test_leaving_a_page_that_is_awaited_leaves_it(window, qtbot):
    window.show_presets()
    window.show_pictures()
    qtbot.waitUntil(lambda: all(isinstance(window.pages.widget(at), Page) for at in range(1, 4)))
    assert window.pages.currentWidget() is window.pictures
    assert window._rail.buttons.checkedId() == 0


def test_a_page_that_fails_while_it_is_made_says_so_and_can_be_opened_when_its_fault_is_gone(
    window, session, qtbot, tmp_path, monkeypatch
):
    """Its fault is told as any other; the other pages are made, and what was asked of it is done in the end."""

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(runs_page, "LogView", fail)  # when most of the page is made, with commands of its own
    with qtbot.capture_exceptions() as faults:
        session.going.run.emit(tmp_path)
        place = window.pages.currentWidget()
        qtbot.waitUntil(place.button.isVisible)
        qtbot.waitUntil(lambda: all(isinstance(window.pages.widget(at), Page) for at in (1, 3)))
    window.commands.refresh_now()
    assert "could not be opened" in place.words.text()
    assert "Try again" in place.words.text()
    assert [kind for kind, *_ in faults] == [MemoryError]
    monkeypatch.undo()
    qtbot.mouseClick(place.button, Qt.MouseButton.LeftButton)
    assert (place.words.text(), place.button.isVisible()) == ("Opening…", False)
    page = shown_page(window, RunsPage)
    assert tmp_path in session.runs._open
    window.commands.refresh_now()
    assert window.commands["runs.forget"].owner is page
    in_menu = [action.objectName() for action in window.commands.menu("runs").actions()]
    assert len(in_menu) == len(set(in_menu))


def test_a_window_that_ends_takes_along_what_is_half_made(session, qtbot):
    window = Window(session)
    workshop = window._workshop
    workshop.make_all()
    qtbot.waitUntil(lambda: bool(workshop._half))
    half = list(workshop._half.values())
    window.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    assert [page for page in half if isValid(page)] == []
