"""The way home from worker threads: calls functions on the window's thread, through Qt's event loop."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Qt, Signal, Slot


class Poster(QObject):
    """`post` may be called from any thread; what it is given runs in the thread that made the poster, in order.

    After `close`, which comes when the session has ended, nothing runs any more.
    """

    _posted = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._open = True
        self._posted.connect(self._call, Qt.ConnectionType.QueuedConnection)

    def post(self, work: Callable[[], None]) -> None:
        """Call `work` soon; a thread that outlives the poster may call it too."""
        if self._open:
            self._posted.emit(work)

    def close(self) -> None:
        """Drop what is on its way and what comes later."""
        self._open = False

    @Slot(object)
    def _call(self, work: Callable[[], None]) -> None:
        if self._open:
            work()
