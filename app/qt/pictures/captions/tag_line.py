"""The line in which tags are typed: Enter adds them and stays."""

from __future__ import annotations

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QWidget

from app.qt.pictures.captions.tag_field import ENTER, Complete, TagField

_UNDO = (QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Redo)


class TagLine(TagField):
    """Enter adds at the end, Shift+Enter at the front, a chosen proposal too.

    Ctrl+Up and Ctrl+Down step between pictures, and so do Left and Right while the line is empty; Backspace then goes
    to the last tag. Escape clears the line and leaves it.
    """

    entered = Signal(str, bool)
    """What was typed or chosen, and whether it belongs to the front."""
    stepped = Signal(int)
    back = Signal()
    left = Signal()

    def __init__(self, complete: Complete, parent: QWidget | None = None) -> None:
        super().__init__(complete, parent)
        self.list.taken.connect(lambda _: self._enter(False))
        self.setPlaceholderText(self.tr("Type a tag, Enter"))
        self.setAccessibleName(self.tr("Add tags"))
        self.setAccessibleDescription(
            self.tr("Enter adds at the end, Shift+Enter at the front, Ctrl+Up and Ctrl+Down go to other pictures")
        )

    def event(self, event: QEvent) -> bool:
        """Leave undo and redo to the window while nothing is typed."""
        override = event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent)
        if override and not self.text() and any(map(event.matches, _UNDO)):  # type: ignore[attr-defined]
            event.ignore()
            return False
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """See the class."""
        key, dropped = event.key(), self.list.isVisible()
        if key in ENTER:
            self.enter(bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
        elif key == Qt.Key.Key_Escape and not dropped:
            self.setText("")
            self.left.emit()
        elif not self._step(event):
            super().keyPressEvent(event)

    def enter(self, front: bool = False) -> None:
        """Enter what is typed, or the proposal that is chosen."""
        if self.list.isVisible() and self.list.chosen:
            self.take(self.list.chosen.text)
        self._enter(front)

    def _step(self, event: QKeyEvent) -> bool:
        """Go to another picture, or to the tags."""
        key, control = event.key(), bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        empty = not self.text() and not control
        if (control and key == Qt.Key.Key_Down) or (empty and key == Qt.Key.Key_Right):
            self.stepped.emit(1)
        elif (control and key == Qt.Key.Key_Up) or (empty and key == Qt.Key.Key_Left):
            self.stepped.emit(-1)
        elif empty and key == Qt.Key.Key_Backspace:
            self.back.emit()
        else:
            return False
        self.list.hide()
        return True

    def _enter(self, front: bool) -> None:
        text = self.text()
        self.list.hide()
        self.setText("")  # and not clear(): what was typed is no undo of the line any more
        if text.strip():
            self.entered.emit(text, front)
