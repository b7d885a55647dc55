"""What the page's two lists have in common: rows that are known by a key, with words for how each stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, QRect, QRectF, Qt
from PySide6.QtGui import QColor, QFont, QPainter
from PySide6.QtWidgets import QStyle, QStyleOptionViewItem

from app.qt.theme import colours

Index = QModelIndex | QPersistentModelIndex
DOT = 8
"""How wide and high the dot is that says how a row stands, in Qt's pixels."""
_Row = TypeVar("_Row")


class StandingModel(QAbstractListModel, Generic[_Row]):
    """The rows of now; `key` tells by what one is known again."""

    def __init__(self, key: Callable[[_Row], object], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._key = key
        self.rows: Sequence[_Row] = ()
        self.words: Sequence[str] = ()
        """How each row stands."""

    def renew(self, rows: Sequence[_Row], words: Sequence[str]) -> bool:
        """Show these; returns whether they are others than before. Else the view keeps its place."""
        others = [*map(self._key, rows)] != [*map(self._key, self.rows)]
        before = list(zip(self.rows, self.words, strict=True))
        if others:
            self.beginResetModel()
        self.rows, self.words = tuple(rows), tuple(words)
        if others:
            self.endResetModel()
            return True
        for place, (old, new) in enumerate(zip(before, zip(rows, words, strict=True), strict=True)):
            if old != new:
                self.dataChanged.emit(self.index(place), self.index(place))
        return False

    def place_of(self, key: object) -> QModelIndex:
        """Return where a row stands; an invalid index where it is not listed."""
        place = next((place for place, row in enumerate(self.rows) if self._key(row) == key), -1)
        return self.index(place) if place >= 0 else QModelIndex()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: N802, B008 (Qt's signature)
        """Return how many there are."""
        return 0 if parent.isValid() else len(self.rows)


def paint_ground(painter: QPainter, option: QStyleOptionViewItem) -> bool:
    """Paint what lies under a row; return whether the row is chosen."""
    scheme = colours()
    chosen = bool(option.state & QStyle.StateFlag.State_Selected)
    hovered = bool(option.state & QStyle.StateFlag.State_MouseOver)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.fillRect(option.rect, QColor(scheme.accent if chosen else scheme.hover if hovered else scheme.base))
    return chosen


def paint_dot(painter: QPainter, line: QRect, colour: str) -> None:
    """Paint the dot that says how a row stands, at the left of a line."""
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(colour))
    painter.drawEllipse(QRectF(line.left(), line.top() + (line.height() - DOT) / 2, DOT, DOT))


def paint_words(painter: QPainter, place: QRect, text: str, colour: str, font: QFont) -> None:
    """Write one line, cut where it is too long."""
    painter.setFont(font)
    painter.setPen(QColor(colour))
    cut = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, place.width())
    painter.drawText(place, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), cut)


def paint_focus(painter: QPainter, option: QStyleOptionViewItem, chosen: bool) -> None:
    """Paint the ring around a row that has the keyboard."""
    if option.state & QStyle.StateFlag.State_HasFocus:
        painter.setPen(QColor(colours().on_accent if chosen else colours().focus))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawRoundedRect(QRectF(option.rect).adjusted(1.5, 1.5, -1.5, -1.5), 3, 3)
