"""A training run traced as a whole: the traces that a forecast takes from two entries, combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.memory.trace.memory_trace import MemoryTrace
from trainer.memory.trace.train_step import Size, trace_micro, trace_optimizer
from trainer.memory.trace.workload import Workload


@dataclass(frozen=True, slots=True)
class StepTraces:
    """The traces of a training run, in order.

    ``weights``, then for each optimizer step ``micro_first``, any number of ``micro_more``, and
    ``optimizer_first`` in the run's first step or ``optimizer`` in a later one. Micro-batches may change buckets.
    """

    weights: MemoryTrace
    micro_first: Mapping[Size, MemoryTrace]
    micro_more: Mapping[Size, MemoryTrace]
    optimizer_first: MemoryTrace
    optimizer: MemoryTrace


def trace_steps(workload: Workload, buckets: Sequence[Size], pictures: int) -> StepTraces:
    """Trace training on micro-batches of ``pictures`` images in each of ``buckets`` (width, height)."""
    micro = trace_micro(workload, buckets, pictures)
    return StepTraces(micro.weights, micro.first, micro.more, *trace_optimizer(workload))
