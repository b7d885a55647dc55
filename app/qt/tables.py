"""Tables of plain, possibly untrusted text, with bars to compare numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QResizeEvent
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem, QTreeView, QWidget

from app.qt.theme import colors
from app.qt.widgets import plain_tip

_Index = QModelIndex | QPersistentModelIndex
_BAR = int(Qt.ItemDataRole.UserRole)
_BAR_HEIGHT, _GAP, _SIDE = 10.0, 10, 9
_NUMBER_WIDTH = 96
"""Width reserved for the number beside a bar, in px."""
_COLUMN_GAP = 16
"""Space between a column's longest text and the next column, in px."""
_MAX_UNCUT = 24
"""Number of characters that always fit in a cell; the tooltip repeats longer texts in full."""


@dataclass(frozen=True, slots=True)
class Row:
    """One table row; `bar` is the bar's length in the last column, from 0 to 1, or None for no bar."""

    texts: tuple[str, ...]
    bar: float | None = None
    tip: str = ""


def _tip(row: Row, text: str) -> str:
    """Return a cell's tooltip: the full text if it may be cut off, then the row's tip."""
    shown = text if len(text) > _MAX_UNCUT else ""
    return "\n\n".join(filter(None, (shown, row.tip))) or text


class Rows(QAbstractTableModel):
    """Table model of text rows under column titles."""

    def __init__(self, titles: Sequence[str], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.titles = tuple(titles)
        self.rows: list[Row] = []

    def show(self, rows: Sequence[Row]) -> None:
        """Replace all rows."""
        self.beginResetModel()
        self.rows = list(rows)
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return the number of rows."""
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return the number of columns."""
        return 0 if parent.isValid() else len(self.titles)

    def headerData(self, section: int, side: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> object:  # noqa: N802
        """Return a column title."""
        shown = side == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole
        return self.titles[section] if shown else None

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return a cell's text, tooltip, or bar length."""
        if not index.isValid():
            return None
        row = self.rows[index.row()]
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return row.texts[index.column()]
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(_tip(row, row.texts[index.column()]))
        if role == _BAR and index.column() == len(self.titles) - 1:
            return row.bar
        return None


def distribute_widths(wanted: Sequence[int], room: int) -> list[int]:
    """Return column widths whose sum is at most `room` px; only the widest columns shrink, to equal widths."""
    widths = [0] * len(wanted)
    for done, column in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        widths[column] = min(wanted[column], room // (len(wanted) - done))
        room -= widths[column]
    return widths


class Table(QTreeView):
    """Table view of text rows; the last column takes the remaining width."""

    def __init__(self, titles: Sequence[str], name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._wanted: list[int] = []
        self.lines = Rows(titles, self)
        self.setModel(self.lines)
        self.setItemDelegate(BarDelegate(self))
        self.setRootIsDecorated(False)
        self.setUniformRowHeights(True)
        self.setAllColumnsShowFocus(True)
        self.setAccessibleName(name)
        self.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.header().setStretchLastSection(True)
        self.header().setSectionsMovable(False)

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Replace all rows, and fit the columns to their content as far as the width allows."""
        self.lines.show(rows)
        self._wanted = [
            max(self.sizeHintForColumn(column), self.header().sectionSizeHint(column)) + _COLUMN_GAP
            for column in range(len(self.lines.titles))
        ]
        self._fit_columns()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Distribute the new width among the columns."""
        super().resizeEvent(event)
        self._fit_columns()

    def _fit_columns(self) -> None:
        for column, width in enumerate(distribute_widths(self._wanted, self.viewport().width())[:-1]):
            self.setColumnWidth(column, width)


class BarDelegate(QStyledItemDelegate):
    """Delegate that draws a bar and its number in one cell."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Draw the background, then the bar and its number."""
        length = index.data(_BAR)
        if not isinstance(length, float):
            super().paint(painter, option, index)
            return
        scheme = colors()
        chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        if chosen:
            painter.fillRect(option.rect, QColor(scheme.accent))
        inside = option.rect.adjusted(_SIDE, 0, -_SIDE, 0)
        room = max(inside.width() - _NUMBER_WIDTH - _GAP, 0)
        top = inside.center().y() + 0.5 - _BAR_HEIGHT / 2
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(scheme.on_accent if chosen else scheme.focus))
        painter.drawRoundedRect(QRectF(inside.left(), top, max(room * length, 2.0), _BAR_HEIGHT), 3, 3)
        painter.restore()
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.text))
        words = inside.adjusted(room + _GAP, 0, 0, 0)
        painter.drawText(words, int(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter), str(index.data()))

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return the size of a cell; a bar gets at least the width that is reserved for its number."""
        bar = 2 * (_NUMBER_WIDTH + _SIDE) + _GAP if isinstance(index.data(_BAR), float) else 0
        return super().sizeHint(option, index).expandedTo(QSize(bar, option.fontMetrics.height() + 10))
