"""Suggest changes to a fit or recipe that save memory, each with the bytes saved and the change in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
        """Return the workload with the change applied; buckets scale with the resolution."""
        recipe = changed(workload.recipe, self.keys)
        share = (recipe.resolution or 1) / (workload.recipe.resolution or 1)
        buckets = workload.buckets if share == 1.0 else _scaled(workload, share)
        return replace(workload, recipe=recipe, buckets=buckets)


def reduced_recipes(workload: Workload) -> Iterator[RecipeChange]:
    """Yield changes that save memory: single ones, lower resolutions, then all single ones at lower resolutions."""
    recipe = workload.recipe
    kept: dict[str, Any] = {}
    for single in _singles(recipe):
        yield RecipeChange(single)
        kept |= single
    for side in _sides(recipe):
        yield RecipeChange({"resolution": side})
    for side in _sides(recipe):
        yield RecipeChange({**kept, "resolution": side})


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


def _singles(recipe: RecipeConfig) -> Iterator[dict[str, Any]]:
    if recipe.optimizer.name == "adamw":
        yield {"optimizer.name": "adamw8bit"}
    trained = [name for name in ("text_encoder", "text_encoder_2") if getattr(recipe, name).learning_rate]
    if trained and recipe.learning_rate:
        yield {f"{name}.learning_rate": 0.0 for name in trained}
    rank = recipe.rank // 2
    while rank >= LOWEST_RANK:
        yield {"rank": rank, "alpha": recipe.alpha_at(rank)}
        rank //= 2


def _sides(recipe: RecipeConfig) -> Iterator[int]:
    """Yield resolutions below the recipe's, rounded down to multiples of the bucket step."""
    step, side = recipe.images.bucket_step, recipe.resolution or 0
    for share in SHARES:
        lower = int(side * share) // step * step
        if lower >= SMALLEST_SIDE:
            yield lower


def _scaled(workload: Workload, share: float) -> tuple[BucketUse, ...]:
    """Return the buckets with sides scaled by `share`, an approximation of how images would be sorted into buckets."""
    step = workload.recipe.images.bucket_step

    def scaled(side: int) -> int:
        return max(step, int(side * share) // step * step)

    return merged(replace(use, width=scaled(use.width), height=scaled(use.height)) for use in workload.buckets)


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
    for change in reduced_recipes(workload):
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
