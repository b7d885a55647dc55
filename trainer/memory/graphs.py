"""What a run takes whose steps are recorded as CUDA graphs (trainer.training.graphs). Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from trainer.memory.tape import Storage, Tape
from trainer.memory.traces import Steps

DRIVER_BYTES = 64 << 10
"""That the driver takes for each operation of a graph, as PyTorch's authors have told; not measured here."""


@dataclass(frozen=True)
class Graphs:
    """What follows once plain steps have been done, in this order."""

    held: tuple[Tape, ...]
    """What lives from then on."""
    recorded: tuple[Tape, ...]
    """Played into the private pool."""
    beside: tuple[Tape, ...]
    """Plain steps of other shapes meanwhile."""

    @property
    def tapes(self) -> tuple[Tape, ...]:
        """All of them."""
        return (*self.held, *self.recorded, *self.beside)


def graphs_of(steps: Sequence[Steps[Tape]], beside: Sequence[Tape], shapes: int) -> Graphs:
    """For so many ``shapes`` of micro-batches, of which ``steps`` are the bounding ones."""
    return Graphs(
        held=(_held(steps[0].micro_first, steps[0].micro_more, shapes),),
        recorded=tuple(_as_recorded(each.micro_more) for each in steps),
        beside=tuple(beside),
    )


# Kept, so that like questions get the very same tapes, by which trainer.memory.forecast.Runs knows what was played.
@lru_cache(maxsize=8)
def _held(first: Tape, more: Tape, shapes: int) -> Tape:
    """The masters' gradients, which keep their place between steps, and the driver's part of the graphs.

    The gradients are there three times while a step is recorded: what was learned before, what it learns, and what its
    replay gives. The driver's is counted here although PyTorch's allocator does not hand it out: it has to fit all the
    same.
    """
    gradients = sum(each.bytes for each in first.storages if (each.name or "").startswith("master_gradient."))
    driver = shapes * DRIVER_BYTES * sum(work.count for work in more.work)
    storages = (
        Storage(3 * gradients, "gradients", "graphs", "graphs", "graphs.gradients"),
        Storage(driver, "temporary", "graphs", "graphs", "graphs.driver"),
    )
    return Tape("graphs", storages, np.arange(len(storages), dtype=np.int32), ())


@lru_cache(maxsize=8)
def _as_recorded(tape: Tape) -> Tape:
    """The same on the stream of recordings, for which libraries take workspaces of their own."""
    storages = tuple(
        replace(each, name=f"{each.name} of graphs") if each.kind == "workspace" and each.name else each
        for each in tape.storages
    )
    return replace(tape, storages=storages)
