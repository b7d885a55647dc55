"""Where the cells of the matrix lie: arithmetic alone, so that only what is seen costs anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
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
