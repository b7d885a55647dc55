"""The order of a run's phases, and the points where a run returns cached GPU memory to the driver.

Run and forecast both read this module. A forecast that released memory where the run keeps it would predict fewer
reserved bytes than every run measures, and that difference would be calibrated as a forecast error.
"""

from __future__ import annotations

from typing import Literal, get_args

from trainer.config.fit import FitConfig
from trainer.protocol.forecast import ForecastPhase

LoadPhase = Literal["load", "quantise"]
DuringRun = Literal["validate", "preview", "checkpoint", "save"]
ReleasePoint = Literal["cache_pictures", "cache_texts", "load", "quantise", "draw", "decode"]
"""The part of a run that has just ended; the memory trace of this part has the same name."""

RELEASE_POINTS: frozenset[str] = frozenset(get_args(ReleasePoint))
"""All release points; elsewhere a run returns cached memory only if memory runs out or it records CUDA graphs."""

AT_START: tuple[DuringRun, ...] = ("validate", "checkpoint", "preview")
"""Phases between loading and the first step, in this order."""
BETWEEN_STEPS: tuple[DuringRun, ...] = ("validate", "checkpoint", "save", "preview")
"""Phases between two steps if everything is due, in this order."""

PHASES: tuple[ForecastPhase, ...] = (
    "cache_pictures",
    "cache_texts",
    "load",
    "quantise",
    "first_step",
    "train",
    *BETWEEN_STEPS,
)
"""All phases, in the order in which a run first reaches the peak of each."""


def load_phase(fit: FitConfig) -> LoadPhase:
    """Return the name of the phase that loads the base: quantizing it takes more memory than loading."""
    return "load" if fit.quantize in (None, "none") else "quantise"
