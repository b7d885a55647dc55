"""The rows of the list of bases: used last, on this PC, and, when searched for, what cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem

from app.core.models.verdict import Found, Verdict
from app.qt.theme import colours
from app.qt.tips import plain_tip
from app.qt.train.base_words import details, family_of, verdict_words

_Index = QModelIndex | QPersistentModelIndex
_SIDE, _GAP = 12, 8


@dataclass(frozen=True, slots=True)
class Row:
    """A heading, or a base: `text` is what becomes `base.model`."""

    kind: Literal["heading", "base", "unusable"]
    name: str
    text: str = ""
    detail: str = ""
    badge: str = ""


def rows(
    found: Iterable[Found], recent: Mapping[str, Verdict | None], typed: str, titles: tuple[str, str, str]
) -> Iterator[Row]:
    """Yield what answers the words typed, under `titles`: used last, on this PC, cannot be used.

    Of those in `recent`, used last, it is said what they are as soon as somebody has looked.
    """
    words = typed.casefold().split()
    known = {str(one.path): one for one in found}
    used = [_row(known[text]) if text in known else _used(text, verdict) for text, verdict in recent.items()]
    others = [_row(one) for text, one in known.items() if text not in recent]
    usable = [row for row in others if row.kind == "base"]
    unusable = [row for row in others if row.kind == "unusable"] if words else []
    for title, group in zip(titles, (used, usable, unusable), strict=True):
        answering = [row for row in group if _answers(row, words)]
        if answering:
            yield Row("heading", title)
            yield from answering


def _row(found: Found) -> Row:
    kind: Literal["base", "unusable"] = "unusable" if found.told.problem else "base"
    return Row(kind, found.name, str(found.path), details(found), family_of(found.told))


def _used(text: str, verdict: Verdict | None) -> Row:
    """One that lies where nobody searches, or is not on this PC."""
    if verdict is None:
        return Row("base", text, text)
    told, path = verdict.told, Path(text)
    kind: Literal["base", "unusable"] = "unusable" if told.problem else "base"
    if verdict.place != "here":
        return Row(kind, text, text, told.problem or verdict_words(verdict), family_of(told))
    name = path.stem if path.suffix.lower() == ".safetensors" else path.name
    detail = told.problem or " · ".join(filter(None, (verdict_words(verdict), str(path.parent))))
    return Row(kind, name, text, detail, family_of(told))


def _answers(row: Row, words: list[str]) -> bool:
    text = f"{row.name}\n{row.text}\n{row.detail}\n{row.badge}".casefold()
    return all(word in text for word in words)


class BaseRows(QAbstractListModel):
    """Them as Qt wants them; headings and what is unusable cannot be chosen."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[Row] = []

    def show(self, rows: Iterable[Row]) -> None:
        """Replace them."""
        self.beginResetModel()
        self.rows = list(rows)
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return how many there are."""
        return 0 if parent.isValid() else len(self.rows)

    def flags(self, index: _Index) -> Qt.ItemFlag:
        """Let only bases be chosen."""
        usable = index.isValid() and self.rows[index.row()].kind == "base"
        return (Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable) if usable else Qt.ItemFlag.NoItemFlags

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return a row's name; all of it for a screen reader; its path as the tip."""
        if not index.isValid():
            return None
        row = self.rows[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return row.name
        if role == Qt.ItemDataRole.UserRole:
            return row.text
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(row.text)
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return ", ".join(part for part in (row.name, row.badge, row.detail) if part)
        return None

    def first(self) -> QModelIndex:
        """Return the first base, or no place."""
        return next((self.index(n) for n, row in enumerate(self.rows) if row.kind == "base"), QModelIndex())


class BaseDelegate(QStyledItemDelegate):
    """Paints a base on two lines with its badge at the right."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Draw one row."""
        model = index.model()
        assert isinstance(model, BaseRows)
        row, scheme = model.rows[index.row()], colours()
        painter.save()
        inside = option.rect.adjusted(_SIDE, 0, -_SIDE, 0)
        if row.kind == "heading":
            painter.setFont(option.font)
            painter.setPen(QColor(scheme.muted))
            bottom = inside.adjusted(0, 0, 0, -4)
            painter.drawText(bottom, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom, row.name)
        else:
            chosen = bool(option.state & QStyle.StateFlag.State_Selected)
            self._ground(painter, option, chosen)
            self._lines(painter, option, inside, row, chosen)
        painter.restore()

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return a row's size."""
        model = index.model()
        assert isinstance(model, BaseRows)
        line = option.fontMetrics.height()
        return QSize(200, line + 16 if model.rows[index.row()].kind == "heading" else 2 * line + 14)

    def _ground(self, painter: QPainter, option: QStyleOptionViewItem, chosen: bool) -> None:
        scheme = colours()
        if chosen:
            painter.fillRect(option.rect, QColor(scheme.accent))
        elif option.state & QStyle.StateFlag.State_MouseOver and option.state & QStyle.StateFlag.State_Enabled:
            painter.fillRect(option.rect, QColor(scheme.hover))

    def _lines(self, painter: QPainter, option: QStyleOptionViewItem, inside: QRect, row: Row, chosen: bool) -> None:
        scheme, metrics = colours(), option.fontMetrics
        if row.badge:
            inside.setRight(self._badge(painter, option, inside, row.badge, chosen) - _GAP)
        usable = row.kind == "base"
        painter.setFont(option.font)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.text if usable else scheme.muted))
        name = metrics.elidedText(row.name, Qt.TextElideMode.ElideMiddle, inside.width())
        upper = Qt.AlignmentFlag.AlignTop if row.detail else Qt.AlignmentFlag.AlignVCenter
        lines = inside.adjusted(0, 6, 0, -6)
        painter.drawText(lines, Qt.AlignmentFlag.AlignLeft | upper, name)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.muted if usable else scheme.warning))
        mode = Qt.TextElideMode.ElideMiddle if usable else Qt.TextElideMode.ElideRight
        detail = metrics.elidedText(row.detail, mode, inside.width())
        painter.drawText(lines, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom, detail)

    def _badge(self, painter: QPainter, option: QStyleOptionViewItem, inside: QRect, words: str, chosen: bool) -> int:
        """Draw the badge at the right; return where it begins."""
        scheme = colours()
        font = QFont(option.font)
        font.setWeight(QFont.Weight.DemiBold)
        metrics = QFontMetrics(font)
        size = QSize(metrics.horizontalAdvance(words) + 16, metrics.height() + 4)
        place = QRect(inside.right() - size.width(), inside.center().y() - size.height() // 2, *size.toTuple())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.edge))
        painter.setBrush(Qt.BrushStyle.NoBrush if chosen else QColor(scheme.raised))
        painter.drawRoundedRect(QRectF(place).adjusted(0.5, 0.5, -0.5, -0.5), 4, 4)
        painter.setFont(font)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.text))
        painter.drawText(place, Qt.AlignmentFlag.AlignCenter, words)
        return place.left()
