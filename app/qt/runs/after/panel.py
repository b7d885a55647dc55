"""What comes after the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QLabel, QVBoxLayout, QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands

if TYPE_CHECKING:
    from app.core.runs.run import Run


class AfterPanel(QWidget):
    """Shows what a run saved, tries it out and exports it."""

    said = Signal(str)
    told = Signal(str, str, object)
    failed = Signal(object)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands
        self._run: Run | None = None
        self._headline = QLabel(self.tr("No run is shown."))
        self._headline.setWordWrap(True)
        QVBoxLayout(self).addWidget(self._headline)

    def show_run(self, run: Run | None) -> None:
        """Show what this run saved; None for no run."""
        self._run = run
