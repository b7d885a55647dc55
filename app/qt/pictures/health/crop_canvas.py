"""A picture with the part that training shows, the rest dimmed; the frame is moved and sized by mouse and keys."""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QMouseEvent, QPainter, QPainterPath, QPaintEvent, QPen, QWheelEvent
from PySide6.QtWidgets import QWidget

from app.core.health.judging import moved, scaled
from app.core.library import Crop
from app.core.session import Session
from app.qt.pictures.zoom import Zoom, ZoomArea
from app.qt.theme import colours

_STEPS = {
    Qt.Key.Key_Left: (-1, 0),
    Qt.Key.Key_Right: (1, 0),
    Qt.Key.Key_Up: (0, -1),
    Qt.Key.Key_Down: (0, 1),
}
_STEP = 0.02
_GRIP = 14
"""Pixels of the screen around a corner within which it is taken hold of."""


class CropCanvas(ZoomArea):
    """Drag the frame to move it, a corner or the wheel to size it; arrows (Shift: one pixel), + and - do the same."""

    pulled = Signal()
    """The user holds a frame that is another now."""
    framed = Signal()
    """The user has put the frame elsewhere: a drag has ended, or a key was pressed."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, Zoom(), parent)
        self.zoom.setParent(self)
        self.fits_up_to = 8.0
        self.margin = 24
        self.frame: Crop | None = None
        self.thirds = True
        self._corner: tuple[int, int] | None = None
        self._held: QPointF | None = None
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setAccessibleName(self.tr("Crop"))
        self.setAccessibleDescription(self.tr("Arrow keys move the frame, plus and minus size it"))

    def show_frame(self, frame: Crop | None) -> None:
        """Show which part is trained."""
        self.frame = frame
        self.update()

    def shift(self, across: float, down: float) -> None:
        """Move the frame by fractions of the picture."""
        if self.frame:
            self.show_frame(moved(self.frame, across, down))

    def shrink(self, factor: float, anchor: tuple[float, float] = (0.5, 0.5)) -> None:
        """Make the frame smaller, or larger by a factor above 1."""
        size = self.full_size
        if self.frame and size:
            self.show_frame(scaled(self.frame, factor, (size.width(), size.height()), anchor))

    def rectangle(self) -> QRectF:
        """Return where the frame lies in the widget."""
        whole, (left, top, right, bottom) = self.place(), self.frame or (0.0, 0.0, 1.0, 1.0)
        return QRectF(
            whole.x() + left * whole.width(),
            whole.y() + top * whole.height(),
            (right - left) * whole.width(),
            (bottom - top) * whole.height(),
        )

    # Events

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the picture, the shade, the frame and its thirds."""
        super().paintEvent(event)
        if self.frame is None:
            return
        painter, frame = QPainter(self), self.rectangle()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        outside = QPainterPath()
        outside.addRect(self.place())
        inside = QPainterPath()
        inside.addRect(frame)
        # Black and white lie on the picture, not on the window, so they are the same in every palette.
        painter.fillPath(outside.subtracted(inside), QColor(0, 0, 0, 165))
        if self.thirds:
            painter.setPen(QPen(QColor(255, 255, 255, 110), 1.0))
            for part in (1 / 3, 2 / 3):
                x, y = frame.x() + part * frame.width(), frame.y() + part * frame.height()
                painter.drawLine(QPointF(x, frame.top()), QPointF(x, frame.bottom()))
                painter.drawLine(QPointF(frame.left(), y), QPointF(frame.right(), y))
        for colour, width in ((QColor(0, 0, 0, 190), 4.0), (QColor(255, 255, 255), 2.0)):
            painter.setPen(QPen(colour, width))
            painter.drawRect(frame)
        painter.setPen(QPen(QColor(0, 0, 0, 190), 1.0))
        painter.setBrush(QColor(255, 255, 255))
        for spot in (frame.topLeft(), frame.topRight(), frame.bottomLeft(), frame.bottomRight()):
            painter.drawRect(QRectF(spot.x() - 4, spot.y() - 4, 8, 8))
        if self.hasFocus():
            painter.setPen(QPen(QColor(colours().focus), 2.0))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRect(QRectF(self.rect()).adjusted(1, 1, -1, -1))
        painter.end()

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Take hold of a corner, or of the frame."""
        self.setFocus()
        if event.button() == Qt.MouseButton.LeftButton and self.frame:
            self._corner, self._held = self._corner_at(event.position()), event.position()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Move or size the frame."""
        if self._held is None:
            self._show_cursor(event.position())
            return
        whole, went = self.place(), event.position() - self._held
        if self._corner is None:
            self.shift(went.x() / whole.width(), went.y() / whole.height())
        else:
            self._pull(event.position(), self._corner)
        self._held = event.position()
        self.pulled.emit()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Let go."""
        if self._held is not None:
            self._held = self._corner = None
            self.framed.emit()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Take hold again: two clicks mean nothing more here."""
        self.mousePressEvent(event)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Size the frame."""
        self.shrink(1 / 1.06 if event.angleDelta().y() > 0 else 1.06)
        self.framed.emit()
        event.accept()

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Move or size the frame."""
        key, size = Qt.Key(event.key()), self.full_size
        if key in _STEPS and size:
            fine = event.modifiers() & Qt.KeyboardModifier.ShiftModifier
            across, down = _STEPS[key]
            wide, high = (1 / size.width(), 1 / size.height()) if fine else (_STEP, _STEP)
            self.shift(across * wide, down * high)
        elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal):
            self.shrink(1.04)
        elif key == Qt.Key.Key_Minus:
            self.shrink(1 / 1.04)
        else:
            super().keyPressEvent(event)
            return
        self.framed.emit()

    def _corner_at(self, spot: QPointF) -> tuple[int, int] | None:
        """Return which corner (0 or 1 across, 0 or 1 down) is near."""
        frame = self.rectangle()
        for across, x in ((0, frame.left()), (1, frame.right())):
            for down, y in ((0, frame.top()), (1, frame.bottom())):
                if abs(spot.x() - x) <= _GRIP and abs(spot.y() - y) <= _GRIP:
                    return across, down
        return None

    def _pull(self, spot: QPointF, corner: tuple[int, int]) -> None:
        """Size the frame so that a corner follows the pointer; the corner opposite stays."""
        frame = self.rectangle()
        opposite = QPointF(frame.left() if corner[0] else frame.right(), frame.top() if corner[1] else frame.bottom())
        across = (spot.x() - opposite.x()) * (1 if corner[0] else -1) / frame.width()
        down = (spot.y() - opposite.y()) * (1 if corner[1] else -1) / frame.height()
        anchor = 1 - corner[0], 1 - corner[1]
        self.shrink(min(max(across, down, 0.01), *self._room(anchor)), anchor)

    def _room(self, anchor: tuple[int, int]) -> tuple[float, float]:
        """Return how much larger the frame can get without leaving the picture, its corner at `anchor` fixed."""
        left, top, right, bottom = self.frame or (0.0, 0.0, 1.0, 1.0)
        across = (right if anchor[0] else 1.0 - left) / (right - left)
        return across, (bottom if anchor[1] else 1.0 - top) / (bottom - top)

    def _show_cursor(self, spot: QPointF) -> None:
        corner = self._corner_at(spot)
        if corner is not None:
            same = corner[0] == corner[1]
            self.setCursor(Qt.CursorShape.SizeFDiagCursor if same else Qt.CursorShape.SizeBDiagCursor)
        elif self.rectangle().contains(spot):
            self.setCursor(Qt.CursorShape.SizeAllCursor)
        else:
            self.unsetCursor()
