"""Main-thread services: a queue for calls from workers, scheduled garbage collection, and priority for user input.

Garbage collection runs only on the main thread. Python would collect on whichever thread happens to allocate; if that
is a worker and the cycle contains a QObject, Qt destroys it there while holding a lock and waits for the GIL, and the
main thread may hold the GIL and wait for that lock: a deadlock. A full collection also visits every object: 170 ms at
100,000 images. Reference counting frees most objects at once, so cycles are few; young ones are still collected often,
the rest when the user switches to another program.
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
"""Seconds of queued work per turn before input and painting get theirs; Qt alone would run the whole queue at once."""
_YOUNG = 2_000
"""New objects that trigger a collection of the young generation, which takes a millisecond or two."""
_FEW = 500
"""New objects since the last check below which the next check may come later."""
_MIDDLE = 4


class MainThreadQueue(QObject):
    """Queue of calls from any thread that run in order on the thread that created the queue.

    After `close`, at the end of the session, queued calls are dropped.
    """

    _posted = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._open = True
        self._waiting: deque[Callable[[], None]] = deque()
        self._access = threading.Lock()
        self._scheduled = False
        """Whether `_on_posted` is scheduled: always so while work is waiting, also in a dialog's nested event loop."""
        self._posted.connect(self._on_posted, Qt.ConnectionType.QueuedConnection)

    def post(self, work: Callable[[], None]) -> None:
        """Call `work` soon on the queue's thread; harmless after `close`."""
        if self._open:
            with self._access:
                self._waiting.append(work)
                self._schedule()

    def close(self) -> None:
        """Drop waiting and later calls."""
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
"""Opening a large folder creates about 5,000 objects per busy interval; an idle window wakes up less often."""


class GcScheduler(QObject):
    """Runs Python's garbage collector from the event loop; full collections only while the app is inactive."""

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
    """Event filter that makes workers yield as soon as a window gets input or has to paint.

    `MainThreadQueue` does the same for calls that workers post. Workers continue when Qt's event loop is about to wait,
    and during native dialogs, whose event loops Qt does not report.
    """

    def __init__(self, window: QWidget) -> None:
        super().__init__(window)
        window.installEventFilter(self)
        QAbstractEventDispatcher.instance().aboutToBlock.connect(self._on_about_to_block)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Make workers yield; never consume the event."""
        set_window_busy()
        if event.type() == QEvent.Type.WinIdChange and isinstance(watched, QWidget) and watched.internalWinId():
            watched.windowHandle().installEventFilter(self)  # keys and mouse events reach the QWindow first
        return False

    @Slot()
    def _on_about_to_block(self) -> None:
        set_window_idle()
