"""A page of a later version: what it will be for."""

from __future__ import annotations

from PySide6.QtWidgets import QLabel, QVBoxLayout, QWidget


class Coming(QWidget):
    """A title and a sentence."""

    def __init__(self, title: str, sentence: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        column = QVBoxLayout(self)
        column.setContentsMargins(40, 36, 40, 36)
        column.setSpacing(8)
        for text, role in ((title, "title"), (sentence, "muted"), (self.tr("Not in this version yet."), "muted")):
            label = QLabel(text)
            label.setProperty("role", role)
            label.setWordWrap(True)
            column.addWidget(label)
        column.addStretch()
