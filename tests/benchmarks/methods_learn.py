"""Train the demo base with every adapter, optimizer, loss and schedule, and check that each learns.

    python -m tests.benchmarks.methods_learn [--only lokr ... | --date 2026-11-26] [--steps 30] [--threads 1] [--list]
        [--record [FILE]]

A method learns if the last validation loss, on images that it was not trained on and with fixed noise, is below that of
the untrained base. Exits with 1 if a method does not. The test suite trains the methods of the current date.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from tests.support.optimizers import NAMES, settings_of
from tests.support.sample import places_of
from trainer.config.methods import ADAPTERS, LOSSES, SCHEDULES
from trainer.config.write import demo_job
from trainer.protocol import events, files
from trainer.training.run.start import start

RESULTS = Path(__file__).parent / "results" / "methods_learn.md"
QUIET = ("report.validation.every=100000", "report.previews.prompts=[]", "report.saving.every_steps=100000")
"""Measure the validation loss only at the start and at the end."""
CONSTANT = ("recipe.schedule.kind=constant", "recipe.schedule.warmup=0")

# Rates at which each adapter of rank 16 learns on the tiny base; the demo's is for a LoRA.
_RATES = {"oft": "3e-3", "lokr": "3e-3"}
_PIECES = ('recipe.schedule.step_rules="1:0.5,0.1"',)
# Settings of their authors and of LoRA users, where those of the demo or of the other tests are for something else: a
# lower rate for CAME, whose first steps are about ten times larger than AdamW's, and for Lion, whose steps are as large
# as the rate; a higher one for RAdam Schedule-Free, whose first five steps move nothing; Adafactor's rate not
# multiplied by the size of the weights, which is zero in half of them; and d_coef for whole runs, not for few steps.
# D-Adaptation divides by the root of a second moment that starts at zero, without bias correction: its first steps and
# estimates are up to 1 / sqrt(1 - beta2) = 32 times too large, and an estimate never falls. From d0 = 1e-4 it rose to
# 0.04 within five steps, and the loss to 1.07; the package alone does the same with these gradients. The remedy of its
# README is a growth rate of 1.02; bias_correction = true (0.086) or beta2 = 0.9 (0.078) help too.
_OPTIMIZER_SETTINGS = {
    "adafactor": ("recipe.optimizer.scale_parameter=false",),
    "came": ("recipe.learning_rate=1e-4",),
    "dadapt_adam": ("recipe.optimizer.d0=5e-4", "recipe.optimizer.growth_rate=1.02"),
    "lion": ("recipe.learning_rate=5e-4",),
    "lion8bit": ("recipe.learning_rate=5e-4",),
    "prodigy_plus_schedulefree": ("recipe.optimizer.d_coef=2.0",),
    "radam_schedulefree": ("recipe.learning_rate=1e-2",),
}
METHODS: Mapping[str, tuple[str, ...]] = {
    **{name: (f"recipe.adapter={name}", f"recipe.learning_rate={_RATES.get(name, '1.5e-3')}") for name in ADAPTERS},
    **{name: (*settings_of(name), *_OPTIMIZER_SETTINGS.get(name, ()), *CONSTANT) for name in NAMES},
    **{name: (f"recipe.objective.loss={name}", "recipe.objective.debiased_estimation=false") for name in LOSSES},
    **{name: (f"recipe.schedule.kind={name}", *(_PIECES if name == "piecewise" else ())) for name in SCHEDULES},
}
"""Overrides of the demo job, by method."""
PER_DAY = 2
"""The most methods that the test suite trains on a day; with 37 methods, all have their day within 19 days."""


@dataclass(frozen=True)
class Result:
    """Validation losses of a run before its first and after its last step."""

    first: float
    last: float
    seconds: float

    @property
    def learned(self) -> bool:
        """Return whether the loss fell."""
        return self.last < self.first


def methods_of(day: date) -> list[str]:
    """Return the methods that the test suite trains on a day: each has its day in turn."""
    names = list(METHODS)
    return [names[place] for place in places_of(day, PER_DAY, len(names))]


def learn(name: str, steps: int, threads: int | None = None) -> Result:
    """Train the demo base with a method, in a folder of its own; None: on as many threads as there are cores."""
    held_out: list[float] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.Validation):
            held_out.append(event.loss)

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        files.write_text(job, demo_job())
        on_threads = (f"fit.threads={threads}",) if threads else ()
        start(job, (*METHODS[name], f"recipe.steps={steps}", *QUIET, *on_threads), on_event=watch)
    return Result(held_out[0], held_out[-1], time.monotonic() - began)


def report(results: Mapping[str, Result], steps: int) -> str:
    """Return the results as Markdown."""
    rows = [
        f"| {name} | {each.first:.4f} | {each.last:.4f} | {each.last / each.first - 1:+.1%} | {each.seconds:.0f} s |"
        for name, each in results.items()
    ]
    return "\n".join(
        (
            "# Every method learns on the demo base",
            "",
            f"Validation loss before and after {steps} steps on the CPU, {datetime.now(UTC):%Y-%m-%d}; this compares a "
            "method with the untrained base, not methods with each other.",
            "",
            "| method | before | after | change | time |",
            "|---|---|---|---|---|",
            *rows,
            "",
        )
    )


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a method did not learn."""
    parser = argparse.ArgumentParser(description="Check that every method learns.")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    chosen.add_argument("--date", type=date.fromisoformat, help="train only the methods of this date")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--record", nargs="?", type=Path, const=RESULTS)
    options = parser.parse_args(arguments)
    if options.list:
        say("\n".join(METHODS))
        return 0
    results = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["IMPASTO_HOME"] = home
        for name in methods_of(options.date) if options.date else options.only:
            results[name] = learn(name, options.steps, options.threads)
            found = results[name]
            say(f"{name}: {found.first:.4f} to {found.last:.4f} in {found.seconds:.0f} s")
    if options.record:
        files.write_text(options.record, report(results, options.steps))
    failed = [name for name, found in results.items() if not found.learned]
    if failed:
        say("Did not learn: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
