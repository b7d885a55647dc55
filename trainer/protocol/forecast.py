"""What a forecast says, as plain data: written into run directories, printed as JSON, read by the app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer.protocol import files
from trainer.protocol.reading import read_record
from trainer.protocol.records import build, json_keys, to_record

SEARCHED = ("quantise", "checkpointing", "micro_batch", "vae_tiling", "preview_offload")
"""The keys of a fit that the planner searches, where the job leaves them open."""
ROUNDING: Mapping[str, str] = {"int8": "0.8 %", "int8_products": "0.8 %", "nf4": "9 %"}
"""By how much a weight of a quantised base differs on average from what it was: measured on normally distributed
weights with bitsandbytes 0.50; bf16 itself rounds by 0.17 %."""
# How many measured steps weigh as much as the forecast does.
FORECAST_WEIGHT = 5
# A phase that reserves at least this share of the run's peak may have made it.
NEAR_PEAK = 0.98

CPU = "cpu"
"""The name of a forecast's device where a job trains on the CPU."""

ForecastPhase = Literal[
    "load",
    "quantise",
    "cache_pictures",
    "cache_texts",
    "first_step",
    "train",
    "validate",
    "preview",
    "checkpoint",
    "save",
]


@json_keys("name", "module", "stage", "allocated", "by_kind", "largest")
@dataclass(frozen=True)
class Peak:
    """A named high point of a phase."""

    name: str
    """In words, such as "backward of the first up block"."""
    module: str
    stage: str
    allocated: int
    """Bytes that the allocator has handed out at that moment."""
    by_kind: Mapping[str, int]
    """Those bytes by kind of storage: weights, adapter, gradients, optimizer, activations, temporary, workspace."""
    largest: tuple[tuple[str, int], ...]
    """The modules that hold most of it then, with their bytes, the largest first."""


@json_keys("phase", "allocated", "reserved", "host", "seconds", "peaks", "timeline")
@dataclass(frozen=True)
class PhaseForecast:
    """What one phase needs."""

    phase: ForecastPhase
    allocated: int
    """Peak bytes handed out by PyTorch's allocator, as torch.cuda.max_memory_allocated counts."""
    reserved: int
    """Peak bytes it takes from the driver when nothing limits it, as torch.cuda.max_memory_reserved counts."""
    host: int
    """Peak bytes of private main memory."""
    seconds: float
    """Of the whole run spent in this phase."""
    peaks: tuple[Peak, ...] = ()
    """In the order of time; the highest decides."""
    timeline: tuple[tuple[int, int], ...] = ()
    """(allocated, reserved) at evenly spaced moments of the phase, for drawing; at most a few hundred."""


@json_keys(
    "card", "phases", "allocated", "reserved", "outside", "margin", "budget", "fits", "seconds", "step_seconds",
    "exact", "error", "time_factor", "flops", "flops_limit", "encodes_alone",
)  # fmt: skip
@dataclass(frozen=True)
class Forecast:
    """What a job needs on one card, before it starts."""

    card: str
    phases: tuple[PhaseForecast, ...]
    allocated: int
    """The highest of all phases."""
    reserved: int
    outside: int
    """Bytes that the driver counts for this process beyond the allocator: CUDA context, libraries."""
    margin: int
    """Bytes kept free because forecasts err."""
    budget: int
    """Bytes that the allocator may take: free memory less ``outside`` and ``margin``."""
    fits: bool
    """Whether the replay within the budget, retries included, ends without out-of-memory."""
    seconds: float
    """Of the whole run."""
    step_seconds: Mapping[str, float]
    """Of one optimizer step by bucket, such as "1024x1024"."""
    exact: bool = True
    """False where numbers were interpolated or stand on no trace: then they are estimates."""
    error: float = 0.0
    """The share by which an estimate may be off; 0 for an exact forecast."""
    time_factor: float = 1.0
    """What finished runs had all seconds here multiplied with, so that the next correction can undo it."""
    flops: float = 0.0
    """What all training steps of the run compute, recomputed activations included; 0 when not known."""
    flops_limit: float = 0.0
    """FLOP/s of the card's dense matrix units in the base's number format; 0 when not known."""
    encodes_alone: bool = False
    """Whether the models are put aside while pictures and captions are encoded between epochs, for want of room."""

    def of(self, phase: str) -> PhaseForecast | None:
        """The part for one phase; None when it is not in the forecast."""
        return next((part for part in self.phases if part.phase == phase), None)

    @property
    def on_cpu(self) -> bool:
        """Whether it is for the CPU: then only times and main memory are forecast."""
        return self.card == CPU

    @property
    def host(self) -> int:
        """Peak bytes of private main memory in any phase."""
        return max((phase.host for phase in self.phases), default=0)

    @property
    def decisive(self) -> PhaseForecast:
        """The phase that needs most.

        Most phases reserve what earlier ones left cached: of those near the peak, the one that allocates most made it.
        """
        near = [phase for phase in self.phases if phase.reserved >= NEAR_PEAK * self.reserved]
        return max(near, key=lambda phase: phase.allocated)

    @property
    def mean_step_seconds(self) -> float | None:
        """Of one optimizer step as batches are dealt, mixed ones too; None when it is not known.

        The first step is forecast to take as long as all on average; without it the buckets are counted alike.
        """
        first = self.of("first_step")
        if first is not None:
            return first.seconds
        return sum(self.step_seconds.values()) / len(self.step_seconds) if self.step_seconds else None


def blended(forecast: float | None, measured: Sequence[float]) -> float | None:
    """Return the seconds a step to expect from now on: the forecast, giving way to the mean of measured steps.

    The forecast weighs as much as FORECAST_WEIGHT steps. None where there is neither.
    """
    weight = 0 if forecast is None else FORECAST_WEIGHT
    if not weight + len(measured):
        return None
    return (weight * (forecast or 0.0) + sum(measured)) / (weight + len(measured))


def write_forecast(path: Path, forecast: Forecast) -> None:
    """Write a forecast as JSON in one step; raises OSError when it cannot be written."""
    files.write_json(path, to_record(forecast))


def read_forecast(path: Path) -> Forecast | None:
    """Read a forecast back; None when there is none or it cannot be read, for it decides nothing."""
    try:
        return read_record(path, "list", forecast_from)
    except (OSError, ValueError):
        return None


def forecast_from(found: Mapping[str, Any]) -> Forecast:
    """Return a forecast from its JSON; raises ValueError, TypeError, KeyError or AttributeError for anything else."""
    phases = tuple(map(phase_from, found["phases"]))
    return build(Forecast, {**found, "phases": phases})


def phase_from(found: Mapping[str, Any]) -> PhaseForecast:
    """Return one phase from its JSON; raises as :func:`forecast_from` does."""
    peaks = tuple(_peak(peak) for peak in found.get("peaks", ()))
    timeline = tuple((allocated, reserved) for allocated, reserved in found.get("timeline", ()))
    return build(PhaseForecast, {**found, "peaks": peaks, "timeline": timeline})


def _peak(found: Mapping[str, Any]) -> Peak:
    largest = tuple((module, size) for module, size in found["largest"])
    return build(Peak, {**found, "largest": largest})


class Operation(Protocol):
    """Operations of one kind and size, as a trace counts them."""

    @property
    def kind(self) -> str:
        """gemm, conv, attention, or other, which is bound by memory."""

    @property
    def dtype(self) -> str:
        """The number format it computes in, such as "bfloat16"."""

    @property
    def stage(self) -> str:
        """Such as "forward" or "backward"."""

    @property
    def flops(self) -> int:
        """Of one operation: a multiply-add counts two."""

    @property
    def bytes(self) -> int:
        """That one operation reads and writes."""

    @property
    def count(self) -> int:
        """How many operations of this size there are."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What one operation takes, besides what every operation takes."""

    kind: str
    dtype: str
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Rate:
    """What a device takes for a trace's operations."""

    device: str
    """As people know it, such as "RTX 3060 12GB" or "cpu, 8 threads"."""
    timed: tuple[Timed, ...]
    """At least one of each kind; others of a kind and format go as fast as the most similar of these."""
    bandwidth: float
    """Bytes a second that no operation exceeds."""
    launch: float
    """Seconds of the device that each operation takes however small it is."""
    host: float
    """Seconds that the CPU takes to hand an operation to the device; 0 where the CPU itself computes."""
    disk: float = 500e6
    """Bytes a second when a base is read and placed: a SATA SSD, unless measured."""
