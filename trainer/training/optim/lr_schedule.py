"""Learning rate schedules: a multiplier for each step of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.recipe import ScheduleConfig

Multiplier = Callable[[int], float]
"""Function that returns the factor for all learning rates at a step (from 0)."""


def multiplier(schedule: ScheduleConfig, steps: int) -> Multiplier:
    """Return the schedule of a run of ``steps`` optimizer steps.

    During warm-up, the multiplier rises linearly from 0 in the first step, as in diffusers' schedules. Then it depends
    on the progress p, which goes from 0 after warm-up to 1 after the last step and stays 1 from then on:
    constant 1; linear 1 - p; cosine (1 + cos(pi p)) / 2; restarts cosine of (cycles * p) modulo 1;
    polynomial (1 - p)^power; rex (1 - p) / (1 - p / 2) (Chen et al. 2022, "REX: Revisiting Budgeted Training with an
    Improved Schedule", equation for the sampling rate 1). All but constant and rex fall to ``end`` instead of 0.
    """
    warmup = warmup_steps(schedule, steps)
    curve = _CURVES[schedule.kind]
    floor = 0.0 if schedule.kind == "rex" else schedule.end

    def at(step: int) -> float:
        if step < warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1.0 - floor) * curve(progress, schedule)

    return at


def warmup_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Return the number of warm-up steps: ``warmup``, or that fraction of ``steps`` if it is below 1."""
    return round(schedule.warmup * steps) if schedule.warmup < 1 else round(schedule.warmup)


def _constant(progress: float, schedule: ScheduleConfig) -> float:
    return 1.0


def _linear(progress: float, schedule: ScheduleConfig) -> float:
    return 1.0 - progress


def _cosine(progress: float, schedule: ScheduleConfig) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _restarts(progress: float, schedule: ScheduleConfig) -> float:
    return 0.0 if progress == 1.0 else _cosine(schedule.cycles * progress % 1.0, schedule)


def _polynomial(progress: float, schedule: ScheduleConfig) -> float:
    return float((1.0 - progress) ** schedule.power)


def _rex(progress: float, schedule: ScheduleConfig) -> float:
    return (1.0 - progress) / (1.0 - progress / 2.0)


_CURVES: dict[str, Callable[[float, ScheduleConfig], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "restarts": _restarts,
    "polynomial": _polynomial,
    "rex": _rex,
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
