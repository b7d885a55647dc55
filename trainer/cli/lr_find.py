"""The lr-find command: a learning rate range test, which trains a temporary LoRA with a rising learning rate.

The rate rises exponentially from step to step, and the loss shows where learning starts and where it breaks down (Smith
2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3). As in fastai's `lr_find`, the suggestion is
the rate at which the smoothed loss falls most steeply over the logarithm of the rate. fastai smooths with a running
mean, which lags behind and so moves the curve toward higher rates; here, each point is a mean of the steps around it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import words
from trainer.cli.common import Commands, add_command, add_set, echo_json, echo_lines, engine_imports, note, positive
from trainer.errors import EXIT_DONE, EXIT_RESUMABLE, JobError, RunError
from trainer.protocol import commands as protocol
from trainer.protocol import events
from trainer.protocol.records import json_keys, to_record
from trainer.protocol.run_directory import RunDirectory, forget_run

if TYPE_CHECKING:
    from trainer.config.job import Job

_HELP = "suggest a learning rate: train briefly with a rising rate and show where the loss falls"
_SHORTEST, _LONGEST = 20, 1000  # steps
_MOST_FACTOR = 1000.0  # the highest factor of a schedule
_WIDTH = 1 / 20  # standard deviation of the smoothing kernel, as a share of the test
_DIVERGED = 4.0  # fastai's limit: a smoothed loss of this many times the lowest one ends the test
_SURE = 3.0  # standard errors by which the smoothed loss must fall
_ROWS = 20  # of the table
_KEPT = (events.PhaseStarted, events.PhaseProgress, events.PhaseFinished, events.StepEvent, events.AttemptStarted)
_SIZE, _LEFT, _TOP, _RIGHT, _BOTTOM = (1000, 560), 90, 50, 40, 60
_INK, _FAINT, _PAPER, _LINE, _MARK = "#222222", "#bbbbbb", "#ffffff", "#0072b2", "#d55e00"


@json_keys("learning_rate", "loss", "smoothed")
@dataclass(frozen=True)
class Point:
    """One step of the test."""

    learning_rate: float
    loss: float
    smoothed: float
    """Mean loss of the steps around this one."""


@json_keys("points", "suggestion", "lowest", "fall", "noise")
@dataclass(frozen=True)
class RangeTest:
    """Result of a range test."""

    points: Sequence[Point]
    suggestion: float | None
    """Learning rate at which the loss falls most steeply; None if it does not clearly fall."""
    lowest: float
    """Learning rate of the lowest smoothed loss; if it is not the last one, higher ones make the loss rise."""
    fall: float
    """Decrease of the smoothed loss from the first step to the lowest."""
    noise: float
    """Standard error of the fall."""


def add_commands(commands: Commands) -> None:
    """Define the command and its arguments."""
    find = add_command(commands, "lr-find", _HELP, run)
    find.add_argument("job", metavar="JOB", type=Path, help="the job.toml file; its runs are not touched")
    find.add_argument("--steps", type=positive, default=100, help="steps of the test (default 100)")
    find.add_argument("--from", dest="low", type=float, default=1e-6, metavar="RATE", help="first rate (default 1e-6)")
    find.add_argument("--to", dest="high", type=float, default=1e-2, metavar="RATE", help="last rate (default 1e-2)")
    add_set(find, "override a key of the job")
    find.add_argument("--chart", metavar="FILE", type=Path, help="write loss against learning rate as a PNG")
    find.add_argument("--json", action="store_true", help="print one JSON object, for scripts")


def run(options: argparse.Namespace) -> int:
    """Run the test and print its result."""
    from trainer.config.load import load_job

    job = load_job(options.job, options.set)
    rates = ramp(job, options.steps, options.low, options.high)
    losses = _train(options, job, rates)
    if losses is None:
        note("The test was interrupted; nothing of it is kept.")
        return EXIT_RESUMABLE
    found = evaluate(rates[: len(losses)], losses)
    if options.chart is not None:
        draw(found, options.chart)
    if options.json:
        echo_json(to_record(found))
    else:
        echo_lines(table(found))
        echo_lines(summary(found))
    return EXIT_DONE


# --- training


def ramp(job: Job, steps: int, low: float, high: float) -> list[float]:
    """Return the learning rate of each step, rising exponentially from `low` to `high`.

    Raises JobError for an unusable range, and for an optimizer that finds the rate itself or averages the weights.
    """
    optimizer, base = job.recipe.optimizer, base_rate(job)
    if optimizer.method.finds_rate or optimizer.ignores_rates:
        sentence = f"Could not test learning rates: {optimizer.method.title} finds the rate itself."
        raise JobError("lr_find.optimizer", sentence, 'Choose another optimizer: --set recipe.optimizer.name="adamw".')
    if optimizer.method.averages:
        sentence = f"Could not test learning rates: {optimizer.method.title} needs the same rate in all steps."
        raise JobError("lr_find.optimizer", sentence, "Compare some rates: `sweep JOB --set recipe.learning_rate=...`.")
    if not _SHORTEST <= steps <= _LONGEST:
        sentence = f"Could not test learning rates in {steps} steps."
        raise JobError("lr_find.steps", sentence, f"Set --steps to a number from {_SHORTEST} to {_LONGEST:,}.")
    if not 0.0 < low < high <= _MOST_FACTOR * base:
        sentence = f"Could not test learning rates from {low:g} to {high:g}."
        most = f"{_MOST_FACTOR * base:g}, {_MOST_FACTOR:g} times the job's own rate"
        raise JobError("lr_find.range", sentence, f"Set --from and --to to rising rates above 0 and up to {most}.")
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def base_rate(job: Job) -> float:
    """Return the job's learning rate that the test varies; the other parts keep their ratio to it."""
    from trainer.config.job import learning_rates

    return next(iter(learning_rates(job).values()))


def _train(options: argparse.Namespace, job: Job, rates: Sequence[float]) -> list[float] | None:
    """Train a temporary run with these rates; return the loss of each step, or None if the user interrupted it.

    A loss that is not finite ends the list, as does one that has diverged.
    """
    from trainer.cli.display import open_display

    with tempfile.TemporaryDirectory(prefix="impasto-lr-find-", ignore_cleanup_errors=True) as folder:
        test = _Test()
        with open_display(sys.stderr, as_json=False) as show:
            with engine_imports(show):
                from trainer.cli.planning import plan_run
                from trainer.training.reporting.reporter import learn_nothing
                from trainer.training.run.start import start

            def on_event(event: events.Event) -> None:
                test.on_event(event)
                if isinstance(event, _KEPT):  # the others are about files that are deleted when the test ends
                    show(event)

            overrides = [*options.set, *_overrides(job, rates, folder)]
            try:
                code = start(options.job, overrides, on_event, plan_run, learn_nothing, test.on_run)
            finally:
                if test.run is not None:
                    forget_run(test.run.path)
    return test.losses if code == EXIT_DONE or test.diverged else None


def _overrides(job: Job, rates: Sequence[float], folder: str) -> list[str]:
    """Return settings for a run of these rates in `folder` that saves, renders and measures as little as possible."""
    from trainer.config.toml_file import toml_value

    factors = [f"{rate / base_rate(job):.6g}" for rate in rates]
    rules = ",".join([*(f"{factor}:{step}" for step, factor in enumerate(factors[:-1], 1)), factors[-1]])
    seldom = len(rates) + 1
    return [
        f"output.runs={toml_value(folder)}",
        f"recipe.steps={len(rates)}",
        "recipe.schedule.kind=piecewise",
        f'recipe.schedule.step_rules="{rules}"',
        "recipe.schedule.warmup=0",
        f"report.max_skipped={seldom}",
        "report.previews.prompts=[]",
        f"report.validation={{every={seldom}, timesteps=[500]}}",
        f"report.saving={{every_steps={seldom}, checkpoint_every={seldom}}}",
        "report.tensorboard=false",
    ]


class _Test:
    """A range test in progress: the losses so far, and the run that it stops when they diverge."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.diverged = False
        self.run: RunDirectory | None = None

    def on_run(self, path: Path) -> None:
        """Remember the run's folder."""
        self.run = RunDirectory(path)

    def on_event(self, event: events.Event) -> None:
        """Record the loss of a step, and stop the run once the loss has diverged."""
        if not isinstance(event, events.StepEvent) or self.diverged:
            return
        if event.loss is not None:
            self.losses.append(event.loss)
        self.diverged = event.loss is None or has_diverged(self.losses)
        if self.diverged and self.run is not None:
            protocol.send(self.run.commands, "stop")


# --- result


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether the mean of the latest losses is far above the lowest such mean, so that no rate above is useful.

    Means of 10 losses, because single ones depend more on the timestep than on the weights.
    """
    means = [sum(losses[end - 10 : end]) / 10 for end in range(10, len(losses) + 1)]
    return bool(means) and means[-1] > _DIVERGED * min(means)


def evaluate(rates: Sequence[float], losses: Sequence[float]) -> RangeTest:
    """Return the smoothed curve of a test and its suggestion; raises RunError if it has too few points.

    No rate is suggested if the loss falls by less than three standard errors.
    """
    if len(losses) < _SHORTEST // 2:
        sentence = f"Could not test learning rates: the loss diverged after {len(losses)} steps."
        raise RunError("lr_find.diverged", sentence, "Start at a lower rate with --from.")
    width = max(1.0, _WIDTH * len(losses))
    curve = smoothed(losses, width)
    low = min(range(len(curve)), key=curve.__getitem__)
    fall, noise = curve[0] - curve[low], _fall_error(losses, curve, low, width)
    logs = [math.log(rate) for rate in rates]
    slopes = {at: (curve[at + 1] - curve[at - 1]) / (logs[at + 1] - logs[at - 1]) for at in range(1, low)}
    is_sure = bool(slopes) and fall > _SURE * noise
    points = [Point(*values) for values in zip(rates, losses, curve, strict=True)]
    suggestion = rates[min(slopes, key=slopes.__getitem__)] if is_sure else None
    return RangeTest(points, suggestion, rates[low], fall, noise)


def smoothed(losses: Sequence[float], width: float) -> list[float]:
    """Return the mean around each loss, weighted by a Gaussian with a standard deviation of `width` steps."""
    count = len(losses)
    return [_dot(_weights(center, count, width), losses) for center in range(count)]


def _fall_error(losses: Sequence[float], curve: Sequence[float], low: int, width: float) -> float:
    """Return the standard error of the curve's fall from its first point to the one at `low`.

    The losses' variance is that of their distances from the curve up to there, but at least over half of the test,
    divided by the share of it that a mean with these weights leaves. At the ends of the curve, where means are of fewer
    losses, the error is larger.
    """
    count = max(low + 1, len(losses) // 2)
    kernels = [_weights(at, len(losses), width) for at in range(count)]
    left = sum(1.0 - 2.0 * kernel[at] + _dot(kernel, kernel) for at, kernel in enumerate(kernels))
    variance = sum((loss - mean) ** 2 for loss, mean in zip(losses[:count], curve, strict=False)) / left
    difference = [first - last for first, last in zip(kernels[0], kernels[low], strict=True)]
    return math.sqrt(variance * _dot(difference, difference))


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def _weights(center: int, count: int, width: float) -> list[float]:
    """Return the weights of `count` losses in the mean around one of them."""
    weights = [math.exp(-0.5 * ((at - center) / width) ** 2) for at in range(count)]
    total = sum(weights)
    return [weight / total for weight in weights]


def table(found: RangeTest) -> list[str]:
    """Return the curve as a table of at most 20 rows."""
    count = min(_ROWS, len(found.points))
    shown = [found.points[round(row * (len(found.points) - 1) / (count - 1))] for row in range(count)]
    rows = [(f"{each.learning_rate:.2e}", f"{each.smoothed:.4f}", f"{each.loss:.4f}") for each in shown]
    return words.columns([("LEARNING RATE", "SMOOTHED LOSS", "LOSS OF THE STEP"), *rows])


def summary(found: RangeTest) -> list[str]:
    """Return the suggestion and what it is worth."""
    figures = f"The smoothed loss falls by {found.fall:.4f}, with a standard error of {found.noise:.4f}"
    if found.suggestion is None:
        return [f"No suggestion: {figures[0].lower()}{figures[1:]}, so the fall may be chance.", "Try more --steps."]
    is_last = found.lowest == found.points[-1].learning_rate
    beyond = "the highest rate of the test; try a higher --to" if is_last else "higher rates make it worse"
    return [
        f"Suggestion: recipe.learning_rate = {found.suggestion:.1e}, where the loss falls most steeply. {figures}.",
        f"The loss is lowest at {found.lowest:.1e}{', ' if is_last else '; '}{beyond}.",
        "This is a starting point: the test sees only a short training from new weights, and the loss does not say "
        "how images look. Compare rates around it with `sweep`.",
    ]


def draw(found: RangeTest, path: Path) -> None:
    """Write an image (PNG) of the loss against the learning rate; raises RunError if it cannot be written."""
    from PIL import Image, ImageDraw, ImageFont

    from trainer.cli.sweep import Scale
    from trainer.protocol.places import write_remedy

    rates = [point.learning_rate for point in found.points]
    bounds = [point.smoothed for point in found.points]
    margin = 0.3 * (max(bounds) - min(bounds)) or 0.1
    width, height = _SIZE
    x = Scale(rates[0], rates[-1], _LEFT, width - _RIGHT, logarithmic=True)
    y = Scale(min(bounds) - margin, max(bounds) + margin, height - _BOTTOM, _TOP)
    image = Image.new("RGB", _SIZE, _PAPER)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for point in found.points:
        if y.low <= point.loss <= y.high:
            across, down = x.place(point.learning_rate), y.place(point.loss)
            pen.ellipse((across - 2, down - 2, across + 2, down + 2), fill=_FAINT)
    pen.line([(x.place(point.learning_rate), y.place(point.smoothed)) for point in found.points], _LINE, width=3)
    if found.suggestion is not None:
        across = x.place(found.suggestion)
        pen.line((across, _TOP, across, height - _BOTTOM), _MARK, width=2)
        pen.text((across + 6, _TOP), f"{found.suggestion:.1e}", _MARK, font)
    pen.line((_LEFT, height - _BOTTOM, width - _RIGHT, height - _BOTTOM), _INK)
    for power in range(math.ceil(math.log10(rates[0])), math.floor(math.log10(rates[-1])) + 1):
        pen.text((x.place(10.0**power), height - _BOTTOM + 8), f"1e{power}", _INK, font, anchor="ma")
    for value in (min(bounds), max(bounds)):
        pen.text((_LEFT - 8, y.place(value)), f"{value:.4f}", _INK, font, anchor="rm")
    pen.text(((_LEFT + width - _RIGHT) / 2, height - 28), "Learning rate", _INK, font, anchor="ma")
    pen.text((12, 14), "Smoothed loss (line) and loss of single steps (dots)", _INK, font)
    try:
        image.save(path, format="PNG")
    except OSError as error:
        sentence = f"Could not write the chart {path}: {error.strerror or error}."
        raise RunError("lr_find.chart", sentence, write_remedy(error)) from error
