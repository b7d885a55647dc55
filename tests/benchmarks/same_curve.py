"""Test whether a technique leaves the loss curve unchanged: on compared with off, over several seeds of the demo.

    python -m tests.benchmarks.same_curve [--only lean ...] [--steps 200] [--seeds 5] [--record [FILE]]

Each run is a real one on the bundled base in bf16 on the CPU. Its losses are averaged over windows of 20 steps. Runs
with the technique on and off and the same seed use the same images, noise and timesteps, so that they differ only by
rounding; runs with different seeds differ by chance. A technique passes if its largest difference in any window is less
than the smallest spread of any window (standard deviation over the seeds, technique off). Exits with 1 if one does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import torch

from trainer.adapter import lean
from trainer.config.write import demo_job
from trainer.dataset import decoders
from trainer.protocol import events, files
from trainer.training.run.start import start

RESULTS = Path(__file__).parent / "results" / "same_curve.md"
WINDOW = 20
PATIENCE = 3600.0
"""Seconds that the processes that read images may take to start: they import this module first, slowly on a busy
machine."""
QUIET = ("report.validation.every=100000", "report.previews.prompts=[]")
"""Measure the validation loss only at the start and at the end."""


@dataclass(frozen=True)
class Technique:
    """Something that makes a step faster or smaller; ``on`` and ``off`` are settings of the job."""

    what: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    lean: bool | None = None
    """Whether our own LoRA layers are on; None: the trainer's default."""


TECHNIQUES = {
    "lean": Technique("our own LoRA layers, compared with PEFT's", lean=True),
    "gradient_checkpointing": Technique(
        "all activations recomputed, compared with none",
        on=("fit.gradient_checkpointing=full",),
        off=("fit.gradient_checkpointing=none",),
    ),
    "micro_batches": Technique(
        "images one at a time, compared with all four at once", on=("fit.micro_batch=1",), off=("fit.micro_batch=4",)
    ),
    "channels_last": Technique(
        "UNet in channels-last layout with norms that preserve it, compared with contiguous",
        on=("fit.channels_last=true",),
    ),
    "compile": Technique("transformer blocks compiled, compared with uncompiled", on=("fit.compile=true",)),
    "int8": Technique("base weights in int8, compared with bf16", on=("fit.quantize=int8",)),
    "nf4": Technique("base weights in NF4, compared with bf16", on=("fit.quantize=nf4",)),
    "together": Technique(
        "our own LoRA layers and blocks, channels-last layout, all activations recomputed, images one at a time, "
        "compared with PEFT's layers and none of these",
        on=("fit.channels_last=true", "fit.gradient_checkpointing=full", "fit.micro_batch=1"),
        off=("fit.gradient_checkpointing=none", "fit.micro_batch=4"),
        lean=True,
    ),
    "int8_products": Technique(
        "base linear layers with int8 products, forward and backward, compared with bf16",
        on=("fit.quantize=int8_products",),
    ),
}


@dataclass(frozen=True)
class Curve:
    """Losses that a run reported."""

    losses: list[float]
    held_out: float
    """The last validation loss."""

    def windows(self) -> list[float]:
        """Return the mean loss of every complete window."""
        whole = len(self.losses) // WINDOW * WINDOW
        return [statistics.fmean(self.losses[begin : begin + WINDOW]) for begin in range(0, whole, WINDOW)]


@dataclass(frozen=True)
class Comparison:
    """A technique on and off, by seed."""

    off: Sequence[Curve]
    on: Sequence[Curve]

    @property
    def difference(self) -> float:
        """Return the largest difference of a window's mean between on and off with the same seed."""
        return max(
            abs(one - other)
            for off, on in zip(self.off, self.on, strict=True)
            for one, other in zip(off.windows(), on.windows(), strict=True)
        )

    @property
    def install(self) -> float:
        """Return the smallest standard deviation over the seeds of any window, technique off."""
        curves = [curve.windows() for curve in self.off]
        return min(statistics.stdev(curve[place] for curve in curves) for place in range(len(curves[0])))

    @property
    def held_out_difference(self) -> float:
        """Return the largest difference of the final validation loss."""
        return max(abs(off.held_out - on.held_out) for off, on in zip(self.off, self.on, strict=True))

    @property
    def good(self) -> bool:
        """Return whether on and off differ by less than chance."""
        return self.difference < self.install


def compare(technique: Technique, seeds: int, steps: int, say: Callable[[str], object]) -> Comparison:
    """Run a technique off and on with seeds from 1."""

    def curves(*, on: bool) -> list[Curve]:
        found = []
        for seed in range(1, seeds + 1):
            found.append(curve_of(technique, seed, steps, on=on))
            say(f"{technique.what}, {'on' if on else 'off'}, seed {seed}: held-out loss {found[-1].held_out:.4f}")
        return found

    return Comparison(curves(on=False), curves(on=True))


def curve_of(technique: Technique, seed: int, steps: int, *, on: bool) -> Curve:
    """Run the demo in a separate folder."""
    losses: list[float] = []
    held_out: list[float] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.StepEvent):
            assert event.loss is not None, "the loss must be finite"
            losses.append(event.loss)
        elif isinstance(event, events.Validation):
            assert event.loss is not None
            held_out.append(event.loss)

    settings = [f"recipe.steps={steps}", f"recipe.seed={seed}", "fit.dtype=bf16", "fit.threads=1", *QUIET]
    settings += technique.on if on else technique.off
    layers = lean.ENABLED if technique.lean is None else technique.lean == on
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(lean, "ENABLED", layers),
        patch.object(decoders, "SECONDS", PATIENCE),
    ):
        home = {"IMPASTO_HOME": str(Path(folder) / "home")}
        job = Path(folder) / "job.toml"
        job.write_text(demo_job(), encoding="utf-8")
        with patch.dict(os.environ, home):
            if start(job, settings, watch) != 0:
                raise SystemExit("a run failed")
    return Curve(losses, held_out[-1])


def table(compared: dict[str, Comparison], seeds: int, steps: int, command: str) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Effect of techniques on the loss",
        "",
        f"`{command}`, {datetime.now(UTC).date()}, torch {torch.__version__}: the demo in bf16 on the CPU, {steps} "
        f"steps, {seeds} seeds, losses averaged over windows of {WINDOW} steps. Passed: the largest difference between "
        "on and off with the same seed, in any window, is less than the smallest spread between seeds in any window.",
        "",
        "| technique | largest difference | spread of seeds | validation loss off | largest difference | passed |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in compared.items():
        held_out = [curve.held_out for curve in one.off]
        lines.append(
            f"| {TECHNIQUES[name].what} | {one.difference:.5f} | {one.install:.5f} | "
            f"{min(held_out):.4f} to {max(held_out):.4f} | {one.held_out_difference:.5f} | {one.good} |"
        )
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Compare the techniques and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(TECHNIQUES), default=list(TECHNIQUES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--record", nargs="?", type=Path, const=RESULTS, help=f"write {RESULTS.name}, or a file of another name there"
    )
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    command = " ".join(["python -m tests.benchmarks.same_curve", *(words if words is not None else sys.argv[1:])])
    compared: dict[str, Comparison] = {}
    for name in options.only:
        compared[name] = compare(TECHNIQUES[name], options.seeds, options.steps, _say)
        if options.record:
            files.write_text(RESULTS.parent / options.record, table(compared, options.seeds, options.steps, command))
    _say(table(compared, options.seeds, options.steps, command))
    return 0 if all(one.good for one in compared.values()) else 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
