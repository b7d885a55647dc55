"""Represent the configurations that fill a GPU best as plain data for JSON output and the app."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.protocol.records import build, json_keys


@json_keys(
    "batch", "resolution", "rank", "gradient_checkpointing", "quantize", "optimizer", "allocated", "reserved", "fill",
    "seconds_per_image", "front",
)  # fmt: skip
@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A configuration that fits, trained with the whole batch at once."""

    batch: int
    resolution: int
    rank: int
    gradient_checkpointing: str | tuple[str, ...]
    quantize: str
    optimizer: str
    allocated: int
    """Peak bytes allocated in training, without the workspaces of cuBLAS and cuDNN."""
    reserved: int | None
    """Peak bytes reserved from the driver in training; None if the configuration was not simulated."""
    fill: float
    """Share of the usable memory that is reserved; without a simulation, the share that is allocated."""
    seconds_per_image: float
    front: bool = False
    """Whether no other configuration of this resolution is faster without needing more memory."""


@json_keys(
    "points", "others", "total", "computed", "missing", "dominated", "too_large", "left_out", "budget", "seconds"
)
@dataclass(frozen=True, slots=True)
class Sweep:
    """Result of a sweep."""

    points: tuple[SweepPoint, ...]
    """Simulated configurations, the one that fills the GPU best first."""
    others: tuple[SweepPoint, ...]
    """Further configurations that fit by what they allocate; they may be dominated or not simulated."""
    total: int
    """Number of all combinations."""
    computed: int
    """Number of combinations whose memory was computed."""
    missing: int
    """Number of combinations that could not be computed, because traces are missing."""
    dominated: int
    """Number of computed configurations that fit, but another one is at least as good in every respect."""
    too_large: int
    """Number of computed configurations that do not fit."""
    left_out: tuple[tuple[str, str], ...]
    """Quantization and checkpointing of combinations that were not all computed, because traces are missing."""
    budget: int
    seconds: float
    """Seconds that the sweep took."""

    @property
    def skipped(self) -> int:
        """Return the number of combinations that did not have to be computed."""
        return self.total - self.computed - self.missing


def sweep_from(found: Mapping[str, Any]) -> Sweep:
    """Return a sweep from its JSON fields; raises ValueError, TypeError, KeyError or AttributeError if invalid."""
    points, others = (tuple(map(_point_from, found[key])) for key in ("points", "others"))
    left_out = tuple((quantize, checkpointing) for quantize, checkpointing in found["left_out"])
    return build(Sweep, {**found, "points": points, "others": others, "left_out": left_out})


def _point_from(found: Mapping[str, Any]) -> SweepPoint:
    blocks = found["gradient_checkpointing"]
    return build(SweepPoint, {**found, "gradient_checkpointing": blocks if isinstance(blocks, str) else tuple(blocks)})


def round_numbers(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 of each decade between two bounds, as ticks of a chart."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for decade in decades for step in (1, 2, 5) if low <= (tick := step * 10.0**decade) <= high]
