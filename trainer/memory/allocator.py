"""A model of PyTorch's CUDA caching allocator: what it takes from the driver for a sequence of births and deaths.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.10 to 2.13: native backend, one device, one stream,
no graphs. Nothing is approximated but addresses, which the driver chooses; they only break ties between equal blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace

from trainer.memory.snapshot import BlockState, PoolName, SegmentState, Snapshot

MIB = 2**20

SMALLEST_BLOCK = 512
"""Every size is a multiple of this."""
LARGEST_SMALL = MIB
"""Up to here a block belongs to the small pool; the pools never mix."""
SMALL_SEGMENT = 2 * MIB
SEGMENT_OF_ITS_OWN = 10 * MIB
"""From here on a block that finds no place gets a segment of its size, rounded up to SEGMENT_STEP."""
SEGMENT_STEP = 2 * MIB
OVERSIZE_SLACK = 20 * MIB
"""How much larger than asked an unsplittable block may be and still be handed out (max_non_split_rounding)."""

# A free block is filed as one integer, size above address: sorted, these give best fit with the lowest address first.
_ADDRESS_BITS = 48
_ADDRESS = 2**_ADDRESS_BITS - 1
# An expandable segment reserves addresses for 1.125 times the card; here, for more than any card has.
EXPANDABLE_RANGE = 2**44


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What PYTORCH_ALLOC_CONF and torch.cuda.set_per_process_memory_fraction can say; the defaults are PyTorch's."""

    capacity: int | None = None
    """Bytes that the segments may sum to; None for no limit."""
    expandable: bool = False
    """Segments grow page by page (expandable_segments). Windows has none: PyTorch warns and ignores it there."""
    max_split_size: int | None = None
    """Blocks of so many bytes and more are never split."""
    roundup_power2_divisions: int = 0
    """Sizes are rounded up to one of so many steps between two powers of two; 0 and 1 for none."""
    garbage_collection_threshold: float = 0.0
    """The share of ``capacity`` above which blocks unused for long are given back before new ones are taken."""
    large_segment_size: int = 20 * MIB
    """Of the segments that blocks of 1 to 10 MiB share, and of an expandable segment's large pages."""


class OutOfMemory(Exception):
    """The allocator cannot give what was asked for, not even after it returned all that it could."""

    def __init__(self, requested: int, allocated: int, reserved: int, capacity: int) -> None:
        super().__init__(f"{requested} bytes asked for with {allocated} handed out, {reserved} of {capacity} taken")
        self.requested = requested
        self.allocated = allocated
        self.reserved = reserved
        self.capacity = capacity


class _Block:
    """A piece of a segment, in use or free, between its neighbours in the same segment."""

    __slots__ = ("address", "after", "before", "mapped", "pool", "requested", "since", "size")

    def __init__(self, address: int, size: int, pool: _Pool, before: _Block | None, after: _Block | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before = before
        self.after = after
        self.requested: int | None = None
        self.mapped = True
        self.since = 0  # the pool's count of searches when it became free


class _Pool:
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

    def copy(self) -> _Pool:
        twin = copy(self)
        twin.free, twin.unmapped = list(self.free), list(self.unmapped)
        return twin


class Allocator:
    """Hands out blocks and keeps the books as PyTorch does, in bytes.

    ``place`` says at which address the driver puts a new segment of the size it is given; absent: one after the other.
    """

    def __init__(self, settings: AllocatorSettings | None = None, place: Callable[[int], int] | None = None) -> None:
        settings = settings or AllocatorSettings()
        self._settle(settings)
        self.allocated = 0
        """Bytes of all blocks in use, with what could not be split off them (torch.cuda.memory_allocated)."""
        self.reserved = 0
        """Bytes of all segments (torch.cuda.memory_reserved)."""
        self.requested = 0
        """Bytes that were asked for and are in use."""
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0
        """How often everything returnable was returned to make room (num_alloc_retries)."""
        self._place = place or self._append
        self._end = 0
        large_rest = SMALLEST_BLOCK if settings.expandable else LARGEST_SMALL + 1
        self._small = _Pool("small", SMALLEST_BLOCK, SMALL_SEGMENT)
        self._large = _Pool("large", large_rest, settings.large_segment_size)
        self._blocks: dict[int, _Block] = {}
        if settings.expandable:
            self._reserve_addresses()

    def _settle(self, settings: AllocatorSettings) -> None:
        """Works by these settings from here on."""
        self.settings = settings
        unlimited = 2**_ADDRESS_BITS
        self._oversize = settings.max_split_size or unlimited
        self._split_below = unlimited if settings.expandable else self._oversize
        self._collects = settings.capacity is not None and settings.garbage_collection_threshold > 0
        self._plain = not (settings.expandable or settings.max_split_size or self._collects)
        self._power2 = settings.roundup_power2_divisions > 1

    # Handing out and taking back

    def allocate(self, requested: int) -> int:
        """Hands out a block for ``requested`` (at least 1) bytes; returns its address, which is its handle.

        Raises OutOfMemory where PyTorch would.
        """
        size = self._round(requested) if self._power2 else (requested + 511) & -512
        pool = self._small if size <= LARGEST_SMALL else self._large
        free = pool.free
        # Best fit: the smallest free block that is large enough, of equal ones that with the lowest address.
        index = bisect_left(free, size << _ADDRESS_BITS)
        if not self._plain:
            index = self._choose(pool, index, size)
        found = index < len(free)
        block = self._blocks[free.pop(index) & _ADDRESS] if found else self._take(pool, size, requested)
        rest = block.size - size
        # What is not split off is handed out with the block and counts as allocated.
        if rest >= pool.least_rest and size < self._split_below:
            block.size = size
            insort(free, rest << _ADDRESS_BITS | self._insert_after(block, rest).address)
        block.requested = requested
        self.requested += requested
        self.allocated = allocated = self.allocated + block.size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        return block.address

    def free(self, handle: int) -> None:
        """Takes a block back; it merges with free neighbours, and nothing goes back to the driver."""
        block = self._blocks[handle]
        if block.requested is None:
            raise ValueError(f"the block at {handle} is free already")
        self.allocated -= block.size
        self.requested -= block.requested
        block.requested = None
        self._merge_and_file(block)

    def empty_cache(self) -> None:
        """Gives back every segment, or page of an expandable one, that holds no live byte (torch.cuda.empty_cache)."""
        for pool in (self._large, self._small):
            for key in tuple(pool.free):
                block = self._blocks[key & _ADDRESS]
                if self.settings.expandable:
                    self._unmap(block)
                elif _is_segment(block):
                    self._return(block)

    def reset_peaks(self) -> None:
        """Lets the peaks begin again at what is held now (torch.cuda.reset_peak_memory_stats)."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    # The whole state

    def copy(self, capacity: int | None) -> Allocator:
        """Another in the same state, down to the addresses: what is handed out here can be freed there.

        From here on its segments may sum to ``capacity`` bytes.
        """
        twin = copy(self)
        twin._settle(replace(self.settings, capacity=capacity))
        if self._place == self._append:
            twin._place = twin._append
        pools = {id(pool): pool.copy() for pool in (self._small, self._large)}
        twin._small, twin._large = pools.values()
        twin._blocks = blocks = {}
        for address, block in self._blocks.items():
            blocks[address] = new = _Block(address, block.size, pools[id(block.pool)], None, None)
            new.requested, new.mapped, new.since = block.requested, block.mapped, block.since
        for address, block in self._blocks.items():
            if (after := block.after) is not None:
                blocks[address].after, blocks[after.address].before = blocks[after.address], blocks[address]
        return twin

    def snapshot(self) -> Snapshot:
        """All segments with their blocks, by address."""
        runs: list[list[_Block]] = []
        for address in sorted(self._blocks):
            block = self._blocks[address]
            if block.mapped:
                if block.before is None or not block.before.mapped:
                    runs.append([])
                runs[-1].append(block)
        return Snapshot(tuple(_segment_state(blocks) for blocks in runs))

    @classmethod
    def restored(
        cls,
        snapshot: Snapshot,
        settings: AllocatorSettings | None = None,
        place: Callable[[int], int] | None = None,
    ) -> Allocator:
        """An allocator that goes on from a snapshot (of segments that do not expand), its peaks at what is held."""
        allocator = cls(settings, place)
        for segment in snapshot.segments:
            allocator._restore(segment)
        allocator.reset_peaks()
        return allocator

    def _restore(self, segment: SegmentState) -> None:
        pool = self._small if segment.pool == "small" else self._large
        before: _Block | None = None
        for state in segment.blocks:
            block = _Block(state.address, state.bytes, pool, before, None)
            if before is not None:
                before.after = block
            self._blocks[state.address] = before = block
            block.requested = state.requested
            if state.requested is None:
                self._file(block)
            else:
                self.allocated += state.bytes
                self.requested += state.requested
        self.reserved += segment.bytes
        self._end = max(self._end, segment.address + segment.bytes)

    # Sizes

    def _round(self, requested: int) -> int:
        """The size of block that so many bytes get with roundup_power2_divisions: a step of a power of two."""
        divisions = self.settings.roundup_power2_divisions
        if requested <= SMALLEST_BLOCK * divisions:
            return (requested + 511) & -512
        # PyTorch takes the power of two below ``divisions`` when that is none itself.
        step = 1 << (requested.bit_length() - divisions.bit_length())
        return -(-requested // step) * step

    def _segment_size(self, size: int) -> int:
        """Of the segment that is opened for a block that finds no place."""
        if size <= LARGEST_SMALL:
            return SMALL_SEGMENT
        if size < SEGMENT_OF_ITS_OWN:
            return self.settings.large_segment_size
        return -(-size // SEGMENT_STEP) * SEGMENT_STEP

    # Free blocks

    def _choose(self, pool: _Pool, index: int, size: int) -> int:
        """The index of the free block to take where settings make more of it than best fit; past the end for none."""
        pool.searches += 1
        free = pool.free
        if index == len(free):
            return index
        if self.settings.expandable:
            # A block before unmapped pages counts as large as it can grow, so that the end is used last.
            while index + 1 < len(free) and self._room(free[index + 1]) < self._room(free[index]):
                index += 1
        found = free[index] >> _ADDRESS_BITS
        small_takes_oversize = size < self._oversize <= found
        wastes_oversize = size >= self._oversize and found >= size + OVERSIZE_SLACK
        return len(free) if small_takes_oversize or wastes_oversize else index

    def _room(self, key: int) -> int:
        """Bytes of a free block of an expandable segment, with the unmapped ones that follow it."""
        block = self._blocks[key & _ADDRESS]
        after = block.after
        return block.size + (after.size if after and not after.mapped else 0)

    def _file(self, block: _Block) -> None:
        """Enters a free block where searches find it."""
        insort(block.pool.free, block.size << _ADDRESS_BITS | block.address)

    def _unfile(self, block: _Block) -> None:
        free = block.pool.free
        del free[bisect_left(free, block.size << _ADDRESS_BITS | block.address)]

    def _merge_and_file(self, block: _Block) -> _Block:
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
        insort(block.pool.free, block.size << _ADDRESS_BITS | block.address)
        return block

    def _insert_after(self, block: _Block, size: int) -> _Block:
        """A new block of ``size`` bytes between ``block`` and what follows it."""
        after = block.after
        new = _Block(block.address + block.size, size, block.pool, block, after)
        block.after = new
        if after is not None:
            after.before = new
        self._blocks[new.address] = new
        return new

    def _swallow(self, block: _Block, after: _Block) -> None:
        """Makes two neighbours one; it keeps the first's address."""
        del self._blocks[after.address]
        block.size += after.size
        block.after = beyond = after.after
        if beyond is not None:
            beyond.before = block

    # The driver

    def _take(self, pool: _Pool, size: int, requested: int) -> _Block:
        """New memory from the driver for a block that found no place; gives back what it can when the limit is hit.

        The order is PyTorch's: collect garbage, ask, return oversize blocks, ask, return all that is free, ask.
        """
        segment = self._segment_size(size)
        if self._collects:
            self._collect_garbage()
        if not self._allowed(segment) and not (self._return_oversize(pool, size) and self._allowed(segment)):
            self.empty_cache()
            self.retries += 1
            if not self._allowed(segment):
                raise OutOfMemory(requested, self.allocated, self.reserved, self.settings.capacity or 0)
        block = self._expand(pool, size) if self.settings.expandable else self._open(pool, segment)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _allowed(self, segment: int) -> bool:
        """Whether the memory fraction admits a segment; PyTorch asks this of expandable ones too, before it grows."""
        capacity = self.settings.capacity
        return capacity is None or self.reserved + segment <= capacity

    def _open(self, pool: _Pool, size: int) -> _Block:
        """A new segment as one block, which is not filed as free."""
        address = self._place(size)
        self._blocks[address] = block = _Block(address, size, pool, None, None)
        self.reserved += size
        return block

    def _append(self, size: int) -> int:
        """Where a segment lies when the driver is not asked: behind the last."""
        self._end += size
        return self._end - size

    def _return(self, block: _Block) -> None:
        """Gives a segment that is one free block back to the driver."""
        self._unfile(block)
        del self._blocks[block.address]
        self.reserved -= block.size

    def _return_oversize(self, pool: _Pool, size: int) -> bool:
        """With max_split_size: gives back the fitting oversize block, or the largest ones until they make room."""
        if self.settings.max_split_size is None or self.settings.expandable:
            return False
        index = bisect_left(pool.free, size << _ADDRESS_BITS)
        if index < len(pool.free):
            self._return(self._blocks[pool.free[index] & _ADDRESS])
            return True
        returned = 0
        while returned < size and pool.free and pool.free[-1] >> _ADDRESS_BITS >= self._oversize:
            block = self._blocks[pool.free[-1] & _ADDRESS]
            returned += block.size
            self._return(block)
        return returned >= size

    def _collect_garbage(self) -> None:
        """Above the threshold, gives back whole large segments unused for longer than average, until below it."""
        pool = self._large
        threshold = int(self.settings.garbage_collection_threshold * (self.settings.capacity or 0))
        unused = [block for key in pool.free if _is_segment(block := self._blocks[key & _ADDRESS])]
        while unused and self.reserved > threshold:
            mean = sum(pool.searches - block.since for block in unused) / len(unused)
            old = [block for block in unused if pool.searches - block.since >= mean]
            for block in old:
                self._return(block)
            unused = [block for block in unused if pool.searches - block.since < mean]

    # Expandable segments: one range of addresses a pool, mapped in pages as it is needed

    def _reserve_addresses(self) -> None:
        for number, pool in enumerate((self._small, self._large)):
            address = number * EXPANDABLE_RANGE
            self._blocks[address] = block = _Block(address, EXPANDABLE_RANGE, pool, None, None)
            block.mapped = False
            pool.unmapped.append(address)

    def _expand(self, pool: _Pool, size: int) -> _Block:
        """A block of at least ``size`` bytes at the lowest address where free and unmapped blocks make room for it."""
        candidate = next(block for block in self._growable(pool) if _run_of_free(block) >= size)
        if not candidate.mapped:
            candidate = self._map(candidate, min(candidate.size, size))
        while candidate.size < size:
            following = candidate.after
            assert following is not None and not following.mapped
            candidate = self._map(following, min(following.size, size - candidate.size))
        self._unfile(candidate)
        return candidate

    def _growable(self, pool: _Pool) -> Iterator[_Block]:
        """Where a block might begin: at the unmapped blocks, or at the free one that lies before."""
        for address in pool.unmapped:
            block = self._blocks[address]
            yield block.before if block.before and block.before.requested is None else block

    def _map(self, block: _Block, size: int) -> _Block:
        """Maps as many pages of an unmapped block as hold ``size`` bytes; returns the free block they fall to."""
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
        self.reserved += mapped
        return self._merge_and_file(block)

    def _unmap(self, block: _Block) -> None:
        """Gives the whole pages of a free block back to the driver."""
        page, base = block.pool.page, block.address // EXPANDABLE_RANGE * EXPANDABLE_RANGE
        first = -(-(block.address - base) // page) * page + base
        last = (block.address + block.size - base) // page * page + base
        if first >= last:
            return
        self._unfile(block)
        self.reserved -= last - first
        beyond = block.address + block.size - last
        if first > block.address:
            block.size = first - block.address
            self._file(block)
            block = self._insert_after(block, last - first)
        else:
            block.size = last - first
        if beyond:
            self._file(self._insert_after(block, beyond))
        self._make_unmapped(block)

    def _make_unmapped(self, block: _Block) -> None:
        """Enters a block as unmapped, one with its unmapped neighbours."""
        block.mapped = False
        if block.after is not None and not block.after.mapped:
            block.pool.unmapped.remove(block.after.address)
            self._swallow(block, block.after)
        if block.before is not None and not block.before.mapped:
            self._swallow(block.before, block)
        else:
            insort(block.pool.unmapped, block.address)


def _segment_state(blocks: list[_Block]) -> SegmentState:
    states = tuple(BlockState(block.address, block.size, block.requested) for block in blocks)
    return SegmentState(blocks[0].address, sum(block.size for block in blocks), blocks[0].pool.name, states)


def _is_segment(block: _Block) -> bool:
    """Whether a block is a segment of its own, not a piece of one."""
    return block.before is None and block.after is None


def _run_of_free(block: _Block | None) -> int:
    """Bytes of a block and of those after it up to the next one in use."""
    total = 0
    while block is not None and block.requested is None:
        total += block.size
        block = block.after
    return total
