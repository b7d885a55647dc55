"""The numbers of a run: what a track holds, how they are smoothed, and the axis that shows them."""

import math
import random

import numpy as np
import pytest

from app.core.runs.curves import at, extent, shown, smoothed
from app.core.runs.series import Series, Track
from trainer.protocol import events


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


def memory_step(step: int, memory: int, reserved: int | None = None, attempt: int = 1) -> events.StepEvent:
    return events.StepEvent(
        step, 0, 0.1, 0.1, {}, 1, 1.0, memory=memory, reserved=reserved, attempt=attempt
    )  # fmt: skip


def test_measured_memory_is_kept_by_phase_and_the_first_step_of_each_attempt_is_one():
    series = Series()
    for event in (
        events.AttemptStarted(1, "cuda:0", attempt=1),
        events.MemorySample("load", 50, 60),
        events.PhaseMemory("load", 1.0, 55, 60, None, None),
        events.PhaseMemory("train", 1.0, 5, 5, None, None),  # what was in use before the first step
        memory_step(1, 90, 100),
        memory_step(2, 95, 110),
        memory_step(3, 120, 130),
        events.MemorySample("preview", 70, 130),
        events.MemorySample("preview", 72, 130),
        events.AttemptStarted(1, "cuda:0", attempt=2),
        memory_step(3, 91, 100, attempt=2),
        memory_step(4, 96, 110, attempt=2),
    ):
        series.add_event(event)
    found = {
        phase: (list(track.allocated.steps), list(track.allocated.values))
        for phase, track in series.phase_memory.items()
    }
    assert found == {
        "load": ([0], [50]),
        "first_step": ([1, 3], [90, 91]),
        "train": ([2, 3, 4], [95, 120, 96]),
        "preview": ([0, 1], [70, 72]),
    }
    assert list(series.phase_memory["train"].reserved.values) == [110, 130, 110]
    assert series.phase_memory["train"].peak_reserved == 130


def test_runs_of_versions_without_samples_have_the_peaks_of_their_phases():
    series = Series()
    series.add_event(events.PhaseMemory("preview", 1.0, 70, 130, None, None))
    series.add_event(events.PhaseMemory("load", 1.0, None, None, None, 9))  # on the CPU
    series.add_event(memory_step(1, 90))
    assert {phase: track.peak_allocated for phase, track in series.phase_memory.items()} == {
        "preview": 70,
        "first_step": 90,
    }
    assert math.isnan(series.phase_memory["first_step"].reserved.values[0])
