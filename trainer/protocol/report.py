"""What a finished run says of itself: forecast against measured, as plain data in its report.json."""

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
    """Handed out by PyTorch's allocator."""
    reserved: int
    """Taken from the driver by PyTorch's allocator."""
    device: int | None = None
    """Taken from the driver by this process, CUDA context included; None where the driver does not tell."""


@json_keys("seconds", "forecast", "forecast_seconds", "measured", "shortfall")
@dataclass(frozen=True)
class PhaseReport:
    """One phase of a run, named as in a forecast: what was foreseen and what came, all its turns together."""

    seconds: float
    """Spent in it, over all attempts."""
    forecast: Memory | None = None
    forecast_seconds: float | None = None
    measured: Memory | None = None
    """None on the CPU, which has no such counts."""
    shortfall: int = 0
    """Bytes still asked for when memory ran out in this phase, the largest time; 0 when it never did."""


@json_keys("count", "seconds", "decode", "encode", "write")
@dataclass(frozen=True)
class CachingReport:
    """How fast pictures or texts were encoded; decoding, encoding and writing went on at once."""

    count: int
    seconds: float
    decode: float | None
    """A second, if decoding waited for nothing else; None for texts."""
    encode: float
    write: float


@json_keys(
    "card", "system", "versions", "seconds", "forecast_seconds", "pictures_per_second", "flops_per_second",
    "share_of_limit", "phases", "time_factor", "exhausted", "caching",
)  # fmt: skip
@dataclass(frozen=True)
class RunReport:
    """A finished run: where it ran, and forecast against measured. What is not known is None or absent."""

    card: str
    """The driver's name for it, or "cpu"."""
    system: str
    """As platform.system() says: "Windows", "Linux"."""
    versions: Mapping[str, str]
    """Of Python, the libraries and, as "driver", the driver: what memory and time may depend on."""
    seconds: float
    """Of all attempts together."""
    forecast_seconds: float | None
    pictures_per_second: float
    """While training: pictures learned from, by seconds of the training phase."""
    flops_per_second: float | None
    """While training: those that a step needs by its trace, recomputed activations included."""
    share_of_limit: float | None
    """Of the card's dense matrix rate in the base's number format; 0 to 1."""
    phases: Mapping[str, PhaseReport] = field(default_factory=dict)
    time_factor: float = 1.0
    """What earlier runs had the forecast's seconds multiplied with; all forecast seconds here contain it."""
    exhausted: int = 0
    """How often memory ran out."""
    caching: Mapping[str, CachingReport] = field(default_factory=dict)
    """By phase, where anything was encoded: of the most that were encoded in one go."""


def write_report(path: Path, report: RunReport) -> None:
    """Write a report as JSON in one step; raises OSError when it cannot be written."""
    files.write_json(path, to_record(report))


def read_report(path: Path) -> RunReport:
    """Read a report back.

    Raises OSError when there is none, UnusableFileError when its text is no report; keys of newer versions are skipped.
    """
    return read_record(path, "list", report_from)


def report_from(found: Mapping[str, Any]) -> RunReport:
    """Build a report from what JSON gives; raises TypeError, KeyError or AttributeError when it is of another shape."""
    phases = {name: _phase(phase) for name, phase in found.get("phases", {}).items()}
    caching = {name: build(CachingReport, one) for name, one in found.get("caching", {}).items()}
    return build(RunReport, {**found, "phases": phases, "caching": caching})


def _phase(found: Mapping[str, Any]) -> PhaseReport:
    memory = {name: build(Memory, found[name]) for name in ("forecast", "measured") if found.get(name)}
    return build(PhaseReport, {**found, **memory})
