"""What a run said: what should be known of it in words, and below all that its engine printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QPlainTextEdit, QVBoxLayout, QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands

if TYPE_CHECKING:
    from app.core.runs.run import Run


class LogView(QWidget):
    """Shows the log of one run."""

    said = Signal(str)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._run: Run | None = None
        self.text = QPlainTextEdit()
        self.text.setReadOnly(True)
        self.text.setAccessibleName(self.tr("Log"))
        QVBoxLayout(self).addWidget(self.text)

    def show_run(self, run: Run | None) -> None:
        """Show another run, or none."""
        self._run = run
