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
