"""A line for tags that proposes how the one being typed may go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import QEvent, QLocale, Qt
from PySide6.QtGui import QFocusEvent, QKeyEvent
from PySide6.QtWidgets import QLineEdit, QWidget

from app.core.query.completion import Proposal
from app.core.tags.completion import Completion
from app.qt.pictures.finding.proposals import ProposalList

Complete = Callable[[str], Sequence[Completion]]
ENTER = (Qt.Key.Key_Return, Qt.Key.Key_Enter)


class TagField(QLineEdit):
    """Up and Down choose a proposal, Tab takes the chosen or the first one, Enter the chosen; Escape closes them."""

    def __init__(self, complete: Complete, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._complete = complete
        self.list = ProposalList(self)
        self.list.taken.connect(lambda proposal: self.take(proposal.text))
        self.textEdited.connect(lambda _: self._propose())

    def take(self, tag: str) -> None:
        """Write a proposal in place of the tag that is being typed."""
        self.setText(self.completed(tag))
        self.list.hide()
        self.textEdited.emit(self.text())
        self.list.hide()

    def completed(self, tag: str) -> str:
        """Return the line with this tag in place of the one being typed."""
        before, comma, _ = self.text().rpartition(",")
        return f"{before}{comma} {tag}" if comma else tag

    def event(self, event: QEvent) -> bool:
        """Take Tab for the proposals while one has more than what is typed; Qt would move the keyboard on."""
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress and event.key() == Qt.Key.Key_Tab:
            chosen = (self.list.chosen or self.list.proposals.proposals[0]) if self.list.isVisible() else None
            if chosen and self.completed(chosen.text) != self.text():
                self.take(chosen.text)
                return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """See the class."""
        key, dropped = event.key(), self.list.isVisible()
        if dropped and key in (Qt.Key.Key_Down, Qt.Key.Key_Up):
            self.list.step(1 if key == Qt.Key.Key_Down else -1)
        elif dropped and key in ENTER and self.list.chosen:
            self.take(self.list.chosen.text)
        elif dropped and key == Qt.Key.Key_Escape:
            self.list.hide()
        else:
            super().keyPressEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Close the proposals."""
        super().focusOutEvent(event)
        self.list.hide()

    def _propose(self) -> None:
        typed = self.text().rpartition(",")[2].strip()
        found = self._complete(typed) if typed else []
        self.list.propose([Proposal(one.tag, 0, 0, self._reason(one), one.pictures or None) for one in found])

    def _reason(self, one: Completion) -> str:
        words = [self.tr("for {alias}").format(alias=one.alias)] if one.alias else []
        words += [QLocale().toString(one.popularity)] if one.popularity else []
        return "  ".join(words) or self.tr("from a list")
