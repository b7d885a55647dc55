"""The numbers of a run: what a track holds, how they are smoothed, and the axis that shows them."""

import math
import random

import numpy as np
import pytest

from app.core.runs.curves import at, extent, shown, smoothed
from app.core.runs.series import Track


def test_a_track_cuts_what_an_earlier_attempt_did():
    track = Track()
    for step in (1, 2, 3, 4):
        track.add(step, step * 10)
    track.add(3, None)
    assert list(track.steps) == [1, 2, 3]
    assert list(track.values)[:2] == [10, 20]
    assert math.isnan(track.values[2])


@pytest.mark.parametrize(("count", "steps"), [(1, 50), (1000, 2), (5000, 50), (3000, 1000), (4000, 1.01), (900, 1)])
def test_smoothing_is_the_average_that_its_formula_says(count, steps):
    chance = random.Random(count)
    values = [math.nan if chance.random() < 0.1 else chance.gauss(3, 1) for _ in range(count)]
    decay, total, weight, expected = 1 - 1 / steps, 0.0, 0.0, []
    for value in values:
        total, weight = total * decay, weight * decay
        if not math.isnan(value):
            total, weight = total + value, weight + 1.0
        expected.append(total / weight if weight else math.nan)
    np.testing.assert_allclose(smoothed(np.array(values), steps), expected, rtol=1e-12)


def test_the_axis_leaves_outliers_out():
    steps = np.arange(1.0, 1001.0)
    values = np.where(steps % 500 == 0, 100.0, steps / 1000.0)
    assert extent(values) == (0.001, 100.0)
    low, high = extent(values, clip=1.0)
    assert 0.0 < low < 0.02
    assert high < 1.0
    assert extent(shown(steps, values, 10.5, 20.5)) == (0.010, 0.021)  # and a point beyond, for the line to go to
    assert extent(values[:0]) is None
    assert at(steps, values, 7.4) == (7.0, 0.007)
    assert at(steps, values, 7.6) == (8.0, 0.008)
    assert at(steps, values, -5.0) == (1.0, 0.001)
    assert at(steps, values, 5000.0) == (1000.0, 100.0)
