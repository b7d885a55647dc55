"""The way home from worker threads: calls functions on the window's thread, through Qt's event loop.

Looks for garbage on the window's thread alone, and never for so long that the window stops.

Python itself would look on whichever thread happens to make an object. Where that is a worker and a QObject lies in a
cycle, Qt destroys it there and waits for the interpreter within a lock that the window's thread, which has the
interpreter, may be waiting for: both stand still for ever. And a full collection looks at every object there is: 170 ms
at 100,000 pictures. What the app drops is freed at once by reference counts; only cycles wait, few of them, and the
young ones are still found often. The rest is looked through when the user turns to another program.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable

from PySide6.QtCore import QAbstractEventDispatcher, QEvent, QObject, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QWidget

from app.core.tasks import window_rests, window_works

_TURN = 0.004
"""Seconds after which what waits lets keys, mouse and painting come first: Qt itself would do all of it at once."""
_YOUNG = 2_000
"""New objects from which on the young are looked through, in a millisecond or two."""
_FEW = 500
"""New objects since the last look below which the next may come later."""
_MIDDLE = 4


class MainThreadQueue(QObject):
    """`post` may be called from any thread; what it is given runs in the thread that made the poster, in order.

    After `close`, which comes when the session has ended, nothing runs any more.
    """

    _posted = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._open = True
        self._waiting: deque[Callable[[], None]] = deque()
        self._access = threading.Lock()
        self._called = False
        """Whether `_call` is on its way: so it is while anything waits, also within a dialog that one of them opens."""
        self._posted.connect(self._call, Qt.ConnectionType.QueuedConnection)

    def post(self, work: Callable[[], None]) -> None:
        """Call `work` soon; a thread that outlives the poster may call it too."""
        if self._open:
            with self._access:
                self._waiting.append(work)
                self._call_soon()

    def close(self) -> None:
        """Drop what is on its way and what comes later."""
        self._open = False

    def _call_soon(self) -> None:
        if self._waiting and not self._called:
            self._called = True
            self._posted.emit()

    @Slot()
    def _call(self) -> None:
        self._called = False
        window_works()
        end = time.perf_counter() + _TURN
        while self._open and (work := self._next()):
            work()
            if time.perf_counter() > end:
                return

    def _next(self) -> Callable[[], None] | None:
        with self._access:
            work = self._waiting.popleft() if self._waiting else None
            self._call_soon()
        return work


_BUSY_MS, _IDLE_MS = 25, 100
"""Within the former opening a large folder makes some 5,000 objects; at rest the window wakes up less often."""


class GcScheduler(QObject):
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


class InputPriorityFilter(QObject):
    """Sees what comes to a window before the window does: keys, the mouse, and that it is to be painted.

    What workers post to it begins in `MainThreadQueue`. Where Qt's event loop turns again, or a system's own dialog
    turns one of which Qt says nothing, workers go on.
    """

    def __init__(self, window: QWidget) -> None:
        super().__init__(window)
        window.installEventFilter(self)
        QAbstractEventDispatcher.instance().aboutToBlock.connect(self._rest)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Have workers stand back; leave the event to whom it is for."""
        window_works()
        if event.type() == QEvent.Type.WinIdChange and isinstance(watched, QWidget) and watched.internalWinId():
            watched.windowHandle().installEventFilter(self)  # keys and the mouse come to this one first
        return False

    @Slot()
    def _rest(self) -> None:
        window_rests()
