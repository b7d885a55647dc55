"""A tape: every storage that a phase takes and gives back, in order, and the work done between. Needs no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

StorageKind = Literal["weights", "adapter", "gradients", "optimizer", "activations", "temporary", "workspace"]
WorkKind = Literal["gemm", "conv", "attention", "other"]
_BLOCK = re.compile(r"\bunet\.(down_blocks\.\d|mid_block|up_blocks\.\d)\b")
BLOCK = 512  # the allocator rounds up to multiples of this


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of device memory."""

    bytes: int
    """As requested, before the allocator rounds."""
    kind: StorageKind
    module: str
    """Dotted path of the module it belongs to, such as "unet.up_blocks.1.attentions.0"; "" for none."""
    stage: str
    """What was going on when it was born, such as "forward" or "backward"."""
    name: str | None = None
    """Set when it outlives its tape, so that a later tape can free it: unique among what lives at once."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one kind and size: what their time on a card is computed from."""

    kind: WorkKind
    dtype: str
    """The number format it computes in: "bfloat16", "float16", "float32", "uint8"."""
    stage: str
    flops: int
    """Of one operation: a multiply-add counts two."""
    bytes: int
    """That one operation reads and writes."""
    count: int
    """How many operations of this shape there are."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTrace:
    """What one phase, or one repeatable part of it, does to memory; each is itself alone."""

    name: str
    storages: tuple[Storage, ...]
    events: NDArray[np.int32]
    """In order: ``i`` where storage i is born, ``~i`` (negative) where it dies. A storage that dies without a birth
    was left by an earlier tape under its name; one that never dies is left to later tapes under its name."""
    work: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class UnetBlock:
    """A block of the UNet, as one forward without checkpointing leaves it."""

    name: str
    held: int
    """Bytes of activations that wait for backward when the forward ends."""
    cost: float
    """How much work it is to compute again, on a scale of its own."""


def unet_block(module: str) -> str | None:
    """The block that a module's path lies in, by the name that a job may list; None outside."""
    found = _BLOCK.search(module)
    return found.group(1) if found else None


def held_after_forward(trace: MemoryTrace) -> dict[str | None, int]:
    """Bytes born in a micro-batch's forward and alive when its backward begins, by block; None: outside of blocks."""
    backward = np.array([storage.stage.startswith("backward") for storage in trace.storages], dtype=bool)
    births = trace.events >= 0
    of_backward = np.flatnonzero(births & backward[np.where(births, trace.events, 0)])
    before = trace.events[: of_backward[0]] if len(of_backward) else trace.events
    alive = set(before[before >= 0].tolist()) - set((~before[before < 0]).tolist())
    held: defaultdict[str | None, int] = defaultdict(int)
    for index in alive:
        storage = trace.storages[index]
        if storage.name is None:
            held[unet_block(storage.module)] += storage.bytes
    return dict(held)


def blocks(weights: MemoryTrace, micro: MemoryTrace) -> list[UnetBlock]:
    """The UNet's blocks by what checkpointing them saves for its cost, the best first.

    ``micro`` is a micro-batch without checkpointing. The cost is counted as weights times places they are applied to:
    a quarter with each level down. That ignores attention's own products; it only decides which sets are looked at.
    """
    held = held_after_forward(micro)
    sizes: defaultdict[str, int] = defaultdict(int)
    for storage in weights.storages:
        if (name := unet_block(storage.module)) is not None and storage.kind == "weights":
            sizes[name] += storage.bytes
    levels = sum(name.startswith("down_blocks.") for name in sizes)
    found = [UnetBlock(name, held.get(name, 0), size / 4 ** _level(name, levels)) for name, size in sizes.items()]
    return sorted(found, key=lambda block: (-block.held / max(block.cost, 1.0), block.name))


def _level(name: str, levels: int) -> int:
    """How often the picture was halved where a block works."""
    if name == "mid_block":
        return levels - 1
    index = int(name.rpartition(".")[2])
    return index if name.startswith("down_blocks.") else levels - 1 - index


def _forward_order(name: str) -> tuple[int, str]:
    """Down, middle, up."""
    return "dmu".index(name[0]), name


@dataclass(frozen=True, slots=True)
class Totals:
    """One tape, or several in a row, in bytes rounded up as the allocator does."""

    net: int
    """What lives longer by the end than at the beginning."""
    peak: int
    """How far above the beginning the highest moment lies."""

    def then(self, other: Totals) -> Totals:
        """Both in a row."""
        return Totals(self.net + other.net, max(self.peak, self.net + other.peak))


NOTHING = Totals(0, 0)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """All that a search asks of a tape."""

    name: str
    sums: Totals
    work: tuple[Work, ...]


def sums(trace: MemoryTrace) -> Totals:
    """The sums of one tape; workspaces are left out, whose size depends on the card.

    No allocator can do with less: what it cannot split off a block only adds to this.
    """
    sizes = np.array(
        [0 if storage.kind == "workspace" else -(-storage.bytes // BLOCK) * BLOCK for storage in trace.storages],
        dtype=np.int64,
    )
    died = trace.events < 0
    changes = sizes[np.where(died, ~trace.events, trace.events)]
    running = np.cumsum(np.where(died, -changes, changes))
    return Totals(int(running[-1]), max(0, int(running.max()))) if len(running) else NOTHING


def outline_of(trace: MemoryTrace) -> TraceSummary:
    """The outline of a tape."""
    return TraceSummary(trace.name, sums(trace), trace.work)


def in_a_row(summaries: Iterable[TraceSummary]) -> Totals:
    """The sums of tapes played one after the other."""
    total = NOTHING
    for summary in summaries:
        total = total.then(summary.sums)
    return total
