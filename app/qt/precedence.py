"""Has workers stand back while the window's thread has something to do."""

from __future__ import annotations

from PySide6.QtCore import QAbstractEventDispatcher, QEvent, QObject, Slot
from PySide6.QtWidgets import QWidget

from app.core.tasks import window_rests, window_works


class Precedence(QObject):
    """Sees what comes to a window before the window does: keys, the mouse, and that it is to be painted.

    What workers post to it begins in `Poster`. Where Qt's event loop turns again, or a system's own dialog turns one of
    which Qt says nothing, workers go on.
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
