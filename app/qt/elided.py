"""A line of text that is cut with an ellipsis where there is no room for all of it."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QLabel, QSizePolicy, QStyleOption, QWidget


class Elided(QLabel):
    """Asks for the room that all of its text needs, and does with less; plain text only."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(text, parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Preferred)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return room for a few letters."""
        return QSize(min(60, super().sizeHint().width()), super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint what there is room for."""
        painter, option = QPainter(self), QStyleOption()
        option.initFrom(self)
        room = self.contentsRect()
        words = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, room.width())
        flags, enabled = int(Qt.AlignmentFlag.AlignVCenter), self.isEnabled()
        self.style().drawItemText(painter, room, flags, option.palette, enabled, words, self.foregroundRole())
        painter.end()
