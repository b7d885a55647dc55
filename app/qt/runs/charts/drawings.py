"""Makes of runs what each chart draws, and says it in words too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from PySide6.QtCore import QCoreApplication

from app.core.runs.curves import arrays, smoothed
from app.core.runs.run import CardWatch, Run
from app.core.runs.series import Mark, Track
from app.qt.runs.charts.axis import Wording, count, number, rate
from app.qt.runs.charts.legend import colour_of
from app.qt.runs.charts.lines import Drawing, Level, Line, Look

# Per cent of the values at either end that an axis need not have room for.
_CLIP = 1.0
# A limit far above what is used would leave the lines no room.
_NEAR = 1.6
_GIB = 1024.0**3


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the user wants to see it."""

    smoothing: float = 50.0
    """Steps that the smooth line averages over."""
    logarithmic: bool = False
    clip: bool = True


def loss(runs: Sequence[Run], wishes: Wishes) -> Drawing:
    """The loss of each step of one run, and smoothed of all."""
    lines = list(_noisy(runs, lambda run: run.series.loss, _tr("each step"), _tr("smoothed"), wishes.smoothing))
    kinds = {mark.kind for run in runs[:1] for mark in run.series.marks}
    legend = (("saved", _tr("saved"), "good"), ("preview", _tr("samples"), "muted"))
    return Drawing(
        lines,
        marks=_marks(runs),
        best=_best(runs),
        logarithmic=wishes.logarithmic,
        clip=_CLIP if wishes.clip else 0.0,
        words=_summary(lines, number),
        extra=tuple((label, colour) for kind, label, colour in legend if kind in kinds),
    )


def held_out(runs: Sequence[Run], wishes: Wishes) -> Drawing:
    """The loss at fixed noise: on pictures held out, else on those that are trained on, which tell no best step."""
    held = list(_each(runs, lambda run: run.series.held_out, _tr("held-out pictures"), "points"))
    trained = list(_each(runs, lambda run: run.series.validation, _tr("trained pictures (none held out)"), "points"))
    title = "" if held and trained else _tr("Loss on held-out pictures") if held else _tr("Loss on trained pictures")
    lines, words = [*held, *trained], _summary([*held, *trained], number)
    return Drawing(lines, best=_best(runs), title=title, logarithmic=wishes.logarithmic, words=words)


def learning_rates(runs: Sequence[Run]) -> Drawing:
    """Learning rates by part."""
    looks: tuple[Look, ...] = ("plain", "dashed", "dotted")
    names = {"unet": _tr("U-Net"), "text_encoder": _tr("text encoder"), "text_encoder_2": _tr("second text encoder")}
    parts = list(dict.fromkeys(part for run in runs for part in run.series.rates))
    lines: list[Line] = []
    for place, part in enumerate(parts):
        lines += _each(runs, partial(_rate, part), names.get(part, part), looks[place % len(looks)])
    return Drawing(lines, words=_summary(lines, rate))


def _rate(part: str, run: Run) -> Track | None:
    return run.series.rates.get(part)


def memory(runs: Sequence[Run]) -> Drawing:
    """Memory on the device, against what was forecast for the first run."""
    measured = _each(runs, lambda run: run.series.memory, _tr("measured"), "thin")
    lines = [replace(line, values=line.values / _GIB) for line in measured]
    most = max((float(np.nanmax(line.values)) for line in lines), default=0.0)
    levels = list(_memory_levels(runs[0], most)) if runs and lines else []
    words = " ".join([_summary(lines, number), *(f"{level.label}: {number(level.value)}." for level in levels)])
    return Drawing(lines, levels, marks=_marks(runs), words=words)


def seconds(runs: Sequence[Run], wishes: Wishes) -> Drawing:
    """Seconds of each step."""
    lines = list(_noisy(runs, lambda run: run.series.seconds, _tr("each step"), _tr("smoothed"), wishes.smoothing))
    return Drawing(lines, clip=_CLIP if wishes.clip else 0.0, words=_summary(lines, number))


def speed(runs: Sequence[Run], wishes: Wishes) -> Drawing:
    """Pictures a second."""
    lines = list(_noisy(runs, lambda run: run.series.speed, _tr("each step"), _tr("smoothed"), wishes.smoothing))
    return Drawing(lines, clip=_CLIP if wishes.clip else 0.0, words=_summary(lines, number))


def card(watch: CardWatch) -> Drawing:
    """Load and temperature of the card since it is watched."""
    told = ((watch.load, _tr("load, %"), "series1"), (watch.temperature, _tr("temperature, °C"), "series2"))
    lines = [Line(label, *arrays(track), "plain", colour) for track, label, colour in told if len(track) > 1]
    return Drawing(lines, words=_summary(lines, count))


def _noisy(runs: Sequence[Run], track: Callable[[Run], Track], raw: str, smooth: str, steps: float) -> Iterator[Line]:
    """Yield the values of each step, of one run only, and smoothed of all."""
    for place, run in enumerate(runs):
        x, y = arrays(track(run))
        if not len(x):
            continue
        if len(runs) == 1:
            yield Line(raw, x, y, "raw", colour_of(place), run.summary.name)
        yield Line(smooth, x, smoothed(y, steps), "smooth", colour_of(place), _named(runs, run))


def _each(runs: Sequence[Run], track: Callable[[Run], Track | None], label: str, look: Look) -> Iterator[Line]:
    for place, run in enumerate(runs):
        found = track(run)
        if found:
            yield Line(label, *arrays(found), look, colour_of(place), _named(runs, run))


def _memory_levels(run: Run, most: float) -> Iterator[Level]:
    if run.forecast is None:
        return
    training = [phase for phase in map(run.forecast.of, ("first_step", "train")) if phase]
    foreseen = max((phase.allocated / _GIB for phase in training), default=0.0)
    budget = run.forecast.budget / _GIB
    if foreseen:
        yield Level(_tr("forecast"), foreseen)
    if 0 < budget < _NEAR * max(most, foreseen):
        yield Level(_tr("limit"), budget, "bad")


def _marks(runs: Sequence[Run]) -> Sequence[Mark]:
    """Return the marks of the first run: those of several could not be told apart."""
    return tuple(runs[0].series.marks) if runs else ()


def _best(runs: Sequence[Run]) -> int | None:
    return runs[0].series.best_step() if runs else None


def _named(runs: Sequence[Run], run: Run) -> str:
    return run.summary.name if len(runs) > 1 else ""


def _summary(lines: Sequence[Line], words: Wording) -> str:
    """Return what the lines do, for who does not see them: where each begins, ends, is lowest and highest."""
    told = [_said(line, words) for line in lines if line.look != "raw" and np.isfinite(line.values).any()]
    return " ".join(told) or _tr("Nothing was measured yet.")


def _said(line: Line, words: Wording) -> str:
    known = np.flatnonzero(np.isfinite(line.values))
    steps, values = line.steps[known], line.values[known]
    low = int(np.argmin(values))
    sentence = _tr("{name}: {first} at first, {last} at step {step}; lowest {low} at step {where}, highest {high}.")
    return sentence.format(
        name=" ".join(filter(None, (line.run, line.label))),
        first=words(values[0]),
        last=words(values[-1]),
        step=count(steps[-1]),
        low=words(values[low]),
        where=count(steps[low]),
        high=words(float(values.max())),
    )


def _tr(text: str) -> str:
    return QCoreApplication.translate("Charts", text)
