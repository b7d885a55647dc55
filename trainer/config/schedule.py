"""How the learning rate changes over the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.config.model import Section


class ScheduleConfig(Section):
    """The learning-rate schedule; formulas stand beside the code in trainer/training/optim/lr_schedule.py."""

    kind: Literal["constant", "linear", "cosine", "restarts", "polynomial", "rex"] = "constant"
    """The shape: constant, falling in a line, falling in a cosine, a cosine that starts again, polynomial, or REX."""
    warmup: int | float = Field(default=0, ge=0)
    """Steps over which the rate rises from zero, or, below 1, the share of the run: 100 or 0.05."""
    end: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the learning rate that is left at the end (linear, cosine, restarts, polynomial)."""
    cycles: int = Field(default=1, ge=1, le=100)
    """How many cosines there are when kind = "restarts"."""
    power: float = Field(default=1.0, gt=0.0, le=10.0)
    """The exponent when kind = "polynomial"."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """A warm-up in steps is a whole number."""
        if self.warmup >= 1 and isinstance(self.warmup, float):
            yield "warmup", f"is {self.warmup}: write a whole number of steps, or a share of the run below 1"
