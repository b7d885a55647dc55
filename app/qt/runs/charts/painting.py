"""Painting of a chart's axes, lines, levels and marks, with the classes for its data and scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor, isfinite, log10
from typing import Literal

import numpy as np
from PySide6.QtCore import QLocale, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QWidget

from app.core.runs.curves import Values, extent, means, peaks, shown
from app.core.runs.series import Mark
from app.qt.theme import colors
from app.qt.theme.palettes import CONTRAST

Entry = tuple[str, str, str]
"""Legend entry: label, color role and look of the line."""

DASHES = {"dashed": Qt.PenStyle.DashLine, "dotted": Qt.PenStyle.DotLine}
"""Pen style of each look that is not drawn as a solid line."""
SERIES_COLORS = 6  # number of distinct line colors in every theme
_ROUND = (1.0, 2.0, 5.0, 10.0)
# Ticks within each power of ten on a logarithmic axis, from dense to sparse; the densest that fits is used.
_MANTISSAS = ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
_MIN_TICKS = 3
_MARGIN = 0.06  # fraction of the value range that is added above and below the lines
# Looks with outliers, which the axis may cut off.
_NOISY = ("raw", "smooth")
_GRID = 48  # alpha of 255: a faint grid
# Pixel columns per point of a smooth line: more points are invisible, and wide pens dominate the painting time.
_SMOOTH = 2
_POINT = 3.0
# Marks drawn as lines over the full height, and as ticks at the bottom with their share of the height.
_VERTICALS = (
    ("resumed", "muted", Qt.PenStyle.DotLine),
    ("stepped_down", "warning", Qt.PenStyle.DashLine),
    ("out_of_memory", "bad", Qt.PenStyle.SolidLine),
)
_TICKS = (("saved", "good", 0.07), ("preview", "muted", 0.035))
_PALE, _PALE_IN_CONTRAST = 0.42, 0.6
"""Share of the line's own color in the result of `pale`, in ordinary themes and in the high-contrast theme."""
_SWATCH, _GAP, _BETWEEN = 18, 6, 16


def pale(color: QColor) -> QColor:
    """Return a pale color for the values at each step behind a smoothed line.

    The color is opaque, because a transparent line would look darker where it overlaps itself.
    """
    ground, share = QColor(colors().base), _PALE_IN_CONTRAST if colors() is CONTRAST else _PALE
    parts = ((color.red(), ground.red()), (color.green(), ground.green()), (color.blue(), ground.blue()))
    return QColor(*(round(share * one + (1.0 - share) * other) for one, other in parts))


def color_of(place: int) -> str:
    """Return the color role of the overlaid run at this index."""
    return f"series{place % SERIES_COLORS + 1}"


class Legend(QWidget):
    """One-row legend of line samples and their names, elided if space is short."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._entries: Sequence[Entry] = ()

    def show_entries(self, entries: Sequence[Entry]) -> None:
        """Show these entries, or nothing if there is only one, because the chart's title already names it."""
        shown = entries if len(entries) > 1 else ()
        if tuple(shown) != tuple(self._entries):
            self._entries = tuple(shown)
            self.setAccessibleName(", ".join(label for label, _, _ in shown))
            self.updateGeometry()
            self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size that all entries need."""
        metrics = self.fontMetrics()
        widths = (_SWATCH + _GAP + _BETWEEN + metrics.horizontalAdvance(label) for label, _, _ in self._entries)
        return QSize(sum(widths), self.minimumSizeHint().height())

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return a minimum width of zero, so that the legend never widens a narrow chart."""
        margins = self.contentsMargins()
        return QSize(0, self.fontMetrics().height() + margins.top() + margins.bottom())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the entries from the left."""
        painter, scheme, metrics = QPainter(self), colors(), self.fontMetrics()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        inside = self.contentsRect()
        x, middle = inside.left(), inside.top() + inside.height() / 2
        for label, color, look in self._entries:
            room = inside.right() - x - _SWATCH - _GAP
            if room < metrics.averageCharWidth() * 4:
                break
            line = QColor(getattr(scheme, color))
            line = pale(line) if look == "raw" else line
            painter.setPen(QPen(line, 1.5 if look == "raw" else 2.5, DASHES.get(look, Qt.PenStyle.SolidLine)))
            painter.drawLine(QPointF(x, middle), QPointF(x + _SWATCH, middle))
            text = metrics.elidedText(label, Qt.TextElideMode.ElideRight, room)
            painter.setPen(QColor(scheme.muted))
            painter.drawText(QPointF(x + _SWATCH + _GAP, middle + (metrics.ascent() - metrics.descent()) / 2), text)
            x += _SWATCH + _GAP + metrics.horizontalAdvance(text) + _BETWEEN
        painter.end()


Wording = Callable[[float], str]


def even(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return evenly spaced, round tick values in a range, at most `most` + 1; `whole` allows only integers."""
    least = (high - low) / max(most, 1)
    if least <= 0.0 or not isfinite(least):
        return []
    power = 10.0 ** floor(log10(least))
    step = next(power * each for each in _ROUND if power * each >= least * (1.0 - 1e-9))
    step = max(1.0, step) if whole else step
    return [place * step for place in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def logarithmic(low: float, high: float, most: int) -> list[float]:
    """Return tick values between 10**low and 10**high, at most `most` + 1."""
    powers = range(floor(low), ceil(high) + 1)
    for mantissas in _MANTISSAS:
        found = _within([mantissa * 10.0**power for power in powers for mantissa in mantissas], low, high)
        if len(found) <= most:
            return found if len(found) >= _MIN_TICKS else even(10.0**low, 10.0**high, most)
    every = ceil(len(powers) / max(most, 1))
    return _within([10.0**power for power in powers if power % every == 0], low, high)


def _within(values: Sequence[float], low: float, high: float) -> list[float]:
    return [value for value in values if low <= log10(value) <= high]


def number(value: float) -> str:
    """Format a number with four significant digits."""
    return QLocale().toString(float(f"{value:.4g}"), "g", 6)


def count(value: float) -> str:
    """Format a number, rounded to an integer."""
    return QLocale().toString(round(value))


def rate(value: float) -> str:
    """Format a learning rate in the usual notation, such as 1e-4."""
    if not value or not isfinite(value):
        return number(value)
    power = floor(log10(abs(value)) + 1e-9)
    return f"{number(round(value / 10.0**power, 2))}e{power}"


Look = Literal["raw", "smooth", "thin", "plain", "dashed", "dotted", "points"]
"""How a line looks.

"raw" shows every step in a pale color behind a smooth line; "smooth" is an average; "thin" shows every step as the main
line; "plain", "dashed" and "dotted" are for values without noise; "points" marks each of a few values with a dot.
"""


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart: `steps` in ascending order and `values`, both of shape (points,)."""

    label: str
    steps: Values
    values: Values
    look: Look
    color: str = "series1"
    """Color role: a field of `Colors`."""
    run: str = ""
    """Name of the run, needed only if several runs are overlaid."""


@dataclass(frozen=True)
class Level:
    """Constant value, such as a limit, drawn as a horizontal line."""

    label: str
    value: float
    color: str = "muted"


@dataclass(frozen=True)
class ChartSpec:
    """Content of one chart."""

    lines: Sequence[ChartLine] = ()
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    best: int | None = None
    """Step with the lowest validation loss, or loss on training images."""
    best_label: str = "{step}"
    """What to write next to that step."""
    title: str = ""
    """Title that replaces the chart's own if it is more specific."""
    logarithmic: bool = False
    clip: float = 0.0
    """Percentage of the lowest and of the highest values that the axis may cut off if a line has outliers."""
    words: str = ""
    """Description for screen readers."""
    extra: tuple[tuple[str, str], ...] = field(default=())
    """Additional legend entries: (label, color role)."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Mapping of steps and values to the pixels of a plot; logarithmic values are exponents of ten."""

    field: QRectF
    steps: tuple[float, float]
    values: tuple[float, float]
    logarithmic: bool

    def across(self, step: float) -> float:
        """Return a step's x position in logical pixels."""
        return float(self.all_across(np.array(step)))

    def up(self, value: float) -> float:
        """Return a value's y position in logical pixels."""
        return float(self.all_up(np.array(value)))

    def all_across(self, steps: Values) -> Values:
        """Return the x positions of an array of steps, in logical pixels."""
        first, last = self.steps
        return self.field.left() + (steps - first) * (self.field.width() / (last - first))

    def all_up(self, values: Values) -> Values:
        """Return the y positions of an array of values, in logical pixels; NaN for values without a logarithm.

        Positions far outside the plot are clipped: QPainter cannot handle arbitrarily large coordinates.
        """
        low, high = self.values
        if self.logarithmic:
            values = np.log10(values, out=np.full_like(values, np.nan), where=values > 0.0)
        share = np.clip((values - low) / (high - low), -1.0, 2.0)
        return np.asarray(self.field.bottom() - share * self.field.height())

    def step_at(self, across: float) -> float:
        """Return the step at an x position."""
        first, last = self.steps
        return first + (across - self.field.left()) / max(self.field.width(), 1.0) * (last - first)


def room_for(drawing: ChartSpec, first: float, last: float) -> tuple[float, float]:
    """Return the value range of the lines between two steps, with a margin; as exponents of ten if logarithmic."""
    ranges = [extent(shown(line.steps, line.values, first, last), _clip(drawing, line)) for line in drawing.lines]
    bounds = [bound for each in ranges if each for bound in each]
    bounds += [level.value for level in drawing.levels]
    if drawing.logarithmic:
        bounds = [float(np.log10(bound)) for bound in bounds if bound > 0]
    if not bounds:
        return 0.0, 1.0
    low, high = min(bounds), max(bounds)
    room = (high - low) * _MARGIN or abs(high) * 0.1 or 1.0
    return (low - room if drawing.logarithmic or low < 0 else max(0.0, low - room)), high + room


def _clip(drawing: ChartSpec, line: ChartLine) -> float:
    return drawing.clip if line.look in _NOISY else 0.0


# Smallest distances between ticks, in font heights: value labels stack vertically, step labels sit side by side.
_APART_UP, _APART_ALONG = 2.2, 4.2
_SIDE, _TOP, _RIGHT, _AXIS_GAP = 62.0, 4.0, 10.0, 6.0
_RAW_OR_THIN, _READ = ("raw", "thin"), ("smooth",)


def field_in(size: QSize, font: QFont) -> QRectF:
    """Return the part of a plot in which lines are drawn, without the axis labels."""
    below = QFontMetricsF(font).height() + _AXIS_GAP
    return QRectF(_SIDE, _TOP, max(1.0, size.width() - _SIDE - _RIGHT), max(1.0, size.height() - _TOP - below))


def paint_axes(painter: QPainter, scale: Scale, words: Wording, along: Wording, *, whole: bool) -> None:
    """Paint the grid lines and both axes with their labels, in the painter's font."""
    field, metrics = scale.field, QFontMetricsF(painter.font())
    room = field.height() / (_APART_UP * metrics.height())
    faint = QColor(colors().edge)
    faint.setAlpha(_GRID)
    for value in (logarithmic if scale.logarithmic else even)(*scale.values, max(2, int(room))):
        up = scale.up(value)
        painter.setPen(QPen(faint, 1))
        painter.drawLine(QPointF(field.left(), up), QPointF(field.right(), up))
        label_box = QRectF(0, up - metrics.height(), field.left() - _AXIS_GAP, 2 * metrics.height())
        _write(painter, label_box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, words(value))
    painter.setPen(QPen(QColor(colors().edge), 1))
    painter.drawLine(field.topLeft(), field.bottomLeft())
    painter.drawLine(field.bottomLeft(), field.bottomRight())
    room = field.width() / (_APART_ALONG * metrics.height())
    for step in even(*scale.steps, max(2, int(room)), whole=whole):
        across = scale.across(step)
        painter.setPen(QPen(QColor(colors().edge), 1))
        painter.drawLine(QPointF(across, field.bottom()), QPointF(across, field.bottom() + 4))
        text = along(step)
        width = metrics.horizontalAdvance(text) + 2
        left = min(across - width / 2, field.right() + _RIGHT - width)
        _write(painter, QRectF(left, field.bottom() + 4, width, metrics.height()), Qt.AlignmentFlag.AlignCenter, text)


def paint_drawing(painter: QPainter, scale: Scale, drawing: ChartSpec) -> None:
    """Paint marks, then lines, then levels on top."""
    painter.setClipRect(scale.field)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
    _paint_marks(painter, scale, drawing.marks)
    if drawing.best is not None:
        _paint_vertical(painter, scale, drawing.best, QPen(QColor(colors().good), 1, Qt.PenStyle.DashDotLine))
    order = {"raw": 0, "smooth": 2}
    for line in sorted(drawing.lines, key=lambda line: order.get(line.look, 1)):
        _paint_line(painter, scale, line)
    for level in drawing.levels:
        _paint_level(painter, scale, level)


def paint_label(painter: QPainter, scale: Scale, step: float, text: str) -> None:
    """Paint a label beside a vertical line, on the side where it fits."""
    across = scale.across(step)
    if not scale.field.left() <= across <= scale.field.right():
        return
    metrics = QFontMetricsF(painter.font())
    box = QRectF(0, 0, metrics.horizontalAdvance(text) + 8, metrics.height() + 2)
    box.moveTopLeft(QPointF(across + 3, scale.field.top() + 3))
    if box.right() > scale.field.right():
        box.moveRight(across - 3)
    painter.fillRect(box, QColor(colors().base))
    painter.setPen(QColor(colors().good))
    painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)


def _write(painter: QPainter, box: QRectF, where: Qt.AlignmentFlag, text: str) -> None:
    painter.setPen(QColor(colors().muted))
    painter.drawText(box, where, text)


def _paint_line(painter: QPainter, scale: Scale, line: ChartLine) -> None:
    """Paint the visible part of a line, reduced to the plot's resolution.

    Noisy lines keep their highest and lowest values; smooth lines are averaged.
    """
    noisy = line.look in _RAW_OR_THIN
    columns = int(scale.field.width() * painter.device().devicePixelRatioF()) // (1 if noisy else _SMOOTH)
    thin = peaks if noisy or line.look == "points" else means
    steps, values = thin(line.steps, line.values, *scale.steps, max(1, columns))
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, not noisy)
    color = QColor(getattr(colors(), line.color))
    color = pale(color) if line.look == "raw" else color
    painter.setPen(QPen(color, 0 if noisy else 2, DASHES.get(line.look, Qt.PenStyle.SolidLine)))
    for points in _parts(scale.all_across(steps), scale.all_up(values)):
        painter.drawPolyline(points)
        if len(points) == 1 and line.look != "points":
            painter.drawPoint(points[0])  # a single step between unknown values
        if line.look == "points":
            painter.setBrush(color)
            for point in points:
                painter.drawEllipse(point, _POINT, _POINT)
    painter.setBrush(Qt.BrushStyle.NoBrush)


def _parts(across: Values, up: Values) -> Iterator[list[QPointF]]:
    """Yield the connected parts of a line, which is split at values that are not finite."""
    known = np.isfinite(up)
    turns = np.flatnonzero(known[1:] != known[:-1]) + 1
    for start, end in pairwise([0, *turns.tolist(), len(known)]):
        if start < end and known[start]:
            yield list(map(QPointF, across[start:end].tolist(), up[start:end].tolist()))


def _paint_level(painter: QPainter, scale: Scale, level: Level) -> None:
    up = scale.up(level.value)
    painter.setPen(QPen(QColor(getattr(colors(), level.color)), 1, Qt.PenStyle.DashLine))
    painter.drawLine(QPointF(scale.field.left(), up), QPointF(scale.field.right(), up))


def _paint_marks(painter: QPainter, scale: Scale, marks: Iterable[Mark]) -> None:
    steps: dict[str, set[int]] = {}
    for mark in marks:
        steps.setdefault(mark.kind, set()).add(mark.step)
    for kind, color, style in _VERTICALS:
        for step in steps.get(kind, ()):
            _paint_vertical(painter, scale, step, QPen(QColor(getattr(colors(), color)), 1, style))
    for kind, color, height in _TICKS:
        for step in steps.get(kind, ()):
            _paint_vertical(painter, scale, step, QPen(QColor(getattr(colors(), color)), 2), height)


def _paint_vertical(painter: QPainter, scale: Scale, step: float, pen: QPen, height: float = 1.0) -> None:
    """Paint a vertical line at a step, from the bottom up to a fraction (`height`) of the plot's height."""
    across, field = scale.across(step), scale.field
    painter.setPen(pen)
    painter.drawLine(QPointF(across, field.bottom()), QPointF(across, field.bottom() - height * field.height()))
