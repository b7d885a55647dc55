"""The queue below the list of runs: what waits, what runs, and what became of the rest."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands


class QueuePanel(QWidget):
    """Shows the queue while it is visible."""

    said = Signal(str)
    told = Signal(str, str, object)
    """As of `Page`."""
    failed = Signal(object)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        QVBoxLayout(self)
