"""What stands above a run: its name, how it stands, how far it is, and what can be asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QLabel, QVBoxLayout, QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands

if TYPE_CHECKING:
    from app.core.runs.run import Run


class RunHeader(QWidget):
    """Speaks of one run."""

    said = Signal(str)
    told = Signal(str, str, object)
    """As of `Page`."""
    failed = Signal(object)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._run: Run | None = None
        self.name = QLabel()
        QVBoxLayout(self).addWidget(self.name)

    def show_run(self, run: Run | None) -> None:
        """Show another run, or none."""
        self._run = run
        self.name.setText(run.directory.name if run else "")
