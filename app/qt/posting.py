"""The way home from worker threads: calls functions on the window's thread, through Qt's event loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from PySide6.QtCore import QObject, Qt, Signal, Slot

from app.core.tasks import window_works

_TURN = 0.004
"""Seconds after which what waits lets keys, mouse and painting come first: Qt itself would do all of it at once."""


class Poster(QObject):
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
