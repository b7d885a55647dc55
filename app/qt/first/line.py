"""A sign with words beside it."""

from __future__ import annotations

from typing import Literal

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy, QToolButton, QWidget

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
        self._sign = QToolButton()
        self._sign.setIconSize(QSize(16, 16))
        self._sign.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._sign.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.words = QLabel()
        self.words.setTextFormat(Qt.TextFormat.PlainText)
        self.words.setWordWrap(True)
        self.words.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.words.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.MinimumExpanding)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        row.addWidget(self._sign, 0, Qt.AlignmentFlag.AlignTop)
        row.addWidget(self.words, 1)

    def say(self, sign: Sign, words: str) -> None:
        """Show this."""
        set_icon(self._sign, *_ICONS[sign])
        self.words.setText(words)
