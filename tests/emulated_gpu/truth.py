"""Compare forecasts with PyTorch's own allocator on the emulated GPU: `python run.py test --gpu --truth` starts this.

Each configuration of a full-size model runs through the trainer's own functions in a process of its own, in every
phase, while another process traces and forecasts it. What only a real GPU decides is stated to the forecast as the
emulator has it: the size of a CUDA context, cuDNN's workspaces, and that recorded graphs take no memory of the driver.
So the table compares bookkeeping; it does not show that these constants are right.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.support.apart import Apart, WorkResult
from tests.support.meters import CudaMeter, Measured
from tests.support.real_phases import RealRun
from tests.support.truth import Prediction, measure_run, predict_run
from tests.support.truth_jobs import TruthJob, emulated_jobs
from tests.support.truth_report import MIB, Line, Row, lines_of, spread
from trainer import gpu
from trainer.memory.allocator.settings import settings_here
from trainer.memory.device.device_state import DeviceState, state_of_listed_gpu
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.forecast import schedule
from trainer.training.acceleration import cuda_graphs

CUDNN_SHARE = 0.25
CONTEXT_MIB = 300
GPU_MIB = 40_000
"""Memory of every emulated GPU: peaks are measured where nothing limits them."""
LIMITED = (
    "sd15 r16 full",
    "sd15 r16",
    "sd15 r16 blocks",
    "sd15 r16 full int8",
    "sdxl r16 full",
    "sdxl r16 full nf4",
)
"""Configurations that also run within the smallest capacity that is forecast for them, as those with a floor do."""
SECONDS = 120.0
"""Time limit of one configuration; the largest take half a minute on an idle core."""
GROUP = 10
"""Configurations that one process runs: starting one takes as long as a small configuration."""
TRAINING = ("first_step", "train")
GOALS = {"allocated": 0.001, "training reserved": 0.003, "other reserved": 0.02}

Seen = tuple[str, str, Measured | None]
"""A job's name with a phase and what it took, or with a remark."""


@dataclass
class Bench:
    """The configurations to compare, with the results so far."""

    folder: Path
    """Folder for traces and the emulated GPU's state."""
    rows: list[Row] = field(default_factory=list)
    limited: dict[str, str] = field(default_factory=dict)
    """How runs within their smallest forecast capacity ended, by name; empty if they fitted."""
    floors: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The smallest forecast capacity and the one that is claimed to be enough, in bytes, by name."""

    def run(self, jobs: Sequence[TruthJob]) -> None:
        """Measure the jobs of each GPU in turn while another process forecasts."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=prepare_forecasts) as pool:
            forecasts = {job.name: pool.submit(forecast, job, self.folder) for job in jobs}
            for model in dict.fromkeys(job.gpu for job in jobs):
                os.environ.update(self._environment(model))  # read by a process when it starts
                with Apart("tests.emulated_gpu.truth") as apart:
                    self._run_on(model, [job for job in jobs if job.gpu == model], forecasts, apart)

    def _run_on(
        self, model: str, jobs: Sequence[TruthJob], forecasts: Mapping[str, Future[Prediction]], apart: Apart
    ) -> None:
        for group in groups_of(jobs):
            self._compare(group, apart.run(SECONDS * len(group), measured, model, group, {}), forecasts)
        capacities = {job.name: least for job in jobs if (least := forecasts[job.name].result().least)}
        limited = [job for job in jobs if job.name in capacities]
        if limited:
            seen = apart.run(SECONDS * len(limited), measured, model, limited, capacities)
            for job in limited:
                self._limit(job, seen, capacities[job.name])
                if job.floor_mib:
                    self.floors[job.name] = capacities[job.name], job.floor_mib * MIB

    def _compare(
        self, group: Sequence[TruthJob], seen: WorkResult[Seen], forecasts: Mapping[str, Future[Prediction]]
    ) -> None:
        for job in group:
            phases: dict[str, Measured] = {}
            for name, phase, found in seen.items:
                if name == job.name and found is not None:
                    phases[phase] = _highest(phases.get(phase, found), found)
            self.rows.append(Row(job.name, forecasts[job.name].result(), phases, 0, remarks_of(job, seen)))
            say(progress_of(self.rows[-1]))

    def _limit(self, job: TruthJob, seen: WorkResult[Seen], capacity: int) -> None:
        self.limited[job.name] = remarks_of(job, seen)
        say(f"{job.name} within {capacity / MIB:.0f} MiB: {self.limited[job.name] or 'fits as forecast'}")

    def _environment(self, model: str) -> dict[str, str]:
        settings = {
            "": model,
            "_MIB": GPU_MIB,
            "_CONTEXT_MIB": CONTEXT_MIB,
            "_CUDNN_SHARE": CUDNN_SHARE,
            "_STATE": self.folder / "state",
        }
        return {f"EMULATED_GPU{name}": str(value) for name, value in settings.items()}


def groups_of(jobs: Sequence[TruthJob]) -> list[Sequence[TruthJob]]:
    """Return the jobs in groups, each short enough that results appear from time to time."""
    return [jobs[first : first + GROUP] for first in range(0, len(jobs), GROUP)]


def remarks_of(job: TruthJob, seen: WorkResult[Seen]) -> str:
    """Return what went wrong with a job; "" if it ran to its end."""
    remarks = [phase for name, phase, found in seen.items if name == job.name and found is None]
    return "; ".join(remark for remark in remarks if remark) if remarks else seen.failure or "it was not run"


def measured(model: str, jobs: Sequence[TruthJob], capacities: Mapping[str, int]) -> Iterator[Seen]:
    """Run jobs on the emulated GPU in this process, one after the other; ``capacities`` limits some, in bytes."""
    name = torch.cuda.get_device_name()
    assert name.endswith(model), f"this process has a {name}"
    torch.set_num_threads(1)
    # All values that are read back are the same, so every graph looks wrong: record it nevertheless.
    cuda_graphs.TOLERANCES.update(dict.fromkeys(cuda_graphs.TOLERANCES, float("inf")))
    meter = CudaMeter()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = gpu.cublas_workspace(
        torch.cuda.get_device_capability(meter.device), deterministic=False
    )
    total = torch.cuda.mem_get_info()[1]
    for job in jobs:
        torch.cuda.set_per_process_memory_fraction(min(capacities.get(job.name, total) / total, 1.0), meter.device)
        failure = ""
        try:
            yield from _measured_phases(job, meter, limited=job.name in capacities)
        except Exception as error:  # noqa: BLE001 (any failure is reported)
            failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        if left := meter.reset():
            failure += f" {left} bytes stayed allocated"
        yield job.name, failure, None


def _measured_phases(job: TruthJob, meter: CudaMeter, *, limited: bool) -> Iterator[Seen]:
    workload = job.workload()
    launches = graph_launches()
    run = RealRun(workload, meter.device)
    for phase, found in measure_run(job, run, meter, between_epochs=not limited):
        yield job.name, phase, found
    if workload.fit.cuda_graphs and (run.graph_notices or graph_launches() == launches):
        notices = " ".join(run.graph_notices) or "the trainer did not say why"
        yield job.name, f"no CUDA graph was recorded: {notices}", None


def graph_launches() -> int:
    """Return how many CUDA graphs this process has launched on its emulated GPU."""
    count = ctypes.CDLL("libcudart.so.13").emulated_gpu_count
    count.restype = ctypes.c_uint64
    return int(count(b"graph_launch"))


def prepare_forecasts() -> None:
    """Set what the emulator has otherwise than a GPU, in a process that only forecasts."""
    torch.set_num_threads(1)
    schedule.DRIVER_BYTES = 0


def forecast(job: TruthJob, folder: Path) -> Prediction:
    """Forecast a job on its emulated GPU; traces are stored in ``folder``."""
    least = job.name in LIMITED or job.floor_mib > 0
    return predict_run(job.workload(), emulated_state(job.gpu), folder, least=least)


def emulated_state(model: str) -> DeviceState:
    """Return an empty emulated GPU, with the emulator's constants in place of a GPU's."""
    state = state_of_listed_gpu(find_gpu(f"RTX {model}"), system="Linux")
    overheads = replace(
        state.overheads, context_bytes=CONTEXT_MIB * MIB, desktop_bytes=0, cudnn_workspace_share=CUDNN_SHARE
    )
    return replace(state, overheads=overheads, allocator=settings_here(system="Linux"))


def _highest(one: Measured, other: Measured) -> Measured:
    """Return the peaks of a phase that occurs twice."""
    names = ("requested", "allocated", "reserved", "seconds")
    return Measured(*(max(getattr(one, name), getattr(other, name)) for name in names))


def rows_of(row: Row) -> Iterator[dict[str, Any]]:
    """Yield a configuration's phases as plain data, with errors in percent of what was measured."""
    phases: dict[str, dict[str, Any]] = {}
    for line in lines_of(row):
        found = phases.setdefault(line.phase, {"name": row.name, "phase": line.phase})
        found[f"{line.measure}_error_percent"] = round(100 * line.error, 4)
        found[f"{line.measure}_measured"], found[f"{line.measure}_forecast"] = line.measured, line.foreseen
    yield from phases.values()


def kind_of(line: Line) -> str:
    """Return which goal a line has."""
    return (
        "allocated" if line.measure == "allocated" else f"{'training' if line.phase in TRAINING else 'other'} reserved"
    )


def summary(bench: Bench, seconds: float) -> Iterator[str]:
    """Yield how near forecasts came, what went wrong, and what each run within its forecast capacity did."""
    lines = [line for row in bench.rows for line in lines_of(row)]
    for kind, goal in GOALS.items():
        errors = [abs(line.error) for line in lines if kind_of(line) == kind]
        if errors:
            near = sum(error <= goal for error in errors)
            yield f"* {kind}: {near} of {len(errors)} values within {100 * goal:.1f}%; {spread(errors)}"
    false = [name for name, failure in bench.limited.items() if failure]
    yield f"* within the smallest forecast capacity: {len(bench.limited) - len(false)} of {len(bench.limited)} runs fit"
    yield from (f"* {name}, forecast to fit: {bench.limited[name]}" for name in false)
    for name, (least, floor) in bench.floors.items():
        yield f"* {name}: {least / MIB:.0f} MiB are enough; claimed for {floor / MIB:.0f} MiB"
    yield from (f"* {row.name}: {row.remark}" for row in bench.rows if row.remark)
    yield f"* {len(bench.rows)} configurations in {seconds / 60:.1f} minutes"


def table(bench: Bench, seconds: float) -> str:
    """Return the comparison as Markdown."""
    today = datetime.now(UTC).date().isoformat()
    head = [
        f"# Forecast and measurement on the emulated GPU, {today}",
        "",
        f"torch {torch.__version__}, no GPU: PyTorch's own allocator and dispatcher, full-size models, random weights; "
        "made by `python run.py test --gpu --truth`.",
        "It shows that the bookkeeping is right, not that a GPU needs what the emulator states: a context of "
        f"{CONTEXT_MIB} MiB, {CUDNN_SHARE:.0%} of a convolution's operands as cuDNN's workspace, and no memory of the "
        "driver for recorded graphs. The forecast is given the same three.",
        "MiB; each phase at its highest occurrence in a run. `_later` phases encode between epochs, beside the models.",
        "",
        "## Summary",
        "",
        *summary(bench, seconds),
        "",
        "## All",
        "",
        "| configuration | phase | allocated | forecast | error | reserved | forecast | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for found in (each for row in bench.rows for each in rows_of(row)):
        cells = [
            f"{found[f'{kind}_measured'] / MIB:.2f} | {found[f'{kind}_forecast'] / MIB:.2f} | "
            f"{found[f'{kind}_error_percent']:+.3f}%"
            for kind in ("allocated", "reserved")
        ]
        head.append(f"| {found['name']} | {found['phase']} | {' | '.join(cells)} |")
    return "\n".join(head) + "\n"


def is_good(bench: Bench) -> bool:
    """Return whether every configuration ran completely, no forecast fit failed, and errors are within the goals."""
    lines = [line for row in bench.rows for line in lines_of(row)]
    near = [abs(line.error) <= GOALS[kind_of(line)] for line in lines if line.measure == "allocated"]
    reserved = all(abs(line.error) <= GOALS[kind_of(line)] for line in lines if line.measure == "reserved")
    remarks = any(row.remark for row in bench.rows) or any(bench.limited.values())
    remarks = remarks or any(least > floor for least, floor in bench.floors.values())
    return not remarks and reserved and sum(near) >= 0.95 * len(near)


def progress_of(row: Row) -> str:
    """Return a configuration's largest errors in one line."""
    worst: dict[str, Line] = {}
    for line in lines_of(row):
        if abs(line.error) >= abs(worst.setdefault(kind_of(line), line).error):
            worst[kind_of(line)] = line
    errors = [f"{kind} {line.error:+.3%} ({line.phase})" for kind, line in worst.items()]
    return f"{row.name:44} {', '.join(errors)} {row.remark}"


def chosen(only: Sequence[str]) -> list[TruthJob]:
    """Return all jobs; with ``only``, the named ones, or the first N if it is a number."""
    jobs = emulated_jobs()
    if not only:
        return jobs
    if len(only) == 1 and only[0].isdecimal():
        return jobs[: int(only[0])]
    if unknown := set(only) - {job.name for job in jobs}:
        raise SystemExit(
            f"No configuration is named {', '.join(sorted(unknown))}. There are: {', '.join(job.name for job in jobs)}."
        )
    return [job for job in jobs if job.name in only]


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the table, and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="run.py test --gpu --truth", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="N", help="the first N configurations, or names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row as JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the printed table as Markdown")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        bench.run(chosen(options.only))
    text = table(bench, time.monotonic() - started)
    say(f"\n{text}")
    if options.table:
        options.table.write_text(text, encoding="utf-8", newline="\n")
    if options.json:
        rows = [found for row in bench.rows for found in rows_of(row)]
        content = {
            "rows": rows,
            "limited": bench.limited,
            "remarks": {row.name: row.remark for row in bench.rows if row.remark},
        }
        options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0 if is_good(bench) else 1


if __name__ == "__main__":
    sys.exit(main())
