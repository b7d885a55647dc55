"""Loads what draws charts a little at a time, so that neither the start nor the first look at a run holds the window.

It costs a fifth of a second in all. Workers take only what is none of Qt's: pyqtgraph asks PySide for all its classes,
which PySide makes when they are first asked for, and a thread that does so while another does crashes both.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator

import PySide6.QtCore
import PySide6.QtGui
import PySide6.QtWidgets
from PySide6.QtCore import QObject, QTimer, Signal

from app.core.tasks import Single, Tasks

_PIECE = 0.005
"""Seconds that one piece holds the window; pyqtgraph itself cannot be cut, and takes nearly a tenth."""
_PAUSE_MS = 50
# What pyqtgraph brings besides Qt.
_BESIDE = (
    "numpy",
    "numpy.typing",
    "cProfile",
    "pydoc",
    "colorama",
    "multiprocessing.connection",
    "xml.etree.ElementTree",
)
_OF_QT = ("PySide6.QtOpenGLWidgets", "PySide6.QtTest", "pyqtgraph", "app.qt.runs.charts.board")


class Loading(QObject):
    """Goes on between whatever else happens, without pauses once somebody waits for it."""

    done = Signal()

    def __init__(self, tasks: Tasks, parent: QObject) -> None:
        super().__init__(parent)
        self.over = False
        """Whether charts can be drawn."""
        self._pieces = _pieces()
        self._beside = Single(tasks)
        self._next = QTimer(self)
        self._next.setInterval(_PAUSE_MS)
        self._next.timeout.connect(self._go_on)

    def begin(self) -> None:
        """Load while nobody waits for it."""
        if not self.over and not self._next.isActive():
            self._beside.run(lambda: [importlib.import_module(name) for name in _BESIDE], lambda _: self._next.start())

    def hurry(self) -> None:
        """Somebody waits: load without pauses."""
        self._next.setInterval(0)
        self.begin()

    def _go_on(self) -> None:
        end = time.perf_counter() + _PIECE
        for _ in self._pieces:
            if time.perf_counter() > end:
                return
        self._next.stop()
        self.over = True
        self.done.emit()


def _pieces() -> Iterator[None]:
    """Load one thing at a time."""
    for module in (PySide6.QtCore, PySide6.QtGui, PySide6.QtWidgets):
        for name in dir(module):
            getattr(module, name)
            yield
    for name in _OF_QT:
        yield  # each in a piece of its own
        importlib.import_module(name)
