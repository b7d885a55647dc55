"""Prepare a track for a chart: numpy arrays, smoothing, and axis ranges.

It imports numpy: import it only in code that draws charts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.core.runs.series import Track

Values = NDArray[np.float64]

# Points sampled for percentiles; more would not change the axis but slow down the frame.
_SAMPLE = 20_000
# Largest divisor within a block of the moving average; float64 overflows at 1e308.
_LARGEST_POWER = 200.0


def arrays(track: Track) -> tuple[Values, Values]:
    """Return the steps and values of a track as arrays of shape (points,), copied since the track keeps growing."""
    return np.array(track.steps, dtype=np.float64), np.array(track.values, dtype=np.float64)


def smoothed(values: Values, steps: float) -> Values:
    """Return the exponential moving average over about `steps` (at least 1), with bias correction.

    NaN values are ignored. With w = 1 for known values, else 0, and d = 1 - 1/steps,

        average[t] = sum_j d^(t-j) w[j] values[j] / sum_j d^(t-j) w[j]

    which is Adam's bias correction (Kingma and Ba 2015, section 3), extended to missing values. The average is NaN
    before the first value.
    """
    decay = 1.0 - 1.0 / max(1.0, steps)
    if decay == 0.0:
        return values
    known = np.isfinite(values)
    total = _discounted(np.where(known, values, 0.0), decay)
    weight = _discounted(known.astype(np.float64), decay)
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0.0)


def _discounted(values: Values, decay: float) -> Values:
    """Return sum_j decay^(t-j) values[j] for each t, computed block by block from sums of values / decay^j."""
    block = max(1, int(_LARGEST_POWER / -np.log10(decay)))
    powers = decay ** np.arange(1, block + 1)
    result, carried = np.empty_like(values), 0.0
    for start in range(0, len(values), block):
        part = values[start : start + block]
        power = powers[: len(part)]
        result[start : start + block] = power * (np.cumsum(part / power) + carried)
        carried = float(result[min(start + block, len(values)) - 1])
    return result


def between(steps: Values, first: float, last: float) -> slice:
    """Return the index range of the points between two steps, plus one point on either side."""
    low, high = np.searchsorted(steps, (first, last))
    return slice(max(0, int(low) - 1), int(high) + 1)


def shown(steps: Values, values: Values, first: float, last: float) -> Values:
    """Return the known values between two steps, for choosing an axis range; if there are very many, a sample."""
    part = values[between(steps, first, last)]
    part = part[:: max(1, len(part) // _SAMPLE)]
    return part[np.isfinite(part)]


def peaks(steps: Values, values: Values, first: float, last: float, columns: int) -> tuple[Values, Values]:
    """Divide the steps from `first` to `last` into `columns` and return the extremes of each column.

    Each column yields two points, its lowest and its highest value. Returns all points if there are few.
    """
    steps, values, starts = _columns(steps, values, first, last, columns)
    if starts is None:
        return steps, values
    ends = np.stack([np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)], axis=1)
    return np.repeat(steps[starts], 2), ends.ravel()


def means(steps: Values, values: Values, first: float, last: float, columns: int) -> tuple[Values, Values]:
    """Divide the steps from `first` to `last` into `columns` and return the mean of each column's known values.

    Returns all points if there are few.
    """
    steps, values, starts = _columns(steps, values, first, last, columns)
    if starts is None:
        return steps, values
    known = np.isfinite(values)
    total = np.add.reduceat(np.where(known, values, 0.0), starts)
    count = np.add.reduceat(known, starts, dtype=np.float64)
    return steps[starts], np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0.0)


def _columns(
    steps: Values, values: Values, first: float, last: float, columns: int
) -> tuple[Values, Values, NDArray[np.intp] | None]:
    """Return the steps and values of the points between two steps, and the index of each column's first point.

    The indexes are None if there are few enough points to draw them all. Columns start at multiples of their width,
    which keeps their points the same while the user scrolls.
    """
    part = between(steps, first, last)
    steps, values = steps[part], values[part]
    if len(steps) <= 2 * columns:
        return steps, values, None
    width = (last - first) / columns
    edges = np.arange(np.floor(first / width), np.ceil(last / width) + 1) * width
    starts = np.unique(np.append(0, np.searchsorted(steps, edges)))
    return steps, values, starts[starts < len(steps)]


def extent(values: Values, clip: float = 0.0) -> tuple[float, float] | None:
    """Return the lowest and highest value, ignoring `clip` percent at either end; None if there are no values."""
    if not len(values):
        return None
    low, high = np.percentile(values, (clip, 100.0 - clip))
    return float(low), float(high)


def at(steps: Values, values: Values, step: float) -> tuple[float, float] | None:
    """Return the nearest step and its value; None if there are no points or the value is unknown."""
    if not len(steps):
        return None
    place = int(np.searchsorted(steps, step))
    if place and (place == len(steps) or step - steps[place - 1] < steps[place] - step):
        place -= 1
    return None if np.isnan(values[place]) else (float(steps[place]), float(values[place]))
