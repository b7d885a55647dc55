"""The line in which a query is written: underlines what is wrong with it and lets proposals drop down."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QFocusEvent, QInputMethodEvent, QKeyEvent, QTextCharFormat
from PySide6.QtWidgets import QApplication, QLineEdit, QWidget

from app.core.query.completion import Proposal
from app.core.query.language import Fault
from app.qt.pictures.finding.proposals import ProposalList
from app.qt.theme import colours

_ENTER = (Qt.Key.Key_Return, Qt.Key.Key_Enter)


class FilterField(QLineEdit):
    """Enter asks, Down and Ctrl+Space propose, Tab takes a proposal, Escape closes the list and then clears."""

    asked = Signal()
    """Enter was pressed, or the field was cleared."""
    settled = Signal()
    """The proposals were closed and none was taken: what is typed is meant as it stands."""
    left = Signal()
    """The keyboard went elsewhere."""
    listed = Signal()
    """Alt+Down: the kept filters are wanted."""

    def __init__(self, propose: Callable[[str, int], list[Proposal]], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._propose = propose
        self.list = ProposalList(self)
        self.list.taken.connect(self.take)
        self.setPlaceholderText(self.tr("Filter, such as tag:cat -tag:dog size:<512"))
        self.setAccessibleName(self.tr("Filter"))
        self.setAccessibleDescription(self.tr("Shows only the pictures that this query finds"))
        self.textEdited.connect(lambda _: self.propose(typing=True))

    def underline(self, faults: Iterable[Fault]) -> None:
        """Draw a wave below these parts of the text, and below no other.

        Formats are no part of a line edit; an input method may give some, so we speak as one (QTBUG-46603).
        """
        wave = QTextCharFormat()
        wave.setUnderlineStyle(QTextCharFormat.UnderlineStyle.WaveUnderline)
        wave.setUnderlineColor(colours().bad)
        kind = QInputMethodEvent.AttributeType.TextFormat
        cursor = self.cursorPosition()
        marks = [QInputMethodEvent.Attribute(kind, f.start - cursor, f.end - f.start, wave) for f in faults]
        QApplication.sendEvent(self, QInputMethodEvent("", marks))

    def propose(self, *, typing: bool = False) -> None:
        """Let the proposals for the word at the cursor drop down; while typing only where something is typed."""
        text, cursor = self.text(), self.cursorPosition()
        wanted = not typing or (cursor > 0 and not text[cursor - 1].isspace())
        self.list.propose(self._propose(text, cursor) if wanted else [])

    def take(self, proposal: Proposal) -> None:
        """Write a proposal in place of the word it is for."""
        text, cursor = proposal.put_into(self.text())
        self.setText(text)
        self.setCursorPosition(cursor)
        self.list.hide()
        self.textEdited.emit(text)

    def event(self, event: QEvent) -> bool:
        """Take Tab for the list while it is there; Qt would move the keyboard on."""
        if event.type() == QEvent.Type.KeyPress and isinstance(event, QKeyEvent) and self.list.isVisible():
            proposal = self.list.chosen or self.list.proposals.proposals[0]
            if event.key() == Qt.Key.Key_Tab:
                self.take(proposal)
                return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """See the class."""
        key, dropped = event.key(), self.list.isVisible()
        if key == Qt.Key.Key_Down and event.modifiers() & Qt.KeyboardModifier.AltModifier:
            self.listed.emit()
        elif key in (Qt.Key.Key_Down, Qt.Key.Key_Up) and dropped:
            self.list.step(1 if key == Qt.Key.Key_Down else -1)
        elif key == Qt.Key.Key_Down or (
            key == Qt.Key.Key_Space and event.modifiers() & Qt.KeyboardModifier.ControlModifier
        ):
            self.propose()
        elif key in _ENTER and dropped and self.list.chosen:
            self.take(self.list.chosen)
        elif key in _ENTER:
            self.list.hide()
            self.asked.emit()
        elif key == Qt.Key.Key_Escape and dropped:
            self.list.hide()
            self.settled.emit()
        elif key == Qt.Key.Key_Escape and self.text():
            self.clear()
            self.asked.emit()
        else:
            super().keyPressEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Close the list with it."""
        super().focusOutEvent(event)
        if self.list.isVisible():
            self.list.hide()
            self.settled.emit()
        self.left.emit()
