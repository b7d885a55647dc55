"""Estimate a plan from traces of a similar recipe, until its own are recorded. Does not require torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.config.fit import FitConfig
from trainer.config.methods import FP32, MasterWeight
from trainer.config.presets.library import preset_with_recipe
from trainer.config.recipe import RecipeConfig
from trainer.files.tokens import CHUNK
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.schedule import PhaseCounts, bounding_shapes
from trainer.memory.planner.optimizers import state_bytes
from trainer.memory.planner.planner import Plan, plan
from trainer.memory.planner.request import PlanRequest, assumed_request, least_weights
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.workload import TracePart, Workload, complete_fit
from trainer.protocol.plan import PlanEstimate

# Recipe whose traces ship for every family.
KNOWN_RECIPE = "style"
# Settings of a recipe that change traces without changing the adapter; their defaults are the most likely to be known.
MINOR_KEYS = ("dropout", "rank_dropout", "module_dropout", "max_weight_norm", "ema_decay", "optimizer")
# An estimate this close to the budget, as a share of it, says neither that the job fits nor that it does not.
UNSURE = 0.03
# Images whose pixels differ by at most this share count as equally large.
SAME_SIZE = 0.1
# Bytes for each number of a LoRA in fp32: the master weight and its gradient.
_MASTER = 2 * FP32
_PARTS: tuple[TracePart, ...] = (
    "optimizer",
    "cache_pictures",
    "cache_texts",
    "load",
    "quantise",
    "validate",
    "preview",
)


@dataclass(frozen=True)
class EstimatedPlan:
    """A plan of a similar recipe, and what it says about the one that was asked for."""

    fit: FitConfig
    """Planned fit of the similar recipe, which is likely to work."""
    figures: PlanEstimate | None
    """None if the similar recipe has images of another size or another adapter, with too different memory and time."""


def estimated_plan(request: PlanRequest, traces: TraceLibrary) -> EstimatedPlan | None:
    """Return an estimate for a request whose traces are missing; None if they are known, or no similar ones are.

    Nothing is traced. Memory is that of the similar recipe's plan, with the difference in the bytes of adapter,
    gradients and optimizer state added; time is that plan's.
    """
    state = request.device_state
    if state.on_cpu or not _has_to_trace(request, traces):
        return None
    for workload, counts in _similar(request):
        found = _known_plan(workload, request.written, counts, state, TraceLibrary(traces.store, _refuse))
        if found is not None:
            forecast = found.forecast
            # A run that fits returns cached blocks to the driver rather than exceed the budget.
            reserved = min(forecast.reserved, forecast.budget) if forecast.fits else forecast.reserved
            reserved += _trained_bytes(request.workload) - _trained_bytes(workload)
            figures = PlanEstimate(reserved, state.budget, forecast.seconds, _fits(reserved, state.budget))
            same_adapter = workload.recipe.adapter == request.workload.recipe.adapter
            alike = same_adapter and abs(_pixels(workload) / _pixels(request.workload) - 1) <= SAME_SIZE
            return EstimatedPlan(found.fit, figures if alike else None)
    return None


def _has_to_trace(request: PlanRequest, traces: TraceLibrary) -> bool:
    """Return whether traces of the plainest fit are missing, which every search begins with."""
    dtype = "bf16" if request.device_state.gpu.bf16 else "fp16"
    fit = complete_fit(request.written.replaced(dtype=request.written.dtype or dtype))
    workload = replace(request.workload, fit=fit)
    shape = bounding_shapes(workload)[0]
    if not traces.has_steps(workload, shape, workload.images_at_once(shape)):
        return True
    return not all(traces.has_phase(workload, part) for part in _PARTS)


def _similar(request: PlanRequest) -> Iterator[tuple[Workload, PhaseCounts]]:
    """Yield workloads with known or likely known traces, the most similar first."""
    workload, recipe = request.workload, request.workload.recipe
    plain = RecipeConfig()
    minor = {key: getattr(plain, key) for key in MINOR_KEYS}
    yield replace(workload, recipe=recipe.model_copy(update=minor)).at_tokens(CHUNK), request.counts
    if not workload.has_published_unet:  # the traces of the preset say nothing about other architectures
        return
    preset = preset_with_recipe(KNOWN_RECIPE, workload.family)
    amounts = [f"recipe.effective_batch={recipe.effective_batch}", f"recipe.steps={recipe.steps}"]
    known = assumed_request(workload.family, preset.recipe, request.device_state, overrides=amounts)
    yield known.workload, request.counts


class _NotTracedError(Exception):
    """Traces are missing."""


def _refuse() -> None:
    raise _NotTracedError


def _known_plan(
    workload: Workload, written: FitConfig, counts: PhaseCounts, device_state: DeviceState, known: TraceLibrary
) -> Plan | None:
    """Return the best plan among fits with known traces, or the smallest one if none fits; None without traces."""
    try:
        found = plan(workload, written, device_state, known, counts, deadline=Deadline(0), others=False)
    except _NotTracedError:
        return None
    return found.pick or found.smaller


def _trained_bytes(workload: Workload) -> int:
    """Return the least bytes of the UNet's adapter with master weights, gradients and optimizer state."""
    numbers, rank = least_weights(workload), workload.recipe.rank
    width = 4 if workload.fit.dtype == "fp32" else 2
    # As one matrix: only the state of optimizers that keep sums of rows and columns depends on the shapes.
    weights = [MasterWeight((rank, numbers // rank), starts_at_zero=False)] if numbers else []
    average = FP32 if workload.recipe.ema_decay else 0
    return numbers * (2 * width + _MASTER + average) + state_bytes(workload.recipe.optimizer, weights)


def _pixels(workload: Workload) -> int:
    width, height, _ = bounding_shapes(workload)[0]
    return width * height


def _fits(reserved: int, budget: int) -> bool | None:
    """Return whether a job is likely to fit; None if the estimate is too close to the budget to say."""
    if abs(reserved - budget) <= UNSURE * budget:
        return None
    return reserved < budget
