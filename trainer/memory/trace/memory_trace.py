"""Memory trace: the births and deaths of a phase's storages in order, and its work. Needs no torch."""

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
BLOCK = 512  # bytes; the allocator rounds up to multiples of this


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation of GPU memory."""

    bytes: int
    """Bytes requested, before the allocator rounds up."""
    kind: StorageKind
    module: str
    """Dotted path of its module, such as "unet.up_blocks.1.attentions.0"; "" for none."""
    stage: str
    """Stage in which it was born, such as "forward" or "backward"."""
    name: str | None = None
    """Name by which a later trace can free it, unique among live storages; None if it dies within its trace."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one kind and size, from which their time is computed."""

    kind: WorkKind
    dtype: str
    """Dtype that it computes in: "bfloat16", "float16", "float32" or "uint8"."""
    stage: str
    flops: int
    """FLOPs of one operation; a multiply-add counts as two."""
    bytes: int
    """Bytes that one operation reads and writes."""
    count: int
    """Number of operations of this kind and size."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTrace:
    """What one phase, or one repeatable part of it, does to memory; compared by identity."""

    name: str
    storages: tuple[Storage, ...]
    events: NDArray[np.int32]
    """In order, ``i`` where storage i is born and ``~i`` (negative) where it dies. A storage that dies without a birth
    was left by an earlier trace under its name; one that never dies is left to later traces under its name."""
    work: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class UnetBlock:
    """Block of the UNet, measured in a forward without checkpointing."""

    name: str
    saved_bytes: int
    """Bytes of activations saved for backward at the end of the forward."""
    cost: float
    """Relative cost of computing the block again."""


def unet_block(module: str) -> str | None:
    """Return the name of the UNet block that contains a module, as in job files; None outside of blocks."""
    found = _BLOCK.search(module)
    return found.group(1) if found else None


def held_after_forward(trace: MemoryTrace) -> dict[str | None, int]:
    """Return the bytes that a forward saves for backward, by UNet block (None: outside of blocks)."""
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
    """Return the UNet's blocks, those first whose checkpointing saves the most memory for its cost.

    ``micro`` is a micro-batch without checkpointing. The cost is bytes of weights times the positions that they apply
    to, which fall to a quarter at each level down. That ignores attention scores; it only decides the search order.
    """
    held = held_after_forward(micro)
    sizes: defaultdict[str, int] = defaultdict(int)
    for storage in weights.storages:
        if (name := unet_block(storage.module)) is not None and storage.kind == "weights":
            sizes[name] += storage.bytes
    levels = sum(name.startswith("down_blocks.") for name in sizes)
    found = [UnetBlock(name, held.get(name, 0), size / 4 ** _level(name, levels)) for name, size in sizes.items()]
    return sorted(found, key=lambda block: (-block.saved_bytes / max(block.cost, 1.0), block.name))


def _level(name: str, levels: int) -> int:
    """Return how often the image has been halved where a block works."""
    if name == "mid_block":
        return levels - 1
    index = int(name.rpartition(".")[2])
    return index if name.startswith("down_blocks.") else levels - 1 - index


def _forward_order(name: str) -> tuple[int, str]:
    """Return a sort key for blocks in the order of the forward: down, mid, up."""
    return "dmu".index(name[0]), name


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over one or more traces, in bytes rounded up as the allocator does."""

    net: int
    """Bytes alive at the end minus bytes alive at the beginning."""
    peak: int
    """Highest number of live bytes above the level at the beginning."""

    def then(self, other: Totals) -> Totals:
        """Return the totals of this followed by ``other``."""
        return Totals(self.net + other.net, max(self.peak, self.net + other.peak))


NOTHING = Totals(0, 0)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The parts of a trace that the planner's search needs."""

    name: str
    totals: Totals
    work: tuple[Work, ...]


def totals(trace: MemoryTrace) -> Totals:
    """Return the totals of a trace, without workspaces, whose size depends on the GPU.

    They are a lower bound for any allocator: what cannot be split off a block only adds to them.
    """
    sizes = np.array(
        [0 if storage.kind == "workspace" else -(-storage.bytes // BLOCK) * BLOCK for storage in trace.storages],
        dtype=np.int64,
    )
    died = trace.events < 0
    changes = sizes[np.where(died, ~trace.events, trace.events)]
    running = np.cumsum(np.where(died, -changes, changes))
    return Totals(int(running[-1]), max(0, int(running.max()))) if len(running) else NOTHING


def summary_of(trace: MemoryTrace) -> TraceSummary:
    """Return the summary of a trace."""
    return TraceSummary(trace.name, totals(trace), trace.work)


def total_in_sequence(summaries: Iterable[TraceSummary]) -> Totals:
    """Return the totals of traces played one after the other."""
    total = NOTHING
    for summary in summaries:
        total = total.then(summary.totals)
    return total
