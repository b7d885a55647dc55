"""A line of text whose undo is that of the page: Ctrl+Z takes back what was done to the job, wherever the cursor is."""

from __future__ import annotations

from PySide6.QtCore import QEvent
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QLineEdit

_PAGES = (QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Redo)


class Line(QLineEdit):
    """Everything else is as in Qt's own."""

    def event(self, event: QEvent) -> bool:
        """Leave undo and redo to the window's commands."""
        key = event if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.ShortcutOverride else None
        if key is not None and any(key.matches(sequence) for sequence in _PAGES):
            event.ignore()
            return True
        return super().event(event)

    def show_text(self, text: str) -> None:
        """Show another text, from its beginning; the cursor stays where the text is the same."""
        if text != self.text():
            self.setText(text)
            if not self.hasFocus():
                self.setCursorPosition(0)
