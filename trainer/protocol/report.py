"""Report of a finished run, report.json: forecast and measured memory and time as plain data."""

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
    """Peak bytes of one phase on the training device."""

    allocated: int
    """Peak bytes allocated by PyTorch."""
    reserved: int
    """Peak bytes that PyTorch's allocator reserved from the driver."""
    device: int | None = None
    """Peak GPU bytes of this process, CUDA context included; None if the driver does not report them."""


@json_keys("seconds", "forecast", "forecast_seconds", "measured", "shortfall")
@dataclass(frozen=True)
class PhaseReport:
    """Forecast and measurement of one phase of a run, named as in the forecast, summed over all its stretches."""

    seconds: float
    """Seconds spent in the phase over all attempts."""
    forecast: Memory | None = None
    forecast_seconds: float | None = None
    measured: Memory | None = None
    """Measured memory; None on the CPU, which has no such counters."""
    shortfall: int = 0
    """Largest allocation in bytes that failed in this phase; 0 if memory never ran out."""


@json_keys("count", "seconds", "decode", "encode", "write")
@dataclass(frozen=True)
class CachingReport:
    """Encoding speed of images or texts; decoding, encoding and writing run concurrently."""

    count: int
    seconds: float
    decode: float | None
    """Images per second if decoding never waited for another stage; None for texts."""
    encode: float
    write: float


@json_keys(
    "card", "system", "versions", "seconds", "forecast_seconds", "pictures_per_second", "flops_per_second",
    "share_of_limit", "phases", "time_factor", "exhausted", "caching",
)  # fmt: skip
@dataclass(frozen=True)
class RunReport:
    """Report of a finished run: where it ran, forecast and measurements. Unknown values are None or absent."""

    card: str
    """Name of the GPU by its driver, or "cpu"."""
    system: str
    """Value of platform.system(), such as "Windows" or "Linux"."""
    versions: Mapping[str, str]
    """Versions of Python, the libraries and, as "driver", the GPU driver, on which memory and time may depend."""
    seconds: float
    """Seconds of all attempts together."""
    forecast_seconds: float | None
    pictures_per_second: float
    """Images per second of the training phase."""
    flops_per_second: float | None
    """FLOP/s while training, by the FLOPs of a step's trace, recomputed activations included."""
    share_of_limit: float | None
    """Share, 0 to 1, of the GPU's dense matrix throughput in the base's dtype."""
    phases: Mapping[str, PhaseReport] = field(default_factory=dict)
    time_factor: float = 1.0
    """Factor learned from earlier runs that all forecast seconds here contain."""
    exhausted: int = 0
    """Number of times that memory ran out."""
    caching: Mapping[str, CachingReport] = field(default_factory=dict)
    """Encoding speed by phase if anything was encoded, from the pass that encoded the most."""


def write_report(path: Path, report: RunReport) -> None:
    """Write a report as JSON atomically; raises OSError if it cannot be written."""
    files.write_json(path, to_record(report))


def read_report(path: Path) -> RunReport:
    """Return the report in a file; keys of newer versions are skipped.

    Raises OSError if the file is missing and UnusableFileError if it is not a report.
    """
    return read_record(path, "list", report_from)


def report_from(found: Mapping[str, Any]) -> RunReport:
    """Return the report in parsed JSON; raises TypeError, KeyError or AttributeError if it is not a report."""
    phases = {name: _phase(phase) for name, phase in found.get("phases", {}).items()}
    caching = {name: build(CachingReport, one) for name, one in found.get("caching", {}).items()}
    return build(RunReport, {**found, "phases": phases, "caching": caching})


def _phase(found: Mapping[str, Any]) -> PhaseReport:
    memory = {name: build(Memory, found[name]) for name in ("forecast", "measured") if found.get(name)}
    return build(PhaseReport, {**found, **memory})
