"""Traces the training step as the loop takes it: micro-batches and optimizer steps, as tapes that follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer.memory.trace.cuda_kernels import attention_kernel
from trainer.memory.trace.derive import joined
from trainer.memory.trace.memory_trace import MemoryTrace
from trainer.memory.trace.meta_models import META, dtype_of, empty_engine, know_engine, micro_batch
from trainer.memory.trace.recorder import Tracer, recording
from trainer.memory.trace.workload import Workload
from trainer.training.loop import Engine
from trainer.training.optim.master_weights import measure
from trainer.training.optim.optimizer import set_learning_rates

Size = tuple[int, int]

# bitsandbytes pages states from this many numbers on: they lie in memory that the allocator does not know.
PAGED_FROM = 1e5
# A bucket that every base can halve as often as it does.
SMALLEST: Size = (64, 64)


@dataclass(frozen=True, slots=True)
class MicroTapes:
    """Micro-batches as tapes that follow one another by the names of what they leave: ``first``, then any ``more``."""

    weights: MemoryTrace
    """Base, adapter and masters, as they are placed, before any of them."""
    first: Mapping[Size, MemoryTrace]
    """The first micro-batch of an optimizer step by its bucket, in which the masters' gradients are born."""
    more: Mapping[Size, MemoryTrace]
    """Any further one, in the same bucket or another."""


def trace_micro(workload: Workload, buckets: Sequence[Size], images: int) -> MicroTapes:
    """Traces micro-batches of ``pictures`` in each of ``buckets`` (width, height), on meta tensors."""
    engine = empty_engine(workload)
    with recording(attention_kernel(workload.fit.attention, dtype_of(workload))) as tracer:
        work = _Training(workload, engine, tracer)
        weights = tracer.cut("weights")
        begin = work.begin_step()
        steps = {bucket: work.micro_step(bucket, images) for bucket in buckets}
        first, more = work.accumulate("accumulate_first"), work.accumulate("accumulate_more")
    return MicroTapes(
        weights=weights,
        first={bucket: joined("micro_first", (begin, step, first)) for bucket, step in steps.items()},
        more={bucket: joined("micro_more", (step, more)) for bucket, step in steps.items()},
    )


def trace_optimizer(workload: Workload) -> tuple[MemoryTrace, MemoryTrace]:
    """Traces the first optimizer step of a run, in which its state appears, and any later one.

    They follow on micro-batches of any size; one of the smallest tells which weights get gradients.
    """
    engine = empty_engine(workload)
    with recording(attention_kernel(workload.fit.attention, dtype_of(workload))) as tracer:
        work = _Training(workload, engine, tracer)
        work.begin_step()
        work.micro_step(SMALLEST, 1)
        work.accumulate("")
        first = work.optimizer_step("optimizer_first")
        work.begin_step()
        work.accumulate("")
        return first, work.optimizer_step("optimizer")


class _GradientSlot(NamedTuple):
    """Where a gradient lies: those of layers that are computed together are parts of one piece of memory."""

    storage: int
    bytes: int
    """Of the whole storage."""
    offset: int
    stride: tuple[int, ...]


class _Training:
    """The parts of an optimizer step, as trainer.training.loop.Engine calls them, each cut off as a tape."""

    def __init__(self, workload: Workload, engine: Engine, tracer: Tracer) -> None:
        self.subject = workload
        self.engine = engine
        self.tracer = tracer
        self.modules = know_engine(tracer, engine)
        self.total: Tensor | None = None
        self.places: dict[str, _GradientSlot] = {}
        """Where the gradients of those weights lie that get one."""
        _hide_paged_state(engine.optimizer)

    def begin_step(self) -> MemoryTrace:
        self.total = torch.zeros((), device=META)
        self.tracer.know(self.total, "temporary", "", "loss")
        return self.tracer.cut("begin")

    def micro_step(self, bucket: Size, images: int) -> MemoryTrace:
        """Forward and backward up to the working weights' gradients, which are dropped again off the tape."""
        micro = micro_batch(self.subject, bucket, images)
        assert self.total is not None
        with self.tracer.stage("forward"):
            self.total += self.engine.micro_step(micro)
        working = self.engine.masters.working
        self.places = {key: _place(weight.grad) for key, weight in working.items() if weight.grad is not None}
        self._label_gradients(working)
        trace = self.tracer.cut("micro_step")
        for weight in working.values():
            weight.grad = None
        self.tracer.cut("")
        return trace

    def accumulate(self, name: str) -> MemoryTrace:
        """The working weights' gradients, put there off the tape, taken into the masters'."""
        masters = self.engine.masters
        buffers: dict[int, Tensor] = {}
        for key, place in self.places.items():
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

    def optimizer_step(self, name: str) -> MemoryTrace:
        """From the summed loss and gradients to refreshed weights without gradients."""
        engine = self.engine
        assert self.total is not None
        with self.tracer.stage("optimizer"):
            set_learning_rates(engine.optimizer, 1.0)
            measure(self.total, engine.masters, engine.loss_scale)
            engine.move(1.0, 1.0)
            self.total = None
        self._label_state()
        return self.tracer.cut(name)

    def _label_gradients(self, weights: Mapping[str, Tensor]) -> None:
        kind = "working" if weights is self.engine.masters.working else "master"
        for key, weight in weights.items():
            if weight.grad is not None:
                self.tracer.know(weight.grad, "gradients", self.modules[key], f"{kind}_gradient.{key}")

    def _label_state(self) -> None:
        """Single numbers are made by torch.tensor, which no mode sees, and so are born here; pages stay unknown."""
        for key, master in self.engine.masters.masters.items():
            for entry, value in self.engine.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor) and value.is_meta and (value.numel() == 1 or self.tracer.knows(value)):
                    self.tracer.know(value, "optimizer", self.modules[key], f"{entry}.{key}")


def _place(gradient: Tensor) -> _GradientSlot:
    storage = gradient.untyped_storage()
    return _GradientSlot(storage._cdata, storage.nbytes(), int(gradient.storage_offset()), gradient.stride())


def _hide_paged_state(optimizer: Any) -> None:
    """Takes a paged optimizer's large states from where the tracer does not look."""
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
