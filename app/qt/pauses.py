"""Looks for garbage on the window's thread alone, and never for so long that the window stops.

Python itself would look on whichever thread happens to make an object. Where that is a worker and a QObject lies in a
cycle, Qt destroys it there and waits for the interpreter within a lock that the window's thread, which has the
interpreter, may be waiting for: both stand still for ever. And a full collection looks at every object there is: 170 ms
at 100,000 pictures. What the app drops is freed at once by reference counts; only cycles wait, few of them, and the
young ones are still found often. The rest is looked through when the user turns to another program.
"""

from __future__ import annotations

import gc

from PySide6.QtCore import QObject, Qt, QTimer
from PySide6.QtGui import QGuiApplication

_YOUNG = 2_000
"""New objects from which on the young are looked through, in a millisecond or two."""
_FEW = 500
"""New objects since the last look below which the next may come later."""
_MIDDLE = 4
_BUSY_MS, _IDLE_MS = 25, 100
"""Within the former opening a large folder makes some 5,000 objects; at rest the window wakes up less often."""


class Collector(QObject):
    """Collects while the event loop runs, in full only while no window of the app is the active one."""

    def __init__(self, application: QGuiApplication) -> None:
        super().__init__(application)
        gc.disable()
        self._known = 0
        self._timer = QTimer(self, interval=_IDLE_MS)
        self._timer.timeout.connect(self._look)
        self._timer.start()
        application.applicationStateChanged.connect(self._changed)

    def _look(self) -> None:
        young, middle, _ = gc.get_count()
        new, self._known = young - self._known, young
        if young >= _YOUNG:
            gc.collect(1 if middle >= _MIDDLE else 0)
            self._known = 0
        period = _BUSY_MS if new >= _FEW else _IDLE_MS
        if period != self._timer.interval():
            self._timer.setInterval(period)

    def _changed(self, state: Qt.ApplicationState) -> None:
        if state != Qt.ApplicationState.ApplicationActive:
            gc.collect()
