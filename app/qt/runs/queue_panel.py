"""The queue: which jobs wait, and in which order."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands


class QueuePanel(QWidget):
    """Shows what waits and what runs."""

    said = Signal(str)
    told = Signal(str, str, object)
    failed = Signal(object)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
