"""Zoomable view of one image, fitted or at any scale, that can be moved with mouse and keys."""

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
from app.core.library import LibraryChange, LibraryImage
from app.core.session import Session
from app.core.tasks import Tasks
from app.qt.theme import colors
from app.qt.widgets import until_destroyed

_NOTCH = 1.25


# Resolved on the main thread at import: PySide creates an enum on first use, which is not safe from two threads.
_RGB, _PAINTED = QImage.Format.Format_RGB888, QImage.Format.Format_RGB32


class FullImage(NamedTuple):
    """A full-resolution image, and a copy reduced to about the window's size for smooth scaling."""

    image: QImage
    small: QImage


class FullImageLoader:
    """Loads full images for one view; a new request cancels the previous one."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._request = 0
        self._future: Future[FullImage] | None = None

    def load(self, image: LibraryImage, longest: int, done: Callable[[FullImage | str], None]) -> None:
        """Load an image and call `done` with it, or with the reason why it cannot be shown.

        `longest` is the longer side of the view in device px. `drop` or another `load` cancels the call to `done`.
        """
        self.drop()
        request, path = self._request, image.path

        def deliver(whole: FullImage | str) -> None:
            if request == self._request:
                done(whole)

        self._future = self._tasks.run(
            lambda: _load(path, longest), deliver, lambda fault: deliver(str(fault)), kept=False
        )

    def drop(self) -> None:
        """Cancel the current request."""
        self._request += 1
        if self._future:
            self._future.cancel()
            self._future = None


def _load(path: Path, longest: int) -> FullImage:
    from app.core.disk.images import load_whole  # imports numpy and Pillow, which would delay the first window

    pixels, small = load_whole(path, longest)
    return FullImage(_image(*pixels), _image(*small))


def _image(width: int, height: int, rgb: bytes) -> QImage:
    # A format that Qt paints without conversion; the conversion also copies, so the result owns its memory.
    return QImage(rgb, width, height, 3 * width, _RGB).convertToFormat(_PAINTED)


_MAX_SCALE, _MIN_SCALE = 8.0, 0.02


class Zoom(QObject):
    """Scale and position of a view; areas that share a `Zoom` move together.

    `scale` is in screen px per image px, None to fit; `middle` is the point at the center of the view, in fractions of
    the image's width and height.
    """

    changed = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.scale: float | None = None
        self.middle = QPointF(0.5, 0.5)

    def set(self, scale: float | None, middle: QPointF | None = None) -> None:
        """Set the scale and the center, limited to valid values."""
        self.scale = None if scale is None else max(_MIN_SCALE, min(_MAX_SCALE, scale))
        middle = middle or self.middle
        self.middle = QPointF(max(0.0, min(1.0, middle.x())), max(0.0, min(1.0, middle.y())))
        self.changed.emit()

    def fit(self) -> None:
        """Fit the whole image into the view."""
        self.set(None, QPointF(0.5, 0.5))


class ZoomArea(QWidget):
    """Widget that shows an image at the scale and position of a `Zoom`: first its thumbnail, then the full image."""

    pressed = Signal()
    loaded = Signal()

    def __init__(self, session: Session, zoom: Zoom, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self.zoom = session, zoom
        self._wholes = FullImageLoader(session.tasks)
        self.images: Mapping[int, LibraryImage] = session.library.images
        """Images that `show_image` can show, by id."""
        self.image: int | None = None
        self.whole: FullImage | None = None
        self.problem: str | None = None
        self.marked = False
        """Whether to draw a ring that marks the current image among several."""
        self.fits_up_to = 1.0
        """Maximum scale of a fitted image: 1 for viewing, larger for editing."""
        self.margin = 0
        """Free space around a fitted image in logical px; makes handles at its edges easy to grab."""
        self._preview: QImage | None = None
        self._grabbed: QPointF | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        zoom.changed.connect(self.update)
        until_destroyed(
            self,
            session.thumbnails.ready.connect(self._on_thumbnail_ready),
            session.library.altered.connect(self._on_library_altered),
        )

    def show_image(self, number: int | None) -> None:
        """Show the image with this id, or none for None."""
        if number != self.image:
            self.image, self.whole, self.problem, self._preview = number, None, None, None
            self._load()

    def _load(self) -> None:
        image = self.images.get(self.image or 0)
        self._wholes.drop()
        if image and self.isVisible():
            kept = [self._session.thumbnails.get(image, edge) for edge in reversed(EDGES)]
            self._set_preview(next((one for one in kept if one), None))
            lost = self._session.datasets.lost.get(image.folder.root)
            if lost:  # reading from a lost disk could block forever
                self._on_loaded(lost.sentence)
                return
            if self._preview is None:
                self._session.thumbnails.request(image, EDGES[1])
            longest = round(max(self.width(), self.height()) * self.devicePixelRatioF())
            self._wholes.load(image, max(longest, EDGES[1]), self._on_loaded)
        self.update()

    def _on_loaded(self, whole: FullImage | str) -> None:
        if isinstance(whole, str):
            self.problem = whole
        else:
            self.whole = whole
        self.update()
        self.loaded.emit()

    def _on_thumbnail_ready(self, thumbnail: Thumbnail) -> None:
        if thumbnail.image == self.image and self.whole is None:
            self._set_preview(thumbnail)

    def _set_preview(self, thumbnail: Thumbnail | None) -> None:
        if thumbnail and thumbnail.problem is None:
            size = thumbnail.width, thumbnail.height, 3 * thumbnail.width
            self._preview = QImage(thumbnail.rgb, *size, QImage.Format.Format_RGB888).copy()
            self.update()

    def _on_library_altered(self, altered: LibraryChange) -> None:
        again = "file" in altered.what or ("problem" in altered.what and self.whole is None)
        if self.image in altered.altered and again:
            number, self.image = self.image, None
            self.show_image(number)

    # Scale and position

    @property
    def full_size(self) -> QSize | None:
        """Return the image's size in px or, if unknown, the thumbnail's size; None if that is unknown too."""
        if self.whole:
            return self.whole.image.size()
        image = self.images.get(self.image or 0)
        if image and image.width and image.height:
            return QSize(image.width, image.height)
        return self._preview.size() if self._preview else None

    @property
    def scale(self) -> float:
        """Return the current scale in screen px per image px."""
        size = self.full_size
        if self.zoom.scale is not None or size is None:
            return self.zoom.scale or 1.0
        ratio = self.devicePixelRatioF()
        width, height = (max(1, side - 2 * self.margin) * ratio for side in (self.width(), self.height()))
        return min(width / size.width(), height / size.height(), self.fits_up_to)

    def place(self) -> QRectF:
        """Return the rectangle of the whole image in widget coordinates."""
        size, scale = self.full_size or QSize(1, 1), self.scale / self.devicePixelRatioF()
        width, height = size.width() * scale, size.height() * scale
        return QRectF(
            _start(self.width(), width, self.zoom.middle.x()),
            _start(self.height(), height, self.zoom.middle.y()),
            width,
            height,
        )

    def zoom_by(self, factor: float, at: QPointF | None = None) -> None:
        """Zoom by a factor; the image point at `at`, by default the center of the widget, stays in place."""
        place, spot = self.place(), at or QPointF(self.width() / 2, self.height() / 2)
        scale = max(_MIN_SCALE, min(_MAX_SCALE, self.scale * factor))
        growth = scale / self.scale
        anchor = QPointF((spot.x() - place.x()) / place.width(), (spot.y() - place.y()) / place.height())
        center = QPointF(self.width() / 2, self.height() / 2)
        width, height = place.width() * growth, place.height() * growth
        middle = QPointF(anchor.x() + (center.x() - spot.x()) / width, anchor.y() + (center.y() - spot.y()) / height)
        self.zoom.set(scale, middle)

    def toggle_full(self, at: QPointF | None = None) -> None:
        """Toggle between 100% (one screen px per image px) and fitted."""
        if self.zoom.scale == 1.0:
            self.zoom.fit()
        else:
            self.zoom.set(1.0, self._fraction(at) if at else None)

    def _fraction(self, at: QPointF) -> QPointF:
        place = self.place()
        return QPointF((at.x() - place.x()) / place.width(), (at.y() - place.y()) / place.height())

    def move_by(self, across: float, down: float) -> None:
        """Move the visible part of the image by fractions of the widget's size."""
        place = self.place()
        step = QPointF(across * self.width() / place.width(), down * self.height() / place.height())
        self.zoom.set(self.zoom.scale, self.zoom.middle + step)

    # Events

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the visible part, using the full image or the reduced copy, depending on the scale."""
        painter = QPainter(self)
        painter.fillRect(event.rect(), QColor(colors().base))
        place, image = self.place(), self._image()
        if image is not None:
            painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform, self.scale < 2.0)
            seen = place.intersected(QRectF(self.rect()))
            across, down = image.width() / place.width(), image.height() / place.height()
            corner = seen.topLeft() - place.topLeft()
            part = QRectF(corner.x() * across, corner.y() * down, seen.width() * across, seen.height() * down)
            painter.drawImage(seen, image, part)
        elif self.problem:
            painter.setPen(QColor(colors().bad))
            flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(self.rect().adjusted(24, 24, -24, -24), int(flags), self.problem)
        if self.marked:
            painter.setPen(QPen(QColor(colors().focus), 2.0))
            painter.drawRect(QRectF(self.rect()).adjusted(1, 1, -1, -1))
        painter.end()

    def _image(self) -> QImage | None:
        if self.whole is None:
            return None if self.problem else self._preview
        enough = self.scale * self.whole.image.width() <= self.whole.small.width() * 1.01
        return self.whole.small if enough else self.whole.image

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Start moving the image."""
        self.pressed.emit()
        if event.button() == Qt.MouseButton.LeftButton:
            self._grabbed = event.position()
            self.setCursor(Qt.CursorShape.ClosedHandCursor)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Move the image with the pointer."""
        if self._grabbed is not None:
            moved, self._grabbed = self._grabbed - event.position(), event.position()
            self.move_by(moved.x() / max(1, self.width()), moved.y() / max(1, self.height()))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Stop moving the image."""
        self._grabbed = None
        self.unsetCursor()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Toggle between 100%, centered on the clicked point, and fitted."""
        self.toggle_full(event.position())

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Zoom in or out around the pointer."""
        self.zoom_by(_NOTCH if event.angleDelta().y() > 0 else 1 / _NOTCH, event.position())
        event.accept()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Repaint at the new size."""
        super().resizeEvent(event)
        self.update()

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Load the image that was requested while hidden."""
        super().showEvent(event)
        if self.whole is None:
            self._load()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Release the full image."""
        super().hideEvent(event)
        self._wholes.drop()
        self.whole = None


def _start(room: float, length: float, middle: float) -> float:
    """Return where the image starts on one axis: centered if it fits, otherwise with no gap at either end."""
    if length <= room:
        return (room - length) / 2
    return min(0.0, max(room - length, room / 2 - middle * length))
