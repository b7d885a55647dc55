"""One picture to look at closely: fitted, or at any scale, moved about by mouse and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from PySide6.QtCore import QObject, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QHideEvent,
    QImage,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
    QShowEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.core.disk.thumbnails import EDGES, Thumbnail
from app.core.library import Altered, Picture
from app.core.session import Session
from app.core.tasks import Tasks
from app.qt.theme import colours
from app.qt.widgets import until_destroyed

_NOTCH = 1.25


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


_MOST, _LEAST = 8.0, 0.02


class Zoom(QObject):
    """How closely and where one looks; areas that share one move together.

    `scale` is screen pixels for each of the picture's, None to fit; `middle` the place in the middle, as fractions.
    """

    changed = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.scale: float | None = None
        self.middle = QPointF(0.5, 0.5)

    def set(self, scale: float | None, middle: QPointF | None = None) -> None:
        """Look so from now on."""
        self.scale = None if scale is None else max(_LEAST, min(_MOST, scale))
        middle = middle or self.middle
        self.middle = QPointF(max(0.0, min(1.0, middle.x())), max(0.0, min(1.0, middle.y())))
        self.changed.emit()

    def fit(self) -> None:
        """Show all of the picture."""
        self.set(None, QPointF(0.5, 0.5))


class ZoomArea(QWidget):
    """Shows a picture at the scale and place of a `Zoom`: its thumbnail at once, all its pixels when they are there."""

    pressed = Signal()
    loaded = Signal()

    def __init__(self, session: Session, zoom: Zoom, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self.zoom = session, zoom
        self._wholes = Wholes(session.tasks)
        self.pictures: Mapping[int, Picture] = session.library.pictures
        """What it shows one of, by number."""
        self.picture: int | None = None
        self.whole: Whole | None = None
        self.problem: str | None = None
        self.marked = False
        """Whether it has a ring, as the current one of several."""
        self.fits_up_to = 1.0
        """How much a small picture is enlarged to fit: not at all for looking, more for working on it."""
        self.margin = 0
        """Logical pixels that stay free on each side of a fitted picture: room to grab what lies on its edges."""
        self._stand_in: QImage | None = None
        self._grabbed: QPointF | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        zoom.changed.connect(self.update)
        until_destroyed(
            self, session.thumbnails.ready.connect(self._ready), session.library.altered.connect(self._altered)
        )

    def show_picture(self, number: int | None) -> None:
        """Show another picture, or none."""
        if number != self.picture:
            self.picture, self.whole, self.problem, self._stand_in = number, None, None, None
            self._load()

    def _load(self) -> None:
        picture = self.pictures.get(self.picture or 0)
        self._wholes.drop()
        if picture and self.isVisible():
            kept = [self._session.thumbnails.get(picture, edge) for edge in reversed(EDGES)]
            self._take(next((one for one in kept if one), None))
            if lost := self._session.datasets.lost.get(picture.folder.root):  # each would wait for its disk for ever
                self._have(lost.sentence)
                return
            if self._stand_in is None:
                self._session.thumbnails.request(picture, EDGES[1])
            longest = round(max(self.width(), self.height()) * self.devicePixelRatioF())
            self._wholes.load(picture, max(longest, EDGES[1]), self._have)
        self.update()

    def _have(self, whole: Whole | str) -> None:
        if isinstance(whole, str):
            self.problem = whole
        else:
            self.whole = whole
        self.update()
        self.loaded.emit()

    def _ready(self, thumbnail: Thumbnail) -> None:
        if thumbnail.picture == self.picture and self.whole is None:
            self._take(thumbnail)

    def _take(self, thumbnail: Thumbnail | None) -> None:
        if thumbnail and thumbnail.problem is None:
            size = thumbnail.width, thumbnail.height, 3 * thumbnail.width
            self._stand_in = QImage(thumbnail.rgb, *size, QImage.Format.Format_RGB888).copy()
            self.update()

    def _altered(self, altered: Altered) -> None:
        again = "file" in altered.what or ("problem" in altered.what and self.whole is None)
        if self.picture in altered.altered and again:
            number, self.picture = self.picture, None
            self.show_picture(number)

    # Scale and place

    @property
    def full_size(self) -> QSize | None:
        """Return the picture's own size, as far as it is known."""
        if self.whole:
            return self.whole.image.size()
        picture = self.pictures.get(self.picture or 0)
        if picture and picture.width and picture.height:
            return QSize(picture.width, picture.height)
        return self._stand_in.size() if self._stand_in else None

    @property
    def scale(self) -> float:
        """Return screen pixels for each of the picture's, now."""
        size = self.full_size
        if self.zoom.scale is not None or size is None:
            return self.zoom.scale or 1.0
        ratio = self.devicePixelRatioF()
        width, height = (max(1, side - 2 * self.margin) * ratio for side in (self.width(), self.height()))
        return min(width / size.width(), height / size.height(), self.fits_up_to)

    def place(self) -> QRectF:
        """Return where all of the picture would be, in logical pixels of the area."""
        size, scale = self.full_size or QSize(1, 1), self.scale / self.devicePixelRatioF()
        width, height = size.width() * scale, size.height() * scale
        return QRectF(
            _start(self.width(), width, self.zoom.middle.x()),
            _start(self.height(), height, self.zoom.middle.y()),
            width,
            height,
        )

    def zoom_by(self, factor: float, at: QPointF | None = None) -> None:
        """Look closer or from farther away; what is at `at` stays there."""
        place, spot = self.place(), at or QPointF(self.width() / 2, self.height() / 2)
        scale = max(_LEAST, min(_MOST, self.scale * factor))
        grown = scale / self.scale
        held = QPointF((spot.x() - place.x()) / place.width(), (spot.y() - place.y()) / place.height())
        centre = QPointF(self.width() / 2, self.height() / 2)
        width, height = place.width() * grown, place.height() * grown
        middle = QPointF(held.x() + (centre.x() - spot.x()) / width, held.y() + (centre.y() - spot.y()) / height)
        self.zoom.set(scale, middle)

    def toggle_full(self, at: QPointF | None = None) -> None:
        """Go from fitted to one screen pixel for each of the picture's, or back."""
        if self.zoom.scale == 1.0:
            self.zoom.fit()
        else:
            self.zoom.set(1.0, self._fraction(at) if at else None)

    def _fraction(self, at: QPointF) -> QPointF:
        place = self.place()
        return QPointF((at.x() - place.x()) / place.width(), (at.y() - place.y()) / place.height())

    def move_by(self, across: float, down: float) -> None:
        """Move the picture by a part of the area."""
        place = self.place()
        step = QPointF(across * self.width() / place.width(), down * self.height() / place.height())
        self.zoom.set(self.zoom.scale, self.zoom.middle + step)

    # Events

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the part that is seen, from the image that suits the scale."""
        painter = QPainter(self)
        painter.fillRect(event.rect(), QColor(colours().base))
        place, image = self.place(), self._image()
        if image is not None:
            painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform, self.scale < 2.0)
            seen = place.intersected(QRectF(self.rect()))
            across, down = image.width() / place.width(), image.height() / place.height()
            corner = seen.topLeft() - place.topLeft()
            part = QRectF(corner.x() * across, corner.y() * down, seen.width() * across, seen.height() * down)
            painter.drawImage(seen, image, part)
        elif self.problem:
            painter.setPen(QColor(colours().bad))
            flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(self.rect().adjusted(24, 24, -24, -24), int(flags), self.problem)
        if self.marked:
            painter.setPen(QPen(QColor(colours().focus), 2.0))
            painter.drawRect(QRectF(self.rect()).adjusted(1, 1, -1, -1))
        painter.end()

    def _image(self) -> QImage | None:
        if self.whole is None:
            return None if self.problem else self._stand_in
        enough = self.scale * self.whole.image.width() <= self.whole.small.width() * 1.01
        return self.whole.small if enough else self.whole.image

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Take hold of the picture."""
        self.pressed.emit()
        if event.button() == Qt.MouseButton.LeftButton:
            self._grabbed = event.position()
            self.setCursor(Qt.CursorShape.ClosedHandCursor)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Move the picture along."""
        if self._grabbed is not None:
            moved, self._grabbed = self._grabbed - event.position(), event.position()
            self.move_by(moved.x() / max(1, self.width()), moved.y() / max(1, self.height()))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Let go."""
        self._grabbed = None
        self.unsetCursor()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Go to 100 % where it is clicked, or back."""
        self.toggle_full(event.position())

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Look closer or from farther away, around the pointer."""
        self.zoom_by(_NOTCH if event.angleDelta().y() > 0 else 1 / _NOTCH, event.position())
        event.accept()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Fit anew."""
        super().resizeEvent(event)
        self.update()

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Load what was asked for while it was hidden."""
        super().showEvent(event)
        if self.whole is None:
            self._load()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Free what is large."""
        super().hideEvent(event)
        self._wholes.drop()
        self.whole = None


def _start(room: float, length: float, middle: float) -> float:
    """Return where something begins: in the middle if there is room, else so that no room is left empty."""
    if length <= room:
        return (room - length) / 2
    return min(0.0, max(room - length, room / 2 - middle * length))
