"""Compare the optimizers for a job: bytes of their state, peak of training, seconds per step. Does not require torch.

Tracing an optimizer step takes seconds per optimizer, so an optimizer that is not traced yet is estimated from what its
library allocates for a weight. `tests/train/memory/planner/test_optimizers.py` compares that with real steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.adapter.layers import trained_layers
from trainer.adapter.names import slots
from trainer.config.methods import FP32, MasterWeight
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.optimizers.section import OptimizerSection
from trainer.config.recipe import RecipeConfig
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.schedule import bounding_shapes, step_seconds, training_totals
from trainer.memory.trace.library import Steps, TraceLibrary
from trainer.memory.trace.memory_trace import BLOCK, MemoryTrace, Storage, Totals, TraceSummary, Work
from trainer.memory.trace.workload import TraceRequest, Workload
from trainer.protocol.records import json_keys


@json_keys("name", "state", "peak", "step_seconds", "exact", "chosen")
@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """What one optimizer would need and take in a job, with everything else as planned."""

    name: str
    state: int
    """Bytes of state on the GPU; the master weights and their gradients do not count."""
    peak: int
    """Peak bytes allocated in training."""
    step_seconds: float
    exact: bool
    """Whether an optimizer step was traced; otherwise the figures are computed from the sizes of the weights."""
    chosen: bool
    """Whether the job uses this optimizer."""


def optimizer_rows(workload: Workload, device_state: DeviceState, traces: TraceLibrary) -> Iterator[OptimizerRow]:
    """Yield a row for each optimizer, the job's own first; only its own traces are recorded if they are missing."""

    def seconds(work: Iterable[Work]) -> float:
        return roofline.seconds(work, device_state.rate)

    bucket = bounding_shapes(workload)[0]
    images = workload.images_at_once(bucket)
    own = traces.step_summaries(workload, bucket, images)
    weights = master_weights(traces.steps(workload, bucket, images).weights, workload)
    gradients = own.micro_first.totals.net
    for config in all_optimizers(workload.recipe):
        other = with_optimizer(workload, config)
        exact = traces.has(TraceRequest(other, "optimizer"))
        last = traces.phase_summaries(other, "optimizer") if exact else estimated_steps(config, weights, gradients)
        steps: Steps[TraceSummary] = replace(own, optimizer_first=last[0], optimizer=last[1])
        yield OptimizerRow(
            name=config.registered_name,
            state=last[0].totals.net + gradients,
            peak=training_totals(other, bucket, steps).peak,
            step_seconds=step_seconds(other, bucket, steps, seconds),
            exact=exact,
            chosen=config.name == workload.recipe.optimizer.name,
        )


def all_optimizers(recipe: RecipeConfig) -> list[OptimizerSection]:
    """Return every optimizer with its default arguments, after the recipe's own with its arguments.

    "other" is not a single optimizer, so it is listed only if the recipe selects one by it.
    """
    names = OPTIMIZERS.keys() - {recipe.optimizer.name, "other"}
    return [recipe.optimizer, *(kind.model_validate({}) for name, kind in OPTIMIZERS.items() if name in names)]


def with_optimizer(workload: Workload, config: OptimizerSection) -> Workload:
    """Return the workload with another optimizer.

    The recipe is not validated: an optimizer may require another schedule, which does not affect memory.
    """
    return replace(workload, recipe=workload.recipe.model_copy(update={"optimizer": config}))


def master_weights(weights: MemoryTrace, workload: Workload) -> list[MasterWeight]:
    """Return the sizes of all trained weights from the trace that places them."""
    masters = [storage for storage in weights.storages if (storage.name or "").startswith("master.")]
    table = slots(workload.family, workload.unet_config, workload.text_configs)
    ranks = {slot.kohya: settings.rank for slot, settings in trained_layers(table, workload.recipe).items()}
    return [
        _master(storage.bytes // FP32, storage.module, _rank_in(ranks, storage.name or ""), workload)
        for storage in masters
    ]


def _rank_in(ranks: Mapping[str, int], name: str) -> int:
    """Return the rank of the layer whose master weight has this name, such as "master.lora_unet_….lora_up.weight"."""
    return ranks[name.removeprefix("master.").partition(".")[0]]


def _master(numbers: int, module: str, rank: int, workload: Workload) -> MasterWeight:
    """Return the shape of a LoRA's first factor, rank × inputs, or of its second, outputs × rank.

    Those of other methods are taken as matrices of as many rows as the rank, which only matters for factored states.
    """
    if not workload.recipe.is_plain_lora:
        rows = math.gcd(rank, numbers)
        return MasterWeight((rows, numbers // rows), starts_at_zero=False)
    layer, factor, _ = module.rsplit(".", 2)
    kernel = _kernel(layer.rpartition(".")[2], workload) if layer.startswith("unet.") else 0
    if factor == "lora_A":
        sides = (kernel, kernel) if kernel else ()
        return MasterWeight((rank, numbers // rank // (kernel or 1) ** 2, *sides), starts_at_zero=False)
    return MasterWeight((numbers // rank, rank, *((1, 1) if kernel else ())), starts_at_zero=True)


def _kernel(name: str, workload: Workload) -> int:
    """Return the size of a UNet layer's convolution kernel; 0 if the layer is linear."""
    if name in ("proj_in", "proj_out"):  # convolutions in SD 1.5, linear in SDXL
        return 0 if workload.unet_config.get("use_linear_projection") else 1
    if name == "conv_shortcut":
        return 1
    return 3 if name.startswith("conv") else 0


def estimated_steps(
    config: OptimizerSection, weights: Sequence[MasterWeight], gradients: int
) -> tuple[TraceSummary, TraceSummary]:
    """Return summaries of a run's first optimizer step and of a later one, which free ``gradients`` bytes."""
    state, temporary = state_bytes(config, weights), temporary_bytes(config, weights)
    at_first = temporary if config.method.first_moves else 0
    work = (estimated_work(config, weights),)
    return (
        TraceSummary("optimizer_first", Totals(state - gradients, state + at_first), work),
        TraceSummary("optimizer", Totals(-gradients, temporary), work),
    )


def estimated_traces(
    config: OptimizerSection, weights: Sequence[MasterWeight], micro: MemoryTrace
) -> tuple[MemoryTrace, MemoryTrace]:
    """Return traces of a run's first optimizer step and of a later one, after the micro-batch ``micro``.

    They allocate the state and what a step needs for a moment, and free the gradients.
    """
    died = {~event for event in micro.events[micro.events < 0].tolist()}
    born = micro.events[micro.events >= 0].tolist()
    gradients = [micro.storages[index] for index in born if index not in died and micro.storages[index].name]
    sizes = state_sizes(config, weights)
    state = [Storage(size, "optimizer", "", "optimizer", f"state.{place}") for place, size in enumerate(sizes)]
    temporary = Storage(temporary_bytes(config, weights), "temporary", "", "optimizer")
    return _step_trace("optimizer_first", state, temporary, gradients), _step_trace(
        "optimizer", [], temporary, gradients
    )


def _step_trace(name: str, state: Sequence[Storage], temporary: Storage, gradients: Sequence[Storage]) -> MemoryTrace:
    """Return a trace that allocates ``state``, allocates and frees ``temporary``, and frees ``gradients``."""
    storages = (*state, temporary, *gradients)
    kept = len(state)
    events = [*range(kept + 1), ~kept, *(~place for place in range(kept + 1, len(storages)))]
    return MemoryTrace(name, storages, np.array(events, dtype=np.int32), ())


def state_bytes(config: OptimizerSection, weights: Iterable[MasterWeight]) -> int:
    """Return the bytes that an optimizer's state takes on the GPU, each tensor rounded up as the allocator does."""
    return sum(-(-size // BLOCK) * BLOCK for size in state_sizes(config, weights))


def state_sizes(config: OptimizerSection, weights: Iterable[MasterWeight]) -> list[int]:
    """Return the bytes of each tensor of an optimizer's state on the GPU."""
    return [*(size for weight in weights for size in config.state_sizes(weight)), *config.method.shared]


def temporary_bytes(config: OptimizerSection, weights: Sequence[MasterWeight]) -> int:
    """Return the bytes that a step allocates for a moment."""
    sizes = [FP32 * weight.numbers for weight in weights]
    return round(config.method.copies * sum(sizes)) or max(sizes, default=0)


def estimated_work(config: OptimizerSection, weights: Sequence[MasterWeight]) -> Work:
    """Return the work of an optimizer step."""
    step = config.method.work
    count = step.once + step.each * len(weights)
    numbers = sum(weight.numbers for weight in weights)
    return Work("other", "float32", "optimizer", 0, int(step.traffic * numbers / count), count)
