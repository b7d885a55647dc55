"""What to change in a plan or recipe to need less memory, how much that gains, and what time it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.fit import FitConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.schedule import bounding_buckets, step_seconds, training_sums
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import Work
from trainer.memory.trace.workload import BucketUse, Workload

LOWEST_RANK = 4
SMALLEST_SIDE = 256
# Resolutions are offered in these shares of the one asked for.
SHARES = (0.875, 0.75, 0.625, 0.5)


@dataclass(frozen=True)
class RecipeChange:
    """Keys of a recipe with other values."""

    keys: Mapping[str, Any]
    """By their names below ``recipe``, such as "text_encoder.learning_rate"."""

    def applied_to(self, subject: Workload) -> Workload:
        """The subject with the change; its shapes follow the resolution."""
        recipe = changed(subject.recipe, self.keys)
        share = (recipe.resolution or 1) / (subject.recipe.resolution or 1)
        buckets = subject.buckets if share == 1.0 else _scaled(subject, share)
        return replace(subject, recipe=recipe, buckets=buckets)


def lighter(subject: Workload) -> Iterator[RecipeChange]:
    """Changes in the order of what they cost the result: one alone first, then all of them with less resolution."""
    recipe = subject.recipe
    kept: dict[str, Any] = {}
    for single in _singles(recipe):
        yield RecipeChange(single)
        kept |= single
    for side in _sides(recipe):
        yield RecipeChange({"resolution": side})
    for side in _sides(recipe):
        yield RecipeChange({**kept, "resolution": side})


def changed(recipe: RecipeConfig, keys: Mapping[str, Any]) -> RecipeConfig:
    """The recipe with some keys replaced; those of inner tables by their dotted names."""
    values = recipe.model_dump(exclude_unset=True)
    for key, value in keys.items():
        *tables, name = key.split(".")
        inner = values
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return RecipeConfig.model_validate(values)


def _singles(recipe: RecipeConfig) -> Iterator[dict[str, Any]]:
    if recipe.optimizer.name == "adamw":
        yield {"optimizer.name": "adamw8bit"}
    trained = [name for name in ("text_encoder", "text_encoder_2") if getattr(recipe, name).learning_rate]
    if trained and recipe.learning_rate:
        yield {f"{name}.learning_rate": 0.0 for name in trained}
    rank = recipe.rank // 2
    while rank >= LOWEST_RANK:
        # The strength alpha/rank stays as it was.
        yield {"rank": rank, "alpha": recipe.alpha * rank / recipe.rank}
        rank //= 2


def _sides(recipe: RecipeConfig) -> Iterator[int]:
    """Lower resolutions in whole steps of the buckets."""
    step, side = recipe.pictures.bucket_step, recipe.resolution or 0
    for share in SHARES:
        lower = int(side * share) // step * step
        if lower >= SMALLEST_SIDE:
            yield lower


def _scaled(subject: Workload, share: float) -> tuple[BucketUse, ...]:
    """Shapes about as the pictures would fall into them: their own, smaller, in whole steps."""
    step = subject.recipe.pictures.bucket_step
    uses: dict[tuple[int, int], int] = {}
    for bucket in subject.buckets:
        width, height = (max(step, int(side * share) // step * step) for side in bucket.size)
        uses[width, height] = uses.get((width, height), 0) + bucket.pictures
    largest_first = sorted(uses, key=lambda size: (-size[0] * size[1], size))
    return tuple(BucketUse(*size, uses[size]) for size in largest_first)


@dataclass(frozen=True)
class Suggestion:
    """One key of a fit or recipe changed, everything else as planned."""

    key: str
    """As in a job, such as "fit.micro_batch"."""
    value: Any
    saved: int
    """Bytes that training then needs less, at its highest moment."""
    slower: float
    """By which factor a step then takes longer; below 1: shorter."""


def levers(subject: Workload, fit: FitConfig, situation: DeviceState, traces: TraceLibrary) -> Iterator[Suggestion]:
    """The levers that save something, those of the fit first; traces what is not known."""
    planned = replace(subject, fit=fit)
    now = training_figures(planned, situation, traces)
    for key, value, other in _changed(planned):
        then = training_figures(other, situation, traces)
        if then[0] < now[0]:
            yield Suggestion(key, value, now[0] - then[0], then[1] / now[1])


def _changed(subject: Workload) -> Iterator[tuple[str, Any, Workload]]:
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


def training_figures(subject: Workload, situation: DeviceState, traces: TraceLibrary) -> tuple[int, float]:
    """Bytes at the highest moment of training, and seconds a step; traces what is not known."""

    def seconds(work: Iterable[Work]) -> float:
        return roofline.seconds(work, situation.rate)

    steps = traces.step_outlines(subject, bounding_buckets(subject)[0], subject.fit.micro_batch or 1)
    return training_sums(subject, steps).peak, step_seconds(subject, steps, seconds)
