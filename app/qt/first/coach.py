"""The strip above the page that says what is seen there; it covers nothing and blocks nothing."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QToolButton, QVBoxLayout, QWidget

from app.qt.theme import set_icon


class Coach(QFrame):
    """One step of a tour at a time."""

    back = Signal()
    onward = Signal()
    acted = Signal()
    """The step's own button was pressed."""
    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("coach")
        self.count, self.title, self.words = QLabel(), QLabel(), QLabel()
        self.former, self.next, self.act = QPushButton(self.tr("Back")), QPushButton(), QPushButton()
        self.closing = QToolButton()
        self._build()
        for button, signal in (
            (self.former, self.back),
            (self.next, self.onward),
            (self.act, self.acted),
            (self.closing, self.closed),
        ):
            button.clicked.connect(lambda _=False, signal=signal: signal.emit())

    def show_step(self, number: int, of: int, title: str, words: str, act: str = "") -> None:
        """Show a step, numbered from 1; `act` is the title of a button of its own."""
        self.count.setText(self.tr("Tour, {number} of {of}").format(number=number, of=of))
        self.title.setText(title)
        self.words.setText(words)
        self.former.setEnabled(number > 1)
        self.next.setText(self.tr("Next") if number < of else self.tr("Done"))
        self.act.setText(act)
        self.act.setVisible(bool(act))
        self.act.setDefault(bool(act))  # the look of what comes next
        self.next.setDefault(not act)
        self.setAccessibleName(f"{self.count.text()}: {title}")
        self.setAccessibleDescription(words)

    def _build(self) -> None:
        self.count.setProperty("role", "muted")
        self.title.setProperty("role", "heading")
        for label in (self.title, self.words):
            label.setTextFormat(Qt.TextFormat.PlainText)
        self.words.setWordWrap(True)
        self.closing.setToolTip(self.tr("End the tour"))
        self.closing.setAccessibleName(self.tr("End the tour"))
        self.closing.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        set_icon(self.closing, "close")
        texts = QVBoxLayout()
        texts.setSpacing(2)
        head = QHBoxLayout()
        head.setSpacing(10)
        head.addWidget(self.title)
        head.addWidget(self.count)
        head.addStretch()
        texts.addLayout(head)
        texts.addWidget(self.words)
        row = QHBoxLayout(self)
        row.setContentsMargins(14, 10, 8, 10)
        row.setSpacing(8)
        row.addLayout(texts, 1)
        for button in (self.act, self.former, self.next):
            row.addWidget(button, 0, Qt.AlignmentFlag.AlignVCenter)
        row.addWidget(self.closing, 0, Qt.AlignmentFlag.AlignTop)
