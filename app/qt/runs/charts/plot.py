"""The part of a chart with the lines: painted with QPainter, moved and enlarged with the mouse.

The values' axis always fits what is seen, so there is one direction to move in, and a wheel does what one expects.
"""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QLineF, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFocusEvent,
    QFont,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QPixmap,
    QResizeEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.qt.runs.charts.axis import Wording
from app.qt.runs.charts.lines import Drawing
from app.qt.runs.charts.painting import field_in, paint_axes, paint_drawing, paint_label
from app.qt.runs.charts.scale import Scale, room_for
from app.qt.theme import colours

ZOOM = 0.7
"""What remains in sight of what was, at each turn of the wheel or press of a key."""
_TURN = 120.0  # a wheel's notch, in Qt's eighths of a degree


class Plot(QWidget):
    """Shows a `Drawing` between two steps; who holds it says which, also when the user wants to see others."""

    moved = Signal(float, float)
    """The user wants to see these steps: first, last."""
    reset = Signal()
    """The user wants to see all steps."""
    hovered = Signal(object)
    """The step under the pointer: a float, or None where the pointer left."""

    def __init__(self, words: Wording, along: Wording, press: Callable[[int], bool], *, whole: bool) -> None:
        """`words` and `along` word the axes; `press` does what a key asks for, and tells whether that was anything."""
        super().__init__()
        self._words, self._along, self._press, self._whole = words, along, press, whole
        self._drawing = Drawing()
        self._cursor: float | None = None
        self._dragged: float | None = None
        self._painted: QPixmap | None = None
        self.steps = (0.0, 1.0)
        """The first and the last that are in sight."""
        self.values = (0.0, 1.0)
        """The lowest and the highest that have room; exponents of ten where the axis is logarithmic."""
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    @property
    def scale(self) -> Scale:
        """Where each step and value stands now."""
        return Scale(field_in(self.size(), self._small()), self.steps, self.values, self._drawing.logarithmic)

    def show_drawing(self, drawing: Drawing) -> None:
        """Draw other lines, or more of them."""
        self._drawing = drawing
        self._fit()

    def show_steps(self, first: float, last: float) -> None:
        """Show the steps from one to another; nobody is told of it."""
        self.steps = (first, max(last, first + 1e-9))
        self._fit()

    def point_at(self, step: float | None) -> None:
        """Put the cursor at a step; None takes it away."""
        self._cursor = step
        self.update()

    def paint_anew(self) -> None:
        """Paint with the colours, the font and the size that are now in force."""
        self._painted = None
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Wider than high."""
        return QSize(320, 150)

    # --- Qt's events

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the lines where anything changed, and the cursor over them."""
        ratio = self.devicePixelRatioF()
        if self._painted is None or self._painted.devicePixelRatioF() != ratio:
            self._painted = self._paint(ratio)
        painter = QPainter(self)
        painter.drawPixmap(0, 0, self._painted)
        if self._cursor is not None:
            field, across = self.scale.field, self.scale.across(self._cursor)
            painter.setPen(QPen(QColor(colours().muted), 1))
            painter.drawLine(QLineF(across, field.top(), across, field.bottom()))
        if self.hasFocus():
            painter.setPen(QPen(QColor(colours().focus), 2))
            painter.drawRect(self.rect().adjusted(1, 1, -1, -1))
        painter.end()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Paint for the new size."""
        super().resizeEvent(event)
        self.paint_anew()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Follow the colours and the font."""
        super().changeEvent(event)
        if event.type() in (QEvent.Type.PaletteChange, QEvent.Type.FontChange):
            self.paint_anew()

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Take hold of the steps."""
        if event.button() == Qt.MouseButton.LeftButton:
            self._dragged = event.position().x()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Move the steps that are held, else follow the pointer."""
        across, scale = event.position().x(), self.scale
        if self._dragged is not None:
            by = scale.step_at(self._dragged) - scale.step_at(across)
            self._dragged = across
            self.moved.emit(self.steps[0] + by, self.steps[1] + by)
        elif scale.field.contains(event.position()):
            self.hovered.emit(scale.step_at(across))
        else:
            self.hovered.emit(None)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Let go."""
        self._dragged = None

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Show all again."""
        self.reset.emit()

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Enlarge with Ctrl held; else the page scrolls, as everywhere."""
        if not event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            event.ignore()
            return
        self.zoom(self.scale.step_at(event.position().x()), ZOOM ** (event.angleDelta().y() / _TURN))
        event.accept()

    def zoom(self, middle: float, by: float) -> None:
        """Ask for a share of the steps in sight, or for more than are, that leaves one of them where it stands."""
        first, last = self.steps
        self.moved.emit(middle - (middle - first) * by, middle + (last - middle) * by)

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        """Take the cursor away."""
        super().leaveEvent(event)
        self.hovered.emit(None)

    def focusInEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Show the ring."""
        super().focusInEvent(event)
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Take ring and cursor away."""
        super().focusOutEvent(event)
        self.hovered.emit(None)
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Move, enlarge, read."""
        event.setAccepted(self._press(event.key()))

    # --- inside

    def _fit(self) -> None:
        """Give the values' axis room for what is seen."""
        self.values = room_for(self._drawing, *self.steps)
        self.paint_anew()

    def _paint(self, ratio: float) -> QPixmap:
        pixmap = QPixmap(self.size() * ratio)
        pixmap.setDevicePixelRatio(ratio)
        pixmap.fill(QColor(colours().base))
        painter, scale = QPainter(pixmap), self.scale
        painter.setFont(self._small())
        paint_axes(painter, scale, self._words, self._along, whole=self._whole)
        paint_drawing(painter, scale, self._drawing)
        if self._drawing.best is not None:
            best = self.tr("best: {step}").format(step=self._along(self._drawing.best))
            paint_label(painter, scale, self._drawing.best, best)
        painter.end()
        return pixmap

    def _small(self) -> QFont:
        font = self.font()
        font.setPointSizeF(font.pointSizeF() * 0.9)
        return font
