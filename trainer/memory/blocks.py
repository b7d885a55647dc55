"""The pieces that the allocator's model cuts memory into, how they part and merge, and the pools of the free ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from copy import copy

from trainer.memory.snapshot import BlockState, PoolName, SegmentState

# A free block is filed as one integer, size above address: sorted, these give best fit with the lowest address first.
ADDRESS_BITS = 48
ADDRESS = 2**ADDRESS_BITS - 1


class Block:
    """A piece of a segment, in use or free, between its neighbours in the same segment."""

    __slots__ = ("address", "after", "before", "mapped", "pool", "requested", "since", "size")

    def __init__(self, address: int, size: int, pool: Pool, before: Block | None, after: Block | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before = before
        self.after = after
        self.requested: int | None = None
        self.mapped = True
        self.since = 0  # the pool's count of searches when it became free


class Pool:
    """The free blocks of one pool; small and large allocations never share a segment."""

    __slots__ = ("free", "least_rest", "name", "page", "searches", "unmapped")

    def __init__(self, name: PoolName, least_rest: int, page: int) -> None:
        self.name = name
        self.free: list[int] = []
        self.least_rest = least_rest
        """From how many bytes on what is left of a block is split off."""
        self.page = page
        """Bytes that an expandable segment maps at once."""
        self.searches = 0
        self.unmapped: list[int] = []
        """Addresses of the unmapped blocks of the expandable segment, in order."""

    def copy(self) -> Pool:
        """Another with the same blocks."""
        twin = copy(self)
        twin.free, twin.unmapped = list(self.free), list(self.unmapped)
        return twin


class Blocks:
    """All blocks by address, and the bytes of their segments."""

    def __init__(self) -> None:
        self.reserved = 0
        """Bytes of all segments (torch.cuda.memory_reserved)."""
        self._blocks: dict[int, Block] = {}

    def _file(self, block: Block) -> None:
        """Enters a free block where searches find it."""
        insort(block.pool.free, block.size << ADDRESS_BITS | block.address)

    def _unfile(self, block: Block) -> None:
        free = block.pool.free
        del free[bisect_left(free, block.size << ADDRESS_BITS | block.address)]

    def _merge_and_file(self, block: Block) -> Block:
        """Merges a mapped block, that was in use or unmapped, with its free neighbours; returns the one it became."""
        after = block.after
        if after is not None and after.requested is None and after.mapped:
            self._unfile(after)
            self._swallow(block, after)
        before = block.before
        if before is not None and before.requested is None and before.mapped:
            self._unfile(before)
            self._swallow(before, block)
            block = before
        block.since = block.pool.searches
        self._file(block)
        return block

    def _insert_after(self, block: Block, size: int) -> Block:
        """A new block of ``size`` bytes between ``block`` and what follows it."""
        after = block.after
        new = Block(block.address + block.size, size, block.pool, block, after)
        block.after = new
        if after is not None:
            after.before = new
        self._blocks[new.address] = new
        return new

    def _swallow(self, block: Block, after: Block) -> None:
        """Makes two neighbours one; it keeps the first's address."""
        del self._blocks[after.address]
        block.size += after.size
        block.after = beyond = after.after
        if beyond is not None:
            beyond.before = block


def segment_state(blocks: list[Block]) -> SegmentState:
    """A segment from all its blocks, by address."""
    states = tuple(BlockState(block.address, block.size, block.requested) for block in blocks)
    return SegmentState(blocks[0].address, sum(block.size for block in blocks), blocks[0].pool.name, states)


def is_segment(block: Block) -> bool:
    """Whether a block is a segment of its own, not a piece of one."""
    return block.before is None and block.after is None


def run_of_free(block: Block | None) -> int:
    """Bytes of a block and of those after it up to the next one in use."""
    total = 0
    while block is not None and block.requested is None:
        total += block.size
        block = block.after
    return total
