"""Axes whose numbers are written as people write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, isfinite, log10

import pyqtgraph
from PySide6.QtCore import QLocale
from PySide6.QtGui import QColor, QFont

from app.qt.theme import colours

Wording = Callable[[float], str]

_SIDE = 62
_GRID = 48  # of 255: the grid is to be seen through


class Axis(pyqtgraph.AxisItem):  # type: ignore[misc] # has no types
    """Words each mark with a function; steps are whole numbers, so there is no mark between two of them."""

    def __init__(self, orientation: str, words: Wording, *, whole: bool = False) -> None:
        super().__init__(orientation)
        self._words = words
        self._whole = whole
        self.enableAutoSIPrefix(False)
        self.setStyle(tickLength=-4, autoExpandTextSpace=False, hideOverlappingLabels=orientation == "bottom")
        if orientation == "left":
            self.setWidth(_SIDE)
            self.setGrid(_GRID)

    def put_on(self, font: QFont) -> None:
        """Take the colours in force and a font."""
        scheme = colours()
        self.setPen(QColor(scheme.edge))
        self.setTextPen(QColor(scheme.muted))
        self.setTickFont(font)

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:  # noqa: N802
        """Word the marks of an even axis."""
        return [self._words(value * scale) for value in values]

    def logTickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:  # noqa: N802
        """Word the marks of a logarithmic axis, which are given as powers of ten."""
        return [self._words(10.0**value) for value in values]

    def tickSpacing(self, low: float, high: float, size: float) -> list[tuple[float, float]]:  # noqa: N802
        """Return the distances of marks, none below one step where only whole numbers mean anything."""
        spacing: list[tuple[float, float]] = super().tickSpacing(low, high, size)
        return [each for each in spacing if each[0] >= 1.0] if self._whole else spacing


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
