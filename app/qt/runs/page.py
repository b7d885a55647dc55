"""The Runs page: the runs and the queue on the left, one run on the right."""

from __future__ import annotations

from PySide6.QtWidgets import QVBoxLayout

from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.coming import Coming
from app.qt.page import Page


class RunsPage(Page):
    """Shows runs, those that go on live."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        words = self.tr("Here you will watch runs, compare what they learn, and go on with those that stopped.")
        QVBoxLayout(self).addWidget(Coming(self.tr("Runs"), words))
