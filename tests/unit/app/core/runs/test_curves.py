"""What charts draw of very many points, and where their axes have marks; compared with counting one by one."""

import math

import numpy as np
import pytest

from app.core.runs.curves import means, peaks
from app.qt.runs.charts.painting import even, logarithmic

COLUMNS = 50


@pytest.fixture(params=range(8))
def track(request):
    """Steps and values (points,) of a run, some not known, and a stretch of its steps."""
    chance = np.random.default_rng(request.param)
    points = int(chance.integers(1, 3_000))
    steps = np.cumsum(chance.integers(1, 4, points)).astype(np.float64)
    values = np.where(chance.random(points) < 0.1, np.nan, chance.lognormal(size=points))
    first = chance.uniform(-0.2, 0.6) * steps[-1]
    return steps, values, first, first + chance.uniform(0.05, 0.8) * steps[-1]


def columns_of(steps, first, last):
    """Return the column of each point, one by one; those before and after the stretch have one each."""
    width = (last - first) / COLUMNS
    least, most = math.floor(first / width) - 1, math.ceil(last / width)
    return [min(max(math.floor(step / width), least), most) for step in steps]


@pytest.mark.parametrize("of", [peaks, means])
def test_a_column_holds_what_its_points_say(track, of):
    steps, values, first, last = track
    drawn = of(steps, values, first, last, COLUMNS)
    seen = [i for i, step in enumerate(steps) if first <= step <= last]
    inside = slice(max(0, seen[0] - 1), seen[-1] + 2) if seen else slice(0, 0)
    if len(seen) + 2 <= 2 * COLUMNS:
        assert set(steps[seen]) <= set(drawn[0]) and len(drawn[0]) <= len(seen) + 2
        return
    groups: dict[int, list[float]] = {}
    for column, value in zip(columns_of(steps[inside], first, last), values[inside], strict=True):
        groups.setdefault(column, []).append(value)
    known = [[value for value in group if not math.isnan(value)] or [math.nan] for group in groups.values()]
    if of is peaks:
        expected = [bound for group in known for bound in (min(group), max(group))]
    else:
        expected = [sum(group) / len(group) for group in known]
    np.testing.assert_allclose(drawn[1], expected, rtol=1e-12)
    assert len(drawn[0]) == len(drawn[1]) and list(drawn[0]) == sorted(drawn[0])


def test_columns_keep_their_points_while_one_moves_along():
    steps = np.arange(1.0, 10_001.0)
    values = np.random.default_rng(1).random(10_000)
    here, there = (
        dict(zip(*means(steps, values, by, by + 5_000.0, COLUMNS), strict=True)) for by in (1_000.0, 1_033.0)
    )
    both = sorted(here.keys() & there.keys())
    assert len(both) >= COLUMNS - 3
    assert all(here[step] == there[step] for step in both[1:-1])


@pytest.mark.parametrize(("low", "high"), [(0.0, 800.0), (0.11, 0.14), (-3.0, 7.0), (0.0, 1.3e7), (7.1, 7.1004)])
@pytest.mark.parametrize("most", [2, 5, 9])
def test_marks_of_an_even_axis_are_round_numbers_within_it(low, high, most):
    marks = even(low, high, most)
    assert 1 <= len(marks) <= most + 1
    assert all(low - 1e-9 * abs(low) <= mark <= high * (1 + 1e-9) for mark in marks)
    digits = {f"{mark - marks[0]:.6e}".split("e")[0].strip("-").rstrip("0").rstrip(".") for mark in marks[1:2]}
    assert digits <= {"1", "2", "5"}


def test_steps_have_no_marks_between_two_of_them():
    assert even(0.0, 3.0, 20, whole=True) == [0.0, 1.0, 2.0, 3.0]
    assert even(1.0, 1.0, 5) == []


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (-2.0, 0.0, 5, [0.01, 0.03, 0.1, 0.3, 1.0]),
        (-2.0, 0.0, 8, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]),
        (-0.35, -0.1, 5, [0.5, 0.6, 0.7]),
        (-9.0, 3.0, 4, [1e-8, 1e-4, 1.0]),
    ],
)
def test_marks_of_a_logarithmic_axis_are_round_too(low, high, most, expected):
    assert logarithmic(low, high, most) == pytest.approx(expected)
