"""What to change in a plan or recipe to need less memory, how much that gains, and what time it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.fit import FitConfig
from trainer.memory import timing
from trainer.memory.course import bounding_buckets, step_seconds, training_sums
from trainer.memory.recipes import lighter
from trainer.memory.situation import Situation
from trainer.memory.subject import Subject
from trainer.memory.tape import Work
from trainer.memory.traces import Traces


@dataclass(frozen=True)
class Lever:
    """One key of a fit or recipe changed, everything else as planned."""

    key: str
    """As in a job, such as "fit.micro_batch"."""
    value: Any
    saved: int
    """Bytes that training then needs less, at its highest moment."""
    slower: float
    """By which factor a step then takes longer; below 1: shorter."""


def levers(subject: Subject, fit: FitConfig, situation: Situation, traces: Traces) -> Iterator[Lever]:
    """The levers that save something, those of the fit first; traces what is not known."""
    planned = replace(subject, fit=fit)
    now = training_figures(planned, situation, traces)
    for key, value, other in _changed(planned):
        then = training_figures(other, situation, traces)
        if then[0] < now[0]:
            yield Lever(key, value, now[0] - then[0], then[1] / now[1])


def _changed(subject: Subject) -> Iterator[tuple[str, Any, Subject]]:
    fit = subject.fit
    for key, value in _of_fit(fit):
        yield f"fit.{key}", value, replace(subject, fit=fit.changed(**{key: value}))
    told: set[str] = set()
    for change in lighter(subject):
        (key, value), *more = change.keys.items()
        if (more and key != "rank") or key in told:  # each key once, by its first step down
            continue
        told.add(key)
        yield f"recipe.{key}", value, change.applied_to(subject)


def _of_fit(fit: FitConfig) -> Iterable[tuple[str, Any]]:
    if fit.checkpointing != "full":
        yield "checkpointing", "full"
    if (fit.micro_batch or 1) > 1:
        yield "micro_batch", -(-(fit.micro_batch or 1) // 2)
    if fit.quantise in (None, "none"):
        yield "quantise", "int8"
    if fit.quantise != "nf4":
        yield "quantise", "nf4"


def training_figures(subject: Subject, situation: Situation, traces: Traces) -> tuple[int, float]:
    """Bytes at the highest moment of training, and seconds a step; traces what is not known."""

    def seconds(work: Iterable[Work]) -> float:
        return timing.seconds(work, situation.rate)

    steps = traces.step_outlines(subject, bounding_buckets(subject)[0], subject.fit.micro_batch or 1)
    return training_sums(subject, steps).peak, step_seconds(subject, steps, seconds)
