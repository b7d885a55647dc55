"""Paints what a chart holds: axes, lines, levels and marks."""

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
from app.qt.theme import colours
from app.qt.theme.palettes import CONTRAST

Entry = tuple[str, str, str]
"""Label, colour role, look."""

DASHES = {"dashed": Qt.PenStyle.DashLine, "dotted": Qt.PenStyle.DotLine}
"""The looks of lines that are broken."""
COLOURS = 6
_ROUND = (1.0, 2.0, 5.0, 10.0)
# What is marked of each power of ten on a logarithmic axis: as much of it as there is room for.
_MANTISSAS = ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
_FEW = 3
_ROOM = 0.06
# Looks with noise, of which an axis need not have room for all.
_NOISY = ("raw", "smooth")
_GRID = 48  # of 255: the grid is to be seen through
# Columns of pixels for each point of a line one reads: more points are not seen, and wide pens are what costs a frame.
_SMOOTH = 2
_POINT = 3.0
# Kinds of marks that are lines over the whole chart, and those that are ticks at its foot, with their height.
_UPRIGHT = (
    ("resumed", "muted", Qt.PenStyle.DotLine),
    ("stepped_down", "warning", Qt.PenStyle.DashLine),
    ("out_of_memory", "bad", Qt.PenStyle.SolidLine),
)
_TICKS = (("saved", "good", 0.07), ("preview", "muted", 0.035))
_PALE, _PALE_IN_CONTRAST = 0.42, 0.6
"""The share of its line's colour that noise has; the rest is the ground's."""
_SWATCH, _GAP, _BETWEEN = 18, 6, 16


def pale(colour: QColor) -> QColor:
    """Return the colour of noise in a line's own; not seen through: lines over each other would be darker than one."""
    ground, share = QColor(colours().base), _PALE_IN_CONTRAST if colours() is CONTRAST else _PALE
    parts = ((colour.red(), ground.red()), (colour.green(), ground.green()), (colour.blue(), ground.blue()))
    return QColor(*(round(share * one + (1.0 - share) * other) for one, other in parts))


def colour_of(place: int) -> str:
    """Return the role of the colour that the run at this place has, of several laid over each other."""
    return f"series{place % COLOURS + 1}"


class Legend(QWidget):
    """A row of short lines with their names; names that find no room are cut."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._entries: Sequence[Entry] = ()

    def show_entries(self, entries: Sequence[Entry]) -> None:
        """Show these, or nothing where there is only one: then the chart's title names it."""
        shown = entries if len(entries) > 1 else ()
        if tuple(shown) != tuple(self._entries):
            self._entries = tuple(shown)
            self.setAccessibleName(", ".join(label for label, _, _ in shown))
            self.updateGeometry()
            self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the room of all entries."""
        metrics = self.fontMetrics()
        widths = (_SWATCH + _GAP + _BETWEEN + metrics.horizontalAdvance(label) for label, _, _ in self._entries)
        return QSize(sum(widths), self.minimumSizeHint().height())

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return a width that never keeps a chart from being narrow."""
        margins = self.contentsMargins()
        return QSize(0, self.fontMetrics().height() + margins.top() + margins.bottom())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw the entries from the left."""
        painter, scheme, metrics = QPainter(self), colours(), self.fontMetrics()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        inside = self.contentsRect()
        x, middle = inside.left(), inside.top() + inside.height() / 2
        for label, colour, look in self._entries:
            room = inside.right() - x - _SWATCH - _GAP
            if room < metrics.averageCharWidth() * 4:
                break
            line = QColor(getattr(scheme, colour))
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
    """Return at most about so many round numbers between two, all `whole` where only those mean anything."""
    least = (high - low) / max(most, 1)
    if least <= 0.0 or not isfinite(least):
        return []
    power = 10.0 ** floor(log10(least))
    step = next(power * each for each in _ROUND if power * each >= least * (1.0 - 1e-9))
    step = max(1.0, step) if whole else step
    return [place * step for place in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def logarithmic(low: float, high: float, most: int) -> list[float]:
    """Return at most about so many round numbers between two powers of ten that are given by their exponents."""
    powers = range(floor(low), ceil(high) + 1)
    for mantissas in _MANTISSAS:
        found = _within([mantissa * 10.0**power for power in powers for mantissa in mantissas], low, high)
        if len(found) <= most:
            return found if len(found) >= _FEW else even(10.0**low, 10.0**high, most)
    every = ceil(len(powers) / max(most, 1))
    return _within([10.0**power for power in powers if power % every == 0], low, high)


def _within(values: Sequence[float], low: float, high: float) -> list[float]:
    return [value for value in values if low <= log10(value) <= high]


def number(value: float) -> str:
    """Word a number with as many digits as tell something."""
    return QLocale().toString(float(f"{value:.4g}"), "g", 6)


def count(value: float) -> str:
    """Word a whole number."""
    return QLocale().toString(round(value))


def rate(value: float) -> str:
    """Word a learning rate as artists write it: 1e-4."""
    if not value or not isfinite(value):
        return number(value)
    power = floor(log10(abs(value)) + 1e-9)
    return f"{number(round(value / 10.0**power, 2))}e{power}"


Look = Literal["raw", "smooth", "thin", "plain", "dashed", "dotted", "points"]
"""Raw: each step, pale. Smooth: the line one reads. Thin: each step, where that is what one reads. Plain, dashed,
dotted: lines without noise. Points: each counts."""


@dataclass(frozen=True)
class ChartLine:
    """One line: values (points,) by rising steps (points,)."""

    label: str
    steps: Values
    values: Values
    look: Look
    colour: str = "series1"
    """A role of `Colours`."""
    run: str = ""
    """The run's name, where several are laid over each other."""


@dataclass(frozen=True)
class Level:
    """A value that holds for all steps, such as a limit."""

    label: str
    value: float
    colour: str = "muted"


@dataclass(frozen=True)
class ChartSpec:
    """All of one chart."""

    lines: Sequence[ChartLine] = ()
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    best: int | None = None
    """The step with the lowest held-out loss."""
    title: str = ""
    """Instead of the chart's own, where that leaves open what is drawn."""
    logarithmic: bool = False
    clip: float = 0.0
    """Per cent of the raw values at either end that the axis need not have room for."""
    words: str = ""
    """What the chart shows, for who does not see it."""
    extra: tuple[tuple[str, str], ...] = field(default=())
    """Further entries of the legend: (label, colour)."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A field of a widget, the steps along it, and the values up it: powers of ten where it is logarithmic."""

    field: QRectF
    steps: tuple[float, float]
    values: tuple[float, float]
    logarithmic: bool

    def across(self, step: float) -> float:
        """Return where a step stands, from the left, in Qt's pixels."""
        return float(self.all_across(np.array(step)))

    def up(self, value: float) -> float:
        """Return where a value stands, from the top."""
        return float(self.all_up(np.array(value)))

    def all_across(self, steps: Values) -> Values:
        """Return where each of many steps stands."""
        first, last = self.steps
        return self.field.left() + (steps - first) * (self.field.width() / (last - first))

    def all_up(self, values: Values) -> Values:
        """Return where each of many values stands, NaN of those that have no logarithm.

        Those far outside stand a little outside: Qt's painter takes no coordinates of any size.
        """
        low, high = self.values
        if self.logarithmic:
            values = np.log10(values, out=np.full_like(values, np.nan), where=values > 0.0)
        share = np.clip((values - low) / (high - low), -1.0, 2.0)
        return np.asarray(self.field.bottom() - share * self.field.height())

    def step_at(self, across: float) -> float:
        """Return the step that stands at a place, from the left."""
        first, last = self.steps
        return first + (across - self.field.left()) / max(self.field.width(), 1.0) * (last - first)


def room_for(drawing: ChartSpec, first: float, last: float) -> tuple[float, float]:
    """Return the range of values that shows well what is drawn between two steps; exponents where it is logarithmic."""
    ranges = [extent(shown(line.steps, line.values, first, last), _clip(drawing, line)) for line in drawing.lines]
    bounds = [bound for each in ranges if each for bound in each]
    bounds += [level.value for level in drawing.levels]
    if drawing.logarithmic:
        bounds = [float(np.log10(bound)) for bound in bounds if bound > 0]
    if not bounds:
        return 0.0, 1.0
    low, high = min(bounds), max(bounds)
    room = (high - low) * _ROOM or abs(high) * 0.1 or 1.0
    return (low - room if drawing.logarithmic or low < 0 else max(0.0, low - room)), high + room


def _clip(drawing: ChartSpec, line: ChartLine) -> float:
    return drawing.clip if line.look in _NOISY else 0.0


# Distances of an axis' marks, in heights of its font: words stand beside those of the values, and above those of steps.
_APART_UP, _APART_ALONG = 2.2, 4.2
_SIDE, _TOP, _RIGHT, _AXIS_GAP = 62.0, 4.0, 10.0, 6.0
_RAW_OR_THIN, _READ = ("raw", "thin"), ("smooth",)


def field_in(size: QSize, font: QFont) -> QRectF:
    """Return where the lines are in a plot of a size: beside the words of its axes."""
    below = QFontMetricsF(font).height() + _AXIS_GAP
    return QRectF(_SIDE, _TOP, max(1.0, size.width() - _SIDE - _RIGHT), max(1.0, size.height() - _TOP - below))


def paint_axes(painter: QPainter, scale: Scale, words: Wording, along: Wording, *, whole: bool) -> None:
    """Paint the grid and the words of both axes, in the painter's font."""
    field, metrics = scale.field, QFontMetricsF(painter.font())
    room = field.height() / (_APART_UP * metrics.height())
    faint = QColor(colours().edge)
    faint.setAlpha(_GRID)
    for value in (logarithmic if scale.logarithmic else even)(*scale.values, max(2, int(room))):
        up = scale.up(value)
        painter.setPen(QPen(faint, 1))
        painter.drawLine(QPointF(field.left(), up), QPointF(field.right(), up))
        beside = QRectF(0, up - metrics.height(), field.left() - _AXIS_GAP, 2 * metrics.height())
        _write(painter, beside, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, words(value))
    painter.setPen(QPen(QColor(colours().edge), 1))
    painter.drawLine(field.topLeft(), field.bottomLeft())
    painter.drawLine(field.bottomLeft(), field.bottomRight())
    room = field.width() / (_APART_ALONG * metrics.height())
    for step in even(*scale.steps, max(2, int(room)), whole=whole):
        across = scale.across(step)
        painter.setPen(QPen(QColor(colours().edge), 1))
        painter.drawLine(QPointF(across, field.bottom()), QPointF(across, field.bottom() + 4))
        text = along(step)
        width = metrics.horizontalAdvance(text) + 2
        left = min(across - width / 2, field.right() + _RIGHT - width)
        _write(painter, QRectF(left, field.bottom() + 4, width, metrics.height()), Qt.AlignmentFlag.AlignCenter, text)


def paint_drawing(painter: QPainter, scale: Scale, drawing: ChartSpec) -> None:
    """Paint lines, levels and marks, one above the other."""
    painter.setClipRect(scale.field)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
    _paint_marks(painter, scale, drawing.marks)
    if drawing.best is not None:
        _upright(painter, scale, drawing.best, QPen(QColor(colours().good), 1, Qt.PenStyle.DashDotLine))
    order = {"raw": 0, "smooth": 2}
    for line in sorted(drawing.lines, key=lambda line: order.get(line.look, 1)):
        _paint_line(painter, scale, line)
    for level in drawing.levels:
        _paint_level(painter, scale, level)


def paint_label(painter: QPainter, scale: Scale, step: float, text: str) -> None:
    """Write beside an upright line what it is, on whichever side there is room."""
    across = scale.across(step)
    if not scale.field.left() <= across <= scale.field.right():
        return
    metrics = QFontMetricsF(painter.font())
    box = QRectF(0, 0, metrics.horizontalAdvance(text) + 8, metrics.height() + 2)
    box.moveTopLeft(QPointF(across + 3, scale.field.top() + 3))
    if box.right() > scale.field.right():
        box.moveRight(across - 3)
    painter.fillRect(box, QColor(colours().base))
    painter.setPen(QColor(colours().good))
    painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)


def _write(painter: QPainter, box: QRectF, where: Qt.AlignmentFlag, text: str) -> None:
    painter.setPen(QColor(colours().muted))
    painter.drawText(box, where, text)


def _paint_line(painter: QPainter, scale: Scale, line: ChartLine) -> None:
    """Paint no more points of a line than are seen: of noise its peaks, else means; those that count each are all."""
    noisy = line.look in _RAW_OR_THIN
    columns = int(scale.field.width() * painter.device().devicePixelRatioF()) // (1 if noisy else _SMOOTH)
    thin = peaks if noisy or line.look == "points" else means
    steps, values = thin(line.steps, line.values, *scale.steps, max(1, columns))
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, not noisy)
    colour = QColor(getattr(colours(), line.colour))
    colour = pale(colour) if line.look == "raw" else colour
    painter.setPen(QPen(colour, 0 if noisy else 2, DASHES.get(line.look, Qt.PenStyle.SolidLine)))
    for points in _parts(scale.all_across(steps), scale.all_up(values)):
        painter.drawPolyline(points)
        if len(points) == 1 and line.look != "points":
            painter.drawPoint(points[0])  # a step between two that are not known
        if line.look == "points":
            painter.setBrush(colour)
            for point in points:
                painter.drawEllipse(point, _POINT, _POINT)
    painter.setBrush(Qt.BrushStyle.NoBrush)


def _parts(across: Values, up: Values) -> Iterator[list[QPointF]]:
    """Yield the parts of a line that lie between values which are not known."""
    known = np.isfinite(up)
    turns = np.flatnonzero(known[1:] != known[:-1]) + 1
    for start, end in pairwise([0, *turns.tolist(), len(known)]):
        if start < end and known[start]:
            yield list(map(QPointF, across[start:end].tolist(), up[start:end].tolist()))


def _paint_level(painter: QPainter, scale: Scale, level: Level) -> None:
    up = scale.up(level.value)
    painter.setPen(QPen(QColor(getattr(colours(), level.colour)), 1, Qt.PenStyle.DashLine))
    painter.drawLine(QPointF(scale.field.left(), up), QPointF(scale.field.right(), up))


def _paint_marks(painter: QPainter, scale: Scale, marks: Iterable[Mark]) -> None:
    steps: dict[str, set[int]] = {}
    for mark in marks:
        steps.setdefault(mark.kind, set()).add(mark.step)
    for kind, colour, style in _UPRIGHT:
        for step in steps.get(kind, ()):
            _upright(painter, scale, step, QPen(QColor(getattr(colours(), colour)), 1, style))
    for kind, colour, height in _TICKS:
        for step in steps.get(kind, ()):
            _upright(painter, scale, step, QPen(QColor(getattr(colours(), colour)), 2), height)


def _upright(painter: QPainter, scale: Scale, step: float, pen: QPen, height: float = 1.0) -> None:
    """Draw a line at a step from the foot up, over a share of the field's height."""
    across, field = scale.across(step), scale.field
    painter.setPen(pen)
    painter.drawLine(QPointF(across, field.bottom()), QPointF(across, field.bottom() - height * field.height()))
