"""Paints what a chart holds: axes, lines, levels and marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QPainter, QPen

from app.core.runs.curves import Values, means, peaks
from app.core.runs.series import Mark
from app.qt.runs.charts.axis import Wording, even, logarithmic
from app.qt.runs.charts.legend import DASHES, pale
from app.qt.runs.charts.lines import Drawing, Level, Line
from app.qt.runs.charts.scale import Scale
from app.qt.theme import colours

# Distances of an axis' marks, in heights of its font: words stand beside those of the values, and above those of steps.
_APART_UP, _APART_ALONG = 2.2, 4.2
_SIDE, _TOP, _RIGHT, _GAP = 62.0, 4.0, 10.0, 6.0
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
_NOISY, _READ = ("raw", "thin"), ("smooth",)


def field_in(size: QSize, font: QFont) -> QRectF:
    """Return where the lines are in a plot of a size: beside the words of its axes."""
    below = QFontMetricsF(font).height() + _GAP
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
        beside = QRectF(0, up - metrics.height(), field.left() - _GAP, 2 * metrics.height())
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


def paint_drawing(painter: QPainter, scale: Scale, drawing: Drawing) -> None:
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


def _paint_line(painter: QPainter, scale: Scale, line: Line) -> None:
    """Paint no more points of a line than are seen: of noise its peaks, else means; those that count each are all."""
    noisy = line.look in _NOISY
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
