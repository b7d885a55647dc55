"""The Presets page: recipes and fits that are built in, own or received."""

from __future__ import annotations

from PySide6.QtWidgets import QVBoxLayout

from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.coming import Coming
from app.qt.page import Page


class PresetsPage(Page):
    """Shows presets as cards."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        words = self.tr("Here you will keep your presets and exchange them with others.")
        QVBoxLayout(self).addWidget(Coming(self.tr("Presets"), words))
