"""Collecting garbage never stops the window, happens on its thread alone, and does happen."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from pytestqt.qtbot import QtBot

from app.qt import main_thread
from app.qt.main_thread import GcScheduler


@pytest.fixture
def collector(qapp: QGuiApplication) -> Iterator[GcScheduler]:
    was_on = gc.isenabled()
    gc.enable()
    collector = GcScheduler(qapp)
    yield collector
    collector.deleteLater()
    if was_on:
        gc.enable()


class Knot:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


def test_cycles_of_a_worker_are_freed_on_the_windows_thread(collector: GcScheduler, qtbot: QtBot) -> None:
    freed: list[threading.Thread] = []
    gone: list[weakref.ref[Knot]] = []

    def work() -> None:
        gone.extend(weakref.ref(Knot(), lambda _: freed.append(threading.current_thread())) for _ in range(10_000))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert freed == []
    qtbot.waitUntil(lambda: len(freed) == 10_000)
    assert set(freed) == {threading.main_thread()}


def test_a_window_at_rest_wakes_up_less_often(collector: GcScheduler) -> None:
    collector._on_timeout()
    kept = [[number] for number in range(1_500)]  # too few to be looked through
    collector._on_timeout()
    assert collector._timer.interval() == main_thread._BUSY_MS and len(kept) == 1_500
    collector._on_timeout()
    assert collector._timer.interval() == main_thread._IDLE_MS


def test_many_objects_start_no_full_collection_and_leaving_the_window_does(
    collector: GcScheduler, qapp: QGuiApplication, qtbot: QtBot
) -> None:
    knot = Knot()
    gone = weakref.ref(knot)
    before = gc.get_stats()
    kept = [[number] for number in range(400_000)]
    looks = before[0]["collections"] + before[1]["collections"]
    qtbot.waitUntil(lambda: sum(each["collections"] for each in gc.get_stats()[:2]) > looks)
    assert gc.get_stats()[2]["collections"] == before[2]["collections"] and len(kept) == 400_000
    del knot
    qapp.applicationStateChanged.emit(Qt.ApplicationState.ApplicationActive)
    assert gc.get_stats()[2]["collections"] == before[2]["collections"]
    qapp.applicationStateChanged.emit(Qt.ApplicationState.ApplicationInactive)
    assert gone() is None and gc.get_stats()[2]["collections"] == before[2]["collections"] + 1
