"""Paints a tag with its count at the right."""

from __future__ import annotations

from PySide6.QtCore import QLocale, QModelIndex, QPersistentModelIndex, QSize, Qt
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem

from app.qt.theme import colours

_Index = QModelIndex | QPersistentModelIndex
_SIDE = 10
_GAP = 10


class TagDelegate(QStyledItemDelegate):
    """One row; the count in a quieter colour, so that the eye runs along the tags."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Draw ground, tag and count."""
        scheme = colours()
        chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        if chosen:
            painter.fillRect(option.rect, QColor(scheme.accent))
        elif option.state & QStyle.StateFlag.State_MouseOver:
            painter.fillRect(option.rect, QColor(scheme.hover))
        inside = option.rect.adjusted(_SIDE, 0, -_SIDE, 0)
        count = QLocale().toString(int(index.data(Qt.ItemDataRole.UserRole)))
        painter.setFont(option.font)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.muted))
        painter.drawText(inside, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, count)
        inside.setRight(inside.right() - option.fontMetrics.horizontalAdvance(count) - _GAP)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.text))
        tag = option.fontMetrics.elidedText(str(index.data()), Qt.TextElideMode.ElideMiddle, inside.width())
        painter.drawText(inside, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, tag)

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return a row's size."""
        return QSize(80, option.fontMetrics.height() + 8)
