"""Chart with title, legend and a plot of lines by step, painted with QPainter.

The user pans and zooms along the steps only; the value axis always fits the visible lines.
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
from app.qt.theme import colors

ZOOM = 0.7
"""Factor by which each wheel notch or key press scales the visible range."""
_WHEEL_NOTCH = 120.0  # one wheel notch, in eighths of a degree
_NUDGE = 0.01  # fraction of the visible range that each press of an arrow key moves


class Plot(QWidget):
    """Widget that paints a `ChartSpec` between two steps and asks its owner, by signals, to pan or zoom."""

    moved = Signal(float, float)
    """First and last step that the user wants to see."""
    reset = Signal()
    """The user wants to see all steps."""
    hovered = Signal(object)
    """Step under the pointer as a float, or None once the pointer has left."""

    def __init__(self, words: Wording, along: Wording, press: Callable[[int], bool], *, whole: bool) -> None:
        """Take formatters for values (`words`) and steps (`along`); `press` returns whether it handled a key."""
        super().__init__()
        self._words, self._along, self._on_key, self._whole = words, along, press, whole
        self._drawing = ChartSpec()
        self._cursor: float | None = None
        self._dragged: float | None = None
        self._painted: QPixmap | None = None
        self.steps = (0.0, 1.0)
        """First and last visible step."""
        self.values = (0.0, 1.0)
        """Lowest and highest value on the value axis, as exponents of ten if it is logarithmic."""
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    @property
    def scale(self) -> Scale:
        """Mapping of steps and values to pixels."""
        return Scale(field_in(self.size(), self._small_font()), self.steps, self.values, self._drawing.logarithmic)

    def show_drawing(self, drawing: ChartSpec) -> None:
        """Draw this chart's lines."""
        self._drawing = drawing
        self._fit()

    def show_steps(self, first: float, last: float) -> None:
        """Show a range of steps without emitting a signal."""
        self.steps = (first, max(last, first + 1e-9))
        self._fit()

    def point_at(self, step: float | None) -> None:
        """Move the cursor to a step, or remove it for None."""
        self._cursor = step
        self.update()

    def repaint_lines(self) -> None:
        """Repaint the lines with the current colors, font and size."""
        self._painted = None
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the preferred size, wider than high."""
        return QSize(320, 150)

    # --- Qt's events

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the lines, from a cache if nothing has changed, and the cursor on top."""
        ratio = self.devicePixelRatioF()
        if self._painted is None or self._painted.devicePixelRatioF() != ratio:
            self._painted = self._paint(ratio)
        painter = QPainter(self)
        painter.drawPixmap(0, 0, self._painted)
        if self._cursor is not None:
            field, across = self.scale.field, self.scale.across(self._cursor)
            painter.setPen(QPen(QColor(colors().muted), 1))
            painter.drawLine(QLineF(across, field.top(), across, field.bottom()))
        if self.hasFocus():
            painter.setPen(QPen(QColor(colors().focus), 2))
            painter.drawRect(self.rect().adjusted(1, 1, -1, -1))
        painter.end()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Repaint for the new size."""
        super().resizeEvent(event)
        self.repaint_lines()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Repaint when colors or font change."""
        super().changeEvent(event)
        if event.type() in (QEvent.Type.PaletteChange, QEvent.Type.FontChange):
            self.repaint_lines()

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Start dragging."""
        if event.button() == Qt.MouseButton.LeftButton:
            self._dragged = event.position().x()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Pan while dragging, otherwise move the cursor."""
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
        """Stop dragging."""
        self._dragged = None

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Show all steps again."""
        self.reset.emit()

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Zoom with Ctrl held; otherwise the page scrolls."""
        if not event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            event.ignore()
            return
        self.zoom(self.scale.step_at(event.position().x()), ZOOM ** (event.angleDelta().y() / _WHEEL_NOTCH))
        event.accept()

    def zoom(self, middle: float, by: float) -> None:
        """Ask the owner to scale the visible range by a factor, keeping the step `middle` in place."""
        first, last = self.steps
        self.moved.emit(middle - (middle - first) * by, middle + (last - middle) * by)

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        """Remove the cursor."""
        super().leaveEvent(event)
        self.hovered.emit(None)

    def focusInEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Show the focus ring."""
        super().focusInEvent(event)
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Hide the focus ring and the cursor."""
        super().focusOutEvent(event)
        self.hovered.emit(None)
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Handle keys: move the cursor, pan, zoom."""
        event.setAccepted(self._on_key(event.key()))

    # --- inside

    def _fit(self) -> None:
        """Fit the value axis to the visible lines."""
        self.values = room_for(self._drawing, *self.steps)
        self.repaint_lines()

    def _paint(self, ratio: float) -> QPixmap:
        pixmap = QPixmap(self.size() * ratio)
        pixmap.setDevicePixelRatio(ratio)
        pixmap.fill(QColor(colors().base))
        painter, scale = QPainter(pixmap), self.scale
        painter.setFont(self._small_font())
        paint_axes(painter, scale, self._words, self._along, whole=self._whole)
        paint_drawing(painter, scale, self._drawing)
        if self._drawing.best is not None:
            label = self._drawing.best_label.format(step=self._along(self._drawing.best))
            paint_label(painter, scale, self._drawing.best, label)
        painter.end()
        return pixmap

    def _small_font(self) -> QFont:
        font = self.font()
        font.setPointSizeF(font.pointSizeF() * 0.9)
        return font


class Chart(QFrame):
    """Chart with title, legend, plot and readout; `words` and `along` format values and steps."""

    moved = Signal(float, float)
    """First and last step that the user wants to see."""
    reset = Signal()
    """The user wants to see all steps."""

    def __init__(self, title: str, words: Wording, along: Wording = count, *, whole: bool = True) -> None:
        super().__init__()
        self.title = title
        self._words, self._along = words, along
        self.drawing = ChartSpec()
        self.cursor_step: float | None = None
        """Step that the cursor marks, or None if there is no cursor."""
        self.plot = Plot(words, along, self._on_key, whole=whole)
        self.plot.setAccessibleName(title)
        self.plot.moved.connect(self.moved)
        self.plot.reset.connect(self.reset)
        self.plot.hovered.connect(lambda step: self.point_at(step if self.drawing.lines else None))
        self.legend = Legend()
        self.readout = QLabel()
        self.readout.setProperty("role", "muted")
        self.readout.setTextFormat(Qt.TextFormat.PlainText)  # it contains names of runs
        self._lay_out()

    def draw(self, drawing: ChartSpec) -> None:
        """Show this chart, with its title and legend."""
        self.drawing = drawing
        self._title.setText(drawing.title or self.title)
        self.plot.setAccessibleName(self._title.text())
        self.plot.setAccessibleDescription(drawing.words)
        self.plot.show_drawing(drawing)
        self.legend.show_entries(self._entries())

    def show_steps(self, first: float, last: float) -> None:
        """Show a range of steps without emitting a signal."""
        self.plot.show_steps(first, last)

    def point_at(self, step: float | None) -> None:
        """Move the cursor to a step and show the values there, or remove the cursor for None."""
        self.cursor_step = step
        self.plot.point_at(step)
        self.readout.setText(self.readout_at(step) if step is not None else "")
        self._legend_or_readout.setCurrentWidget(self.readout if self.readout.text() else self.legend)

    def readout_at(self, step: float) -> str:
        """Return a step and the values of all lines there, formatted for display."""
        found = [(line, at(line.steps, line.values, step)) for line in self.drawing.lines]
        points = [(line, point) for line, point in found if point]
        if not points:
            return ""
        named = len({line.label for line, _ in points}) > 1 or len({line.run for line, _ in points}) > 1
        words = [f"{line.run or line.label} {self._words(v)}" if named else self._words(v) for line, (_, v) in points]
        return f"{self._along(points[0][1][0])}:  " + ",  ".join(words)

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Repaint the legend when colors change."""
        super().changeEvent(event)
        if event.type() == QEvent.Type.PaletteChange and hasattr(self, "legend"):
            self.legend.update()

    # --- inside

    def _on_key(self, key: int) -> bool:
        """Handle a key; return whether this chart uses it."""
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
            lines.setdefault(line.label, (line.label, line.color, line.look))
        levels = [(level.label, level.color, "dashed") for level in self.drawing.levels]
        return [*lines.values(), *levels, *((label, color, "plain") for label, color in self.drawing.extra)]

    def _lay_out(self) -> None:
        self._title = QLabel(self.title)
        self._title.setProperty("role", "heading")
        top = QHBoxLayout()
        top.setSpacing(14)
        top.addWidget(self._title)
        self._legend_or_readout = QStackedWidget()  # the readout replaces the legend: there is room for one
        self._legend_or_readout.addWidget(self.legend)
        self._legend_or_readout.addWidget(self.readout)
        self._legend_or_readout.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        top.addWidget(self._legend_or_readout, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        column.addLayout(top)
        column.addWidget(self.plot, 1)
