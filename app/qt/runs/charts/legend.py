"""Says which line is which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, isfinite, log10

from PySide6.QtCore import QLocale, QPointF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QWidget

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
