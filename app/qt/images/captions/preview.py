"""Preview of an edit: shows each caption before and after, with the differences marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from PySide6.QtCore import QAbstractListModel, QModelIndex, QPersistentModelIndex, QPoint, QRect, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter
from PySide6.QtWidgets import QFrame, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QTreeView, QWidget

from app.core.edits.bulk import Span, differences
from app.qt.theme import colors

_Index = QModelIndex | QPersistentModelIndex
_PAD, _NAME = 8, 150
_CONTEXT = 24
"""Characters shown before the first difference if the caption is too long to show in full."""
_compared = lru_cache(maxsize=512)(differences)


class ChangeRow(NamedTuple):
    """One row of the preview."""

    name: str
    before: str | None
    """Old caption; None if there is none."""
    after: str


class PreviewModel(QAbstractListModel):
    """List model of changes, converted to rows on demand: 100,000 changes cost nothing up front."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.changes: Sequence[Any] = ()
        self._row: Callable[[Any], ChangeRow] = lambda change: change

    def show(self, changes: Sequence[Any], row: Callable[[Any], ChangeRow]) -> None:
        """Replace the changes; `row` converts a change to a row."""
        self.beginResetModel()
        self.changes, self._row = changes, row
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802 - Qt's signature
        """Return the number of changes."""
        return 0 if parent.isValid() else len(self.changes)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return the row's name; for tooltips and screen readers, a sentence with the name and both captions."""
        if not index.isValid():
            return None
        row = self.row(index)
        if role == Qt.ItemDataRole.DisplayRole:
            return row.name
        if role in (Qt.ItemDataRole.AccessibleTextRole, Qt.ItemDataRole.ToolTipRole):
            words = self.tr("{name}: {before} becomes {after}")
            return words.format(name=row.name, before=self.before(row), after=row.after or self.tr("nothing"))
        return None

    def row(self, index: _Index) -> ChangeRow:
        """Return one change as a row."""
        return self._row(self.changes[index.row()])

    def before(self, row: ChangeRow) -> str:
        """Return the old caption, or "no caption"."""
        return self.tr("no caption") if row.before is None else row.before


class PreviewDelegate(QStyledItemDelegate):
    """Delegate that paints the name on the left and the old caption above the new one on the right."""

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return the height of two lines."""
        return QSize(300, 2 * option.fontMetrics.height() + 12)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Paint one change."""
        model = index.model()
        assert isinstance(model, PreviewModel)
        change, look, box = model.row(index), colors(), option.rect
        painter.save()
        if option.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(box, QColor(look.hover))
        painter.setPen(QColor(look.line))
        painter.drawLine(box.bottomLeft(), box.bottomRight())
        painter.setPen(QColor(look.muted))
        name = QRect(box.left() + _PAD, box.top(), _NAME - _PAD, box.height())
        text = option.fontMetrics.elidedText(change.name, Qt.TextElideMode.ElideMiddle, name.width())
        painter.drawText(name, Qt.AlignmentFlag.AlignVCenter, text)
        lines = box.adjusted(_NAME + _PAD, 5, -_PAD, -5)
        self._paint_texts(painter, option, lines, change, model)
        painter.restore()

    def _paint_texts(
        self, painter: QPainter, option: QStyleOptionViewItem, box: QRect, change: ChangeRow, model: PreviewModel
    ) -> None:
        look = colors()
        before, after = change.before or "", change.after
        found = _compared(before, after)
        first = min((span.start for span in (*found.gone[:1], *found.new[:1])), default=0)
        longest = max(before, after, key=len)
        start = max(0, first - _CONTEXT) if option.fontMetrics.horizontalAdvance(longest) > box.width() else 0
        upper = QRect(box.left(), box.top(), box.width(), box.height() // 2)
        lower = upper.translated(0, upper.height())
        if change.before is None:
            painter.setPen(QColor(look.muted))
            painter.drawText(upper, Qt.AlignmentFlag.AlignVCenter, model.before(change))
        else:
            gone = _font(option.font, strike=True)
            _paint_text(painter, upper, before, start, found.gone, (option.font, look.muted), (gone, look.bad))
        new = _font(option.font, strike=False)
        _paint_text(painter, lower, after, start, found.new, (option.font, look.text), (new, look.good))


class ChangeList(QTreeView):
    """List view of changes."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.list = PreviewModel(self)
        self.setModel(self.list)
        self.setItemDelegate(PreviewDelegate(self))
        self.setUniformRowHeights(True)
        self.setRootIsDecorated(False)
        self.setHeaderHidden(True)
        self.setFrameShape(QFrame.Shape.StyledPanel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Preview of the changes"))


def _font(font: QFont, *, strike: bool) -> QFont:
    """Return the font that marks a difference, struck out or bold and underlined: color alone is not enough."""
    result = QFont(font)
    result.setStrikeOut(strike)
    result.setUnderline(not strike)
    result.setBold(not strike)
    return result


def _paint_text(
    painter: QPainter,
    box: QRect,
    text: str,
    start: int,
    marked: Sequence[Span],
    plain: tuple[QFont, str],
    other: tuple[QFont, str],
) -> None:
    """Paint the text from position `start`, elided to the box, with marked parts in another font and color."""
    text = text.replace("\n", "\u21b5")
    runs = [("\u2026", plain)] if start else []
    place = start
    for span in marked:
        runs += [(text[place : span.start], plain), (text[span.start : span.end], other)]
        place = span.end
    x = box.left()
    for words, (font, ink) in [*runs, (text[place:], plain)]:
        if x >= box.right() or not words:
            continue
        measure = QFontMetrics(font)
        painter.setFont(font)
        painter.setPen(QColor(ink))
        shown = measure.elidedText(words, Qt.TextElideMode.ElideRight, box.right() - x)
        painter.drawText(QPoint(x, box.top() + (box.height() + measure.ascent() - measure.descent()) // 2), shown)
        x += measure.horizontalAdvance(shown)
