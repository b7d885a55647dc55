"""The table of forecasts and measurements, and its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from tests.support.meters import Measured
from tests.support.truth import LATER_STEPS, PHASES, Prediction, percentile
from trainer.memory.device.device_state import DeviceState

MIB = 2**20
CPU_REMARK = (
    "Small models in main memory: requested bytes, as PyTorch's profiler counts them, without temporary buffers inside "
    "convolutions and 8-bit optimizers, and without what is in main memory on a GPU machine too: the random number "
    "generator's states that checkpointing saves, and the noise schedule in float64. The CPU stores dropout masks in "
    "the dtype of the input, which is measured but not forecast."
)


@dataclass(frozen=True)
class Row:
    """One configuration, forecast and measured."""

    name: str
    prediction: Prediction
    phases: Mapping[str, Measured]
    outside: int
    """Bytes that the driver counted outside the allocator at the end."""
    remark: str


@dataclass(frozen=True)
class Edge:
    """A configuration run under a memory limit near the smallest capacity that was forecast."""

    name: str
    capacity: int
    foreseen: bool
    """Whether the forecast says that it fits."""
    fitted: bool


@dataclass(frozen=True)
class Line:
    """One phase of one configuration; errors are relative to the measurement."""

    name: str
    phase: str
    measure: str
    """"requested", "allocated" or "reserved"."""
    measured: int
    foreseen: int

    @property
    def error(self) -> float:
        """Return the relative error, positive if the forecast is too high."""
        return self.foreseen / self.measured - 1.0


def lines_of(row: Row) -> Iterator[Line]:
    """Yield allocated and reserved bytes of each phase, or requested bytes if the device knows neither."""
    for phase in PHASES:
        if phase in row.phases and phase in row.prediction.phases:
            measured, foreseen = row.phases[phase], row.prediction.phases[phase]
            for measure in ("allocated", "reserved") if measured.reserved else ("requested",):
                yield Line(row.name, phase, measure, getattr(measured, measure), getattr(foreseen, measure))


def line_of(row: Row) -> str:
    """Return a configuration's training in one line, to follow progress."""
    errors = [f"{line.measure} {line.error:+.3%}" for line in lines_of(row) if line.phase == "train"]
    return f"{row.name:36} {', '.join(errors)} {row.remark}"


def report(
    card: str,
    date: str,
    device_state: DeviceState,
    rows: Sequence[Row],
    edges: Sequence[Edge],
    asked: int,
    remarks: Sequence[str] = (),
) -> str:
    """Return the whole table as Markdown."""
    lines = [line for row in rows for line in lines_of(row)]
    parts = [
        f"# Forecast and measurement, {card}, {date}",
        f"torch {torch.__version__}; {len(rows)} of {asked} configurations, random weights; "
        f"made by "
        f"`python -m tests.benchmarks.memory_truth{' --cpu' if card == 'cpu' else ''}`. MiB, except as stated.",
        *([CPU_REMARK] if card == "cpu" else []),
        "## Summary",
        *_summary(lines, rows, device_state),
        *(f"* {remark}" for remark in remarks),
        *(["## Under a memory limit near the smallest capacity", *_edge_table(edges)] if edges else []),
        "## All",
        *_table(rows),
    ]
    return "\n".join(parts) + "\n"


def _summary(lines: Sequence[Line], rows: Sequence[Row], device_state: DeviceState) -> Iterator[str]:
    for phases in (("first_step", "train"), tuple(phase for phase in PHASES if phase not in ("first_step", "train"))):
        name = "training" if "train" in phases else "other phases"
        for measure in ("requested", "allocated", "reserved"):
            errors = [abs(line.error) for line in lines if line.measure == measure and line.phase in phases]
            if errors:
                yield f"* {name}, {measure}: {spread(errors)}"
    outside = [row.outside for row in rows if row.outside]
    if outside:
        yield (
            f"* outside the allocator: {min(outside) / MIB:.0f} to {max(outside) / MIB:.0f}, "
            f"forecast {device_state.outside / MIB:.0f}"
        )
    times = [_time_error(row) for row in rows if "train" in row.phases and not _is_profiled(row)]
    if times:
        yield f"* seconds per step: median error {median(times):.1%}, 95th percentile {percentile(times, 0.95):.1%}"
    for row in rows:
        if row.remark:
            yield f"* {row.name}: {row.remark}"


def spread(errors: Sequence[float]) -> str:
    """Return how large relative errors are: median, 95th percentile, worst."""
    near = sum(error <= 0.001 for error in errors) / len(errors)
    return (
        f"{len(errors)} values, {near:.0%} within 0.1 %, median {median(errors):.3%}, "
        f"95th percentile {percentile(errors, 0.95):.3%}, worst {max(errors):.3%}"
    )


def _is_profiled(row: Row) -> bool:
    """Return whether times are meaningless because the profiler was running."""
    return not row.phases["train"].reserved


def _time_error(row: Row) -> float:
    measured = row.phases["train"].seconds / LATER_STEPS
    return abs(row.prediction.step_seconds / measured - 1.0)


def _edge_table(edges: Sequence[Edge]) -> Iterator[str]:
    short = sum(edge.foreseen and not edge.fitted for edge in edges)
    careful = sum(edge.fitted and not edge.foreseen for edge in edges)
    yield f"Of {len(edges)} runs {short} did not fit though forecast to, {careful} fitted though not forecast to.\n"
    yield "| configuration | cap | forecast | measured |\n|---|---:|---|---|"
    words = {True: "fits", False: "does not fit"}
    for edge in edges:
        yield f"| {edge.name} | {edge.capacity / MIB:.0f} | {words[edge.foreseen]} | {words[edge.fitted]} |"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| configuration | phase | | measured | forecast | error |\n|---|---|---|---:|---:|---:|"
    for row in rows:
        for line in lines_of(row):
            figures = f"{line.measured / MIB:.2f} | {line.foreseen / MIB:.2f} | {line.error:+.3%}"
            yield f"| {line.name} | {line.phase} | {line.measure} | {figures} |"
        if row.phases and "train" in row.phases and not _is_profiled(row):
            seconds = row.phases["train"].seconds / LATER_STEPS
            foreseen = row.prediction.step_seconds
            figures = f"{seconds:.3f} | {foreseen:.3f} | {foreseen / seconds - 1.0:+.1%}"
            yield f"| {row.name} | train | s a step | {figures} |"
