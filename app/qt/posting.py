"""The way home from worker threads: calls functions on the window's thread, through Qt's event loop."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Qt, Signal, Slot


class Poster(QObject):
    """`post` may be called from any thread; what it is given runs in the thread that made the poster, in order."""

    _posted = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._posted.connect(self._call, Qt.ConnectionType.QueuedConnection)

    def post(self, work: Callable[[], None]) -> None:
        """Call `work` soon."""
        self._posted.emit(work)

    @Slot(object)
    def _call(self, work: Callable[[], None]) -> None:
        work()
