"""Tables of texts share their room fairly among columns, however wide the window is made."""

from __future__ import annotations

import pytest
from pytestqt.qtbot import QtBot

from app.qt.tables import Row, Table, distribute_widths


@pytest.mark.parametrize(
    ("wanted", "room", "widths"),
    [
        ([80, 60, 60], 500, [80, 60, 60]),
        ([80, 900, 600], 500, [80, 210, 210]),
        ([80, 200, 900], 500, [80, 200, 220]),
        ([900, 900, 900], 300, [100, 100, 100]),
        ([80, 60], 0, [0, 0]),
        ([], 500, []),
    ],
)
def test_the_widest_columns_share_what_the_others_leave(wanted: list[int], room: int, widths: list[int]) -> None:
    assert distribute_widths(wanted, room) == widths


def test_long_values_beside_each_other_are_equally_wide_at_every_width(qtbot: QtBot) -> None:
    table = Table(("Setting", "Now", "In that version"), "Differences")
    qtbot.addWidget(table)
    long = "Soft gouache landscapes, made with 60 pictures. " * 3
    table.show_rows([Row(("Notes", long, long + long)), Row(("Rank", "16", "32"))])
    for width in (500, 900, 500):
        table.resize(width, 200)
        table.show()
        qtbot.waitUntil(lambda width=width: table.width() == width)
        qtbot.waitUntil(lambda: sum(map(table.columnWidth, range(3))) == table.viewport().width())
        first, second, third = map(table.columnWidth, range(3))
        assert first < 120 and abs(second - third) <= 1


def test_a_column_of_bars_keeps_room_for_them_beside_long_texts(qtbot: QtBot) -> None:
    table = Table(("Tag", "Count"), "Tags")
    qtbot.addWidget(table)
    table.show_rows([Row(("a long tag " * 20, "7"), 0.5)])
    table.resize(600, 200)
    table.show()
    qtbot.waitUntil(lambda: table.columnWidth(0) + table.columnWidth(1) == table.viewport().width())
    assert table.columnWidth(1) >= 200
