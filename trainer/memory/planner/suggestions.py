"""Suggest changes to a fit or recipe that save memory, each with the bytes saved and the change in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from trainer.config.fit import FitConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.schedule import (
    PhaseCounts,
    RunSchedule,
    bounding_shapes,
    step_seconds,
    training_totals,
)
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import Work
from trainer.memory.trace.workload import BucketUse, Workload, merged
from trainer.protocol.records import json_keys

T = TypeVar("T")

LOWEST_RANK = 4
SMALLEST_SIDE = 256
# Suggested resolutions, as shares of the one in the recipe.
SHARES = (0.875, 0.75, 0.625, 0.5)


@dataclass(frozen=True)
class RecipeChange:
    """Changed values for keys of a recipe."""

    keys: Mapping[str, Any]
    """New values by key within ``recipe``, such as "text_encoder.learning_rate"."""

    def applied_to(self, workload: Workload) -> Workload:
        """Return the workload with the change applied; buckets and previews scale with the resolution."""
        before, recipe = workload.recipe.resolution or 1, changed(workload.recipe, self.keys)
        side = recipe.resolution or 1
        if side == before:
            return replace(workload, recipe=recipe)
        # Previews are as large as the images unless a job says otherwise.
        previews = tuple(
            prompt.replaced(width=side, height=side) if (prompt.width, prompt.height) == (before, before) else prompt
            for prompt in workload.previews
        )
        scaled = replace(workload, recipe=recipe, buckets=_scaled(workload.buckets, recipe, before), previews=previews)
        return replace(scaled, validation_buckets=_scaled(workload.validation_buckets, recipe, before))


def reduced_recipes(workload: Workload) -> list[list[RecipeChange]]:
    """Return groups of changes that save memory, from the least to the most within a group, the preferred group first.

    Single changes come first, then lower resolutions, then all single changes together, at last at lower resolutions.
    """
    recipe = workload.recipe
    singles = list(_singles(recipe))
    sides = [{"resolution": side} for side in _sides(recipe)] if not workload.folder_resolutions else []
    others = {key: value for group in singles[:-1] for key, value in group[-1].items()}
    together = [{**others, **last} for last in singles[-1]] if others else []
    strongest = singles[-1][-1] if singles else {}
    groups = [*singles, sides, together, [{**others, **strongest, **side} for side in sides]]
    return [[RecipeChange(keys) for keys in group] for group in groups if group]


def mildest(
    changes: Sequence[RecipeChange], check: Callable[[RecipeChange], T | None]
) -> tuple[RecipeChange, T] | None:
    """Return the first of ``changes`` that works and what ``check`` returns for it (None if a change does not work).

    ``changes`` become stronger, so the last one is checked first: if it does not work, none does. Otherwise, the first
    that works is found by bisection, because each check may take seconds.
    """
    if not changes or (found := check(changes[-1])) is None:
        return None
    low, high = 0, len(changes) - 1
    while low < high:
        middle = (low + high) // 2
        if (other := check(changes[middle])) is None:
            low = middle + 1
        else:
            found, high = other, middle
    return changes[high], found


def changed(recipe: RecipeConfig, keys: Mapping[str, Any]) -> RecipeConfig:
    """Return the recipe with some keys replaced; keys in nested tables are dotted."""
    values = recipe.model_dump(exclude_unset=True)
    for key, value in keys.items():
        *tables, name = key.split(".")
        inner = values
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return RecipeConfig.model_validate(values)


def _singles(recipe: RecipeConfig) -> Iterator[list[dict[str, Any]]]:
    """Yield groups of changes to one setting: the optimizer, text encoders, the rank."""
    if recipe.optimizer.name == "adamw":
        yield [{"optimizer.name": "adamw8bit"}]
    trained = [name for name, encoder in recipe.text_encoders.items() if encoder.learning_rate]
    if trained and recipe.learning_rate:
        yield [{f"{name}.learning_rate": 0.0 for name in trained}]
    ranks = [recipe.rank >> halvings for halvings in range(1, recipe.rank.bit_length())]
    if lower := [{"rank": rank, "alpha": recipe.alpha_at(rank)} for rank in ranks if rank >= LOWEST_RANK]:
        yield lower


def _sides(recipe: RecipeConfig) -> Iterator[int]:
    """Yield resolutions below the recipe's, rounded down to multiples of the bucket step."""
    step, side = recipe.images.bucket_step, recipe.resolution or 0
    for share in SHARES:
        lower = int(side * share) // step * step
        if lower >= SMALLEST_SIDE:
            yield lower


def _scaled(buckets: Sequence[BucketUse], recipe: RecipeConfig, before: int) -> tuple[BucketUse, ...]:
    """Return buckets of the resolution `before` for that of `recipe`, roughly as images would be sorted into them."""
    step, share = recipe.images.bucket_step, (recipe.resolution or 1) / before

    def scaled(side: int) -> int:
        return max(step, int(side * share) // step * step)

    return merged(replace(use, width=scaled(use.width), height=scaled(use.height)) for use in buckets)


@dataclass(frozen=True)
class Suggestion:
    """Change to one key of a fit or recipe; all other keys stay as planned."""

    key: str
    """Key in a job, such as "fit.micro_batch"."""
    value: Any
    saved: int
    """Bytes saved at the peak of training."""
    slower: float
    """Factor by which the time per step changes; below 1 is faster."""


@json_keys("tokens", "saved", "step_seconds", "padded_step_seconds")
@dataclass(frozen=True)
class PaddingSaved:
    """What padding each caption to its own length saves, compared with padding all to the limit."""

    tokens: int
    """The limit."""
    saved: int
    """Bytes saved at the peak of training."""
    step_seconds: float
    """Seconds of a mean optimizer step."""
    padded_step_seconds: float
    """Seconds of a mean optimizer step with all captions padded to the limit."""


def padding_saved(
    workload: Workload, counts: PhaseCounts, device_state: DeviceState, traces: TraceLibrary
) -> PaddingSaved | None:
    """Return what padding each caption to its own length saves; None if all have one length anyway.

    Missing traces are recorded.
    """
    if workload.lengths is None:
        return None
    own = RunSchedule(workload, traces, counts, device_state.rate)
    limit = RunSchedule(workload.padded(), traces, replace(counts, batches=counts.padded), device_state.rate)
    peaks, seconds = [], []
    for schedule in (own, limit):
        shapes = bounding_shapes(schedule.workload)
        totals = (training_totals(schedule.workload, shape, schedule.step_summaries(shape)) for shape in shapes)
        peaks.append(max(each.peak for each in totals))
        seconds.append(schedule.mean_step_seconds(lambda work: roofline.seconds(work, device_state.rate)))
    return PaddingSaved(workload.recipe.token_chunks, peaks[1] - peaks[0], seconds[0], seconds[1])


@dataclass(frozen=True, slots=True)
class StopSavings:
    """What a run needs less once all text encoders with ``stop_after`` have stopped."""

    step: int
    """Number of steps after which they have."""
    bytes: int
    """Bytes by which the peak of training is lower from then on."""
    seconds: float
    """Seconds that all later steps take less, together."""


def stop_savings(
    workload: Workload, device_state: DeviceState, traces: TraceLibrary, deadline: Deadline
) -> StopSavings | None:
    """Return what stopping text encoders saves; None if none stops within the run, or for lack of time.

    Missing traces are recorded until the deadline is over.
    """
    stop, steps = max(workload.recipe.stops.values(), default=0), workload.recipe.steps or 1
    if not 0 < stop < steps:
        return None
    stopped = replace(workload, after_stops=True)
    shape = bounding_shapes(stopped)[0]
    known = traces.has_steps(stopped, shape, stopped.images_at_once(shape))
    if not known and deadline.leaves_out("after_stops"):
        return None
    now, then = (training_figures(each, device_state, traces) for each in (workload, stopped))
    each_step = device_state.correction.time_factor * (now[1] - then[1])
    return StopSavings(stop, now[0] - then[0], each_step * (steps - stop))


def suggestions(
    workload: Workload, fit: FitConfig, device_state: DeviceState, traces: TraceLibrary, deadline: Deadline
) -> Iterator[Suggestion]:
    """Yield suggestions that save memory, those for the fit first.

    Missing traces are recorded until the deadline is over, which then leaves out keys whose effect is unknown.
    """
    planned = replace(workload, fit=fit)
    now = training_figures(planned, device_state, traces)
    for key, value, other in _changed(planned):
        shape = bounding_shapes(other)[0]
        known = traces.has_steps(other, shape, other.images_at_once(shape))
        if not known and deadline.leaves_out(key):
            continue
        then = training_figures(other, device_state, traces)
        if then[0] < now[0]:
            yield Suggestion(key, value, now[0] - then[0], then[1] / now[1])


def _changed(workload: Workload) -> Iterator[tuple[str, Any, Workload]]:
    fit = workload.fit
    for key, value in _of_fit(fit):
        yield f"fit.{key}", value, replace(workload, fit=fit.replaced(**{key: value}))
    seen: set[str] = set()
    for change in chain.from_iterable(reduced_recipes(workload)):
        (key, value), *more = change.keys.items()
        if (more and key != "rank") or key in seen:  # suggest only the first step down of each key
            continue
        seen.add(key)
        yield f"recipe.{key}", value, change.applied_to(workload)


def _of_fit(fit: FitConfig) -> Iterable[tuple[str, Any]]:
    if fit.gradient_checkpointing != "full":
        yield "gradient_checkpointing", "full"
    if (fit.micro_batch or 1) > 1:
        yield "micro_batch", -(-(fit.micro_batch or 1) // 2)
    if not fit.is_streamed:
        yield "stream", "full"
    if not fit.is_quantized:
        yield "quantize", "int8"
    if fit.quantize != "nf4":
        yield "quantize", "nf4"


def training_figures(workload: Workload, device_state: DeviceState, traces: TraceLibrary) -> tuple[int, float]:
    """Return the peak bytes of training and the seconds per step; missing traces are recorded."""

    def seconds(work: Iterable[Work]) -> float:
        return roofline.seconds(work, device_state.rate)

    shape = bounding_shapes(workload)[0]
    steps = traces.step_summaries(workload, shape, workload.images_at_once(shape))
    return training_totals(workload, shape, steps).peak, step_seconds(workload, shape, steps, seconds)
