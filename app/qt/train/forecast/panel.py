"""The forecast of the job that is being set up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QLabel, QVBoxLayout, QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands

if TYPE_CHECKING:
    from app.core.jobs.draft import Draft


class ForecastPanel(QWidget):
    """Says what a job will need and how long it will take, as its settings change."""

    said = Signal(str)
    told = Signal(str, str, object)
    failed = Signal(object)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands
        self._draft: Draft | None = None
        self._headline = QLabel(self.tr("Set up a job to see what it needs."))
        self._headline.setWordWrap(True)
        QVBoxLayout(self).addWidget(self._headline)

    def show_draft(self, draft: Draft | None) -> None:
        """Forecast this job from now on; None for no job."""
        self._draft = draft
