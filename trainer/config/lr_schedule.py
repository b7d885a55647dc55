"""Learning rate schedules: a multiplier for each step of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.recipe import ScheduleConfig

DEFAULT_DECAY = 0.1
"""Share of the run that warmup_stable_decay decays over if the job does not say."""
Multiplier = Callable[[int], float]
"""Function that returns the factor for all learning rates at a step (from 0)."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A schedule and the optimizer steps that it runs over."""

    schedule: ScheduleConfig
    warmup: int
    """Number of warm-up steps."""
    steps: int


def multiplier(schedule: ScheduleConfig, steps: int) -> Multiplier:
    """Return the schedule of a run of ``steps`` optimizer steps.

    During warm-up, the multiplier rises linearly from 0 in the first step, as in diffusers' schedules. Then it depends
    on the progress p, which goes from 0 after warm-up to 1 after the last step and stays 1 from then on:
    constant 1; linear 1 - p; cosine (1 + cos(pi p)) / 2; restarts cosine of (cycles * p) modulo 1;
    polynomial (1 - p)^power; rex (1 - p) / (1 - p / 2) (Chen et al. 2022, "REX: Revisiting Budgeted Training with an
    Improved Schedule", equation for the sampling rate 1); inverse_sqrt 1 / sqrt(1 + p n / timescale) with n the steps
    after warm-up, and warmup_stable_decay 1 until the last ``decay`` steps, as in transformers' schedules of these
    names; piecewise as in diffusers' get_piecewise_constant_schedule.
    All but constant and piecewise fall to ``end``, or toward it, instead of 0.
    """
    run = _Run(schedule, warmup_steps(schedule, steps), steps)
    curve = _CURVES[schedule.kind]
    floor = schedule.end if schedule.has_end else 0.0

    def at(step: int) -> float:
        if step < run.warmup:
            return step / run.warmup
        progress = min(1.0, (step - run.warmup) / max(1, steps - run.warmup))
        return floor + (1.0 - floor) * curve(progress, run)

    return at


def curve(schedule: ScheduleConfig, steps: int, points: int = 400) -> tuple[list[int], list[float]]:
    """Return steps of a run, evenly spread over it and ``points`` at most, and the multiplier at each."""
    last = max(1, steps - 1)
    count = min(last, points - 1)
    shown = [round(last * place / count) for place in range(count + 1)]
    at = multiplier(schedule, steps)
    return shown, [at(step) for step in shown]


def warmup_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Return the number of warm-up steps: ``warmup``, or that fraction of ``steps`` if it is below 1."""
    return _steps(schedule.warmup, steps)


def decay_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Return the number of steps that warmup_stable_decay decays over, at least 1: ``decay``, or that fraction."""
    return max(1, _steps(DEFAULT_DECAY if schedule.decay is None else schedule.decay, steps))


def _steps(value: float, steps: int) -> int:
    """Return a number of steps that is given as such, or as a share of ``steps`` if it is below 1."""
    return round(value * steps) if value < 1 else round(value)


def _step_at(progress: float, run: _Run) -> int:
    return run.warmup + round(progress * (run.steps - run.warmup))


def _constant(progress: float, run: _Run) -> float:
    return 1.0


def _linear(progress: float, run: _Run) -> float:
    return 1.0 - progress


def _cosine(progress: float, run: _Run) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _restarts(progress: float, run: _Run) -> float:
    return 0.0 if progress == 1.0 else _cosine(run.schedule.cycles * progress % 1.0, run)


def _polynomial(progress: float, run: _Run) -> float:
    return float((1.0 - progress) ** run.schedule.power)


def _rex(progress: float, run: _Run) -> float:
    return (1.0 - progress) / (1.0 - progress / 2.0)


def _inverse_sqrt(progress: float, run: _Run) -> float:
    # transformers' default: the warm-up, or 10,000 steps without one.
    timescale = run.schedule.timescale or run.warmup or 10_000
    return 1.0 / math.sqrt(1.0 + progress * (run.steps - run.warmup) / timescale)


def _warmup_stable_decay(progress: float, run: _Run) -> float:
    # Not longer than what is left after the warm-up, or the rate would jump there and start far below its value.
    decay = max(1, min(decay_steps(run.schedule, run.steps), run.steps - run.warmup))
    decayed = max(0.0, 1.0 - (run.steps - _step_at(progress, run)) / decay)
    match run.schedule.decay_type:
        case "linear":
            return 1.0 - decayed
        case "1-sqrt":
            return 1.0 - math.sqrt(decayed)
    return _cosine(decayed, run)


def _piecewise(progress: float, run: _Run) -> float:
    *pieces, last = run.schedule.pieces()
    step = _step_at(progress, run)
    return next((factor for factor, end in pieces if step < _steps(end, run.steps)), last[0])


_CURVES: dict[str, Callable[[float, _Run], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "restarts": _restarts,
    "polynomial": _polynomial,
    "rex": _rex,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _warmup_stable_decay,
    "piecewise": _piecewise,
}


@dataclass(frozen=True, slots=True)
class Segment:
    """Range of optimizer steps, ``first`` to ``last`` (exclusive), over which the schedule runs once."""

    first: int
    last: int
    held: bool = False
    """Whether the learning rate instead stays at the last value of the previous segment."""


def multiplier_over(schedule: ScheduleConfig, segments: Sequence[Segment]) -> Multiplier:
    """Return the schedule that runs once over each segment, except held ones; the first must not be held."""

    def at(step: int) -> float:
        current = segments[0]
        for segment in segments:
            if not segment.held:
                current = segment
            if step < segment.last:
                break
        # In a held segment, this gives the rate of the last step before it.
        within = min(step, current.last - 1) - current.first
        return multiplier(schedule, current.last - current.first)(within)

    return at
