"""Results of timed steps, as a table and as JSON, rewritten after every row."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from tests.benchmarks.speed_techniques import Technique
from tests.support.truth_jobs import TruthJob
from trainer.config.base import Family
from trainer.memory.trace.workload import Workload
from trainer.protocol import files
from trainer.training.device.device import AttentionChoice

MIB = 1 << 20

Adapters = Literal["lean", "layers", "peft"]
"""Ours; ours in diffusers' blocks, which save for backward what our blocks recompute; PEFT's in such blocks."""
Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Base:
    """What has to be loaded again, in a separate process."""

    family: Family
    adapters: Adapters = "lean"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    quantize: Literal["none", "int8", "int8_products", "nf4"] = "none"
    deterministic: bool = False

    def workload(self, resolution: int, *, small: bool) -> Workload:
        """Return the training workload: LoRA rank 16 on attention."""
        fit = {"quantize": self.quantize}
        recipe = {"layers": "attention", "rank": 16}
        job = TruthJob("speed", self.family, (resolution, resolution), recipe=recipe, fit=fit)
        return job.workload(tiny=small, dtype=self.dtype)


@dataclass(frozen=True)
class Case:
    """A step to be timed; resolution is the side of a square, in pixels."""

    resolution: int
    batch: int
    gradient_checkpointing: Checkpointing = "none"
    attention: AttentionChoice = "auto"
    technique: Technique = "none"
    """A technique that the trainer does not use by default."""


@dataclass(frozen=True)
class Timing:
    """Time and memory of one step."""

    seconds: float
    host_seconds: float
    """Time until the host has launched everything; about the whole step if the GPU's queue is full."""
    limit: float
    """FLOP/s of one large matrix product."""
    allocated: int | None
    reserved: int | None
    """Peak bytes; None on the CPU."""
    launched: int | None
    """Kernels, copies and fills on the GPU; on the CPU, PyTorch's calls, nested ones included."""
    operations: int | None
    """What PyTorch's dispatcher sends to the device."""
    waits: int | None
    """How often PyTorch warns that the host waits for the GPU. None if it could not be counted."""


@dataclass(frozen=True)
class Row:
    """A case and its result."""

    base: Base
    case: Case
    timing: Timing | None = None
    failure: str = ""


@dataclass
class Bench:
    """The rows so far, and where they are written."""

    card: str
    folder: Path
    name: str
    small: bool
    flops: dict[tuple[Family, int], Future[int]]
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def keep(self, row: Row) -> None:
        """Add a row and write all of them."""
        self.rows.append(row)
        say(self._line(row))
        self.write()

    def write(self) -> None:
        """Write the current table and JSON."""
        files.write_text(self.folder / f"{self.name}.md", self.table())
        facts = {"date": _today(), "card": self.card, "torch": torch.__version__, "small": self.small}
        rows = [asdict(row) | {"flops": self.flops_of(row), "name": self._name(row)} for row in self.rows]
        files.write_json(self.folder / f"{self.name}.json", {**facts, "rows": rows, "remarks": self.remarks})

    def flops_of(self, row: Row) -> int | None:
        """Return the FLOP of a step, once they are known."""
        future = self.flops.get((row.base.family, row.case.resolution))
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result() * row.case.batch

    def table(self) -> str:
        """Return all rows as Markdown."""
        head = (
            "what",
            "images/s",
            "ms/step",
            "TFLOP/s",
            "of the limit",
            "allocated, MiB",
            "reserved, MiB",
            "launched",
            "operations",
            "host, ms",
            "waits",
        )
        scale = " Tiny models: these numbers are meaningless." if self.small else ""
        lines = [
            f"# Steps timed on {self.card}",
            "",
            f"By `python tests/benchmarks/speed.py --time`, {_today()}, torch {torch.__version__}; random weights, "
            "LoRA r16 on attention, AdamW, one micro-batch per step. "
            f"tests/benchmarks/speed_time.py explains the columns.{scale}",
            "",
            f"| {' | '.join(head)} |",
            "|---" * len(head) + "|",
            *map(self._line, self.rows),
            "",
            *self.remarks,
        ]
        return "\n".join(lines) + "\n"

    def _line(self, row: Row) -> str:
        timing = row.timing
        if timing is None:
            return f"| {self._name(row)} | {row.failure} |" + " |" * 9
        flops = self.flops_of(row)
        rate = None if flops is None else flops / timing.seconds
        cells = (
            self._name(row),
            f"{row.case.batch / timing.seconds:.2f}",
            f"{timing.seconds * 1e3:.1f}",
            "" if rate is None else f"{rate / 1e12:.1f}",
            "" if rate is None else f"{rate / timing.limit:.1%}",
            _mib(timing.allocated),
            _mib(timing.reserved),
            _count(timing.launched),
            _count(timing.operations),
            f"{timing.host_seconds * 1e3:.1f}",
            _count(timing.waits),
        )
        return f"| {' | '.join(cells)} |"

    def _name(self, row: Row) -> str:
        """Return the row's description, naming what differs from the default."""
        base, case = row.base, row.case
        usual = {
            "adapters": "lean",
            "dtype": "bf16",
            "quantize": "none",
            "gradient_checkpointing": "none",
            "attention": "auto",
        }
        usual["technique"] = "none"
        values = {**asdict(base), **asdict(case)}
        special = [
            f"{values[key]}" if key != "gradient_checkpointing" else f"{values[key]} checkpointing" for key in usual
        ]
        differences = [text for text, key in zip(special, usual, strict=True) if values[key] != usual[key]]
        differences += ["deterministic"] if base.deterministic else []
        return ", ".join([f"{base.family} {case.resolution} b{case.batch}", *differences])


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.0f}"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
