"""A sign with words beside it."""

from __future__ import annotations

from typing import Literal

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QWidget

from app.qt.parts import plain_label, sign
from app.qt.theme import set_icon

Sign = Literal["good", "info", "warning", "bad", "waiting"]
_ICONS: dict[Sign, tuple[str, str]] = {
    "good": ("check", "good"),
    "info": ("info", "link"),
    "warning": ("warning", "warning"),
    "bad": ("error", "bad"),
    "waiting": ("more", "muted"),
}


class Line(QWidget):
    """Plain text, as long as it needs to be; the sign is said by the words too."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._sign, self.words = sign(16), plain_label()
        self.words.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.MinimumExpanding)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        row.addWidget(self._sign, 0, Qt.AlignmentFlag.AlignTop)
        row.addWidget(self.words, 1)

    def say(self, kind: Sign, words: str) -> None:
        """Show this."""
        set_icon(self._sign, *_ICONS[kind])
        self.words.setText(words)
