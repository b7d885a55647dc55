"""The Train page in the window: its rows, typing into them, and what reaches the job file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLineEdit
from pytestqt.qtbot import QtBot

from app.qt.train.form import SettingRow
from app.qt.train.page import TrainPage
from app.qt.window import Window
from tests.support.artist import shown_page


def shown(window: Window, qtbot: QtBot) -> TrainPage:
    window.commands["window.train"].trigger()
    page = shown_page(window, TrainPage)
    qtbot.waitUntil(lambda: page.draft is not None and bool(page.sheet.essentials.cards.cards))
    return page


def row_of(page: TrainPage, key: str, kind: str = "") -> SettingRow:
    page.sheet.all.setChecked(True)
    page.sheet.form.finish()
    return page.sheet.form.rows[key, kind]


def type_into(qtbot: QtBot, line: object, text: str) -> None:
    assert isinstance(line, QLineEdit)
    line.setFocus()
    line.selectAll()
    qtbot.keyClicks(line, text) if text else qtbot.keyClick(line, Qt.Key.Key_Delete)


def on_disk(page: TrainPage) -> dict[str, Any]:
    assert page.draft is not None
    return tomllib.loads(page.draft.path.read_text(encoding="utf-8"))


def reaches_disk(qtbot: QtBot, page: TrainPage, until: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the file says so: a second is promised, and a busy machine is given longer."""

    def reached() -> bool:
        try:
            return until(on_disk(page))
        except LookupError:  # not there yet
            return False

    qtbot.waitUntil(reached)
