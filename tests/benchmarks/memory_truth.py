"""Compare forecasts with measurements on a GPU, over 64 configurations with random weights, in a few minutes.

    python -m tests.benchmarks.memory_truth [--cpu] [--minutes 8] [--jobs N] [--edges] [--results FOLDER]

On a GPU each configuration is run for real (the trainer's own functions, full-size models), in a separate process with
a time limit, while other processes trace it. The forecast uses what is known of a GPU before a run. In the remaining
time, or with --edges immediately, a dozen configurations are run again under a memory limit 2 % below and 2 % above the
smallest capacity that was forecast for them. With --cpu small models are run in main memory, where PyTorch's profiler
counts requests: there are no pools and no driver. The table in tests/benchmarks/results is rewritten after each
configuration, so that an interrupted run leaves what it has; the table lists what is missing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.support.apart import Apart, WorkResult
from tests.support.meters import CpuMeter, CudaMeter, Measured
from tests.support.truth import Prediction, measure, predict
from tests.support.truth_jobs import TruthJob, truth_jobs
from tests.support.truth_report import Edge, Row, line_of, report
from trainer import gpu
from trainer.memory.device.device_state import DeviceState, state_of_listed_gpu, state_of_local_gpu
from trainer.memory.device.gpu_specs import Overheads, find_gpu
from trainer.memory.trace.workload import Workload
from trainer.protocol.forecast import DeviceSpeed, ForecastPhase
from trainer.training.acceleration.throughput import measure_rate
from trainer.training.device.out_of_memory import gpu_info

RESULTS = Path(__file__).parent / "results"
EDGE_JOBS = range(2, 14)  # by position: they differ most, and only train
EDGES = (0.98, 1.02)
LONGEST = 90.0
"""Time limit in seconds for one configuration: several times what the largest one needs."""
SLOWER_ON_CPU = 4
OUT_OF_MEMORY = "OutOfMemoryError"

Seen = tuple[ForecastPhase, Measured] | int
"""A phase, or at the end the bytes that the driver counts outside the allocator."""


@dataclass
class Bench:
    """The configurations to run, the device, and the results."""

    device_state: DeviceState
    cpu: bool
    until: float
    path: Path
    """Path of the table."""
    asked: int
    rows: list[Row] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def run(self, jobs: Sequence[TruthJob], folder: Path, apart: Apart, *, only_edges: bool = False) -> None:
        """Measure each job in turn while the next ones are traced; traces are stored in ``folder``."""
        workers = 1 if self.cpu else max((os.cpu_count() or 2) - 2, 1)
        context = multiprocessing.get_context("spawn")
        places = [place for place in range(len(jobs)) if not only_edges or self._is_edge(place)]
        with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            foreseen = {
                place: pool.submit(
                    predict,
                    jobs[place],
                    self._workload(jobs[place]),
                    self.device_state,
                    folder,
                    edge=self._is_edge(place),
                )
                for place in places
            }
            if not only_edges:
                self._measure_all(jobs, foreseen, apart)
            for place in filter(self._is_edge, places):
                self._run_edges(jobs[place], foreseen[place], apart)
            pool.shutdown(cancel_futures=True)
        self._write()

    def _measure_all(self, jobs: Sequence[TruthJob], foreseen: dict[int, Future[Prediction]], apart: Apart) -> None:
        """Measure without waiting for forecasts; a row is complete once both exist."""
        waiting: list[tuple[TruthJob, Future[Prediction], WorkResult[Seen]]] = []
        for place, job in enumerate(jobs):
            if self._left() <= 0:
                break
            result = apart.run(self._limit(), measured_phases, job, self._workload(job), self.cpu)
            waiting.append((job, foreseen[place], result))
            for one in [one for one in waiting if one[1].done()]:
                self._join(*one)
                waiting.remove(one)
        for one in waiting:
            self._join(*one)

    def _join(self, job: TruthJob, future: Future[Prediction], result: WorkResult[Seen]) -> None:
        """Add a row, waiting for its forecast; of a failed job, use what came before the failure."""
        prediction = self._of(future, job)
        if prediction is not None:
            phases = dict(item for item in result.items if not isinstance(item, int))
            outside = sum(item for item in result.items if isinstance(item, int))
            self.rows.append(Row(job.name, prediction, phases, outside, result.failure))
            say(line_of(self.rows[-1]))
        self._write()

    def _of(self, future: Future[Prediction], job: TruthJob) -> Prediction | None:
        """Return a forecast; if it fails, note why, and continue with the others."""
        try:
            return future.result(timeout=max(self._left(), 1.0))
        except Exception as error:  # noqa: BLE001 (any failure becomes a remark)
            self.remarks.append(f"{job.name}: no forecast, {type(error).__name__}: {error}")
            return None

    def _run_edges(self, job: TruthJob, future: Future[Prediction], apart: Apart) -> None:
        """Run a job again with fractions of the capacity that it is forecast to need."""
        for share in EDGES:
            prediction = self._of(future, job) if self._left() > 0 else None
            if prediction is None:
                return
            capacity = int(prediction.least * share)
            result = apart.run(self._limit(), measured_phases, job, self._workload(job), self.cpu, capacity)
            if result.failure and not result.failure.startswith(OUT_OF_MEMORY):
                self.remarks.append(f"{job.name} under a limit: {result.failure}")
                continue
            self.edges.append(Edge(job.name, capacity, foreseen=share >= 1.0, fitted=not result.failure))
            say(f"{job.name} within {share:.0%}: {result.failure or 'completed'}")
            self._write()

    def _write(self) -> None:
        today = datetime.now(UTC).date().isoformat()
        name = "cpu" if self.cpu else self.device_state.gpu.name
        text = report(name, today, self.device_state, self.rows, self.edges, self.asked, self.remarks)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text, encoding="utf-8", newline="\n")

    def _left(self) -> float:
        return self.until - time.monotonic()

    def _limit(self) -> float:
        return LONGEST * (SLOWER_ON_CPU if self.cpu else 1)

    def _workload(self, job: TruthJob) -> Workload:
        return job.workload(tiny=True, dtype="fp32") if self.cpu else job.workload()

    def _is_edge(self, place: int) -> bool:
        return place in EDGE_JOBS and not self.cpu


def measured_phases(job: TruthJob, workload: Workload, cpu: bool, capacity: int | None = None) -> Iterator[Seen]:
    """Measure a job in this process, which ends afterwards; within ``capacity`` bytes of segments if given."""
    meter = CpuMeter() if cpu else CudaMeter()
    if cpu:
        torch.set_num_threads(1)
    else:
        _state_workspace(torch.cuda.get_device_capability(meter.device))
    if capacity is not None:
        total = torch.cuda.get_device_properties(meter.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(capacity / total, 1.0), meter.device)
    yield from measure(job, workload, meter)
    yield meter.outside()


def speed_of_gpu() -> Iterator[tuple[gpu.Gpu, DeviceSpeed]]:
    """Yield the first GPU before anything uses it, and its measured speed."""
    card = gpu_info(0)
    _state_workspace(card.capability)
    yield card, measure_rate(torch.device("cuda", 0), name=card.name)


def _state_workspace(capability: tuple[int, int]) -> None:
    """Set the cuBLAS workspace as trainer.training.device.device.numerics does."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", gpu.cublas_workspace(capability, deterministic=False))


def state_of_gpu(apart: Apart) -> DeviceState:
    """Return the state of the first GPU, so that forecasts are made as for a user who plans to train on it now.

    A separate process reads it, because a CUDA context of this process would take GPU memory all the time.
    """
    result = apart.run(LONGEST, speed_of_gpu)
    if result.failure:
        raise SystemExit(f"The GPU cannot be used: {result.failure}")
    ((card, rate),) = result.items
    _state_workspace(card.capability)
    return state_of_local_gpu(card, rate=rate)


def state_of_main_memory() -> DeviceState:
    """Return the state of main memory, which has no workspaces."""
    none = Overheads(0, 0, cublas_workspace_bytes=0, cudnn_workspace_share=0.0, sources={})
    return replace(state_of_listed_gpu(find_gpu("8GB")), overheads=none)


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what there is time for and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="small models in main memory")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--jobs", type=int, help="how many of the configurations; absent: all")
    parser.add_argument("--edges", action="store_true", help="only the runs under a memory cap")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    # The last configuration, its forecast and the table need some of the time.
    until = time.monotonic() + options.minutes * 60 - 20
    jobs = truth_jobs()[: options.jobs]
    with tempfile.TemporaryDirectory() as folder, Apart("tests.benchmarks.memory_truth") as apart:
        device_state = state_of_main_memory() if options.cpu else state_of_gpu(apart)
        name = "cpu" if options.cpu else device_state.gpu.name.lower().replace(" ", "_")
        path = options.results / f"memory_truth_{name}{'_edges' if options.edges else ''}.md"
        bench = Bench(device_state, options.cpu, until, path, len(jobs))
        bench.run(jobs, Path(folder), apart, only_edges=options.edges)
    say(f"{path.read_text(encoding='utf-8')}\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
