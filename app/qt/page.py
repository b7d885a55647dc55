"""What every page of the rail is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands


class Step(Protocol):
    """Something that was taken back or done again."""

    @property
    def name(self) -> str:
        """What it was, in words."""


class Undoing(Protocol):
    """What Ctrl+Z takes back while a page is shown."""

    @property
    def undo_name(self) -> str | None:
        """What would be taken back, in words; None where there is nothing."""

    @property
    def redo_name(self) -> str | None:
        """What would be done again."""

    def undo(self) -> Step | None:
        """Take it back; return what was taken back."""

    def redo(self) -> Step | None:
        """Do it again; return what was done."""


class NoUndo:
    """That of a page on which nothing can be taken back, not even what was done on another."""

    undo_name = redo_name = None

    def undo(self) -> None:
        """Do nothing."""

    def redo(self) -> None:
        """Do nothing."""


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
    mended = Signal(object)
    """An ImpastoError that was told by `failed`, or a sentence told by `told`, that is over."""
    undoable = Signal()
    """What `undoing` names is another now."""

    undoing: Undoing | None = None
    """The page's own undo; None: that of the captions."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands

    def build(self) -> Iterator[None]:
        """Make its parts, one in each turn of the window's thread; it is shown when there is no more. Called once."""
        yield from ()

    def open(self, path: Path) -> None:
        """Show this thing of the page's kind; pages that have none pass over it."""

    def begin(self, name: str) -> None:
        """Begin something new with what another page names; pages where nothing begins pass over it."""
