"""Limit the time of a search, and record what it leaves out once the time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Deadline:
    """Time limit of a search: once it is over, no more traces are recorded, and `left_out` says what was skipped."""

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        """Start to count ``seconds`` on ``clock``; without ``seconds``, the time is never over."""
        self._clock = clock
        self._end = clock() + seconds
        self.left_out: list[object] = []
        """Candidates that were skipped because the time was over, in this order; results tell users about them."""

    @property
    def is_over(self) -> bool:
        """Return whether the time is over."""
        return self._clock() >= self._end

    def leaves_out(self, candidate: object) -> bool:
        """Return whether the time is over; if so, record that ``candidate`` was left out."""
        late = self.is_over
        if late:
            self.left_out.append(candidate)
        return late
