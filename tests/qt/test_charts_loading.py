"""What draws charts is loaded and made in pieces, between which the window answers."""

import sys
import threading
from types import SimpleNamespace

from PySide6.QtCore import QObject

from app.core.runs.cards import CardWatch
from app.qt.runs.charts import loading
from app.qt.runs.charts.loading import Loading
from tests.support.runs import write_run


def loaded(session, qtbot, owner):
    """Load, and count the turns that the window has meanwhile."""
    loads, turns = Loading(session.tasks, owner), []
    loads._next.timeout.connect(lambda: turns.append(None))
    with qtbot.waitSignal(loads.done):
        loads.hurry()
    assert loads.over
    return len(turns)


def test_it_is_loaded_in_as_many_pieces_as_its_time_makes(session, qtbot, monkeypatch):
    owner = QObject()
    monkeypatch.setattr(loading, "_PIECE", 0.0)
    assert loaded(session, qtbot, owner) > 500
    assert {"pyqtgraph", "app.qt.runs.charts.board"} <= set(sys.modules)


def test_what_is_qt_s_is_loaded_by_the_window_s_thread_and_the_rest_by_a_worker(session, qtbot, monkeypatch):
    owner, threads = QObject(), {}
    record = SimpleNamespace(import_module=lambda name: threads.setdefault(name, threading.current_thread()))
    monkeypatch.setattr(loading, "importlib", record)
    loaded(session, qtbot, owner)
    ours = [name for name, thread in threads.items() if thread is threading.main_thread()]
    assert ours == ["PySide6.QtOpenGLWidgets", "PySide6.QtTest", "pyqtgraph", "app.qt.runs.charts.board"]
    assert "numpy.typing" in threads.keys() - set(ours)


def test_a_chart_is_made_when_it_is_drawn(session, qtbot, tmp_path):
    from app.qt.runs.charts.board import Board
    from app.qt.runs.charts.chart import Chart
    from app.qt.runs.charts.drawings import Wishes

    run = session.runs.open(write_run(tmp_path, "run", 50).path)
    run.read()
    qtbot.waitUntil(lambda: run.loaded)
    board = Board(CardWatch(session.tasks))
    qtbot.addWidget(board)
    assert board.findChildren(Chart) == []
    board.draw([run], Wishes())
    assert board.findChildren(Chart) == [board.loss]
    qtbot.waitUntil(lambda: not board._next.isActive())
    assert len(board._made) == 6
