"""What the window opens by itself at a start, and how recent folders are offered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QPushButton

from app.core.session import Session
from app.qt.main_thread import MainThreadQueue
from app.qt.window import Window
from tests.support import ROOT

SITTING = """
import sys
from PySide6.QtCore import QTimer
from app.qt.window import Window
from app.__main__ import main

inherited, painted = Window.paintEvent, []

def paint(self, event):
    painted.append(len(self.session.datasets.folders) + self.session.recent.is_checking)
    inherited(self, event)

def watch(self):
    if len(self.session.view.ids) == int(sys.argv[1]):
        print(painted[0], len(self.session.datasets.folders))
        self.close()

def show(self):
    self.session.view.shown.connect(lambda _: QTimer.singleShot(0, self, lambda: watch(self)))
    shown(self)

Window.paintEvent, shown, Window.show = paint, Window.show, show
sys.exit(main(sys.argv[2:]))
"""


def sit(pictures: int, *words: Path) -> tuple[int, int]:
    """Start the app until it shows so many pictures; datasets asked for at its first paint, and open at the end."""
    command = [sys.executable, "-c", SITTING, str(pictures), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    first, last = map(int, done.stdout.split()[-2:])
    return first, last


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / name for name in ("Bilder für 猫", "Fotos & mehr")]
    for folder in made:
        folder.mkdir()
        Image.new("RGB", (64, 48), "red").save(folder / "a.png")
    return made


@pytest.fixture
def window(qtbot, session):
    return shown(qtbot, session)


def shown(qtbot, session):
    window = Window(session)
    qtbot.addWidget(window)
    window.painted.connect(session.reopen)
    with qtbot.waitSignal(window.painted):
        window.show()
    return window


def rows(window) -> dict[str, QAction]:
    return {row.toolTip(): row for row in window.recent.actions()[:-2]}


def kept(home: Path, folders: list[Path], left_open: list[Path]) -> None:
    texts = {"recent": [*map(str, folders)], "open": [*map(str, left_open)]}
    (home / "folders.json").write_text(json.dumps(texts), encoding="utf-8")


def test_the_next_start_opens_words_and_what_was_open_besides_after_its_first_paint(folders):
    assert sit(1, folders[0]) == (0, 1)
    assert sit(2, folders[1]) == (0, 2)


def test_a_folder_that_is_gone_is_said_above_the_page_and_is_grey_in_the_menu(
    qtbot, folders, tmp_path, per_user_folder
):
    gone = tmp_path / "gone"
    kept(per_user_folder, [gone, folders[1]], [gone])
    poster = MainThreadQueue()
    session = Session(poster.post)
    window = shown(qtbot, session)
    qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    assert str(gone) in window.notices.sentences()[0]
    qtbot.waitUntil(lambda: not session.recent.is_checking)
    first, second = rows(window).values()
    assert (first.isEnabled(), second.isEnabled()) == (False, True)
    assert first.text().startswith("&1 ") and first.text().endswith("– not found")
    assert "Fotos && mehr" in second.text()
    gone.mkdir()
    window.commands.menu("file").aboutToShow.emit()
    qtbot.waitUntil(first.isEnabled)
    assert "not found" not in first.text()
    session.close()
    poster.close()


def test_a_folder_is_opened_from_the_menu_and_the_list_is_cleared_there(window, session, folders, qtbot):
    assert not window.recent.menuAction().isEnabled()
    for folder in folders:
        window.open([folder])
        qtbot.waitUntil(lambda folder=folder: folder in session.recent.folders)
        session.datasets.close(folder)
    assert list(rows(window)) == [str(folders[1]), str(folders[0])]
    window.show_runs()
    window.recent.popup(window.rect().center())
    qtbot.keyClick(window.recent, Qt.Key.Key_2)
    qtbot.waitUntil(lambda: len(session.view.ids) == 1)
    assert window.pages.currentWidget() is window.images
    qtbot.waitUntil(lambda: list(rows(window)) == [str(folders[0]), str(folders[1])])
    window.recent.actions()[-1].trigger()
    assert session.recent.folders == ()
    assert not window.recent.menuAction().isEnabled()
    assert session.datasets.folders == (folders[0],)


def test_the_empty_window_offers_the_newest_few(window, session, folders, qtbot):
    offered = window.empty_state.recent
    assert not offered.isVisible()
    for folder in folders:
        window.open([folder])
        qtbot.waitUntil(lambda folder=folder: folder in session.recent.folders)
        session.datasets.close(folder)
    assert offered.isVisible()
    (folders[0] / "a.png").unlink()
    folders[0].rmdir()
    session.recent.check()
    qtbot.waitUntil(lambda: not session.recent.is_checking)

    def buttons() -> dict[str, QPushButton]:
        return {button.toolTip(): button for button in offered.findChildren(QPushButton) if button.isVisible()}

    # Qt shows new buttons of a layout when it next lays out.
    qtbot.waitUntil(lambda: list(buttons()) == [str(folders[1]), str(folders[0])])
    gone, there = buttons()[str(folders[0])], buttons()[str(folders[1])]
    assert not gone.isEnabled()
    assert "not found" in gone.text()
    there.setFocus()
    qtbot.keyClick(there, Qt.Key.Key_Space)
    qtbot.waitUntil(lambda: len(session.view.ids) == 1)
    assert not window.empty_state.isVisible()


def test_a_damaged_list_of_folders_is_told(qtbot, per_user_folder):
    (per_user_folder / "folders.json").write_text("{", encoding="utf-8")
    poster = MainThreadQueue()
    session = Session(poster.post)
    window = Window(session)
    qtbot.addWidget(window)
    assert "folders.damaged.json" in window.notices.sentences()[0]
    session.close()
    poster.close()
