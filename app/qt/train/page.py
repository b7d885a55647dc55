"""The Train page: what is trained, on the left; what it will need, on the right."""

from __future__ import annotations

from PySide6.QtWidgets import QVBoxLayout

from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.coming import Coming
from app.qt.page import Page


class TrainPage(Page):
    """Sets up one job at a time."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        words = self.tr("Here you will choose a base and a preset, see what fits your graphics card, and start.")
        QVBoxLayout(self).addWidget(Coming(self.tr("Train"), words))
