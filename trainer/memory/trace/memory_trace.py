"""Define memory traces: a phase's allocations and frees in order, and its work. Does not require torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

StorageKind = Literal["weights", "adapter", "gradients", "optimizer", "activations", "temporary", "workspace"]
WorkKind = Literal["gemm", "conv", "attention", "other", "copy"]
"""Kind of operation; "copy" is a copy from main memory to the GPU, which runs at the same time as the others."""
_BLOCK = re.compile(r"\bunet\.(down_blocks\.\d|mid_block|up_blocks\.\d)\b")
BLOCK = 512  # bytes; the allocator rounds up to multiples of this


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation of GPU memory."""

    bytes: int
    """Bytes requested, before the allocator rounds up."""
    kind: StorageKind
    module: str
    """Dotted path of the module that allocated it, such as "unet.up_blocks.1.attentions.0"; "" for none."""
    stage: str
    """Stage in which it was allocated, such as "forward" or "backward"."""
    name: str | None = None
    """Name by which a later trace can free it, unique among live storages; None if it is freed within its trace."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one kind and size; the basis for time estimates."""

    kind: WorkKind
    dtype: str
    """Dtype of the computation, such as "bfloat16", "float32" or "uint8"."""
    stage: str
    flops: int
    """FLOPs of one operation; a multiply-add counts as two."""
    bytes: int
    """Bytes that one operation reads and writes."""
    count: int
    """Number of operations of this kind and size."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTrace:
    """Memory events and work of one phase, or of one repeatable part of it; compared by identity."""

    name: str
    storages: tuple[Storage, ...]
    events: NDArray[np.int32]
    """Events in order: ``i`` allocates storage i and ``~i`` (negative) frees it. A storage that is freed but not
    allocated was left by an earlier trace under its name; one that is not freed is left to later traces."""
    work: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class UnetBlock:
    """Memory and cost of a UNet block, measured in a forward without checkpointing."""

    name: str
    saved_bytes: int
    """Bytes of activations that are saved for backward when the forward ends."""
    cost: float
    """Relative cost of recomputing the block."""


def unet_block(module: str) -> str | None:
    """Return the UNet block that contains a module, named as in job files; None outside of blocks."""
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
    """Return the UNet's blocks, sorted by the memory that checkpointing saves relative to its cost, best first.

    ``micro`` is a micro-batch without checkpointing. The cost is the bytes of weights times the number of positions
    that they are applied to, which is a quarter as large at each deeper level. It ignores attention scores, because it
    only determines the search order.
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
    """Return the depth of a block: how often the image has been halved before it."""
    if name == "mid_block":
        return levels - 1
    index = int(name.rpartition(".")[2])
    return index if name.startswith("down_blocks.") else levels - 1 - index


def _forward_order(name: str) -> tuple[int, str]:
    """Return a sort key that puts blocks in forward order: down, mid, up."""
    return "dmu".index(name[0]), name


@dataclass(frozen=True, slots=True)
class Totals:
    """Memory totals of one or more traces, in bytes; each allocation is rounded up as the allocator does."""

    net: int
    """Bytes allocated at the end minus bytes allocated at the beginning."""
    peak: int
    """Peak allocated bytes minus bytes allocated at the beginning."""

    def then(self, other: Totals) -> Totals:
        """Return the totals of these traces followed by those of ``other``."""
        return Totals(self.net + other.net, max(self.peak, self.net + other.peak))


NOTHING = Totals(0, 0)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The parts of a trace that the planner's search needs."""

    name: str
    totals: Totals
    work: tuple[Work, ...]


def totals(trace: MemoryTrace) -> Totals:
    """Return the totals of a trace without workspaces, whose size depends on the GPU.

    They are a lower bound for any allocator, because blocks that are not split can only add to them.
    """
    running = running_bytes(trace)
    return Totals(int(running[-1]), max(0, int(running.max()))) if len(running) else NOTHING


def running_bytes(trace: MemoryTrace) -> NDArray[np.int64]:
    """Return, for each event, the bytes allocated after it minus those at the beginning, as `Totals` counts them."""
    sizes = np.array(
        [0 if storage.kind == "workspace" else -(-storage.bytes // BLOCK) * BLOCK for storage in trace.storages],
        dtype=np.int64,
    )
    died = trace.events < 0
    changes = sizes[np.where(died, ~trace.events, trace.events)] if len(sizes) else np.zeros(0, np.int64)
    return np.cumsum(np.where(died, -changes, changes))


def summary_of(trace: MemoryTrace) -> TraceSummary:
    """Return the summary of a trace."""
    return TraceSummary(trace.name, totals(trace), trace.work)


def total_in_sequence(summaries: Iterable[TraceSummary]) -> Totals:
    """Return the totals of traces that are replayed in sequence."""
    total = NOTHING
    for summary in summaries:
        total = total.then(summary.totals)
    return total
