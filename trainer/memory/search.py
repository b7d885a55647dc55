"""Finds the best candidate that fits, looking closely at as few as possible; the answer is that of looking at all."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

Candidate = TypeVar("Candidate")
_Contra = TypeVar("_Contra", contravariant=True)

# Differences in time below this share decide nothing: a forecast cannot tell them apart, and what saves memory
# without need makes a run harder to follow and leaves its ladder a rung less.
SAME_TIME = 0.01
# So many places of the line are told ahead; fits that differ only in how previews are drawn stand side by side.
TOLD_AHEAD = 16


class Preference(NamedTuple):
    """How much a candidate is wanted: the smaller the better, the first difference decides."""

    quality: int
    """How much the base is rounded: 0 not at all; the more, the fewer bits."""
    time: int
    """Seconds of all training steps, on a scale of one per cent."""
    changes: int
    """How many settings are not what they are by default."""
    drawing: int
    """Seconds of all previews, on the same scale. Next to training they are few: they decide nothing before this."""
    bytes: int
    """What its tensors need at the highest moment of all phases."""


class Appraiser(Protocol[_Contra]):
    """Who knows about candidates, first roughly and on request exactly."""

    def preference(self, candidate: _Contra) -> Preference:
        """The exact preference if it is known, else one that is no larger."""

    def exact(self, candidate: _Contra) -> bool:
        """Whether ``preference`` is exact."""

    def hopeless(self, candidate: _Contra) -> bool:
        """Whether what is known already rules out that it fits."""

    def foresee(self, following: Callable[[], Sequence[_Contra]]) -> None:
        """Learns how to ask which candidates come next in line, while it appraises one."""

    def appraise(self, candidate: _Contra) -> None:
        """Makes ``preference`` exact; may raise what was known of others."""

    def fits(self, candidate: _Contra) -> bool:
        """Whether it fits, exactly; may take long the first time, and may raise the candidate's own preference."""


def time_step(seconds: float) -> int:
    """Seconds on a scale whose steps are one per cent."""
    return math.floor(math.log(max(seconds, 1e-9)) / math.log1p(SAME_TIME))


def best(candidates: Sequence[Candidate], appraiser: Appraiser[Candidate]) -> Candidate | None:
    """The most preferred candidate that fits, the earlier of equal ones; None where none does.

    What is known of a candidate never exceeds its true preference. So when the first in line is known exactly and
    fits, no other can be better: those behind it need no closer look (A*, Hart et al. 1968).
    """
    line = [(appraiser.preference(candidate), place) for place, candidate in enumerate(candidates)]
    heapq.heapify(line)

    def following() -> list[Candidate]:
        return [candidates[place] for _, place in heapq.nsmallest(TOLD_AHEAD, line)]

    while line:
        known, place = heapq.heappop(line)
        candidate = candidates[place]
        if appraiser.hopeless(candidate):
            continue
        if (now := appraiser.preference(candidate)) > known:  # others told more of it meanwhile
            heapq.heappush(line, (now, place))
        elif not appraiser.exact(candidate):
            appraiser.foresee(following)
            appraiser.appraise(candidate)
            heapq.heappush(line, (appraiser.preference(candidate), place))
        elif not appraiser.fits(candidate):
            continue
        elif (now := appraiser.preference(candidate)) > known:  # fitting costs it time
            heapq.heappush(line, (now, place))
        else:
            return candidate
    return None
