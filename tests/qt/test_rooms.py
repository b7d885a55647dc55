"""Pages are loaded and made in pieces, between which the window answers."""

import importlib
import threading

from PySide6.QtCore import QCoreApplication, QEvent, Qt, QTimer
from PySide6.QtWidgets import QSplitter, QWidget
from shiboken6 import isValid

from app.core.edits.history import Edit
from app.core.library import ValueChange
from app.core.query import tokens
from app.core.settings import recent
from app.qt import page_loader
from app.qt.page_loader import Page
from app.qt.runs import page as runs_page
from app.qt.runs.page import RunsPage
from app.qt.train.page import TrainPage
from app.qt.window import Window
from tests.support.artist import shown_page
from tests.support.jobs import photographs
from trainer.dataset import pixels
from trainer.errors import JobError


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
    readied = []
    monkeypatch.setattr(pixels, "load_formats", lambda: readied.append(threading.current_thread()))
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
    each = [(*room.parts, room.module) for room in (page_loader.TRAIN, page_loader.RUNS, page_loader.PRESETS)]
    assert [name for name, _ in ours] == [name for names in each for name in names]
    assert len({at for _, at in ours}) == len(ours)  # each in a turn of its own
    beside = [name for name, thread, _ in loaded if thread is not threading.main_thread()]
    assert set(page_loader.BACKGROUND_MODULES) <= set(beside)
    assert all(name.startswith(("app.core.", "trainer.")) for name in beside)  # which no import of Qt is allowed in
    assert {thread is threading.main_thread() for thread in readied} == {False}  # at a folder's opening all is there


def test_a_page_asked_for_earlier_is_named_at_once_and_made_before_the_others(window, qtbot, tmp_path):
    order = []
    window._page_loader.make_all()  # as it does when it was painted
    window._page_loader.made.connect(lambda number, _: order.append(number))
    used = []
    window.show_runs(lambda page: used.append((page, window.pages.currentWidget())))
    place = window.pages.currentWidget()
    assert (place.title.text(), place.words.text()) == ("Runs", "Opening…")
    assert not place.button.isVisible()
    window.session.navigator.run.emit(tmp_path)
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
    room = window._page_loader._parts

    def watched(number):
        for part in room(number):
            parts.append(len(turns))
            yield part

    window._page_loader._parts = watched
    beats = QTimer(window)
    beats.timeout.connect(lambda: turns.append(1))
    beats.start(0)
    window.show_runs()
    assert parts == []
    shown_page(window, RunsPage)
    beats.stop()
    assert len(set(parts)) == len(parts) > 15


def test_a_page_that_is_being_made_stays_out_of_sight_when_the_window_is_shown_again(window, qtbot):
    """Also where it was begun while the window was closed: Qt shows a child together with what it then comes into."""
    parts, seen = window._page_loader._parts, []

    def hidden_meanwhile(number):
        making = parts(number)
        window.hide()
        for part in making:
            window.show()
            half = window._page_loader._half_built.get(number)
            seen.append(half is not None and half.isVisible())
            yield part
            window.hide()
        window.show()

    window._page_loader._parts = hidden_meanwhile
    window.show_presets()
    qtbot.waitUntil(lambda: isinstance(window.pages.widget(3), Page))
    assert len(seen) > 3
    assert not any(seen)


def test_leaving_a_page_that_is_awaited_leaves_it(window, qtbot):
    window.show_presets()
    window.show_images()
    qtbot.waitUntil(lambda: all(isinstance(window.pages.widget(at), Page) for at in range(1, 4)))
    assert window.pages.currentWidget() is window.images
    assert window._sidebar.buttons.checkedId() == 0


def test_a_page_that_fails_while_it_is_made_says_so_and_can_be_opened_when_its_fault_is_gone(
    window, session, qtbot, tmp_path, monkeypatch
):
    """Its fault is told as any other; the other pages are made, and what was asked of it is done in the end."""

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(runs_page, "LogView", fail)  # when most of the page is made, with commands of its own
    with qtbot.capture_exceptions() as faults:
        session.navigator.run.emit(tmp_path)
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
    loader = window._page_loader
    room = loader._parts

    def watched(number):
        for part in room(number):
            if loader._half_built:
                loader._timer.stop()  # it stays half made
            yield part

    loader._parts = watched
    loader.make_all()
    qtbot.waitUntil(lambda: bool(loader._half_built))
    half = list(loader._half_built.values())
    window.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    assert [page for page in half if isValid(page)] == []


def test_a_window_that_ends_while_the_pages_are_loaded_leaves_them(session, qtbot, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(page_loader, "load_background_modules", lambda: gate.wait())
    window = Window(session)
    window._page_loader.make_all()
    window.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    gate.set()
    session.tasks.close()  # waits for the worker, whose answer is on its way then
    QCoreApplication.processEvents()  # a fault in it would fail this test


def test_a_window_closed_while_a_page_is_half_made_remembers_how_that_page_stood(window, session, qtbot):
    window.show_train()
    shown_page(window, TrainPage).columns.setSizes([210, 640, 330])
    window.close()
    before = recent.read_window_state()[0]["train.columns"]
    again = Window(session)
    qtbot.addWidget(again)
    room, parts = again._page_loader._parts, []

    def watched(number):
        for part in room(number):
            half = again.findChild(QSplitter, "train.columns")
            if half and half.count() == 1:
                parts.append(half.sizes())
                again.close()
            yield part

    again._page_loader._parts = watched
    with qtbot.waitExposed(again):
        again.show()
    again.show_train()
    qtbot.waitUntil(lambda: isinstance(again.pages.widget(1), Page))
    assert len(parts) == 1
    assert recent.read_window_state()[0]["train.columns"] == before


def test_parts_of_no_width_that_were_remembered_are_as_wide_as_they_need(window, qtbot):
    """An Impasto before this one could keep such a page, of which a thin line was all that was left."""
    kept = {}
    for name, sizes in (("train.columns", [0, 0, 900]), ("runs", [0, 900]), ("runs.left", [700, 0])):
        whole = QSplitter()
        qtbot.addWidget(whole)
        for _ in sizes:
            whole.addWidget(QWidget())
        whole.setSizes(sizes)
        kept[name] = bytes(whole.saveState().toBase64().data()).decode("ascii")
    window._state = kept
    for show, kind in ((window.show_train, TrainPage), (window.show_runs, RunsPage)):
        show()
        page = shown_page(window, kind)
        named = [each for each in page.findChildren(QSplitter) if each.objectName() in kept]
        qtbot.waitUntil(lambda named=named: all(min(each.sizes()) > 30 for each in named))
        assert named and not any(each.childrenCollapsible() for each in named)


def test_a_page_that_failed_says_that_it_opens_whichever_way_it_is_asked_for_again(window, qtbot, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(runs_page, "LogView", fail)
    with qtbot.capture_exceptions():
        window.show_runs()
        place = window.pages.currentWidget()
        qtbot.waitUntil(place.button.isVisible)
    monkeypatch.undo()
    window._sidebar.buttons.button(2).click()
    assert (place.words.text(), place.button.isVisible()) == ("Opening…", False)
    shown_page(window, RunsPage)


def test_a_page_that_was_asked_for_and_failed_is_not_made_again_with_those_nobody_asked_for(window, qtbot, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(runs_page, "LogView", fail)
    with qtbot.capture_exceptions() as faults:
        window.show_runs()
        place = window.pages.currentWidget()
        qtbot.waitUntil(place.button.isVisible)
        window._page_loader.make_all()
        qtbot.waitUntil(lambda: all(isinstance(window.pages.widget(at), Page) for at in (1, 3)))
    assert place.button.isVisible() and [kind for kind, *_ in faults] == [MemoryError]


def test_what_is_asked_of_a_page_is_done_though_what_was_asked_before_fails(window, qtbot):
    used = []

    def fail(page):
        used.append("fails")
        raise MemoryError

    with qtbot.capture_exceptions() as faults:
        for use in (fail, used.append):
            window.show_runs(use)
        page = shown_page(window, RunsPage)
    assert used == ["fails", page]
    assert [kind for kind, *_ in faults] == [MemoryError]


def test_nothing_is_undone_out_of_sight_while_a_page_is_on_its_way(session, qtbot, tmp_path):
    window, arrives = Window(session), []
    qtbot.addWidget(window)
    parts = window._page_loader._parts

    def late(number):
        while not arrives:  # however long all before it takes
            yield
        yield from parts(number)

    window._page_loader._parts = late
    window.show()
    session.datasets.open(photographs(tmp_path / "cats", 1))
    qtbot.waitUntil(lambda: len(session.view.ids) == 1)
    (number,) = session.view.ids
    before = session.library.images[number].caption
    session.history.do(Edit("Write it", (ValueChange(number, "caption", before, "red"),)))
    qtbot.waitUntil(lambda: window.commands["edit.undo"].text() == "Undo Write it")
    window.show_runs()
    assert window.commands["edit.undo"].text() == "Undo"
    window.commands.refresh_now()
    assert not window.commands["edit.undo"].isEnabled()
    window.undo()
    assert session.library.images[number].caption == "red"
    arrives.append(True)
    shown_page(window, RunsPage)
    assert window.commands["edit.undo"].text() == "Undo Write it"


def test_the_vocabulary_holds_up_no_page_that_is_being_made(session, qtbot, monkeypatch):
    run, made = session.tasks.run, []
    window = Window(session)
    qtbot.addWidget(window)

    def watched(work, *more, **kept):
        if work is page_loader.load_vocabulary:
            made.append([isinstance(window.pages.widget(number), Page) for number in range(1, window.pages.count())])
        return run(work, *more, **kept)

    monkeypatch.setattr(session.tasks, "run", watched)
    window.show_runs()
    window._page_loader.make_all()
    qtbot.waitUntil(lambda: bool(made))
    assert made == [[True] * 3]


def test_no_page_needs_the_vocabulary(window, session, qtbot, monkeypatch):
    asked = threading.Event()

    def missing():
        asked.set()
        raise JobError("asset.missing", "The vocabulary is gone.", "Install Impasto again.")

    monkeypatch.setattr(tokens, "load", missing)
    window.show_runs()
    shown_page(window, RunsPage)
    qtbot.waitUntil(asked.is_set)
    session.tasks.close()  # waits for the worker, whose answer is on its way then
    QCoreApplication.processEvents()  # a fault in it would fail this test
    assert window.notices.sentences() == []
