"""Trace the training step as the training loop runs it: micro-batches and optimizer steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer.config.methods import PAGED_FROM
from trainer.memory.trace.cuda_kernels import attention_kernel
from trainer.memory.trace.derive import join
from trainer.memory.trace.memory_trace import MemoryTrace
from trainer.memory.trace.meta_models import (
    META,
    dtype_of,
    empty_engine,
    engine_of_keys,
    label_engine,
    label_masters,
    micro_batch,
)
from trainer.memory.trace.recorder import Tracer, recording
from trainer.memory.trace.repeat import NotRepeatedError, Repetition, at_block, repetition
from trainer.memory.trace.workload import Workload
from trainer.training.engine import Engine
from trainer.training.optim.master_weights import measure
from trainer.training.optim.optimizer import set_learning_rates

Size = tuple[int, int]

# RAdam only waits for its first 5 steps with beta2 = 0.99 or 0.999, and allocates more from then on.
OPENING_STEPS = 100
# A bucket whose sides every UNet can halve often enough.
SMALLEST: Size = (64, 64)


@dataclass(frozen=True, slots=True)
class MicroTraces:
    """Traces of micro-batches: one ``first``, then any number of ``more``; a storage's name links it across traces."""

    weights: MemoryTrace
    """Trace of placing base, adapter and master weights; comes before all other traces."""
    first: Mapping[Size, MemoryTrace]
    """Traces, by bucket, of a step's first micro-batch, which allocates the master weights' gradients."""
    more: Mapping[Size, MemoryTrace]
    """Traces, by bucket, of any further micro-batch of a step."""
    optimizer: tuple[MemoryTrace, ...]
    """Traces of the first optimizer step and of any later one; empty unless they were requested."""


def trace_micro(
    workload: Workload, buckets: Sequence[Size], images: int, *, with_optimizer: bool = False
) -> MicroTraces:
    """Trace micro-batches of ``images`` in each of ``buckets`` (width, height) on meta tensors.

    ``with_optimizer`` also traces what `trace_optimizer` does, at a third of its time.
    """
    with suppress(NotRepeatedError):
        if (short := repetition(workload)) is not None:
            return _repeated_micro(workload, short, buckets, images, with_optimizer=with_optimizer)
    engine = empty_engine(workload)
    with recording(attention_kernel(workload.fit.attention, dtype_of(workload))) as tracer:
        work = _Training(workload, engine, tracer, label_engine(tracer, engine))
        weights = tracer.cut("weights")
        begin = work.begin_step()
        steps = {bucket: work.micro_step(bucket, images) for bucket in buckets}
        return _micro_traces(weights, begin, steps, work, with_optimizer=with_optimizer)


def _repeated_micro(
    workload: Workload, short: Repetition, buckets: Sequence[Size], images: int, *, with_optimizer: bool
) -> MicroTraces:
    """Return what `trace_micro` returns, traced on a UNet with few transformer blocks.

    Gradients are accumulated, and the optimizer steps, on the weights of the whole adapter: both work on lists of all
    weights. Raises NotRepeatedError if the blocks differ in more than their number.
    """
    engine = empty_engine(short.workload, short.times)
    kernel = attention_kernel(workload.fit.attention, dtype_of(workload))
    with recording(kernel, short.times) as tracer:
        work = _Training(short.workload, engine, tracer, label_engine(tracer, engine))
        weights = short.extended(tracer.cut("weights"))
        begin = work.begin_step()
        steps = {bucket: short.extended(work.micro_step(bucket, images)) for bucket in buckets}
    keys = list(short.keys({key: work.modules[key] for key in engine.adapter.parameters}))
    whole = engine_of_keys(workload, engine, keys)
    with recording(kernel) as tracer:
        modules = {key: at_block(work.modules[traced], number) for key, traced, number in keys}
        rest = _Training(workload, whole, tracer, modules)
        rest.slots = {
            key: work.slots[traced]._replace(storage=(work.slots[traced].storage, number))
            for key, traced, number in keys
            if traced in work.slots
        }
        label_masters(tracer, whole, modules)
        rest.begin_step()
        tracer.cut("weights")
        return _micro_traces(weights, begin, steps, rest, with_optimizer=with_optimizer)


def _micro_traces(
    weights: MemoryTrace,
    begin: MemoryTrace,
    steps: Mapping[Size, MemoryTrace],
    work: _Training,
    *,
    with_optimizer: bool,
) -> MicroTraces:
    """Return traces of micro-batches, of which accumulating gradients is traced here, for all buckets at once."""
    first, more = work.accumulate("accumulate_first"), work.accumulate("accumulate_more")
    return MicroTraces(
        weights=weights,
        first={bucket: join("micro_first", (begin, step, first)) for bucket, step in steps.items()},
        more={bucket: join("micro_more", (step, more)) for bucket, step in steps.items()},
        optimizer=work.optimizer_steps() if with_optimizer else (),
    )


def trace_optimizer(workload: Workload) -> tuple[MemoryTrace, MemoryTrace]:
    """Trace the first optimizer step of a run, which allocates the optimizer's state, and any later one.

    Both traces can follow micro-batches of any size. The smallest micro-batch is run first, to find out which weights
    get gradients.
    """
    engine = empty_engine(workload)
    with recording(attention_kernel(workload.fit.attention, dtype_of(workload))) as tracer:
        work = _Training(workload, engine, tracer, label_engine(tracer, engine))
        work.begin_step()
        work.micro_step(SMALLEST, 1)
        work.accumulate("")  # cut off under no name: only its effect on the gradients is needed here
        return work.optimizer_steps()


class _GradientSlot(NamedTuple):
    """Memory of a gradient; several gradients share a storage if their layers are computed together."""

    storage: Hashable
    bytes: int
    """Bytes of the whole storage."""
    offset: int
    stride: tuple[int, ...]


class _Training:
    """Parts of trainer.training.engine.Engine's optimizer step, each recorded as a separate trace.

    Each part is traced once, and the traces are combined later, so each must begin in the state in which the previous
    one ends. Therefore, micro_step and accumulate drop and create gradients outside of their traces.
    """

    def __init__(self, workload: Workload, engine: Engine, tracer: Tracer, modules: Mapping[str, str]) -> None:
        """Create an engine's parts; ``modules`` contains the module of each weight by key."""
        self.workload = workload
        self.engine = engine
        self.tracer = tracer
        self.modules = modules
        self.total: Tensor | None = None
        self.slots: dict[str, _GradientSlot] = {}
        """Memory of the working weights' gradients, by the weights' keys; weights that get no gradient are missing."""
        _hide_paged_state(engine.optimizer)

    def begin_step(self) -> MemoryTrace:
        """Trace the allocation of the sum of losses."""
        self.total = torch.zeros((), device=META)
        self.tracer.label(self.total, "temporary", "", "loss")
        return self.tracer.cut("begin")

    def micro_step(self, bucket: Size, images: int) -> MemoryTrace:
        """Trace forward and backward of a micro-batch; the working weights' gradients are dropped after the trace."""
        micro = micro_batch(self.workload, bucket, images)
        assert self.total is not None
        with self.tracer.stage("forward"):
            self.total += self.engine.micro_step(micro)
        working = self.engine.master_weights.working
        self.slots = {key: _place(weight.grad) for key, weight in working.items() if weight.grad is not None}
        self._label_gradients(working)
        trace = self.tracer.cut("micro_step")
        for weight in working.values():
            weight.grad = None
        self.tracer.cut("")  # discards a trace with the frees
        return trace

    def accumulate(self, name: str) -> MemoryTrace:
        """Trace adding the working weights' gradients (created before the trace) to the master weights' gradients."""
        masters = self.engine.master_weights
        # One buffer for each storage: layers computed together share one, which is freed with its last gradient.
        buffers: dict[Hashable, Tensor] = {}
        for key, place in self.slots.items():
            weight = masters.working[key]
            if place.storage not in buffers:
                buffers[place.storage] = torch.empty(place.bytes // weight.itemsize, dtype=weight.dtype, device=META)
            weight.grad = buffers[place.storage].as_strided(weight.shape, place.stride, place.offset)
        buffers.clear()
        self._label_gradients(masters.working)
        self.tracer.cut("")
        with self.tracer.stage("accumulate"):
            masters.accumulate()
        self._label_gradients(masters.masters)
        return self.tracer.cut(name)

    def optimizer_steps(self) -> tuple[MemoryTrace, MemoryTrace]:
        """Trace the first optimizer step after a micro-batch, and another one after those in which RAdam only waits."""
        first = self.optimizer_step("optimizer_first")
        for group in self.engine.optimizer.param_groups:
            if "k" in group:  # the step counter of Prodigy and Schedule-Free, a number on the host
                group["k"] += OPENING_STEPS
        self.begin_step()
        self.accumulate("")
        return first, self.optimizer_step("optimizer")

    def optimizer_step(self, name: str) -> MemoryTrace:
        """Trace the optimizer step, from summed loss and gradients to updated weights; gradients are freed."""
        engine = self.engine
        assert self.total is not None
        with self.tracer.stage("optimizer"):
            set_learning_rates(engine.optimizer, 1.0)
            measure(self.total, engine.master_weights, engine.loss_scale)
            engine.optimizer_step(1.0, 1.0)
            self.total = None
        self._label_state()
        return self.tracer.cut(name)

    def _label_gradients(self, weights: Mapping[str, Tensor]) -> None:
        kind = "working" if weights is self.engine.master_weights.working else "master"
        for key, weight in weights.items():
            if weight.grad is not None:
                self.tracer.label(weight.grad, "gradients", self.modules[key], f"{kind}_gradient.{key}")

    def _label_state(self) -> None:
        """Label the optimizer's state, except large paged state, which the tracer must not record.

        Scalars come from torch.tensor, which dispatch modes do not see, so their allocation is recorded here.
        """
        for key, master in self.engine.master_weights.masters.items():
            for entry, value in self.engine.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor) and value.is_meta and (value.numel() == 1 or self.tracer.knows(value)):
                    self.tracer.label(value, "optimizer", self.modules[key], f"{entry}.{key}")


def _place(gradient: Tensor) -> _GradientSlot:
    storage = gradient.untyped_storage()
    return _GradientSlot(storage._cdata, storage.nbytes(), int(gradient.storage_offset()), gradient.stride())


def _hide_paged_state(optimizer: Any) -> None:
    """Allocate a paged optimizer's large states outside of the tracer's view.

    On a GPU they are in unified memory outside of PyTorch's allocator.
    """
    if not getattr(optimizer, "is_paged", False):
        return
    ordinary = optimizer.get_state_buffer

    def get_state_buffer(weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if weight.numel() < PAGED_FROM:
            optimizer.is_paged = False
            buffer: Tensor = ordinary(weight, dtype)
            optimizer.is_paged = True
            return buffer
        with _disable_current_modes():
            return torch.zeros_like(weight, dtype=dtype)

    optimizer.get_state_buffer = get_state_buffer
