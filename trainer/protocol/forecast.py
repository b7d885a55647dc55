"""Represent forecasts as plain data for run directories, JSON output and the app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from trainer.protocol import files
from trainer.protocol.reading import read_record
from trainer.protocol.records import build, json_keys, to_record

SEARCHED_FIT_KEYS = ("quantize", "stream", "gradient_checkpointing", "micro_batch", "vae_tiling", "preview_offload")
"""Fit keys whose values the planner chooses if the job does not set them."""
ROUNDING: Mapping[str, str] = {"int8": "0.8%", "int8_products": "0.8%", "nf4": "9%"}
"""Mean relative rounding error of a weight for each quantization, measured on normally distributed weights with
bitsandbytes 0.50; the rounding error of bf16 itself is 0.17%."""
# Number of measured steps that weigh as much as the forecast.
FORECAST_WEIGHT = 5
# A phase that reserves at least this share of the run's peak may have caused it.
NEAR_PEAK = 0.98

CPU = "cpu"
"""Device name in the forecast of a job that trains on the CPU."""

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

# The order of a run's phases, and the points where a run returns cached GPU memory to the driver. Run and forecast both
# read them: a forecast that releases memory where the run keeps it predicts less than every run measures, and
# calibration would take the difference for an error of the forecast.
LoadPhase = Literal["load", "quantise"]
DuringRun = Literal["validate", "preview", "checkpoint", "save"]
ReleasePoint = Literal["cache_pictures", "cache_texts", "load", "quantise", "draw", "decode"]
"""Part of a run after which cached memory is returned to the driver; the part's memory trace has the same name."""

RELEASE_POINTS: frozenset[str] = frozenset(get_args(ReleasePoint))
"""All release points. Elsewhere, a run returns cached memory only if memory runs out or a CUDA graph is captured."""

AT_START: tuple[DuringRun, ...] = ("validate", "checkpoint", "preview")
"""Phases between loading and the first step, in this order."""
BETWEEN_STEPS: tuple[DuringRun, ...] = ("validate", "checkpoint", "save", "preview")
"""Phases between two steps, in this order if several of them are due."""

PHASES: tuple[ForecastPhase, ...] = (
    "cache_pictures",
    "cache_texts",
    "load",
    "quantise",
    "first_step",
    "train",
    *BETWEEN_STEPS,
)
"""All phases, in the order in which a run first reaches their peaks."""


@json_keys("name", "module", "stage", "allocated", "by_kind", "largest")
@dataclass(frozen=True)
class Peak:
    """Named memory peak within a phase."""

    name: str
    """Description such as "backward of the first up block"."""
    module: str
    stage: str
    allocated: int
    """Allocated bytes at that moment."""
    by_kind: Mapping[str, int]
    """Allocated bytes by kind: weights, adapter, gradients, optimizer, activations, temporary, workspace."""
    largest: tuple[tuple[str, int], ...]
    """Modules that use the most memory, with their bytes, largest first."""


@json_keys("phase", "allocated", "reserved", "host", "seconds", "peaks", "timeline")
@dataclass(frozen=True)
class PhaseForecast:
    """Forecast memory and time of one phase."""

    phase: ForecastPhase
    allocated: int
    """Peak bytes allocated by PyTorch, as torch.cuda.max_memory_allocated counts."""
    reserved: int
    """Peak bytes that would be reserved from the driver if memory were unlimited, as torch.cuda.max_memory_reserved
    counts."""
    host: int
    """Peak bytes of private main memory."""
    seconds: float
    """Seconds that the whole run spends in this phase."""
    peaks: tuple[Peak, ...] = ()
    """Memory peaks in chronological order; the highest one determines how much memory the phase needs."""
    timeline: tuple[tuple[int, int], ...] = ()
    """(allocated, reserved) at evenly spaced moments of the phase, for charts; at most a few hundred."""


@json_keys(
    "gpu", "phases", "allocated", "reserved", "outside", "margin", "budget", "fits", "seconds", "step_seconds",
    "exact", "error", "time_factor", "flops", "flops_limit", "encodes_alone", former={"card": "gpu"},
)  # fmt: skip
@dataclass(frozen=True)
class Forecast:
    """Forecast memory and time of a job on one GPU."""

    gpu: str
    phases: tuple[PhaseForecast, ...]
    allocated: int
    """Peak allocated bytes over all phases."""
    reserved: int
    outside: int
    """GPU bytes of this process outside the allocator: CUDA context, libraries."""
    margin: int
    """Safety margin in bytes for forecast errors."""
    budget: int
    """Bytes that the allocator may reserve: free memory minus ``outside`` and ``margin``."""
    fits: bool
    """Whether the simulated run stays within the budget, retries included."""
    seconds: float
    """Seconds of the whole run."""
    step_seconds: Mapping[str, float]
    """Seconds of one optimizer step by bucket, such as "1024x1024"."""
    exact: bool = True
    """False if the numbers are estimates: interpolated, or not based on a trace."""
    error: float = 0.0
    """Relative error that an estimate may have; 0 for an exact forecast."""
    time_factor: float = 1.0
    """Time calibration factor learned from finished runs; all seconds here have already been multiplied by it."""
    flops: float = 0.0
    """FLOPs of all training steps, recomputed activations included; 0 if unknown."""
    flops_limit: float = 0.0
    """FLOP/s of the GPU's dense matrix units in the base's dtype; 0 if unknown."""
    encodes_alone: bool = False
    """Whether the models are offloaded while images and captions are encoded between epochs, to save memory."""

    def of(self, phase: str) -> PhaseForecast | None:
        """Return the forecast of a phase; None if the run does not have this phase."""
        return next((part for part in self.phases if part.phase == phase), None)

    @property
    def on_cpu(self) -> bool:
        """Return whether the forecast is for the CPU, for which it covers only time and main memory."""
        return self.gpu == CPU

    @property
    def host(self) -> int:
        """Return the peak bytes of private main memory over all phases."""
        return max((phase.host for phase in self.phases), default=0)

    @property
    def decisive(self) -> PhaseForecast:
        """Return the phase that causes the peak of reserved memory.

        Memory cached by earlier phases stays reserved in later ones. Therefore, of the phases near the peak, this is
        the one that allocates the most.
        """
        near = [phase for phase in self.phases if phase.reserved >= NEAR_PEAK * self.reserved]
        return max(near, key=lambda phase: phase.allocated)

    @property
    def mean_step_seconds(self) -> float | None:
        """Return the mean seconds of an optimizer step over all batches; None if unknown.

        This is the length of the phase "first_step", which is forecast as one mean step. A forecast without that phase
        only has the mean of each bucket, so all buckets are weighted equally.
        """
        first = self.of("first_step")
        if first is not None:
            return first.seconds
        return sum(self.step_seconds.values()) / len(self.step_seconds) if self.step_seconds else None


def expected_step_seconds(forecast: float | None, measured: Sequence[float]) -> float | None:
    """Return the expected seconds of a step: a weighted mean of the forecast and the measured steps.

    The forecast has the weight of FORECAST_WEIGHT measured steps. Returns None if there are neither.
    """
    weight = 0 if forecast is None else FORECAST_WEIGHT
    if not weight + len(measured):
        return None
    return (weight * (forecast or 0.0) + sum(measured)) / (weight + len(measured))


def write_forecast(path: Path, forecast: Forecast) -> None:
    """Write a forecast as JSON atomically; raises OSError if it cannot be written."""
    files.write_json(path, to_record(forecast))


def read_forecast(path: Path) -> Forecast | None:
    """Return the forecast in a file; None if the file is missing or unreadable."""
    try:
        return read_record(path, "list", forecast_from)
    except (OSError, ValueError):
        return None


def forecast_from(found: Mapping[str, Any]) -> Forecast:
    """Return a forecast from its JSON fields; raises ValueError, TypeError, KeyError or AttributeError if invalid."""
    phases = tuple(map(phase_from, found["phases"]))
    return build(Forecast, {**found, "phases": phases})


def phase_from(found: Mapping[str, Any]) -> PhaseForecast:
    """Return a phase forecast from its JSON fields; raises the same errors as :func:`forecast_from`."""
    peaks = tuple(_peak(peak) for peak in found.get("peaks", ()))
    timeline = tuple((allocated, reserved) for allocated, reserved in found.get("timeline", ()))
    return build(PhaseForecast, {**found, "peaks": peaks, "timeline": timeline})


def _peak(found: Mapping[str, Any]) -> Peak:
    largest = tuple((module, size) for module, size in found["largest"])
    return build(Peak, {**found, "largest": largest})


class Operation(Protocol):
    """Operations of one kind and size in a trace.

    A protocol, because `trainer.training` may not import the class, which is in `trainer.memory`.
    """

    @property
    def kind(self) -> str:
        """Return "gemm", "conv", "attention", "copy" (to the GPU) or "other" (all others, memory-bound)."""

    @property
    def dtype(self) -> str:
        """Return the dtype of the computation, such as "bfloat16"."""

    @property
    def stage(self) -> str:
        """Return the part of the step, such as "forward" or "backward"."""

    @property
    def flops(self) -> int:
        """Return the FLOPs of one operation; a multiply-add counts as two."""

    @property
    def bytes(self) -> int:
        """Return the bytes that one operation reads and writes."""

    @property
    def count(self) -> int:
        """Return the number of operations of this size."""


@dataclass(frozen=True, slots=True)
class TimedOperation:
    """Measured time of one operation, without the launch overhead that every operation has."""

    kind: str
    dtype: str
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Speed of a device for the operations of a trace."""

    device: str
    """Name for users, such as "RTX 3060 12GB" or "cpu, 8 threads"."""
    timed: tuple[TimedOperation, ...]
    """Measured operations, at least one per kind; others are assumed to be as fast as the most similar one."""
    bandwidth: float
    """Maximum memory bandwidth in bytes per second."""
    launch: float
    """Seconds that every operation takes on the device, however small it is."""
    host: float
    """Seconds of CPU time to launch an operation; 0 if the device is the CPU."""
    disk: float = 500e6
    """Bytes per second when loading a base; the default is that of a SATA SSD."""
    bus: float = 12e9
    """Bytes per second from pinned main memory to the GPU; the default is that of PCIe 4.0 with 8 lanes."""


def load_phase(quantize: str | None) -> LoadPhase:
    """Return the phase that loads the base: "quantise" if it also quantizes the base, else "load"."""
    return "load" if quantize in (None, "none") else "quantise"
