"""Loads whole pictures for the loupe, on workers, as Qt paints them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from PySide6.QtGui import QImage

from app.core.library import Picture
from app.core.tasks import Tasks

# Named where the window's thread loads this: PySide makes an enumeration when it is first used, unfit for two threads.
_RGB, _PAINTED = QImage.Format.Format_RGB888, QImage.Format.Format_RGB32


class Whole(NamedTuple):
    """All pixels of a picture, and the same made small enough for a window to be scaled smoothly from."""

    image: QImage
    small: QImage


class Wholes:
    """Loads one picture for one place: what was asked before and is not begun is dropped."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._asked = 0
        self._future: Future[Whole] | None = None

    def load(self, picture: Picture, longest: int, done: Callable[[Whole | str], None]) -> None:
        """Call `done` with the picture, or why it cannot be shown; never for one that another was asked after.

        `longest` is the longer side of the window's room in device pixels.
        """
        self.drop()
        asked, path = self._asked, picture.path

        def deliver(whole: Whole | str) -> None:
            if asked == self._asked:
                done(whole)

        self._future = self._tasks.run(
            lambda: _load(path, longest), deliver, lambda fault: deliver(str(fault)), kept=False
        )

    def drop(self) -> None:
        """Ask for nothing any more."""
        self._asked += 1
        if self._future:
            self._future.cancel()
            self._future = None


def _load(path: Path, longest: int) -> Whole:
    from app.core.disk.images import load_whole  # numpy and Pillow: the window is shown before they are needed

    pixels, small = load_whole(path, longest)
    return Whole(_image(*pixels), _image(*small))


def _image(width: int, height: int, rgb: bytes) -> QImage:
    # Painted without conversion, and with memory of its own.
    return QImage(rgb, width, height, 3 * width, _RGB).convertToFormat(_PAINTED)
