"""Report of a finished run (report.json): forecast and measured memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.protocol import files
from trainer.protocol.reading import read_record
from trainer.protocol.records import build, json_keys, to_record


@json_keys("allocated", "reserved", "device")
@dataclass(frozen=True)
class Memory:
    """Peak memory of one phase on the training device, in bytes."""

    allocated: int
    """Peak bytes allocated by PyTorch."""
    reserved: int
    """Peak bytes that PyTorch's allocator reserved from the driver."""
    device: int | None = None
    """Peak GPU bytes of this process, CUDA context included; None if the driver does not report them."""


@json_keys("seconds", "forecast", "forecast_seconds", "measured", "shortfall")
@dataclass(frozen=True)
class PhaseReport:
    """Forecast and measurements of one phase of a run; time is added up over all periods of the phase."""

    seconds: float
    """Seconds spent in the phase over all attempts."""
    forecast: Memory | None = None
    forecast_seconds: float | None = None
    measured: Memory | None = None
    """Measured memory; None on the CPU, which has no such counters."""
    shortfall: int = 0
    """Size in bytes of the largest failed allocation in this phase; 0 if memory never ran out."""


@json_keys("count", "seconds", "decode", "encode", "write")
@dataclass(frozen=True)
class CachingReport:
    """Encoding speed of images or texts; decoding, encoding and writing run concurrently."""

    count: int
    seconds: float
    decode: float | None
    """Images per second that decoding would reach without waiting for the other stages; None for texts."""
    encode: float
    write: float


@json_keys(
    "gpu", "system", "versions", "seconds", "forecast_seconds", "images_per_second", "flops_per_second",
    "share_of_limit", "phases", "time_factor", "exhausted", "caching", "data_share",
    former={"card": "gpu", "pictures_per_second": "images_per_second"},
)  # fmt: skip
@dataclass(frozen=True)
class RunReport:
    """Report of a finished run: device, forecast and measurements. Unknown values are None or absent."""

    gpu: str
    """GPU name as the driver reports it, or "cpu"."""
    system: str
    """Value of platform.system(), such as "Windows" or "Linux"."""
    versions: Mapping[str, str]
    """Versions that may affect memory and time: Python, the libraries and, as "driver", the GPU driver."""
    seconds: float
    """Total seconds of all attempts."""
    forecast_seconds: float | None
    images_per_second: float
    """Images per second of the training phase."""
    flops_per_second: float | None
    """FLOP/s while training, from the FLOPs in a step's trace, including recomputed activations."""
    share_of_limit: float | None
    """`flops_per_second` as a fraction (0 to 1) of the GPU's dense matrix throughput in the base's dtype."""
    phases: Mapping[str, PhaseReport] = field(default_factory=dict)
    time_factor: float = 1.0
    """Calibration factor from earlier runs, already applied to all forecast seconds in this report."""
    exhausted: int = 0
    """Number of times that memory ran out."""
    caching: Mapping[str, CachingReport] = field(default_factory=dict)
    """Encoding speed by phase, from the largest encoding pass; phases in which nothing was encoded are absent."""
    data_share: float | None = None
    """Share (0 to 1) of the steps' time in which training waited for data, without the first step of each attempt."""


def write_report(path: Path, report: RunReport) -> None:
    """Write a report as JSON atomically; raises OSError if it cannot be written."""
    files.write_json(path, to_record(report))


def read_report(path: Path) -> RunReport:
    """Return the report in a file; unknown keys, such as those of a newer version, are skipped.

    Raises OSError if the file is missing and UnusableFileError if it is not a report.
    """
    return read_record(path, "list", report_from)


def report_from(found: Mapping[str, Any]) -> RunReport:
    """Return the report from parsed JSON; raises TypeError, KeyError or AttributeError if it is not one."""
    phases = {name: _phase(phase) for name, phase in found.get("phases", {}).items()}
    caching = {name: build(CachingReport, one) for name, one in found.get("caching", {}).items()}
    return build(RunReport, {**found, "phases": phases, "caching": caching})


def _phase(found: Mapping[str, Any]) -> PhaseReport:
    memory = {name: build(Memory, found[name]) for name in ("forecast", "measured") if found.get(name)}
    return build(PhaseReport, {**found, **memory})
