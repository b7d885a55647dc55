"""One chart: a title, a legend, and lines by step that can be moved and enlarged along the steps.

The part of a chart with the lines: painted with QPainter, moved and enlarged with the mouse.

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
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QStackedWidget, QVBoxLayout, QWidget

from app.core.runs.curves import at
from app.qt.runs.charts.painting import (
    ChartSpec,
    Entry,
    Legend,
    Scale,
    Wording,
    count,
    field_in,
    paint_axes,
    paint_drawing,
    paint_label,
    room_for,
)
from app.qt.theme import colours

ZOOM = 0.7
"""What remains in sight of what was, at each turn of the wheel or press of a key."""
_TURN = 120.0  # a wheel's notch, in Qt's eighths of a degree
_NUDGE = 0.01


class Plot(QWidget):
    """Shows a `ChartSpec` between two steps; who holds it says which, also when the user wants to see others."""

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
        self._drawing = ChartSpec()
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

    def show_drawing(self, drawing: ChartSpec) -> None:
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


class Chart(QFrame):
    """Draws a `ChartSpec`; `words` word the values of its axis."""

    moved = Signal(float, float)
    """The user wants to see these steps: first, last."""
    reset = Signal()
    """The user wants to see all steps."""

    def __init__(self, title: str, words: Wording, along: Wording = count, *, whole: bool = True) -> None:
        super().__init__()
        self.title = title
        self._words, self._along = words, along
        self.drawing = ChartSpec()
        self.cursor_step: float | None = None
        """Where the cursor is; None where there is none."""
        self.plot = Plot(words, along, self._press, whole=whole)
        self.plot.setAccessibleName(title)
        self.plot.moved.connect(self.moved)
        self.plot.reset.connect(self.reset)
        self.plot.hovered.connect(lambda step: self.point_at(step if self.drawing.lines else None))
        self.legend = Legend()
        self.readout = QLabel()
        self.readout.setProperty("role", "muted")
        self.readout.setTextFormat(Qt.TextFormat.PlainText)  # runs are named in it
        self._lay_out()

    def draw(self, drawing: ChartSpec) -> None:
        """Draw other lines, or more of them."""
        self.drawing = drawing
        self._title.setText(drawing.title or self.title)
        self.plot.setAccessibleName(self._title.text())
        self.plot.setAccessibleDescription(drawing.words)
        self.plot.show_drawing(drawing)
        self.legend.show_entries(self._entries())

    def show_steps(self, first: float, last: float) -> None:
        """Show the steps from one to another; nobody is told of it."""
        self.plot.show_steps(first, last)

    def point_at(self, step: float | None) -> None:
        """Put the cursor at a step and say what is there; None takes it away."""
        self.cursor_step = step
        self.plot.point_at(step)
        self.readout.setText(self.said_at(step) if step is not None else "")
        self._beside.setCurrentWidget(self.readout if self.readout.text() else self.legend)

    def said_at(self, step: float) -> str:
        """Return what each line says at a step."""
        found = [(line, at(line.steps, line.values, step)) for line in self.drawing.lines]
        told = [(line, point) for line, point in found if point]
        if not told:
            return ""
        named = len({line.label for line, _ in told}) > 1 or len({line.run for line, _ in told}) > 1
        words = [f"{line.run or line.label} {self._words(v)}" if named else self._words(v) for line, (_, v) in told]
        return f"{self._along(told[0][1][0])}:  " + ",  ".join(words)

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Follow the colours."""
        super().changeEvent(event)
        if event.type() == QEvent.Type.PaletteChange and hasattr(self, "legend"):
            self.legend.update()

    # --- inside

    def _press(self, key: int) -> bool:
        """Do what a key asks for; tell whether it asked for anything."""
        first, last = self.plot.steps
        middle = self.cursor_step if self.cursor_step is not None else (first + last) / 2
        width = last - first
        match key:
            case Qt.Key.Key_Left | Qt.Key.Key_Right:
                by = width * _NUDGE * (1 if key == Qt.Key.Key_Right else -1)
                self.point_at(min(max(middle + by, first), last))
                self.plot.setAccessibleDescription(f"{self.readout.text()}. {self.drawing.words}")
            case Qt.Key.Key_Plus | Qt.Key.Key_Equal:
                self.plot.zoom(middle, ZOOM)
            case Qt.Key.Key_Minus:
                self.plot.zoom(middle, 1 / ZOOM)
            case Qt.Key.Key_PageUp | Qt.Key.Key_PageDown:
                by = width * 0.5 * (1 if key == Qt.Key.Key_PageDown else -1)
                self.moved.emit(first + by, last + by)
            case Qt.Key.Key_Home:
                self.reset.emit()
            case _:
                return False
        return True

    def _entries(self) -> list[Entry]:
        lines: dict[str, Entry] = {}
        for line in self.drawing.lines:
            lines.setdefault(line.label, (line.label, line.colour, line.look))
        levels = [(level.label, level.colour, "dashed") for level in self.drawing.levels]
        return [*lines.values(), *levels, *((label, colour, "plain") for label, colour in self.drawing.extra)]

    def _lay_out(self) -> None:
        self._title = QLabel(self.title)
        self._title.setProperty("role", "heading")
        top = QHBoxLayout()
        top.setSpacing(14)
        top.addWidget(self._title)
        self._beside = QStackedWidget()  # what the cursor says stands where the legend stood: there is room for one
        self._beside.addWidget(self.legend)
        self._beside.addWidget(self.readout)
        self._beside.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        top.addWidget(self._beside, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        column.addLayout(top)
        column.addWidget(self.plot, 1)
