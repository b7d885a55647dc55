"""Shows what an edit would change: each caption before and after, with the words marked that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from PySide6.QtCore import QAbstractListModel, QModelIndex, QPersistentModelIndex, QPoint, QRect, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter
from PySide6.QtWidgets import QFrame, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QTreeView, QWidget

from app.core.edits.differences import Span, differences
from app.core.pictures import Change, Picture
from app.qt.theme import colours

_Index = QModelIndex | QPersistentModelIndex
_PAD, _NAME = 8, 150
_AROUND = 24
"""Characters shown before the first difference of a caption that is too long to be shown from its beginning."""
_compared = lru_cache(maxsize=512)(differences)


class PreviewModel(QAbstractListModel):
    """The changes of one edit; a hundred thousand cost nothing until they are looked at."""

    def __init__(self, pictures: Mapping[int, Picture], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._pictures = pictures
        self.changes: Sequence[Change] = ()

    def show(self, changes: Sequence[Change]) -> None:
        """Show these in place of the former."""
        self.beginResetModel()
        self.changes = changes
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802 - Qt's signature
        """Return how many captions change."""
        return 0 if parent.isValid() else len(self.changes)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return the picture's name; for screen readers what becomes of its caption."""
        if not index.isValid():
            return None
        change = self.changes[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return self.name(change)
        if role in (Qt.ItemDataRole.AccessibleTextRole, Qt.ItemDataRole.ToolTipRole):
            words = self.tr("{name}: {before} becomes {after}")
            return words.format(name=self.name(change), before=self.before(change), after=change.after)
        return None

    def name(self, change: Change) -> str:
        """Return the picture's name."""
        picture = self._pictures.get(change.picture)
        return picture.name if picture else ""

    def before(self, change: Change) -> str:
        """Return the caption as it is."""
        return self.tr("no caption") if change.before is None else str(change.before)


class PreviewDelegate(QStyledItemDelegate):
    """The name at the left; beside it the caption as it is, and below that as it would be."""

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return the height of two lines."""
        return QSize(300, 2 * option.fontMetrics.height() + 12)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Paint one change."""
        model = index.model()
        assert isinstance(model, PreviewModel)
        change, look, box = model.changes[index.row()], colours(), option.rect
        painter.save()
        if option.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(box, QColor(look.hover))
        painter.setPen(QColor(look.line))
        painter.drawLine(box.bottomLeft(), box.bottomRight())
        painter.setPen(QColor(look.muted))
        name = QRect(box.left() + _PAD, box.top(), _NAME - _PAD, box.height())
        text = option.fontMetrics.elidedText(model.name(change), Qt.TextElideMode.ElideMiddle, name.width())
        painter.drawText(name, Qt.AlignmentFlag.AlignVCenter, text)
        lines = box.adjusted(_NAME + _PAD, 5, -_PAD, -5)
        self._paint_texts(painter, option, lines, change, model)
        painter.restore()

    def _paint_texts(
        self, painter: QPainter, option: QStyleOptionViewItem, box: QRect, change: Change, model: PreviewModel
    ) -> None:
        look = colours()
        before, after = "" if change.before is None else str(change.before), str(change.after or "")
        found = _compared(before, after)
        first = min((span.start for span in (*found.gone[:1], *found.new[:1])), default=0)
        longest = max(before, after, key=len)
        start = max(0, first - _AROUND) if option.fontMetrics.horizontalAdvance(longest) > box.width() else 0
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


class Preview(QTreeView):
    """The list of changes."""

    def __init__(self, pictures: Mapping[int, Picture], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.list = PreviewModel(pictures, self)
        self.setModel(self.list)
        self.setItemDelegate(PreviewDelegate(self))
        self.setUniformRowHeights(True)
        self.setRootIsDecorated(False)
        self.setHeaderHidden(True)
        self.setFrameShape(QFrame.Shape.StyledPanel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Preview of the changes"))


def _font(font: QFont, *, strike: bool) -> QFont:
    """Return the font of a difference: told by more than its colour."""
    made = QFont(font)
    made.setStrikeOut(strike)
    made.setUnderline(not strike)
    made.setBold(not strike)
    return made


def _paint_text(
    painter: QPainter,
    box: QRect,
    text: str,
    start: int,
    marked: Sequence[Span],
    plain: tuple[QFont, str],
    other: tuple[QFont, str],
) -> None:
    """Paint a text from a place on, its marked parts in another font and colour, as far as the box reaches."""
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
