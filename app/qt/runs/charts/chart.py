"""One chart: a title, a legend, and lines by step that can be moved and enlarged along the steps.

The values' axis always fits what is seen, so there is one direction to move in, and a wheel does what one expects.
"""

from __future__ import annotations

import numpy as np
import pyqtgraph
from PySide6.QtCore import QEvent, QPointF, Qt, Signal
from PySide6.QtGui import QColor, QFocusEvent, QKeyEvent, QPen
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QStackedWidget, QVBoxLayout

from app.core.runs.curves import Values, at, extent, shown
from app.qt.runs.charts.axis import Axis, Wording, count
from app.qt.runs.charts.legend import DASHES, Entry, Legend
from app.qt.runs.charts.lines import Drawing, Line
from app.qt.theme import colours

# Device pixels a point, of the lines one reads: less than one for each pixel column is not seen, and smooth lines with
# wide pens are what costs a frame most.
_SMOOTH_POINTS = 0.5
_RAW_SHARE = 0.42  # of its colour; the rest is the ground's
_ROOM = 0.06
_ZOOM, _NUDGE = 0.7, 0.01


class Chart(QFrame):
    """Draws a `Drawing`; `words` word the values of its axis."""

    moved = Signal(float, float)
    """The user wants to see these steps: first, last."""
    reset = Signal()
    """The user wants to see all steps."""

    def __init__(self, title: str, words: Wording, along: Wording = count, *, whole: bool = True) -> None:
        super().__init__()
        self.title = title
        self._words, self._along = words, along
        self._drawing = Drawing()
        self._items: list[tuple[Line, pyqtgraph.PlotDataItem]] = []
        self._cursor: float | None = None
        self._pointers: list[pyqtgraph.GraphicsObject] = []
        self._axes = (Axis("left", words), Axis("bottom", along, whole=whole))
        self.plot = _Plot(self, self._axes)
        self.legend = Legend()
        self.readout = QLabel()
        self.readout.setProperty("role", "muted")
        self.readout.setTextFormat(Qt.TextFormat.PlainText)  # runs are named in it
        self._lay_out()
        self._put_on()

    @property
    def view(self) -> pyqtgraph.ViewBox:
        """The part with the lines, in whose coordinates they are."""
        return self.plot.getPlotItem().getViewBox()

    def draw(self, drawing: Drawing) -> None:
        """Draw other lines, or more of them."""
        before, self._drawing = self._drawing, drawing
        self.plot.setAccessibleDescription(drawing.words)
        self.plot.setToolTip("")
        self.plot.getPlotItem().setLogMode(y=drawing.logarithmic)
        if [_kind(line) for line in before.lines] == [_kind(line) for line in drawing.lines] and self._items:
            self._items = [(line, item) for line, (_, item) in zip(drawing.lines, self._items, strict=True)]
        else:
            self._make_items()
        for line, item in self._items:
            item.setData(line.steps, _positive(line.values) if drawing.logarithmic else line.values)
        self._point_out()
        self.legend.show_entries(self._entries())
        self.fit()

    def show_steps(self, first: float, last: float) -> None:
        """Show the steps from one to another; nobody is told of it."""
        self.view.setXRange(first, max(last, first + 1e-9), padding=0)
        self.fit()

    def fit(self) -> None:
        """Give the values' axis room for what is seen."""
        first, last = self.view.viewRange()[0]
        ranges = [extent(shown(line.steps, line.values, first, last), self._clip(line)) for line in self._drawing.lines]
        bounds = [bound for each in ranges if each for bound in each]
        bounds += [level.value for level in self._drawing.levels]
        if self._drawing.logarithmic:
            bounds = [float(np.log10(bound)) for bound in bounds if bound > 0]
        if bounds:
            low, high = min(bounds), max(bounds)
            room = (high - low) * _ROOM or abs(high) * 0.1 or 1.0
            floor = low - room if self._drawing.logarithmic or low < 0 else max(0.0, low - room)
            self.view.setYRange(floor, high + room, padding=0)

    def point_at(self, step: float | None) -> None:
        """Put the cursor at a step and say what is there; None takes it away."""
        self._cursor = step
        self._cursor_line.setVisible(step is not None)
        if step is not None:
            self._cursor_line.setPos(step)
        self.readout.setText(self.said_at(step) if step is not None else "")
        self._beside.setCurrentWidget(self.readout if self.readout.text() else self.legend)

    def said_at(self, step: float) -> str:
        """Return what each line says at a step."""
        found = [(line, at(line.steps, line.values, step)) for line in self._drawing.lines]
        told = [(line, point) for line, point in found if point]
        if not told:
            return ""
        named = len({line.label for line, _ in told}) > 1 or len({line.run for line, _ in told}) > 1
        words = [f"{line.run or line.label} {self._words(v)}" if named else self._words(v) for line, (_, v) in told]
        return f"{self._along(told[0][1][0])}:  " + ",  ".join(words)

    # --- what the plot hears

    def hover(self, place: QPointF | None) -> None:
        """Follow the pointer."""
        self.point_at(self.view.mapSceneToView(place).x() if place is not None and self._drawing.lines else None)

    def press(self, key: int) -> bool:
        """Do what a key asks for; tell whether it asked for anything."""
        first, last = self.view.viewRange()[0]
        middle = self._cursor if self._cursor is not None else (first + last) / 2
        width = last - first
        match key:
            case Qt.Key.Key_Left | Qt.Key.Key_Right:
                by = width * _NUDGE * (1 if key == Qt.Key.Key_Right else -1)
                self.point_at(min(max(middle + by, first), last))
                self.plot.setAccessibleDescription(f"{self.readout.text()}. {self._drawing.words}")
            case Qt.Key.Key_Plus | Qt.Key.Key_Equal:
                self.moved.emit(middle - (middle - first) * _ZOOM, middle + (last - middle) * _ZOOM)
            case Qt.Key.Key_Minus:
                self.moved.emit(middle - (middle - first) / _ZOOM, middle + (last - middle) / _ZOOM)
            case Qt.Key.Key_PageUp | Qt.Key.Key_PageDown:
                by = width * 0.5 * (1 if key == Qt.Key.Key_PageDown else -1)
                self.moved.emit(first + by, last + by)
            case Qt.Key.Key_Home:
                self.reset.emit()
            case _:
                return False
        return True

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Follow the colours and the font."""
        super().changeEvent(event)
        if event.type() in (QEvent.Type.PaletteChange, QEvent.Type.FontChange) and hasattr(self, "legend"):
            self._put_on()

    # --- inside

    def _clip(self, line: Line) -> float:
        return self._drawing.clip if line.look in ("raw", "smooth") else 0.0

    def _put_on(self) -> None:
        """Take the colours in force."""
        scheme = colours()
        self.plot.setBackground(QColor(scheme.base))
        small = self.font()
        small.setPointSizeF(small.pointSizeF() * 0.9)
        for axis in self._axes:
            axis.put_on(small)
        self._cursor_line.setPen(QPen(QColor(scheme.muted), 0))
        self._dress_all()
        self._point_out()
        self.legend.update()

    def _make_items(self) -> None:
        for _, item in self._items:
            self.plot.removeItem(item)
        self._items = [(line, _item(line)) for line in self._drawing.lines]
        for line, item in self._items:
            self.plot.addItem(item)
            _thin(line, item)
        self._dress_all()

    def _dress_all(self) -> None:
        """Give the lines the colours in force; pyqtgraph's pens do not become wider by themselves on a fine screen."""
        for line, item in self._items:
            _dress(line, item, self.devicePixelRatioF())

    def _point_out(self) -> None:
        """Draw levels and marks anew."""
        scheme = colours()
        for item in self._pointers:
            self.plot.removeItem(item)
        self._pointers = []
        for level in self._drawing.levels:
            place = float(np.log10(level.value)) if self._drawing.logarithmic else level.value
            pen = QPen(QColor(getattr(scheme, level.colour)), 0, Qt.PenStyle.DashLine)
            self._add_pointer(pyqtgraph.InfiniteLine(place, angle=0, pen=pen), above=3)
        for kind, colour, style in _UPRIGHT:
            for step in {mark.step for mark in self._drawing.marks if mark.kind == kind}:
                self._add_pointer(pyqtgraph.InfiniteLine(step, pen=QPen(QColor(getattr(scheme, colour)), 0, style)))
        for kind, colour, height in _TICKS:
            steps = sorted({mark.step for mark in self._drawing.marks if mark.kind == kind})
            if steps:
                pen = pyqtgraph.mkPen(getattr(scheme, colour), width=2 * self.devicePixelRatioF())
                self._add_pointer(pyqtgraph.VTickGroup(steps, [0.0, height], pen))
        self._best_line.setVisible(self._drawing.best is not None)
        if self._drawing.best is not None:
            self._best_line.setPen(QPen(QColor(scheme.good), 0, Qt.PenStyle.DashDotLine))
            self._best_line.setPos(self._drawing.best)
            self._best_line.label.setColor(scheme.good)
            self._best_line.label.fill = pyqtgraph.mkBrush(scheme.base)
            self._best_line.label.setFormat(self.tr("best: {step}").format(step=count(self._drawing.best)))

    def _add_pointer(self, item: pyqtgraph.GraphicsObject, above: int = -1) -> None:
        item.setZValue(above)
        self.plot.addItem(item, ignoreBounds=True)
        self._pointers.append(item)

    def _entries(self) -> list[Entry]:
        lines: dict[str, Entry] = {}
        for line in self._drawing.lines:
            lines.setdefault(line.label, (line.label, line.colour, line.look))
        levels = [(level.label, level.colour, "dashed") for level in self._drawing.levels]
        return [*lines.values(), *levels, *((label, colour, "plain") for label, colour in self._drawing.extra)]

    def _lay_out(self) -> None:
        self._cursor_line = pyqtgraph.InfiniteLine()
        self._cursor_line.setVisible(False)
        self.plot.addItem(self._cursor_line, ignoreBounds=True)
        # One for good: before each painting a scene calls all labels that it has painted, also those gone since.
        self._best_line = pyqtgraph.InfiniteLine(label="", labelOpts={"position": 0.9})
        self._best_line.setZValue(-1)
        self.plot.addItem(self._best_line, ignoreBounds=True)
        title = QLabel(self.title)
        title.setProperty("role", "heading")
        top = QHBoxLayout()
        top.setSpacing(14)
        top.addWidget(title)
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


class _Plot(pyqtgraph.PlotWidget):  # type: ignore[misc] # has no types
    """The plot of a chart, which hears what the user does."""

    def __init__(self, chart: Chart, axes: tuple[Axis, Axis]) -> None:
        super().__init__(axisItems={axis.orientation: axis for axis in axes}, enableMenu=False)
        self._chart = chart
        self.setAccessibleName(chart.title)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.hideButtons()
        self.setMouseEnabled(x=True, y=False)
        view = self.getPlotItem().getViewBox()
        view.disableAutoRange()
        view.setLimits(xMin=0)
        view.sigRangeChangedManually.connect(lambda: chart.moved.emit(*view.viewRange()[0]))
        self.scene().sigMouseMoved.connect(chart.hover)

    def mouseDoubleClickEvent(self, event: QEvent) -> None:  # noqa: N802
        """Show all again."""
        self._chart.reset.emit()

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        """Take the cursor away."""
        super().leaveEvent(event)
        self._chart.hover(None)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Take the cursor away."""
        super().focusOutEvent(event)
        self._chart.hover(None)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Move, enlarge, read."""
        if not self._chart.press(event.key()):
            event.ignore()

    def wheelEvent(self, event: QEvent) -> None:  # noqa: N802
        """Enlarge with Ctrl held; else the page scrolls, as everywhere."""
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier:  # type: ignore[attr-defined]
            super().wheelEvent(event)
        else:
            event.ignore()


# Kinds of marks that are lines over the whole chart, and those that are ticks at its foot, with their height.
_UPRIGHT = (
    ("resumed", "muted", Qt.PenStyle.DotLine),
    ("stepped_down", "warning", Qt.PenStyle.DashLine),
    ("out_of_memory", "bad", Qt.PenStyle.SolidLine),
)
_TICKS = (("saved", "good", 0.07), ("preview", "muted", 0.035))
# How many points become few: peaks must not be lost, an average has none, and other lines hardly change.
_THINNED = {"raw": "peak", "thin": "peak", "smooth": "mean"}


def _kind(line: Line) -> tuple[str, ...]:
    return line.label, line.look, line.colour, line.run


def _item(line: Line) -> pyqtgraph.PlotDataItem:
    item = pyqtgraph.PlotDataItem(
        antialias=line.look not in ("raw", "thin"),
        autoDownsampleFactor=_SMOOTH_POINTS if line.look == "smooth" else 1.0,
    )
    item.setZValue({"raw": 0, "smooth": 2}.get(line.look, 1))
    return item


def _thin(line: Line, item: pyqtgraph.PlotDataItem) -> None:
    """Let a line draw no more points than are seen; a plot sets this anew for each item that it is given."""
    item.setDownsampling(auto=line.look != "points", method=_THINNED.get(line.look, "subsample"))
    item.setClipToView(True)


def _dress(line: Line, item: pyqtgraph.PlotDataItem, ratio: float) -> None:
    """Give a line the colours in force; `ratio` is that of the screen's pixels to Qt's."""
    colour = QColor(getattr(colours(), line.colour))
    if line.look == "raw":
        colour = _mixed(colour, QColor(colours().base))
    width = 1 if line.look in ("raw", "thin") else 2
    item.setPen(pyqtgraph.mkPen(colour, width=width * ratio, style=DASHES.get(line.look, Qt.PenStyle.SolidLine)))
    if line.look == "points":
        item.setSymbol("o")
        item.setSymbolSize(6)
        item.setSymbolPen(None)
        item.setSymbolBrush(colour)


def _mixed(colour: QColor, ground: QColor) -> QColor:
    """Return a paler colour; not one that is seen through, for lines over each other would be darker than one."""
    parts = ((colour.red(), ground.red()), (colour.green(), ground.green()), (colour.blue(), ground.blue()))
    return QColor(*(round(_RAW_SHARE * one + (1.0 - _RAW_SHARE) * other) for one, other in parts))


def _positive(values: Values) -> Values:
    """Return the values with NaN for those that have no logarithm."""
    return np.where(values > 0.0, values, np.nan)
