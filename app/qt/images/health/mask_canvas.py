"""Canvas for painting a mask over its image."""

from __future__ import annotations

from typing import Literal

import numpy as np
from PySide6.QtCore import QPointF, QRectF, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QImage,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QTabletEvent,
)
from PySide6.QtWidgets import QWidget

from app.core.edits.masks import LEFT_OUT, TRAINED, Mask, shrunk
from app.core.session import Session
from app.qt.images.zoom import Zoom, ZoomArea
from app.qt.theme import colors

Tool = Literal["brush", "eraser", "fill"]
_STEPS = {
    Qt.Key.Key_Left: QPointF(-1, 0),
    Qt.Key.Key_Right: QPointF(1, 0),
    Qt.Key.Key_Up: QPointF(0, -1),
    Qt.Key.Key_Down: QPointF(0, 1),
}
_KEY_STEP = 12
"""Logical px that one press of an arrow key moves the brush."""


class MaskCanvas(ZoomArea):
    """Image with its mask shown as a tint: the brush includes areas in training, the eraser excludes them.

    The left button or a pen uses the tool, the middle button moves the image, and the wheel, + and - zoom. The arrow
    keys move the brush (with Shift, they also paint), and Space uses the tool at the brush's position.
    """

    painted = Signal()
    """Emitted when a stroke or a fill has changed the mask."""
    sized = Signal(int)
    """The brush radius has changed to this many image px."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, Zoom(), parent)
        self.zoom.setParent(self)
        self.fits_up_to = 8.0
        self.painting: Mask | None = None
        self.tool: Tool = "brush"
        self.radius = 40
        """Brush radius in image px."""
        self.hardness = 0.8
        self.opacity = 0.55
        self._last: QPointF | None = None
        self._brush: QPointF | None = None
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setCursor(Qt.CursorShape.CrossCursor)
        self.setAccessibleName(self.tr("Mask"))
        self.setAccessibleDescription(
            self.tr(
                "Arrow keys move the brush; hold Shift to paint while moving, or press Space to paint at its position"
            )
        )

    def show_mask(self, mask: Mask | None) -> None:
        """Set the mask to show and paint on."""
        self.painting = mask
        self.update()

    def resize_brush(self, radius: int) -> None:
        """Set the brush radius."""
        self.radius = max(1, min(radius, 1000))
        self.sized.emit(self.radius)
        self.update()

    # Painting the mask

    def pixel(self, place: QPointF) -> QPointF:
        """Convert a point in the widget to a point in the image, in image px."""
        whole, (height, width) = self.place(), self._shape()
        return QPointF(
            (place.x() - whole.x()) * width / whole.width(), (place.y() - whole.y()) * height / whole.height()
        )

    def at(self, pixel: QPointF) -> QPointF:
        """Convert a point in the image, in image px, to a point in the widget."""
        whole, (height, width) = self.place(), self._shape()
        return QPointF(whole.x() + pixel.x() * whole.width() / width, whole.y() + pixel.y() * whole.height() / height)

    def press(self, place: QPointF, pressure: float = 1.0) -> None:
        """Start a stroke, or fill an area, depending on the tool."""
        if self.painting is None:
            return
        spot = self.pixel(place)
        if self.tool == "fill":
            self._flood(spot)
            return
        self.painting.begin()
        self._last = spot
        self._line(spot, pressure)

    def drag(self, place: QPointF, pressure: float = 1.0) -> None:
        """Move the brush, and continue the stroke if there is one."""
        self._brush = place
        if self._last is not None:
            self._line(self.pixel(place), pressure)
        self.update()

    def lift(self) -> None:
        """End the stroke."""
        if self.painting is not None and self._last is not None:
            self.painting.end()
            self._last = None
            self.painted.emit()

    def _line(self, to: QPointF, pressure: float) -> None:
        assert self.painting is not None
        assert self._last is not None
        radius = max(self.radius * pressure, 0.5)
        value = TRAINED if self.tool == "brush" else LEFT_OUT
        self.painting.stroke(self._last.toTuple(), to.toTuple(), radius, self.hardness, value)
        self._last = to
        self.update()

    def _flood(self, spot: QPointF) -> None:
        assert self.painting is not None
        x, y = int(spot.x()), int(spot.y())
        height, width = self._shape()
        if 0 <= x < width and 0 <= y < height:
            left_out = self.painting.pixels[y, x] < 128
            self.painting.flood(x, y, TRAINED if left_out else LEFT_OUT)
            self.update()
            self.painted.emit()

    def _shape(self) -> tuple[int, int]:
        if self.painting is not None:
            height, width = self.painting.pixels.shape
            return height, width
        return 1, 1

    # Events

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the image, the tint over excluded areas, and the brush outline."""
        super().paintEvent(event)
        if self.painting is None:
            return
        painter = QPainter(self)
        self._tint(painter, self.painting)
        if self._brush is not None and self.tool != "fill":
            radius = self.radius * self.place().width() / self._shape()[1]
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            for color, width in ((QColor(0, 0, 0, 160), 3.0), (QColor(255, 255, 255), 1.2)):
                # Black below white is visible on every image, in every theme.
                painter.setPen(QPen(color, width))
                painter.drawEllipse(self._brush, radius, radius)
        if self.hasFocus():
            painter.setPen(QPen(QColor(colors().focus), 2.0))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRect(QRectF(self.rect()).adjusted(1, 1, -1, -1))
        painter.end()

    def _tint(self, painter: QPainter, mask: Mask) -> None:
        """Paint the tint, sampled at screen resolution to keep its cost independent of the image size."""
        whole, seen = self.place(), self.place().intersected(QRectF(self.rect()))
        if seen.isEmpty():
            return
        ratio, (height, width) = self.devicePixelRatioF(), mask.pixels.shape
        across = np.arange(max(round(seen.width() * ratio), 1)) + 0.5
        down = np.arange(max(round(seen.height() * ratio), 1)) + 0.5
        columns = ((across / ratio + seen.x() - whole.x()) * width / whole.width()).astype(np.intp)
        rows = ((down / ratio + seen.y() - whole.y()) * height / whole.height()).astype(np.intp)
        part = shrunk(mask.pixels, rows.clip(0, height - 1), columns.clip(0, width - 1))
        image = QImage(part.data, part.shape[1], part.shape[0], part.shape[1], QImage.Format.Format_Indexed8)
        tint = QColor(colors().bad)
        table = [
            QColor(tint.red(), tint.green(), tint.blue(), round((255 - gray) * self.opacity)) for gray in range(256)
        ]
        image.setColorTable([color.rgba() for color in table])
        painter.drawImage(seen, image)

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Paint with the left button, or move the image with the middle button."""
        self.setFocus()
        if event.button() == Qt.MouseButton.LeftButton:
            self.press(event.position())
        elif event.button() == Qt.MouseButton.MiddleButton:
            self._grabbed = event.position()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Continue the stroke, or move the image."""
        if self._grabbed is not None:
            super().mouseMoveEvent(event)
        else:
            self.drag(event.position())

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """End the stroke."""
        self._grabbed = None
        self.lift()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Treat a double click as a second press."""
        self.mousePressEvent(event)

    def tabletEvent(self, event: QTabletEvent) -> None:  # noqa: N802
        """Paint with a pen: pressure scales the brush, and the eraser end erases."""
        previous = self.tool
        if event.pointerType() == event.pointingDevice().PointerType.Eraser:
            self.tool = "eraser"
        if event.type() == event.Type.TabletPress:
            self.press(event.position(), event.pressure())
        elif event.type() == event.Type.TabletMove:
            self.drag(event.position(), event.pressure())
        else:
            self.lift()
        self.tool = previous
        event.accept()

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Move and resize the brush, paint and zoom."""
        key = Qt.Key(event.key())
        if key in _STEPS:
            self._move_brush(_STEPS[key], paint=bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
        elif key == Qt.Key.Key_Space:
            self.press(self._at_brush())
            self.lift()
        elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal):
            self.zoom_by(1.25)
        elif key == Qt.Key.Key_Minus:
            self.zoom_by(1 / 1.25)
        elif key == Qt.Key.Key_0:
            self.zoom.fit()
        elif key == Qt.Key.Key_BracketLeft:
            self.resize_brush(min(round(self.radius / 1.2), self.radius - 1))
        elif key == Qt.Key.Key_BracketRight:
            self.resize_brush(max(round(self.radius * 1.2), self.radius + 1))
        else:
            super().keyPressEvent(event)

    def _at_brush(self) -> QPointF:
        if self._brush is None:
            self._brush = QPointF(self.width() / 2, self.height() / 2)
        return self._brush

    def _move_brush(self, direction: QPointF, *, paint: bool) -> None:
        start = self._at_brush()
        if paint and self.tool != "fill":
            self.press(start)
        self.drag(start + direction * _KEY_STEP)
        self.lift()
