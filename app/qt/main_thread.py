"""Main-thread services: a queue for calls from workers, scheduled garbage collection, and priority for user input.

Garbage collection runs only on the main thread. By default, Python collects on whichever thread happens to allocate. On
a worker this can deadlock if a cycle contains a QObject: Qt destroys it while holding a lock and waits for the GIL, and
the main thread may hold the GIL and wait for that lock. A full collection also visits every object, which takes
170 ms with 100,000 images. Reference counting frees most objects immediately, and cycles are rare, so young objects
are collected often, and all others only when the user switches to another program.
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

from app.core.tasks import set_window_busy, set_window_idle

_TURN = 0.004
"""Seconds of queued work before input and painting get a turn; Qt itself would run the whole queue at once."""
_YOUNG = 2_000
"""Number of new objects that triggers a collection of the young generation, which takes one or two ms."""
_FEW = 500
"""If at least this many objects were created since the last check, the next check comes after `_BUSY_MS`."""
_MIDDLE = 4


class MainThreadQueue(QObject):
    """Queue of calls from any thread that run in order on the thread that created the queue.

    `close` drops queued calls at the end of the session.
    """

    _posted = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._open = True
        self._waiting: deque[Callable[[], None]] = deque()
        self._access = threading.Lock()
        self._scheduled = False
        """Whether `_on_posted` is scheduled; True while work is waiting, even in a dialog's nested event loop."""
        self._posted.connect(self._on_posted, Qt.ConnectionType.QueuedConnection)

    def post(self, work: Callable[[], None]) -> None:
        """Call `work` soon on the queue's thread; do nothing after `close`."""
        if self._open:
            with self._access:
                self._waiting.append(work)
                self._schedule()

    def close(self) -> None:
        """Drop all queued calls, and ignore later ones."""
        self._open = False

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._posted.emit()

    @Slot()
    def _on_posted(self) -> None:
        self._scheduled = False
        set_window_busy()
        end = time.perf_counter() + _TURN
        while self._open and (work := self._next()):
            work()
            if time.perf_counter() > end:
                return

    def _next(self) -> Callable[[], None] | None:
        with self._access:
            work = self._waiting.popleft() if self._waiting else None
            self._schedule()
        return work


_BUSY_MS, _IDLE_MS = 25, 100
"""Intervals between checks, in ms. Opening a large folder creates about 5,000 objects per busy interval."""


class GcScheduler(QObject):
    """Runs Python's garbage collector from the event loop; a full collection only when the app becomes inactive."""

    def __init__(self, application: QGuiApplication) -> None:
        super().__init__(application)
        gc.disable()
        self._counted = 0
        self._timer = QTimer(self, interval=_IDLE_MS)
        self._timer.timeout.connect(self._on_timeout)
        self._timer.start()
        application.applicationStateChanged.connect(self._on_application_state_changed)

    def _on_timeout(self) -> None:
        young, middle, _ = gc.get_count()  # automatic collection is off, so `young` grows until we collect
        new, self._counted = young - self._counted, young
        if young >= _YOUNG:
            gc.collect(1 if middle >= _MIDDLE else 0)
            self._counted = 0
        period = _BUSY_MS if new >= _FEW else _IDLE_MS
        if period != self._timer.interval():
            self._timer.setInterval(period)

    def _on_application_state_changed(self, state: Qt.ApplicationState) -> None:
        if state != Qt.ApplicationState.ApplicationActive:
            gc.collect()


class InputPriorityFilter(QObject):
    """Event filter that makes workers pause as soon as a window gets input or has to paint.

    `MainThreadQueue` does the same when it runs queued calls. Workers continue when Qt's event loop is about to wait,
    and during native dialogs, whose event loops Qt does not report.
    """

    def __init__(self, window: QWidget) -> None:
        super().__init__(window)
        window.installEventFilter(self)
        QAbstractEventDispatcher.instance().aboutToBlock.connect(self._on_about_to_block)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Make workers pause; never consume the event."""
        set_window_busy()
        if event.type() == QEvent.Type.WinIdChange and isinstance(watched, QWidget) and watched.internalWinId():
            watched.windowHandle().installEventFilter(self)  # keys and mouse events reach the QWindow first
        return False

    @Slot()
    def _on_about_to_block(self) -> None:
        set_window_idle()
