"""Compare forecast time with measured time on the CPU, for the demo and tiny bases.

    python -m tests.benchmarks.duration [--steps 16] [--results FOLDER]
    python -m tests.benchmarks.duration --whole

With --whole the unmodified demo is trained on all cores, from loading to the last preview, and its duration is compared
with the forecast of `plan JOB`, which is what the window shows before Start. The exit code is 1 unless they are within
a factor of 1.5 of each other. This measures wall-clock time, so the machine must be idle.

Every job runs as `python -m trainer train` would run it, planned and with the device speed measured first, on one
thread. Both sides count the CPU time of that thread, so that other programs on the machine do not matter; on an idle
machine it equals wall-clock time. No job's result corrects the next forecast. Writes
tests/benchmarks/results/duration.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.cli.planning import plan_run
from trainer.config.base import Family
from trainer.config.write import demo_job
from trainer.protocol import events
from trainer.protocol.forecast import Forecast, read_forecast
from trainer.training.run.start import start

RESULTS = Path(__file__).parent / "results"
GOAL = 0.15
WHOLE_GOAL = 1.5
NOTE = (
    "Mixed batches are counted by composition, each micro-batch with all its operations; according to their memory "
    "traces this is correct within 6 % (tests/train/memory/forecast/test_schedule.py). Forecasts are too short "
    "for bf16, where the time of the CPU's convolutions depends on more than FLOP and bytes."
)
# Besides training; loading depends on the disk, not on the CPU.
PHASES = ("cache_pictures", "cache_texts", "validate", "preview")


@dataclass(frozen=True)
class Case:
    """A job to run."""

    name: str
    write: Callable[[Path], Path]
    """Writes the job into a folder and returns its file."""
    overrides: tuple[str, ...] = ()


@dataclass
class Watch:
    """CPU time of the training thread between events."""

    steps: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _last: float = 0.0
    _phase: str = ""

    def __call__(self, event: events.Event) -> None:
        """Record the time of an event; the run calls it in its thread."""
        now = time.thread_time()
        self.phases[self._phase] += now - self._last
        if isinstance(event, events.StepEvent) and self._phase == "train":
            self.steps.append(now - self._last)
        if isinstance(event, events.PhaseStarted):
            self._phase = event.phase
        elif isinstance(event, events.PhaseFinished):
            self._phase = ""
        self._last = time.thread_time()


@dataclass(frozen=True)
class Row:
    """Forecast and measured seconds of one job."""

    name: str
    step: float
    forecast_step: float
    phases: dict[str, tuple[float, float]]

    @property
    def error(self) -> float:
        """Return the relative error of the forecast step time; positive if it is too long."""
        return self.forecast_step / self.step - 1.0


def cases() -> Iterator[Case]:
    """Yield the demo with several fits and recipes, and tiny bases of both families."""
    yield Case("demo", _demo)
    for override in (
        "fit.micro_batch=1",
        "fit.micro_batch=2",
        "recipe.effective_batch=8",
        "fit.gradient_checkpointing=full",
    ):
        yield Case(f"demo, {override.replace('=', ' = ')}", _demo, (override,))
    for override in ("recipe.rank=64", "recipe.layers=attention", "recipe.layers=all", "fit.dtype=bf16"):
        yield Case(f"demo, {override.replace('=', ' = ')}", _demo, (override,))
    text = ("recipe.text_encoder.learning_rate=1e-4",)
    yield Case("demo, text encoder trained", _demo, text)
    families: tuple[Family, ...] = ("sd15", "sdxl")
    for family in families:
        yield Case(f"tiny {family}, photographs in five shapes", partial(_tiny, family))


def _demo(folder: Path) -> Path:
    path = folder / "job.toml"
    path.write_text(demo_job(), encoding="utf-8")
    return path


def _tiny(family: Family, folder: Path) -> Path:
    return write_job(folder, tiny_base(family, folder), photographs(folder / "pictures"))


def run(case: Case, folder: Path, steps: int) -> Row:
    """Run one job in a separate folder."""
    folder.mkdir()
    os.environ["IMPASTO_HOME"] = str(folder / "home")
    watch = Watch()
    overrides = (*case.overrides, f"recipe.steps={steps}", "fit.threads=1")
    if start(case.write(folder), overrides, watch, plan_run) != 0:
        raise SystemExit(f"{case.name} did not end well")
    (home,) = (folder / "runs").iterdir()
    forecast = read_forecast(home / "forecast.json")
    assert forecast is not None
    return Row(case.name, statistics.median(watch.steps), _step_seconds(forecast, steps), _phases(forecast, watch))


def _step_seconds(forecast: Forecast, steps: int) -> float:
    return sum(phase.seconds for phase in forecast.phases if phase.phase in ("first_step", "train")) / steps


def _phases(forecast: Forecast, watch: Watch) -> dict[str, tuple[float, float]]:
    foretold: dict[str, float] = {phase.phase: phase.seconds for phase in forecast.phases}
    return {name: (foretold.get(name, 0.0), watch.phases.get(name, 0.0)) for name in PHASES}


def whole() -> int:
    """Compare the forecast of the whole demo with its wall-clock duration, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IMPASTO_HOME"] = str(Path(folder) / "home")
        job = _demo(Path(folder))
        planned = subprocess.run(
            [sys.executable, "-m", "trainer", "plan", str(job), "--json"], stdout=subprocess.PIPE, check=True
        )
        forecast = json.loads(planned.stdout)["pick"]["forecast"]["seconds"]
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "trainer", "train", str(job)], stdout=subprocess.DEVNULL, check=True)
        command = time.monotonic() - started
        (home,) = (Path(folder) / "runs").iterdir()
        run = _whole_seconds(home / "events.jsonl")
    ratio = forecast / run
    sys.stdout.write(f"forecast {forecast:.0f} s, run {run:.0f} s (command {command:.0f} s): ratio {ratio:.2f}\n")
    return 0 if 1 / WHOLE_GOAL <= ratio <= WHOLE_GOAL else 1


def _whole_seconds(log: Path) -> float:
    """Return the seconds from the first phase to the end of the last."""
    found = [
        event for event in events.read_events(log)[0] if isinstance(event, events.PhaseStarted | events.PhaseFinished)
    ]
    return found[-1].time - found[0].time


def table(rows: list[Row]) -> str:
    """Return the results as Markdown."""
    lines = ["| job | step forecast, ms | step measured, ms | error |", "|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.forecast_step * 1e3:.1f} | {row.step * 1e3:.1f} | {row.error:+.1%} |" for row in rows
    ]
    within = sum(abs(row.error) <= GOAL for row in rows)
    lines += ["", f"{within} of {len(rows)} within {GOAL:.0%}.", "", "Phases, seconds forecast / measured:", ""]
    lines += ["| job | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for row in rows:
        cells = (f"{foretold:.2f} / {measured:.2f}" for foretold, measured in row.phases.values())
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all jobs and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.whole:
        raise SystemExit(whole())
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases()):
            rows.append(run(case, Path(folder) / str(number), options.steps))
            sys.stderr.write(f"{case.name}: {rows[-1].error:+.1%}\n")
    options.results.mkdir(parents=True, exist_ok=True)
    head = (__doc__ or "").partition("\n")[0]
    text = f"# Time, forecast and measured\n\n{head}\n\n{table(rows)}\n{NOTE}\n"
    (options.results / "duration.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
