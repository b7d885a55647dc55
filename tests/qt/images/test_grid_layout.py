"""Where the cells of the grid lie, and what stands in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QRect
from PySide6.QtGui import QImage, QPainter
from PySide6.QtWidgets import QApplication

from app.core.library import Folder, LibraryImage
from app.qt.tile_painting import CellPainter
from app.qt.tiles import GridLayout


@pytest.mark.parametrize("count", [0, 1, 7, 100_000])
@pytest.mark.parametrize("width", [60, 500, 1913])
def test_every_cell_is_found_where_it_lies_and_none_beyond(count: int, width: int) -> None:
    layout = GridLayout(count, width, 100, 20)
    for index in {0, 1, count // 2, count - 1} & set(range(count)):
        left, top, across, down = layout.cell(index)
        corners = [(left, top), (left + across - 1, top + down - 1)]
        assert [layout.at(*corner) for corner in corners] == [index, index]
        assert layout.at(left - 1, top) != index and layout.at(left, top + down) is None
        assert index in layout.between(top + 1, top + 2)
        assert index in layout.within(left + 5, top + 5, left + 6, top + 6)
        assert top + down + layout.gap <= layout.height
    assert layout.between(0, 10**9) == range(count)
    assert layout.at(0, 0) is None and layout.at(width, layout.height + 5) is None


def test_a_band_touches_exactly_the_cells_it_overlaps() -> None:
    layout = GridLayout(23, 700, 90, 15)
    for rectangle in [(0, 0, 699, 2000), (95, 95, 300, 240), (10, 110, 11, 111), (100, 5, 101, 6), (0, 0, 3, 3)]:
        left, top, right, bottom = rectangle
        overlapping = [
            index
            for index in range(23)
            for x, y, width, height in [layout.cell(index)]
            if x <= right and left < x + width and y - layout.gap < bottom and top < y + height + layout.gap
        ]
        assert set(layout.within(*rectangle)) <= set(overlapping)
        strict = [
            index
            for index in range(23)
            for x, y, width, height in [layout.cell(index)]
            if x <= right and left < x + width and y < bottom and top < y + height
        ]
        assert set(strict) <= set(layout.within(*rectangle))


def test_line_breaks_of_every_system_are_one_space_in_a_cell(qapp: QApplication) -> None:
    cells, picture = CellPainter(qapp.font()), LibraryImage(1, Folder(Path("a"), Path("a")), "a.png", caption="x")

    def painted(text: str) -> QImage:
        image = QImage(160, 190, QImage.Format.Format_RGB32)
        image.fill("white")
        painter = QPainter(image)
        cells.paint(painter, QRect(0, 0, 160, 184), picture, None, text, selected=False, current=False, focused=False)
        painter.end()
        return image

    assert painted("one,\ntwo") == painted("one,\r\ntwo") == painted("one, two") != painted("one,  two")
