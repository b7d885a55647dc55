"""Where the pictures of a grid lie: arithmetic alone, so that a hundred thousand cost as much as one."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Layout:
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
