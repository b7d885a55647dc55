"""The samples of a run: a row for each prompt, a column for each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands

if TYPE_CHECKING:
    from app.core.runs.run import Run


class SampleMatrix(QWidget):
    """Shows the previews of one run, and compares any two of them."""

    said = Signal(str)
    chosen = Signal(int)
    """Use the LoRA of this step."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._run: Run | None = None
        self.setAccessibleName(self.tr("Samples"))

    def show_run(self, run: Run | None) -> None:
        """Show another run, or none."""
        self._run = run
