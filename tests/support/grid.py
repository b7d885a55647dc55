"""The Images page's views of a folder of forty real images, and what tests do with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.library import LibraryImage
from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.images.views import ImageViews

COUNT = 40


def forty_pictures(root: Path) -> Path:
    """Make a folder of images of increasing width; every fourth has no caption."""
    root.mkdir()
    for number in range(COUNT):
        Image.new("RGB", (300 + number, 200), (6 * number, 90, 255 - 6 * number)).save(root / f"p{number}.png")
        if number % 4:
            (root / f"p{number}.txt").write_text(f"cat, number {number}", encoding="utf-8")
    return root


@contextmanager
def shown_views(qtbot: QtBot, session: Session, folder: Path) -> Iterator[ImageViews]:
    """Show the views of an opened folder, once everything that is cheap to read has been read."""
    views = ImageViews(session, Commands())
    qtbot.addWidget(views)
    views.resize(900, 700)
    opened: list[object] = []
    session.datasets.opened.connect(opened.append)
    session.datasets.open(folder)
    views.show()
    qtbot.waitUntil(lambda: len(session.view.ids) == COUNT)
    qtbot.waitUntil(lambda: bool(opened))  # captions are read
    qtbot.waitUntil(lambda: all(one.width for one in session.library.images.values()))
    views.grid.setFocus()
    yield views
    views.close()
    QApplication.processEvents()  # run what was posted for after this event


def named(session: Session, name: str) -> LibraryImage:
    return next(one for one in session.library.images.values() if one.name == name)


def settle(qtbot: QtBot, session: Session) -> None:
    """Wait until no files are being moved to the trash or back."""
    qtbot.waitUntil(lambda: session.history.writing is None)


def current(session: Session) -> str:
    return session.library.images[session.view.current or 0].name


def center(views: ImageViews, index: int) -> QPoint:
    return views.grid.rectangle(index).center()


def click(
    qtbot: QtBot, views: ImageViews, index: int, keys: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier
) -> None:
    qtbot.mouseClick(views.grid.viewport(), Qt.MouseButton.LeftButton, keys, center(views, index))
