"""What every page of the rail is."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands


class Page(QWidget):
    """A page tells the window what to say; it adds its actions to the commands when it is made.

    The window makes a page when it is shown for the first time, or when nothing else is to be done after the start.
    """

    said = Signal(str)
    """For the status line, some seconds."""
    told = Signal(str, str, object)
    """For a notice: sentence, kind ("info", "warning", "error"), and (title, function) of its button or None."""
    failed = Signal(object)
    """An ImpastoError, for a notice."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands

    def open(self, path: Path) -> None:
        """Show this thing of the page's kind; pages that have none pass over it."""
