"""Arranges things of different widths in rows, as words are arranged in lines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from PySide6.QtCore import QPoint, QRect, QSize


def flow(sizes: Sequence[QSize], width: int, gap: int, breaks: Collection[int] = ()) -> tuple[list[QRect], int]:
    """Return a place for each size and the height that all take; at the numbers in `breaks` a new row begins.

    What is wider than the width gets a row, and all of it. All in pixels.
    """
    places: list[QRect] = []
    x = y = row = 0
    for number, size in enumerate(sizes):
        wide = min(size.width(), width)
        if x and (x + wide > width or number in breaks):
            x, y = 0, y + row + (2 * gap if number in breaks else gap)
            row = 0
        places.append(QRect(QPoint(x, y), QSize(wide, size.height())))
        x += wide + gap
        row = max(row, size.height())
    return places, y + row
