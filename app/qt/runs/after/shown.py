"""Pictures of files as this room shows them: read on a worker, scaled to the screen's own pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, QRect, QSize, Qt
from PySide6.QtGui import QImage, QPainter, QPaintEvent, QPixmap
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.core.pixels import Pixels, read_pixels
from app.core.session import Session
from app.core.tasks import raise_again
from app.qt.parts import image_of, while_there
from app.qt.theme import colours


def read_image(
    owner: QObject, session: Session, file: Path, done: Callable[[QImage], None], side: int = 0
) -> None:  # fmt: skip
    """Read a picture on a worker; call `done` with it if `owner` is there then, no larger than `side` pixels if given.

    One that cannot be read is null. Workers hand over bytes only: PySide makes its types and enumerations when they are
    first used, and one thread that does so beside another ends the program.
    """

    def have(pixels: Pixels | None) -> None:
        done(image_of(pixels) if pixels else QImage())

    session.tasks.run(lambda: read_pixels(file, side), while_there(owner, have), raise_again, kept=False)


def paint_fitting(painter: QPainter, room: QRect, image: QImage, ratio: float) -> None:
    """Paint an image in the middle of a room: as large as fits, small ones up to four times their size."""
    size = QSize(image.size()).scaled(room.size(), Qt.AspectRatioMode.KeepAspectRatio)
    size = size.boundedTo(image.size() * 4)
    place = QRect(room.topLeft(), size)
    place.moveCenter(room.center())
    way = Qt.TransformationMode.SmoothTransformation
    scaled = image.scaled(size * ratio, Qt.AspectRatioMode.IgnoreAspectRatio, way)
    scaled.setDevicePixelRatio(ratio)
    painter.drawImage(place.topLeft(), scaled)


class Shown(QWidget):
    """One picture, or a sentence while there is none."""

    def __init__(self, session: Session, sentence: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._sentence = sentence
        self._image = QImage()
        self._scaled: tuple[tuple[int, int, float], QPixmap] | None = None
        self.file: Path | None = None
        """What is shown, or on its way."""
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMinimumSize(160, 160)

    @property
    def shows(self) -> bool:
        """Whether a picture is seen."""
        return not self._image.isNull()

    def show_file(self, file: Path | None) -> None:
        """Show a picture; the one before stays until it is read. None: show none."""
        self.file = file
        if file is None:
            self._take(None, QImage())
        else:
            read_image(self, self._session, file, lambda image: self._take(file, image))

    def _take(self, file: Path | None, image: QImage) -> None:
        if file == self.file:
            self._image, self._scaled = image, None
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the picture in the middle."""
        painter = QPainter(self)
        painter.fillRect(self.rect(), colours().base)
        if self._image.isNull():
            painter.setPen(colours().muted)
            room = self.rect().adjusted(16, 16, -16, -16)
            painter.drawText(room, Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap, self._sentence)
            return
        key = (self.width(), self.height(), self.devicePixelRatioF())
        if self._scaled is None or self._scaled[0] != key:
            self._scaled = key, self._fitting()
        painter.drawPixmap(0, 0, self._scaled[1])

    def _fitting(self) -> QPixmap:
        ratio = self.devicePixelRatioF()
        whole = QPixmap(self.size() * ratio)
        whole.setDevicePixelRatio(ratio)
        whole.fill(Qt.GlobalColor.transparent)
        painter = QPainter(whole)
        paint_fitting(painter, self.rect(), self._image, ratio)
        painter.end()
        return whole
