"""How the learning rate changes over the run: a multiplier for every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.recipe import ScheduleConfig

Multiplier = Callable[[int], float]
"""From a step, counted from 0, to what every learning rate is multiplied by in it."""


def multiplier(schedule: ScheduleConfig, steps: int) -> Multiplier:
    """The schedule over a run of ``steps`` optimizer steps.

    Warm-up rises in a line from 0 in the first step, as diffusers' schedules do. What follows is a curve of the
    progress p from 0 after warm-up to 1 after the last step, where it stays for any step beyond:
    constant 1; linear 1 - p; cosine (1 + cos(pi p)) / 2; restarts the same with p = cycles * p modulo 1;
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
    """Warm-up in steps: ``warmup`` itself, or below 1 that share of ``steps``."""
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
    """The optimizer steps from ``first`` up to, not including, ``last``, over which the schedule runs once."""

    first: int
    last: int
    held: bool = False
    """Whether instead the rate stays at the last value of the segment before."""


def multiplier_over(schedule: ScheduleConfig, segments: Sequence[Segment]) -> Multiplier:
    """The schedule run once over each segment that is not held; there must be one that is not, at the front."""

    def at(step: int) -> float:
        former = segments[0]
        for segment in segments:
            if not segment.held:
                former = segment
            if step < segment.last:
                break
        # In a held segment: the rate of the last step that was not.
        within = min(step, former.last - 1) - former.first
        return multiplier(schedule, former.last - former.first)(within)

    return at
