"""Compare the optimizers for a job: bytes of their state, peak of training, seconds per step. Does not require torch.

Tracing an optimizer step takes seconds per optimizer, so an optimizer that is not traced yet is estimated from what its
library allocates for a weight. `tests/train/memory/planner/test_optimizers.py` compares that with real steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import numpy as np

from trainer.config.optimizer import AdafactorConfig, OptimizerConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.schedule import bounding_shapes, step_seconds, training_totals
from trainer.memory.trace.library import Steps, TraceLibrary
from trainer.memory.trace.memory_trace import BLOCK, MemoryTrace, Storage, Totals, TraceSummary, Work
from trainer.memory.trace.workload import TraceRequest, Workload
from trainer.protocol.records import json_keys

# bitsandbytes quantizes the state of weights with at least this many numbers, in blocks with one fp32 scale each.
QUANTIZED_FROM = 4096
QUANTIZED_BLOCK = 256
QUANTIZATION_MAP_BYTES = 1024
# bitsandbytes puts states of this many numbers and more into paged memory, which does not count as GPU memory.
PAGED_FROM = 100_000
FP32 = 4


class MasterWeight(NamedTuple):
    """Sizes of a trained weight, on which an optimizer's state depends."""

    numbers: int
    averages: tuple[int, int]
    """Numbers in Adafactor's averages over columns and over rows."""
    starts_at_zero: bool
    """Whether it is the second factor of a LoRA; Prodigy remembers only a single number of its first value."""


class _Step(NamedTuple):
    """Work of an optimizer step, measured on traces of both families."""

    each: int
    """Operations per weight."""
    once: int
    """Further operations per step."""
    traffic: float
    """Bytes read and written per number, gradient clipping included."""


_STEPS = {
    "adamw": _Step(0, 9, 30.0),
    "adamw8bit": _Step(1, 7, 24.1),
    "paged_adamw8bit": _Step(1, 7, 24.1),
    "lion": _Step(1, 7, 26.0),
    "lion8bit": _Step(1, 7, 23.0),
    "adafactor": _Step(24, 7, 100.0),
    "prodigy": _Step(14, 7, 152.0),
    "schedulefree": _Step(0, 17, 86.0),
}


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

    bucket, images = bounding_shapes(workload)[0], workload.fit.micro_batch or 1
    own = traces.step_summaries(workload, bucket, images)
    weights = master_weights(traces.steps(workload, bucket, images).weights, workload)
    gradients = own.micro_first.totals.net
    for config in all_optimizers(workload.recipe):
        other = with_optimizer(workload, config)
        exact = traces.has(TraceRequest(other, "optimizer"))
        last = traces.phase_summaries(other, "optimizer") if exact else estimated_steps(config, weights, gradients)
        steps: Steps[TraceSummary] = replace(own, optimizer_first=last[0], optimizer=last[1])
        yield OptimizerRow(
            name=config.name,
            state=last[0].totals.net + gradients,
            peak=training_totals(other, steps).peak,
            step_seconds=step_seconds(other, steps, seconds),
            exact=exact,
            chosen=config.name == workload.recipe.optimizer.name,
        )


def all_optimizers(recipe: RecipeConfig) -> list[OptimizerConfig]:
    """Return every optimizer with its default arguments, after the recipe's own with its arguments."""
    others = [kind() for kind in get_args(OptimizerConfig)]
    return [recipe.optimizer, *(config for config in others if config.name != recipe.optimizer.name)]


def with_optimizer(workload: Workload, config: OptimizerConfig) -> Workload:
    """Return the workload with another optimizer.

    The recipe is not validated: an optimizer may require another schedule, which does not affect memory.
    """
    return replace(workload, recipe=workload.recipe.model_copy(update={"optimizer": config}))


def master_weights(weights: MemoryTrace, workload: Workload) -> list[MasterWeight]:
    """Return the sizes of all trained weights from the trace that places them."""
    masters = [storage for storage in weights.storages if (storage.name or "").startswith("master.")]
    return [_master(storage.bytes // FP32, storage.module, workload) for storage in masters]


def _master(numbers: int, module: str, workload: Workload) -> MasterWeight:
    """Return the sizes of a LoRA's first factor, rank × inputs, or of its second, outputs × rank.

    Adafactor averages over each of the last two dimensions. In a 1 × 1 convolution they are single numbers, so it
    saves nothing there; in a 3 × 3 convolution, each average is a third of the weight.
    """
    layer, factor, _ = module.rsplit(".", 2)
    first = factor == "lora_A"
    kernel = _kernel(layer.rpartition(".")[2], workload) if layer.startswith("unet.") else 0
    if kernel == 3 and first:
        return MasterWeight(numbers, (numbers // 3, numbers // 3), starts_at_zero=False)
    if kernel:
        return MasterWeight(numbers, (numbers, numbers), starts_at_zero=not first)
    recipe = workload.recipe
    part = layer.partition(".")[0]
    rank = {"text_encoder": recipe.text_encoder.rank, "text_encoder_2": recipe.text_encoder_2.rank}.get(part)
    rank = rank or recipe.rank
    return MasterWeight(numbers, (rank, numbers // rank), starts_at_zero=not first)


def _kernel(name: str, workload: Workload) -> int:
    """Return the size of a UNet layer's convolution kernel; 0 if the layer is linear."""
    if name in ("proj_in", "proj_out"):  # convolutions in SD 1.5, linear in SDXL
        return 0 if workload.unet_config.get("use_linear_projection") else 1
    if name == "conv_shortcut":
        return 1
    return 3 if name.startswith("conv") else 0


def estimated_steps(
    config: OptimizerConfig, weights: Sequence[MasterWeight], gradients: int
) -> tuple[TraceSummary, TraceSummary]:
    """Return summaries of a run's first optimizer step and of a later one, which free ``gradients`` bytes."""
    state, temporary = state_bytes(config, weights), temporary_bytes(config, weights)
    work = (estimated_work(config, weights),)
    return (
        TraceSummary("optimizer_first", Totals(state - gradients, state + temporary), work),
        TraceSummary("optimizer", Totals(-gradients, temporary), work),
    )


def estimated_traces(
    config: OptimizerConfig, weights: Sequence[MasterWeight], micro: MemoryTrace
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


def state_bytes(config: OptimizerConfig, weights: Iterable[MasterWeight]) -> int:
    """Return the bytes that an optimizer's state takes on the GPU, each tensor rounded up as the allocator does."""
    return sum(-(-size // BLOCK) * BLOCK for size in state_sizes(config, weights))


def state_sizes(config: OptimizerConfig, weights: Iterable[MasterWeight]) -> list[int]:
    """Return the bytes of each tensor of an optimizer's state on the GPU."""
    layout = _LAYOUTS[config.name]
    maps = {"adamw8bit": 2, "paged_adamw8bit": 2, "lion8bit": 1}.get(config.name, 0)
    return [*(size for weight in weights for size in layout(config, weight)), *(maps * [QUANTIZATION_MAP_BYTES])]


def temporary_bytes(config: OptimizerConfig, weights: Sequence[MasterWeight]) -> int:
    """Return the bytes that a step allocates for a moment; only Schedule-Free copies all weights at once."""
    if config.name == "schedulefree":
        return sum(FP32 * weight.numbers for weight in weights)
    return FP32 * max((weight.numbers for weight in weights), default=0)


def estimated_work(config: OptimizerConfig, weights: Sequence[MasterWeight]) -> Work:
    """Return the work of an optimizer step."""
    step = _STEPS[config.name]
    count = step.once + step.each * len(weights)
    numbers = sum(weight.numbers for weight in weights)
    return Work("other", "float32", "optimizer", 0, int(step.traffic * numbers / count), count)


_Layout = Callable[[OptimizerConfig, MasterWeight], list[int]]


def _quantized(entries: int, *, paged: bool = False) -> _Layout:
    """Return the layout of bitsandbytes' 8-bit state with one or two entries per weight."""

    def layout(_: OptimizerConfig, weight: MasterWeight) -> list[int]:
        if weight.numbers < QUANTIZED_FROM:
            return entries * [FP32 * weight.numbers]
        scales = FP32 * -(-weight.numbers // QUANTIZED_BLOCK)
        is_paged = paged and weight.numbers >= PAGED_FROM
        return entries * [scales] if is_paged else entries * [weight.numbers, scales]

    return layout


def _whole(entries: int, *more: int) -> _Layout:
    """Return the layout of an optimizer that keeps ``entries`` copies of each weight in fp32, and smaller tensors."""
    return lambda _, weight: [*(entries * [FP32 * weight.numbers]), *more]


def _prodigy(_: OptimizerConfig, weight: MasterWeight) -> list[int]:
    first_value = FP32 if weight.starts_at_zero else FP32 * weight.numbers
    return [*(3 * [FP32 * weight.numbers]), first_value]


def _adafactor(config: OptimizerConfig, weight: MasterWeight) -> list[int]:
    momentum = isinstance(config, AdafactorConfig) and config.beta1 is not None
    averages = [FP32 * numbers for numbers in weight.averages]
    return [*averages, FP32, *([FP32 * weight.numbers] if momentum else [])]


_LAYOUTS: dict[str, _Layout] = {
    "adamw": _whole(2, FP32),
    "adamw8bit": _quantized(2),
    "paged_adamw8bit": _quantized(2, paged=True),
    "lion": _whole(1),
    "lion8bit": _quantized(1),
    "adafactor": _adafactor,
    "prodigy": _prodigy,
    "schedulefree": _whole(2),
}
