"""Where axes have their marks, and how those are worded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, isfinite, log10

from PySide6.QtCore import QLocale

Wording = Callable[[float], str]

_ROUND = (1.0, 2.0, 5.0, 10.0)
# What is marked of each power of ten on a logarithmic axis: as much of it as there is room for.
_MANTISSAS = ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
_FEW = 3


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
