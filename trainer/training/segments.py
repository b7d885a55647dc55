"""A schedule laid over the stretches of a run that was extended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.schedule import ScheduleConfig
from trainer.training.schedule import Multiplier, multiplier


@dataclass(frozen=True, slots=True)
class Segment:
    """The optimizer steps from ``first`` up to, not including, ``last``, over which the schedule runs once."""

    first: int
    last: int


def multiplier_over(schedule: ScheduleConfig, segments: Sequence[Segment]) -> Multiplier:
    """The schedule run once over each segment; steps beyond the last segment keep its end."""
    curves = [(segment, multiplier(schedule, segment.last - segment.first)) for segment in segments]

    def at(step: int) -> float:
        for segment, curve in curves:
            if step < segment.last:
                return curve(step - segment.first)
        segment, curve = curves[-1]
        return curve(step - segment.first)

    return at
