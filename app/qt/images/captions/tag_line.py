"""Input fields for tags, with suggestions as the user types."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import QEvent, QLocale, Qt, Signal
from PySide6.QtGui import QFocusEvent, QKeyEvent, QKeySequence
from PySide6.QtWidgets import QLineEdit, QWidget

from app.core.query.completion import Proposal
from app.core.tags.completion import Completion
from app.qt.images.finding.suggestions import ProposalList

Complete = Callable[[str], Sequence[Completion]]
ENTER = (Qt.Key.Key_Return, Qt.Key.Key_Enter)
_UNDO_KEYS = (QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Redo)


class TagField(QLineEdit):
    """Tag field with suggestions.

    Up and Down select a suggestion, Enter accepts it, and Escape closes the list. Tab accepts the selected suggestion
    or, if none is selected, the first one.
    """

    def __init__(self, complete: Complete, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._complete = complete
        self.list = ProposalList(self)
        self.list.accepted.connect(lambda proposal: self.accept(proposal.text))
        self.textEdited.connect(lambda _: self._update_suggestions())

    def accept(self, tag: str) -> None:
        """Replace the tag being typed with a suggestion."""
        self.setText(self.completed(tag))
        self.list.hide()
        self.textEdited.emit(self.text())
        self.list.hide()

    def completed(self, tag: str) -> str:
        """Return the text with this tag in place of the one being typed."""
        before, comma, _ = self.text().rpartition(",")
        return f"{before}{comma} {tag}" if comma else tag

    def event(self, event: QEvent) -> bool:
        """Accept a suggestion with Tab if it changes the text; otherwise let Qt move the focus."""
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress and event.key() == Qt.Key.Key_Tab:
            chosen = (self.list.chosen or self.list.proposals.proposals[0]) if self.list.isVisible() else None
            if chosen and self.completed(chosen.text) != self.text():
                self.accept(chosen.text)
                return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Handle the keys for the list of suggestions."""
        key, list_open = event.key(), self.list.isVisible()
        if list_open and key in (Qt.Key.Key_Down, Qt.Key.Key_Up):
            self.list.step(1 if key == Qt.Key.Key_Down else -1)
        elif list_open and key in ENTER and self.list.chosen:
            self.accept(self.list.chosen.text)
        elif list_open and key == Qt.Key.Key_Escape:
            self.list.hide()
        else:
            super().keyPressEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Close the suggestions."""
        super().focusOutEvent(event)
        self.list.hide()

    def _update_suggestions(self) -> None:
        typed = self.text().rpartition(",")[2].strip()
        found = self._complete(typed) if typed else []
        self.list.show_suggestions([Proposal(one.tag, 0, 0, self._reason(one), one.images or None) for one in found])

    def _reason(self, one: Completion) -> str:
        words = [self.tr("alias {alias}").format(alias=one.alias)] if one.alias else []
        words += [QLocale().toString(one.popularity)] if one.popularity else []
        return "  ".join(words) or self.tr("from a tag list")


class TagLine(TagField):
    """Field for adding tags: Enter adds the typed tags at the end of the caption, Shift+Enter at the start.

    Ctrl+Up and Ctrl+Down change the image. While the field is empty, Left and Right also change the image, and
    Backspace selects the last tag. Escape clears the field and emits `left`.
    """

    submitted = Signal(str, bool)
    """The user added tags: the typed text, and whether to add its tags at the start of the caption."""
    stepped = Signal(int)
    back = Signal()
    left = Signal()

    def __init__(self, complete: Complete, parent: QWidget | None = None) -> None:
        super().__init__(complete, parent)
        self.list.accepted.connect(lambda _: self._enter(False))
        self.setPlaceholderText(self.tr("Type a tag and press Enter"))
        self.setAccessibleName(self.tr("Add tags"))
        self.setAccessibleDescription(
            self.tr("Enter adds at the end, Shift+Enter at the start, Ctrl+Up and Ctrl+Down change the image")
        )

    def event(self, event: QEvent) -> bool:
        """Let the window handle undo and redo while the field is empty."""
        override = event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent)
        if override and not self.text() and any(map(event.matches, _UNDO_KEYS)):  # type: ignore[attr-defined]
            event.ignore()
            return False
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Add tags, clear the field, or change the image."""
        key, list_open = event.key(), self.list.isVisible()
        if key in ENTER:
            self.enter(bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
        elif key == Qt.Key.Key_Escape and not list_open:
            self.setText("")
            self.left.emit()
        elif not self._step(event):
            super().keyPressEvent(event)

    def enter(self, front: bool = False) -> None:
        """Add the typed tags, first replacing the last one with the selected suggestion, if any."""
        if self.list.isVisible() and self.list.chosen:
            self.accept(self.list.chosen.text)
        self._enter(front)

    def _step(self, event: QKeyEvent) -> bool:
        """Handle keys that change the image or select the last tag; return whether one was handled."""
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
        self.setText("")  # unlike clear(), this also empties the field's own undo stack
        if text.strip():
            self.submitted.emit(text, front)
