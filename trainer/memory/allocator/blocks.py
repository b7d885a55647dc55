"""The simulated allocator's blocks, the code that splits and merges them, and the pools of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Literal

PoolName = Literal["small", "large"]
# A free block's key is one integer, size above address: a sorted list of keys gives best fit, lowest address first.
ADDRESS_BITS = 48
ADDRESS = 2**ADDRESS_BITS - 1
# PyTorch reserves addresses for 1.125 times the GPU's memory; this is more than any GPU has.
EXPANDABLE_RANGE = 2**44


@dataclass(frozen=True, slots=True)
class BlockState:
    """Snapshot of a block."""

    address: int
    bytes: int
    requested: int | None
    """Bytes requested; None if the block is free."""


@dataclass(frozen=True, slots=True)
class SegmentState:
    """Snapshot of one allocation from the driver or, in an expandable segment, one run of mapped pages."""

    address: int
    bytes: int
    pool: PoolName
    blocks: tuple[BlockState, ...]
    """Blocks sorted by address, without gaps."""


@dataclass(frozen=True, slots=True)
class AllocatorSnapshot:
    """All segments of an allocator at one moment."""

    segments: tuple[SegmentState, ...]

    @property
    def fragmented(self) -> int:
        """Return the free bytes in partly used segments, which no other process can use (inactive_split_bytes)."""
        in_use = (segment.blocks for segment in self.segments if len(segment.blocks) > 1)
        return sum(block.bytes for blocks in in_use for block in blocks if block.requested is None)

    @property
    def largest_free(self) -> int:
        """Return the size in bytes of the largest block that can be allocated without more memory from the driver."""
        free = (block.bytes for segment in self.segments for block in segment.blocks if block.requested is None)
        return max(free, default=0)


class Block:
    """Part of a segment, in use or free, linked to its neighbors in the same segment."""

    __slots__ = ("address", "after", "before", "mapped", "pool", "requested", "since", "size")

    def __init__(self, address: int, size: int, pool: Pool, before: Block | None, after: Block | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before = before
        self.after = after
        self.requested: int | None = None
        self.mapped = True
        self.since = 0  # pool.searches when it became free


class Pool:
    """The free blocks of one pool: small and large allocations have separate pools, which never share a segment."""

    __slots__ = ("free", "least_rest", "name", "page", "searches", "unmapped")

    def __init__(self, name: PoolName, least_rest: int, page: int) -> None:
        self.name = name
        self.free: list[int] = []
        self.least_rest = least_rest
        """Smallest remainder, in bytes, that is split off a block."""
        self.page = page
        """Page size in bytes: the amount of memory that an expandable segment maps at once."""
        self.searches = 0
        self.unmapped: list[int] = []
        """Addresses of the unmapped blocks of the expandable segment, sorted."""

    def copy(self) -> Pool:
        """Return an independent copy of the pool with the same free and unmapped blocks."""
        twin = copy(self)
        twin.free, twin.unmapped = list(self.free), list(self.unmapped)
        return twin


class BlockTable:
    """All blocks by address, and the total bytes of their segments."""

    def __init__(self) -> None:
        self.reserved = 0
        """Total bytes of all segments (torch.cuda.memory_reserved)."""
        self._blocks: dict[int, Block] = {}

    def _file(self, block: Block) -> None:
        """Add a free block to its pool's free list."""
        insort(block.pool.free, block.size << ADDRESS_BITS | block.address)

    def _unfile(self, block: Block) -> None:
        """Remove a free block from its pool's free list."""
        free = block.pool.free
        del free[bisect_left(free, block.size << ADDRESS_BITS | block.address)]

    def _merge_and_file(self, block: Block) -> Block:
        """Merge a mapped block that just became free with its free neighbors; return the merged block."""
        after = block.after
        if after is not None and after.requested is None and after.mapped:
            self._unfile(after)
            self._absorb(block, after)
        before = block.before
        if before is not None and before.requested is None and before.mapped:
            self._unfile(before)
            self._absorb(before, block)
            block = before
        block.since = block.pool.searches
        self._file(block)
        return block

    def _insert_after(self, block: Block, size: int) -> Block:
        """Insert a new block of ``size`` bytes between ``block`` and its successor, and return it."""
        after = block.after
        new = Block(block.address + block.size, size, block.pool, block, after)
        block.after = new
        if after is not None:
            after.before = new
        self._blocks[new.address] = new
        return new

    def _absorb(self, block: Block, after: Block) -> None:
        """Merge a block with its successor, keeping the block's address."""
        del self._blocks[after.address]
        block.size += after.size
        block.after = beyond = after.after
        if beyond is not None:
            beyond.before = block


def segment_state(blocks: list[Block]) -> SegmentState:
    """Return the snapshot of the segment that consists of these blocks, which are sorted by address."""
    states = tuple(BlockState(block.address, block.size, block.requested) for block in blocks)
    return SegmentState(blocks[0].address, sum(block.size for block in blocks), blocks[0].pool.name, states)


def is_segment(block: Block) -> bool:
    """Return whether a block is a whole segment."""
    return block.before is None and block.after is None


def run_of_free(block: Block | None) -> int:
    """Return the total bytes of a block and the free blocks right after it; 0 if the block itself is in use."""
    total = 0
    while block is not None and block.requested is None:
        total += block.size
        block = block.after
    return total


class ExpandableBlocks(BlockTable):
    """Blocks of expandable segments: an unmapped block has addresses but no memory.

    Each pool has one expandable segment, which begins as a single unmapped block larger than any GPU.
    """

    def _reserve_addresses(self, pools: Iterable[Pool]) -> None:
        # Far apart, so that an address tells the segment that a block belongs to (see _unmap).
        for number, pool in enumerate(pools):
            address = number * EXPANDABLE_RANGE
            self._blocks[address] = block = Block(address, EXPANDABLE_RANGE, pool, None, None)
            block.mapped = False
            pool.unmapped.append(address)

    def _expand(self, pool: Pool, size: int) -> Block:
        """Return a block of at least ``size`` bytes at the lowest possible address, mapping pages as needed."""
        # As in PyTorch, the first place that is large enough, not the best fit. A free block there grows by mapping
        # what follows it, which is unmapped: _merge_and_file leaves no two free blocks next to each other.
        candidate = next(block for block in self._growable(pool) if run_of_free(block) >= size)
        if not candidate.mapped:
            candidate = self._map(candidate, min(candidate.size, size))
        while candidate.size < size:
            following = candidate.after
            assert following is not None and not following.mapped
            candidate = self._map(following, min(following.size, size - candidate.size))
        self._unfile(candidate)
        return candidate

    def _growable(self, pool: Pool) -> Iterator[Block]:
        """Yield the blocks from which the segment can grow: each unmapped block, or the free block right before it."""
        for address in pool.unmapped:
            block = self._blocks[address]
            yield block.before if block.before and block.before.requested is None else block

    def _map(self, block: Block, size: int) -> Block:
        """Map enough pages of an unmapped block for ``size`` bytes; return the free block they are merged into."""
        page = block.pool.page
        mapped = min(-(-size // page) * page, block.size)
        block.pool.unmapped.remove(block.address)
        if mapped < block.size:
            rest = block.size - mapped
            block.size = mapped
            remaining = self._insert_after(block, rest)
            remaining.mapped = False
            insort(block.pool.unmapped, remaining.address)
        block.mapped = True
        self.reserved += mapped  # whole pages, even if the block needs only part of the last one
        return self._merge_and_file(block)

    def _unmap(self, block: Block) -> None:
        """Release the whole pages of a free block to the driver; partial pages at its ends stay mapped."""
        page, base = block.pool.page, block.address // EXPANDABLE_RANGE * EXPANDABLE_RANGE
        # Only pages that lie in the block as a whole: a page shared with a block in use has to stay.
        first = -(-(block.address - base) // page) * page + base
        last = (block.address + block.size - base) // page * page + base
        if first >= last:
            return
        self._unfile(block)
        self.reserved -= last - first
        beyond = block.address + block.size - last
        # Split into the partial page before, the whole pages, and the partial page after.
        if first > block.address:
            block.size = first - block.address
            self._file(block)
            block = self._insert_after(block, last - first)
        else:
            block.size = last - first
        if beyond:
            self._file(self._insert_after(block, beyond))
        self._make_unmapped(block)

    def _make_unmapped(self, block: Block) -> None:
        """Mark a block as unmapped and merge it with unmapped neighbors."""
        block.mapped = False
        if block.after is not None and not block.after.mapped:
            block.pool.unmapped.remove(block.after.address)
            self._absorb(block, block.after)
        if block.before is not None and not block.before.mapped:
            self._absorb(block.before, block)
        else:
            insort(block.pool.unmapped, block.address)
