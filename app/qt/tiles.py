"""Where the pictures of a grid lie: arithmetic alone, so that a hundred thousand cost as much as one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import ceil
from time import perf_counter

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QImage, QPixmap

from app.core.disk.thumbnails import Thumbnail, Thumbnails
from app.core.library import Picture

_MEMORY = 48 << 20
_BUDGET = 0.006
"""Seconds that one painting may spend on new pixmaps; the rest comes with the next."""


@dataclass(frozen=True, slots=True)
class GridLayout:
    """Cells of one size from left to right and downwards; lengths in logical pixels, y counted from the first row."""

    count: int
    width: int
    """Of the room for all columns."""
    side: int
    """Of the square for a picture."""
    line: int
    """Height of the text below it, 0 for none."""
    gap: int = 8

    @property
    def columns(self) -> int:
        """How many fit beside one another, at least one."""
        return max(1, (self.width - self.gap) // (self.side + self.gap))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return ceil(self.count / self.columns)

    @property
    def row_height(self) -> int:
        """From the top of one row to the top of the next."""
        return self.side + self.line + self.gap

    @property
    def height(self) -> int:
        """Of everything."""
        return self.rows * self.row_height + self.gap if self.count else 0

    @property
    def _left(self) -> int:
        return (self.width - self.columns * (self.side + self.gap) + self.gap) // 2

    def cell(self, index: int) -> tuple[int, int, int, int]:
        """Return left, top, width and height of a cell."""
        row, column = divmod(index, self.columns)
        left = self._left + column * (self.side + self.gap)
        return left, self.gap + row * self.row_height, self.side, self.side + self.line

    def at(self, x: int, y: int) -> int | None:
        """Return the cell at a place, None between and beyond cells."""
        column, across = divmod(x - self._left, self.side + self.gap)
        row, down = divmod(y - self.gap, self.row_height)
        index = row * self.columns + column
        inside = across < self.side and down < self.side + self.line
        return index if inside and 0 <= column < self.columns and row >= 0 and index < self.count else None

    def between(self, top: int, bottom: int) -> range:
        """Return the cells of all rows that touch a stripe."""
        first = max(0, (top - self.gap) // self.row_height)
        last = max(first, ceil((bottom - self.gap) / self.row_height))
        return range(min(self.count, first * self.columns), min(self.count, last * self.columns))

    def within(self, left: int, top: int, right: int, bottom: int) -> list[int]:
        """Return the cells that a rectangle touches."""
        step = self.side + self.gap
        first = max(0, (left - self._left + self.gap - 1) // step)
        last = min(self.columns - 1, (right - self._left) // step)
        if last < first:
            return []
        rows = self.between(top, bottom)
        starts = range(rows.start, rows.stop, self.columns)
        return [start + column for start in starts for column in range(first, last + 1) if start + column < self.count]


class Images:
    """Makes pixmaps of thumbnails, on the window's thread, a few at a time."""

    def __init__(self, thumbnails: Thumbnails) -> None:
        self._thumbnails = thumbnails
        self._kept: OrderedDict[tuple[int, int], tuple[Thumbnail, QPixmap]] = OrderedDict()
        self._weight = 0
        self._until = 0.0
        self.behind = False
        """Whether the last painting had to leave some for the next."""

    def begin(self) -> None:
        """Start another painting."""
        self._until, self.behind = perf_counter() + _BUDGET, False

    def pixmap(self, picture: Picture, edge: int, side: int, ratio: float) -> QPixmap | str | None:
        """Return a picture to fit a square of `side`, why there is none, or None while it is being made."""
        thumbnail = self._thumbnails.get(picture, edge)
        key = (picture.id, round(side * ratio))
        kept = self._kept.get(key)
        if thumbnail is None:
            return kept[1] if kept else None
        if thumbnail.problem is not None:
            return thumbnail.problem
        if kept and kept[0] is thumbnail:
            self._kept.move_to_end(key)
            return kept[1]
        if perf_counter() > self._until:
            self.behind = True
            return kept[1] if kept else None
        return self._keep(key, thumbnail, scaled(thumbnail, round(side * ratio), ratio))

    def _keep(self, key: tuple[int, int], thumbnail: Thumbnail, pixmap: QPixmap) -> QPixmap:
        if key in self._kept:
            self._weight -= _weight(self._kept.pop(key)[1])
        self._kept[key] = thumbnail, pixmap
        self._weight += _weight(pixmap)
        while self._weight > _MEMORY and len(self._kept) > 1:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._weight -= _weight(oldest)
        return pixmap


def scaled(thumbnail: Thumbnail, side: int, ratio: float) -> QPixmap:
    """Return a thumbnail to fit a square of `side` device pixels, of which there are `ratio` to one of the layout."""
    image = QImage(thumbnail.rgb, thumbnail.width, thumbnail.height, 3 * thumbnail.width, QImage.Format.Format_RGB888)
    size = QSize(thumbnail.width, thumbnail.height)
    longest = max(thumbnail.width, thumbnail.height)
    fits = min(side, round(longest * ratio))  # a small picture is as large beside the words as at 100 %
    if fits != longest:
        size.scale(fits, fits, Qt.AspectRatioMode.KeepAspectRatio)
        image = image.scaled(
            size.expandedTo(QSize(1, 1)),
            Qt.AspectRatioMode.IgnoreAspectRatio,
            Qt.TransformationMode.SmoothTransformation,
        )
    pixmap = QPixmap.fromImage(image)
    pixmap.setDevicePixelRatio(ratio)
    return pixmap


def _weight(pixmap: QPixmap) -> int:
    return pixmap.width() * pixmap.height() * 4


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """Rows below one another, each a line of words and its cells; the first column stays in sight at the left.

    All lengths are logical pixels on the viewport; `across` and `down` are how far it is scrolled.
    """

    rows: int
    columns: int
    width: int
    """Of a cell."""
    height: int
    head: int
    """Height of the line of column titles, which stays in sight at the top."""
    line: int
    """Height of the line of words above a row's cells."""
    gap: int = 8

    @property
    def pitch(self) -> int:
        """From one column to the next."""
        return self.width + self.gap

    @property
    def row_height(self) -> int:
        """From one row to the next."""
        return self.line + self.height + self.gap

    @property
    def all_across(self) -> int:
        """Width of everything."""
        return self.gap + self.columns * self.pitch

    @property
    def all_down(self) -> int:
        """Height of everything."""
        return self.head + self.rows * self.row_height + self.gap

    @property
    def kept(self) -> int:
        """Where the first column's room ends; what is scrolled passes under it."""
        return self.gap + self.pitch

    def left(self, column: int, across: int) -> int:
        """Return where a column begins."""
        return self.gap + column * self.pitch - (across if column else 0)

    def top(self, row: int, down: int) -> int:
        """Return where a row's line of words begins."""
        return self.head + row * self.row_height - down

    def cell(self, row: int, column: int, across: int, down: int) -> tuple[int, int, int, int]:
        """Return left, top, width and height of a cell."""
        return self.left(column, across), self.top(row, down) + self.line, self.width, self.height

    def columns_seen(self, across: int, room: int) -> range:
        """Return the columns after the first of which something is seen in a viewport as wide as `room`."""
        first = (self.kept + across - self.gap) // self.pitch
        last = (room + across - self.gap - 1) // self.pitch
        return range(min(self.columns, max(1, first)), min(self.columns, last + 1))

    def rows_seen(self, down: int, room: int) -> range:
        """Return the rows of which something is seen in a viewport as high as `room`."""
        first = down // self.row_height
        last = (room + down - self.head - 1) // self.row_height
        return range(min(self.rows, first), min(self.rows, last + 1))

    def at(self, x: int, y: int, across: int, down: int) -> tuple[int, int] | None:
        """Return row and column of the cell at a place; None between, above and beyond cells."""
        beyond = 0 if x < self.kept else across
        column, right = divmod(x + beyond - self.gap, self.pitch)
        row, below = divmod(y - self.head + down, self.row_height)
        inside = right < self.width and self.line <= below < self.line + self.height and y >= self.head
        return (row, column) if inside and 0 <= row < self.rows and 0 <= column < self.columns else None
