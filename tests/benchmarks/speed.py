"""Measure the speed of a training step, and its load on GPU and host.

    python tests/benchmarks/speed.py --count --family sdxl --batch 1 --json
    python tests/benchmarks/speed.py --time [--family sdxl] [--minutes 8] [--small]
    python tests/benchmarks/speed.py --overhead [--family sdxl] [--steps 40] [--json]
    python tests/benchmarks/speed.py --host [--family sdxl] [--steps 40] [--json]
    python tests/benchmarks/speed.py --encode [--family sdxl] [--small]

--time measures steps on a GPU (see tests/benchmarks/speed_time.py), --overhead the CPU time of the loop besides the
step (tests/benchmarks/speed_overhead.py), --host the CPU time of the step itself (tests/benchmarks/speed_host.py),
--encode the VAE and the text encoders (tests/benchmarks/speed_encode.py). --count counts one step of a full-size base,
without a GPU and without weights. A step is forward and backward of one micro-batch, gradient accumulation, the
optimizer and the refresh of the working weights, as in trainer.training.engine.Engine, here on meta tensors from the
published configs. It prints `dispatched_operations`, what PyTorch's dispatcher sends to the device below all functions
of our own, without views and allocations (tests/support/counting.py says exactly which), `saved_bytes`, what forward
saves for backward, and `waits`, what would make the host wait for the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

if not __package__:  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import nn

from tests.benchmarks import speed_encode
from tests.benchmarks.speed_host import measure_host
from tests.benchmarks.speed_overhead import measure_overhead
from tests.benchmarks.speed_rows import say
from tests.benchmarks.speed_techniques import Technique, applied
from tests.benchmarks.speed_time import RESULTS, time_steps
from tests.support.counting import StepCounter
from trainer.adapter.attach import attach
from trainer.adapter.lean import ENABLED
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.lr_schedule import Segment
from trainer.config.recipe import RecipeConfig
from trainer.memory.trace.cuda_kernels import as_on_cuda, attention_kernel
from trainer.memory.trace.meta_models import (
    META,
    allow_first_step,
    bare_text_encoders,
    bare_unet,
    dtype_of,
    job_of,
    micro_batch,
    place,
)
from trainer.memory.trace.workload import Workload, workload_without_base
from trainer.training.build import RunParts, assemble_engine
from trainer.training.engine import Engine
from trainer.training.optim.master_weights import measure
from trainer.training.optim.optimizer import set_learning_rates
from trainer.training.step import StepModels

Adapters = Literal["peft", "lean", "peft-fp32"]
ADAPTERS: dict[Adapters, str] = {
    "peft": "PEFT's layers on working copies in the base's dtype",
    "lean": "the layers of trainer.adapter.lean on the same working copies",
    "peft-fp32": "as most trainers do: PEFT's layers with fp32 weights on a base in 16 bits",
}
IN_USE: Adapters = "lean" if ENABLED else "peft"
"""The trainer's default."""
RESOLUTIONS: dict[Family, int] = {"sd15": 512, "sdxl": 1024}
MIB = 2**20


@dataclass(frozen=True)
class Count:
    """Operations, waits and saved bytes of a step."""

    forward: int
    backward: int
    """Including recomputation by gradient checkpointing."""
    accumulate: int
    """Adding gradients of the first micro-batch to the master weights."""
    optimizer: int
    """Measuring and clipping the gradient, the optimizer, the refresh of the working weights."""
    saved_bytes: int
    waits: dict[str, int]
    """By "stage operation"; the loop's own read of loss and norm, once per optimizer step, comes on top."""

    @property
    def dispatched_operations(self) -> int:
        """Return the operations of the whole step."""
        return self.forward + self.backward + self.accumulate + self.optimizer


def count_step(workload: Workload, pictures: int, adapters: Adapters = IN_USE, technique: Technique = "none") -> Count:
    """Count a step of ``pictures`` images in the first bucket, with the operations of a CUDA GPU."""
    engine = _engine(workload, adapters)
    _take_first_step(engine)
    micro = micro_batch(workload, workload.buckets[0].size, pictures)
    counter = StepCounter(META)
    with (
        as_on_cuda(attention_kernel(workload.fit.attention, dtype_of(workload))),
        applied(technique, engine),
        counter,
    ):
        with counter.stage("forward"):
            loss = engine.micro_step(micro)
        with counter.stage("accumulate"):
            engine.master_weights.accumulate()
        with counter.stage("optimizer"):
            set_learning_rates(engine.optimizer, 1.0)
            measure(
                loss, engine.master_weights, engine.loss_scale
            )  # the loop reads the result, but meta tensors cannot be read
            engine.optimizer_step(1.0, 2.0)  # a norm that is clipped
    return Count(
        forward=counter.total("forward"),
        backward=counter.total("backward"),
        accumulate=counter.total("accumulate"),
        optimizer=counter.total("optimizer"),
        saved_bytes=counter.saved_bytes,
        waits={" ".join(key): count for key, count in sorted(counter.waits.items())},
    )


def _take_first_step(engine: Engine) -> None:
    """Let the optimizer create its state, which happens only once."""
    for weight in engine.master_weights.working.values():
        weight.grad = torch.empty_like(weight)
    engine.master_weights.accumulate()
    engine.optimizer_step(1.0, 1.0)


def _engine(workload: Workload, adapters: Adapters) -> Engine:
    """Return the engine as a run builds it, on models without weights."""
    dtype = dtype_of(workload)
    unet, placer, _ = bare_unet(workload)
    unet = place(unet, dtype, placer)
    encoders = [place(encoder, dtype) for encoder in bare_text_encoders(workload)] if workload.trained_texts else []
    adapter = attach(
        workload.family,
        unet,
        cast(Sequence[nn.Module], encoders),
        workload.recipe,
        dtype=torch.float32 if adapters == "peft-fp32" else dtype,
        generator=lambda _: np.random.default_rng(0),
        lean=adapters == "lean",
    )
    nothing = cast(Any, None)  # no cache, batches or collator
    parts = RunParts(cast(Any, workload), cache=nothing, batches=nothing, collator=nothing, device=META)
    models = StepModels(workload.family, unet, tuple(encoders), workload.recipe.clip_skip, dtype)
    engine = assemble_engine(job_of(workload), parts, [Segment(0, 1)], models, adapter)
    allow_first_step(engine.optimizer)
    return engine


def workload_of(options: argparse.Namespace) -> Workload:
    """Return what is to be counted."""
    recipe = {"layers": options.layers, "rank": options.rank, "resolution": options.resolution}
    fit = {
        "dtype": options.dtype,
        "gradient_checkpointing": options.checkpointing,
        "quantize": options.quantize,
    }
    return workload_without_base(options.family, RecipeConfig.model_validate(recipe), FitConfig.model_validate(fit))


def report(options: argparse.Namespace, counts: Iterable[tuple[Adapters, Count]]) -> list[dict[str, Any]]:
    """Return the counts and what they belong to, as JSON."""
    asked = (
        "family",
        "resolution",
        "batch",
        "layers",
        "rank",
        "dtype",
        "quantize",
        "checkpointing",
        "technique",
    )
    of_what = {name: getattr(options, name) for name in asked}
    return [
        {
            **of_what,
            "adapters": adapters,
            "dispatched_operations": count.dispatched_operations,
            "forward": count.forward,
            "backward": count.backward,
            "accumulate": count.accumulate,
            "optimizer": count.optimizer,
            "saved_bytes": count.saved_bytes,
            "waits": count.waits,
            "torch": torch.__version__,
        }
        for adapters, count in counts
    ]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the same as a Markdown table."""
    lines = [
        "| adapters | operations | forward | backward | accumulate | optimizer | saved for backward | waits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = [row["adapters"], *(f"{row[name]:,}" for name in ("dispatched_operations", "forward", "backward"))]
        numbers += [f"{row['accumulate']:,}", f"{row['optimizer']:,}", f"{row['saved_bytes'] / MIB:,.0f} MiB"]
        lines.append(f"| {' | '.join(numbers)} | {sum(row['waits'].values())} |")
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--count", action="store_true", help="count, without a GPU")
    mode.add_argument("--time", action="store_true", help="time steps on the GPU, or small ones on the CPU")
    mode.add_argument("--overhead", action="store_true", help="time the loop around the step on the CPU")
    mode.add_argument("--host", action="store_true", help="time what the host does in a step, on the CPU")
    mode.add_argument("--encode", action="store_true", help="time the VAE on the GPU, or a tiny one on the CPU")
    parser.add_argument("--family", choices=tuple(RESOLUTIONS), help="default: sdxl; both for --time")
    parser.add_argument("--resolution", type=int, help="side of the square bucket; 512 for SD 1.5, 1024 for SDXL")
    parser.add_argument("--batch", type=int, default=1, help="images in the micro-batch")
    parser.add_argument("--layers", choices=("attention", "linear", "all"), default="attention")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--quantize", choices=("none", "int8", "int8_products", "nf4"), default="none")
    parser.add_argument("--checkpointing", choices=("none", "full"), default="none")
    parser.add_argument("--technique", choices=("none", "channels_last"), default="none", help="of --count")
    words = "; ".join(f"{name}: {what}" for name, what in ADAPTERS.items())
    parser.add_argument("--adapters", choices=("all", *ADAPTERS), default=IN_USE, help=words)
    parser.add_argument("--json", action="store_true", help="one JSON object, or a list of them for --adapters all")
    parser.add_argument("--steps", type=int, default=40, help="of --overhead and --host")
    parser.add_argument("--minutes", type=float, default=8.0, help="of --time: start nothing that would end later")
    parser.add_argument("--small", action="store_true", help="of --time and --encode: tiny models on the CPU")
    parser.add_argument("--groups", type=int, help="of --time: only so many groups of rows")
    parser.add_argument("--results", type=Path, default=RESULTS, help="of --time: folder for the table")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the requested measurement and print it."""
    options = arguments().parse_args(words)
    if options.time:
        families: list[Family] = [options.family] if options.family else ["sdxl", "sd15"]
        return time_steps(families, options.minutes, options.results, small=options.small, most=options.groups)
    options.family = options.family or "sdxl"
    if options.encode:
        for line in speed_encode.table(options.family, small=options.small):
            say(line)
        return 0
    measure_mode = _overhead if options.overhead else _host if options.host else _count
    print_result(options, *measure_mode(options))
    return 0


def print_result(options: argparse.Namespace, found: object, text: str) -> None:
    """Print as JSON or as text."""
    sys.stdout.write((json.dumps(found, indent=2) if options.json else text) + "\n")


def _overhead(options: argparse.Namespace) -> tuple[object, str]:
    overhead = asdict(measure_overhead(options.family, steps=options.steps))
    named = (f"{name} {milliseconds:.2f}" for name, milliseconds in overhead.items())
    text = f"CPU milliseconds per step, one image of a tiny {options.family} base: {', '.join(named)}."
    return {"family": options.family, **overhead}, text


def _host(options: argparse.Namespace) -> tuple[object, str]:
    times = measure_host(options.family, options.steps)
    lines = ["| adapters | forward, ms of the CPU | backward | both |", "|---|---|---|---|"]
    for name, spent in times.items():
        numbers = (f"{number:.1f}" for number in (spent.forward, spent.backward, spent.forward + spent.backward))
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return {"family": options.family, **{name: asdict(spent) for name, spent in times.items()}}, "\n".join(lines)


def _count(options: argparse.Namespace) -> tuple[object, str]:
    options.resolution = options.resolution or RESOLUTIONS[options.family]
    chosen = list(ADAPTERS) if options.adapters == "all" else [options.adapters]
    workload = workload_of(options)
    counts = [(one, count_step(workload, options.batch, one, options.technique)) for one in chosen]
    rows = report(options, counts)
    return rows if len(rows) > 1 else rows[0], table(rows)


if __name__ == "__main__":
    sys.exit(main())
