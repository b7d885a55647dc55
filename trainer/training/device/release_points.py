"""The order of a run's phases, and where a run returns cached GPU memory to the driver.

The run and the forecast both read this module. A forecast that released memory where the run keeps it would compare
what the run reserves with less than it can reserve, and the difference would count as an error of every run.
"""

from __future__ import annotations

from typing import Literal, get_args

from trainer.config.fit import FitConfig
from trainer.protocol.forecast import ForecastPhase

LoadPhase = Literal["load", "quantise"]
DuringRun = Literal["validate", "preview", "checkpoint", "save"]
ReleasePoint = Literal["cache_pictures", "cache_texts", "load", "quantise", "draw", "decode"]
"""The part of a run that has just ended. A memory trace of the same name holds what that part does."""

RELEASE_POINTS: frozenset[str] = frozenset(get_args(ReleasePoint))
"""Nowhere else does a run return cached memory, unless memory runs out or it records CUDA graphs."""

AT_START: tuple[DuringRun, ...] = ("validate", "checkpoint", "preview")
"""What a run does between loading and its first step, in this order."""
BETWEEN_STEPS: tuple[DuringRun, ...] = ("validate", "checkpoint", "save", "preview")
"""What a run does between two steps when everything is due, in this order."""

PHASES: tuple[ForecastPhase, ...] = (
    "cache_pictures",
    "cache_texts",
    "load",
    "quantise",
    "first_step",
    "train",
    *BETWEEN_STEPS,
)
"""All phases, in the order in which a run first reaches its highest memory in each."""


def load_phase(fit: FitConfig) -> LoadPhase:
    """Return the name of the phase that loads the base: quantizing it takes more memory than loading."""
    return "load" if fit.quantise in (None, "none") else "quantise"
