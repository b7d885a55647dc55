"""The tags of the dataset as a list that stays quick with a hundred thousand of them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import merge
from typing import Literal

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.core.tags.index import TagCount

Order = Literal["count", "name"]
_Index = QModelIndex | QPersistentModelIndex
# Rows that the view is given at once; it asks for more when it is scrolled to the end.
_PORTION = 1000
# A sort holds the interpreter; parts of this size take about 5 ms.
_PART = 5000


class TagModel(QAbstractListModel):
    """Tags with their counts in the order they are given, handed out in portions."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[TagCount] = []
        self._given = 0

    def show(self, rows: list[TagCount]) -> None:
        """Replace them."""
        self.beginResetModel()
        self.rows = rows
        self._given = min(len(rows), max(_PORTION, self._given))
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return how many the view has been given."""
        return 0 if parent.isValid() else self._given

    def canFetchMore(self, parent: _Index) -> bool:  # noqa: N802
        """Tell whether there are more."""
        return not parent.isValid() and self._given < len(self.rows)

    def fetchMore(self, parent: _Index) -> None:  # noqa: N802
        """Give the next portion."""
        if self.canFetchMore(parent):
            more = min(_PORTION, len(self.rows) - self._given)
            self.beginInsertRows(QModelIndex(), self._given, self._given + more - 1)
            self._given += more
            self.endInsertRows()

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return the tag; with its count as a screen reader says it."""
        if not index.isValid():
            return None
        tag, pictures = self.rows[index.row()]
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            return tag
        if role == Qt.ItemDataRole.UserRole:
            return pictures
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return self.tr("%1, %n picture(s)", "", pictures).replace("%1", tag)
        return None

    def place_of(self, tag: str) -> QModelIndex:
        """Return where a tag stands among the rows given, or no place."""
        for row, found in enumerate(self.rows[: self._given]):
            if found.tag == tag:
                return self.index(row)
        return QModelIndex()


def in_order(counts: Iterable[tuple[str, int]], order: Order) -> list[TagCount]:
    """Sort tags, for a worker: in parts, so that the window's thread can go on in between."""
    rows = [TagCount(*pair) for pair in counts]
    key = _by_count if order == "count" else _by_name
    parts = [sorted(rows[start : start + _PART], key=key) for start in range(0, len(rows), _PART)]
    return list(merge(*parts, key=key))


def _by_count(row: TagCount) -> tuple[int, str]:
    return -row.pictures, row.tag


def _by_name(row: TagCount) -> tuple[str, str]:
    return row.tag.casefold(), row.tag
