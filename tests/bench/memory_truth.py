"""Compares forecasts with what a card measures, over 64 configurations with random weights, in a few minutes.

    python -m tests.bench.memory_truth [--cpu] [--minutes 8] [--jobs N] [--results FOLDER]

On a card each configuration is run for real (the trainer's own functions, full-size models) while other processes trace
it. The forecast knows what it would know of a card before a run. A dozen configurations are run again under a memory
cap 2 % below and 2 % above the least capacity that was forecast for them. With --cpu small models are run in main
memory, where PyTorch's profiler counts what is asked for: there are no pools and no driver. Writes a table to
tests/bench/results/<date>-<card>.md; what the time is too short for is left out of it, and said.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.support.meters import CpuMeter, CudaMeter, Measured, Meter
from tests.support.truth import Prediction, foresee, measure
from tests.support.truth_jobs import TruthJob, truth_jobs
from tests.support.truth_report import Edge, Row, line_of, report
from trainer import gpu
from trainer.errors import ImpastoError
from trainer.memory.cards import find_card
from trainer.memory.overheads import Overheads
from trainer.memory.situation import Situation, situation_ahead, situation_here
from trainer.memory.subject import Subject
from trainer.protocol.forecast import ForecastPhase
from trainer.training.machine import card_of
from trainer.training.rate import measure_rate

RESULTS = Path(__file__).parent / "results"
EDGE_JOBS = range(2, 14)  # by their place: they differ most, and train alone
EDGES = (0.98, 1.02)


@dataclass
class Bench:
    """What is run, on what, and what came out."""

    meter: Meter
    situation: Situation
    cpu: bool
    until: float
    rows: list[Row] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def run(self, jobs: Sequence[TruthJob], folder: Path) -> None:
        """Measures each job in turn while the next ones are traced; tapes are kept in ``folder``."""
        workers = 1 if self.cpu else max((os.cpu_count() or 2) - 2, 1)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            foreseen = [
                pool.submit(foresee, job, self._subject(job), self.situation, folder, edge=self._is_edge(place))
                for place, job in enumerate(jobs)
            ]
            for job, future in zip(jobs, foreseen, strict=True):
                if time.monotonic() > self.until:
                    break
                self._take(job, future)
            pool.shutdown(cancel_futures=True)

    def _take(self, job: TruthJob, future: Future[Prediction]) -> None:
        """Measures one job; one that the device cannot do is remarked on, and the next one comes."""
        prediction = future.result()
        phases: dict[ForecastPhase, Measured] = {}
        remark = ""
        try:
            phases.update(measure(job, self._subject(job), self.meter))
        except (RuntimeError, ImpastoError) as error:  # torch.OutOfMemoryError is a RuntimeError
            remark = str(error).partition("\n")[0]
        outside = self.meter.outside()
        left = self.meter.reset()
        if left:
            remark += f" {left} bytes stayed allocated."
        row = Row(job.name, prediction, phases, outside, remark.strip())
        self.rows.append(row)
        say(line_of(row))
        if prediction.least and phases.keys() >= prediction.phases.keys():
            self.edges += [self._under_cap(job, prediction.least, share) for share in EDGES]

    def _under_cap(self, job: TruthJob, least: int, share: float) -> Edge:
        """Runs a job once more within a share of the capacity that it is said to need."""
        total = torch.cuda.get_device_properties(self.meter.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(least * share / total, 1.0), self.meter.device)
        fitted = True
        try:
            for _ in measure(job, self._subject(job), self.meter):
                pass
        except torch.OutOfMemoryError:
            fitted = False
        torch.cuda.set_per_process_memory_fraction(1.0, self.meter.device)
        self.meter.reset()
        return Edge(job.name, int(least * share), foreseen=share >= 1.0, fitted=fitted)

    def _subject(self, job: TruthJob) -> Subject:
        return job.subject(tiny=True, dtype="fp32") if self.cpu else job.subject()

    def _is_edge(self, place: int) -> bool:
        return place in EDGE_JOBS and not self.cpu


def bench_on_card(until: float) -> Bench:
    """The first card; the forecast is made as for a user who plans to train on it now."""
    meter = CudaMeter()
    card = card_of(0)
    workspace = gpu.cublas_workspace(card.capability, deterministic=False)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", workspace)  # as trainer.training.machine.numerics does
    situation = situation_here(card, rate=measure_rate(meter.device))
    meter.reset()
    return Bench(meter, situation, cpu=False, until=until)


def bench_on_cpu(until: float) -> Bench:
    """Main memory, which knows no workspaces."""
    torch.set_num_threads(1)
    situation = situation_ahead(find_card("8GB"))
    none = Overheads(0, 0, cublas_workspace_bytes=0, cudnn_workspace_share=0.0, sources={})
    return Bench(CpuMeter(), replace(situation, overheads=none), cpu=True, until=until)


def say(text: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what there is time for and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="small models in main memory")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--jobs", type=int, help="how many of the configurations; absent: all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    # The last configuration, its forecast and the table need a little of the time.
    until = time.monotonic() + options.minutes * 60 - 20
    bench = bench_on_cpu(until) if options.cpu else bench_on_card(until)
    jobs = truth_jobs()[: options.jobs]
    with tempfile.TemporaryDirectory() as folder:
        bench.run(jobs, Path(folder))
    card = "cpu" if options.cpu else bench.situation.card.name
    today = datetime.now(UTC).date().isoformat()
    text = report(card, today, bench.situation, bench.rows, bench.edges, len(jobs))
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{today}-{card.lower().replace(' ', '-')}.md"
    path.write_text(text, encoding="utf-8", newline="\n")
    say(f"{text}\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
