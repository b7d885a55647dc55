"""Tables of texts, some of them by strangers and all of them plain, with bars where numbers are to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QResizeEvent
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem, QTreeView, QWidget

from app.qt.theme import colours
from app.qt.widgets import plain_tip

_Index = QModelIndex | QPersistentModelIndex
_BAR = int(Qt.ItemDataRole.UserRole)
_BAR_HEIGHT, _GAP, _SIDE = 10.0, 10, 9
_NUMBER = 96
"""Pixels that are left for the number beside its bar."""
_BETWEEN = 16
"""Pixels between one column's longest text and the next column."""
_CUT = 24
"""Characters from which on a column may have no room for all of a text."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of texts; `bar` is the length of the bar before the last one, 0 to 1, None where it has none."""

    texts: tuple[str, ...]
    bar: float | None = None
    tip: str = ""


def _tip(row: Row, text: str) -> str:
    """Return what is said of a cell: all of a text that may be cut, then what the line means."""
    shown = text if len(text) > _CUT else ""
    return "\n\n".join(filter(None, (shown, row.tip))) or text


class Rows(QAbstractTableModel):
    """Lines under titles."""

    def __init__(self, titles: Sequence[str], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.titles = tuple(titles)
        self.rows: list[Row] = []

    def show(self, rows: Sequence[Row]) -> None:
        """Replace them."""
        self.beginResetModel()
        self.rows = list(rows)
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return how many lines there are."""
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return how many titles there are."""
        return 0 if parent.isValid() else len(self.titles)

    def headerData(self, section: int, side: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> object:  # noqa: N802
        """Return a title."""
        shown = side == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole
        return self.titles[section] if shown else None

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return a text, or the length of the bar before it."""
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


def shared(wanted: Sequence[int], room: int) -> list[int]:
    """Return how wide columns are in so many pixels: as wide as they want, else the widest of them equally wide."""
    widths = [0] * len(wanted)
    for done, column in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        widths[column] = min(wanted[column], room // (len(wanted) - done))
        room -= widths[column]
    return widths


class Table(QTreeView):
    """Shows such lines; the last column takes the room that is left."""

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
        """Replace the lines, and give each column the room it needs as far as there is so much."""
        self.lines.show(rows)
        self._wanted = [
            max(self.sizeHintForColumn(column), self.header().sectionSizeHint(column)) + _BETWEEN
            for column in range(len(self.lines.titles))
        ]
        self._share()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Share the new room among the columns."""
        super().resizeEvent(event)
        self._share()

    def _share(self) -> None:
        for column, width in enumerate(shared(self._wanted, self.viewport().width())[:-1]):
            self.setColumnWidth(column, width)


class BarDelegate(QStyledItemDelegate):
    """Draws a bar before its number, both within the same cell."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Draw the ground as the style does, then bar and number."""
        length = index.data(_BAR)
        if not isinstance(length, float):
            super().paint(painter, option, index)
            return
        scheme = colours()
        chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        if chosen:
            painter.fillRect(option.rect, QColor(scheme.accent))
        inside = option.rect.adjusted(_SIDE, 0, -_SIDE, 0)
        room = max(inside.width() - _NUMBER - _GAP, 0)
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
        """Return a cell's size; a bar is to be as long as its number has room at least."""
        bar = 2 * (_NUMBER + _SIDE) + _GAP if isinstance(index.data(_BAR), float) else 0
        return super().sizeHint(option, index).expandedTo(QSize(bar, option.fontMetrics.height() + 10))
