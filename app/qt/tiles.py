"""Layouts of image grids, computed without loops over all images, and a cache of thumbnail pixmaps."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import ceil
from time import perf_counter

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QImage, QPixmap

from app.core.disk.thumbnails import Thumbnail, Thumbnails
from app.core.library import LibraryImage

_MEMORY = 48 << 20
_BUDGET = 0.006
"""Seconds that one paint event may spend on new pixmaps; the next one creates the rest."""


@dataclass(frozen=True, slots=True)
class GridLayout:
    """Row-major grid of equal cells; lengths in logical px, y relative to the top of the content."""

    count: int
    width: int
    """Width available to all columns."""
    side: int
    """Side length of the square for an image."""
    line: int
    """Height of the text line below an image, or 0 for no text."""
    gap: int = 8

    @property
    def columns(self) -> int:
        """Return the number of columns, at least 1."""
        return max(1, (self.width - self.gap) // (self.side + self.gap))

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return ceil(self.count / self.columns)

    @property
    def row_height(self) -> int:
        """Return the distance from the top of one row to the top of the next."""
        return self.side + self.line + self.gap

    @property
    def height(self) -> int:
        """Return the height of the whole grid."""
        return self.rows * self.row_height + self.gap if self.count else 0

    @property
    def _left(self) -> int:
        return (self.width - self.columns * (self.side + self.gap) + self.gap) // 2

    def cell(self, index: int) -> tuple[int, int, int, int]:
        """Return the left, top, width and height of a cell."""
        row, column = divmod(index, self.columns)
        left = self._left + column * (self.side + self.gap)
        return left, self.gap + row * self.row_height, self.side, self.side + self.line

    def at(self, x: int, y: int) -> int | None:
        """Return the index of the cell at a point, or None."""
        column, across = divmod(x - self._left, self.side + self.gap)
        row, down = divmod(y - self.gap, self.row_height)
        index = row * self.columns + column
        inside = across < self.side and down < self.side + self.line
        return index if inside and 0 <= column < self.columns and row >= 0 and index < self.count else None

    def between(self, top: int, bottom: int) -> range:
        """Return the indexes of all cells in the rows between two y positions."""
        first = max(0, (top - self.gap) // self.row_height)
        last = max(first, ceil((bottom - self.gap) / self.row_height))
        return range(min(self.count, first * self.columns), min(self.count, last * self.columns))

    def within(self, left: int, top: int, right: int, bottom: int) -> list[int]:
        """Return the indexes of the cells that intersect a rectangle."""
        step = self.side + self.gap
        first = max(0, (left - self._left + self.gap - 1) // step)
        last = min(self.columns - 1, (right - self._left) // step)
        if last < first:
            return []
        rows = self.between(top, bottom)
        starts = range(rows.start, rows.stop, self.columns)
        return [start + column for start in starts for column in range(first, last + 1) if start + column < self.count]


class Images:
    """Cache of thumbnail pixmaps, which are created on the main thread, a few per paint event."""

    def __init__(self, thumbnails: Thumbnails) -> None:
        self._thumbnails = thumbnails
        self._pixmaps: OrderedDict[tuple[int, int], tuple[Thumbnail, QPixmap]] = OrderedDict()
        self._weight = 0
        self._until = 0.0
        self.incomplete = False
        """Whether the last paint event ran out of time and another one is needed."""

    def begin(self) -> None:
        """Start the time budget for a paint event."""
        self._until, self.incomplete = perf_counter() + _BUDGET, False

    def pixmap(self, image: LibraryImage, edge: int, side: int, ratio: float) -> QPixmap | str | None:
        """Return a pixmap that fits a `side` px square, the reason why there is none, or None while it is loading."""
        thumbnail = self._thumbnails.get(image, edge)
        key = (image.id, round(side * ratio))
        kept = self._pixmaps.get(key)
        if thumbnail is None:
            return kept[1] if kept else None
        if thumbnail.problem is not None:
            return thumbnail.problem
        if kept and kept[0] is thumbnail:
            self._pixmaps.move_to_end(key)
            return kept[1]
        if perf_counter() > self._until:
            self.incomplete = True
            return kept[1] if kept else None
        return self._store(key, thumbnail, scaled(thumbnail, round(side * ratio), ratio))

    def _store(self, key: tuple[int, int], thumbnail: Thumbnail, pixmap: QPixmap) -> QPixmap:
        if key in self._pixmaps:
            self._weight -= _weight(self._pixmaps.pop(key)[1])
        self._pixmaps[key] = thumbnail, pixmap
        self._weight += _weight(pixmap)
        while self._weight > _MEMORY and len(self._pixmaps) > 1:
            _, (_, oldest) = self._pixmaps.popitem(last=False)
            self._weight -= _weight(oldest)
        return pixmap


def scaled(thumbnail: Thumbnail, side: int, ratio: float) -> QPixmap:
    """Return a pixmap for a square of `side` device px, not enlarged; `ratio` is the device pixel ratio."""
    image = QImage(thumbnail.rgb, thumbnail.width, thumbnail.height, 3 * thumbnail.width, QImage.Format.Format_RGB888)
    size = QSize(thumbnail.width, thumbnail.height)
    longest = max(thumbnail.width, thumbnail.height)
    fits = min(side, round(longest * ratio))  # never enlarge beyond 100 %
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
    """Grid of samples: each row has a text line above its cells, and the first column is always visible.

    All lengths are logical px in the viewport; `across` and `down` are the scroll offsets.
    """

    rows: int
    columns: int
    width: int
    """Width of a cell."""
    height: int
    head: int
    """Height of the column titles, which stay visible at the top."""
    line: int
    """Height of the text line above a row's cells."""
    gap: int = 8

    @property
    def pitch(self) -> int:
        """Return the distance from the left edge of one column to that of the next."""
        return self.width + self.gap

    @property
    def row_height(self) -> int:
        """Return the distance from the top of one row to that of the next."""
        return self.line + self.height + self.gap

    @property
    def all_across(self) -> int:
        """Return the width of the whole grid."""
        return self.gap + self.columns * self.pitch

    @property
    def all_down(self) -> int:
        """Return the height of the whole grid."""
        return self.head + self.rows * self.row_height + self.gap

    @property
    def fixed_right(self) -> int:
        """Return the right edge of the fixed first column, under which the other columns scroll."""
        return self.gap + self.pitch

    def left(self, column: int, across: int) -> int:
        """Return the left edge of a column."""
        return self.gap + column * self.pitch - (across if column else 0)

    def top(self, row: int, down: int) -> int:
        """Return the top of a row's text line."""
        return self.head + row * self.row_height - down

    def cell(self, row: int, column: int, across: int, down: int) -> tuple[int, int, int, int]:
        """Return the left, top, width and height of a cell."""
        return self.left(column, across), self.top(row, down) + self.line, self.width, self.height

    def columns_seen(self, across: int, room: int) -> range:
        """Return the columns visible in a viewport that is `room` px wide, except for the fixed first one."""
        first = (self.fixed_right + across - self.gap) // self.pitch
        last = (room + across - self.gap - 1) // self.pitch
        return range(min(self.columns, max(1, first)), min(self.columns, last + 1))

    def rows_seen(self, down: int, room: int) -> range:
        """Return the rows visible in a viewport that is `room` px high."""
        first = down // self.row_height
        last = (room + down - self.head - 1) // self.row_height
        return range(min(self.rows, first), min(self.rows, last + 1))

    def at(self, x: int, y: int, across: int, down: int) -> tuple[int, int] | None:
        """Return the row and column of the cell at a point, or None."""
        beyond = 0 if x < self.fixed_right else across
        column, right = divmod(x + beyond - self.gap, self.pitch)
        row, below = divmod(y - self.head + down, self.row_height)
        inside = right < self.width and self.line <= below < self.line + self.height and y >= self.head
        return (row, column) if inside and 0 <= row < self.rows and 0 <= column < self.columns else None
