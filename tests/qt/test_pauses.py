"""Collecting garbage never stops the window, and still happens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication

from app.qt.pauses import avoid_pauses


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Knot:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


def test_many_objects_start_no_full_collection_and_leaving_the_window_does(
    qapp: QGuiApplication, thresholds: None
) -> None:
    avoid_pauses(qapp)
    knot = Knot()
    gone = weakref.ref(knot)
    before = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(400_000)]
    assert gc.get_stats()[2]["collections"] == before and len(kept) == 400_000
    del knot
    qapp.applicationStateChanged.emit(Qt.ApplicationState.ApplicationActive)
    assert gc.get_stats()[2]["collections"] == before
    qapp.applicationStateChanged.emit(Qt.ApplicationState.ApplicationInactive)
    assert gone() is None and gc.get_stats()[2]["collections"] == before + 1
