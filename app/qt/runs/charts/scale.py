"""Where a step and a value stand in a chart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QRectF

from app.core.runs.curves import Values, extent, shown
from app.qt.runs.charts.lines import Drawing, Line

_ROOM = 0.06
# Looks with noise, of which an axis need not have room for all.
_NOISY = ("raw", "smooth")


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


def room_for(drawing: Drawing, first: float, last: float) -> tuple[float, float]:
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


def _clip(drawing: Drawing, line: Line) -> float:
    return drawing.clip if line.look in _NOISY else 0.0
