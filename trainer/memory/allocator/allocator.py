"""A model of PyTorch's CUDA caching allocator: what it takes from the driver for a sequence of births and deaths.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.10 to 2.13: native backend, one device, one stream,
and beside it the one that graphs are recorded on. Nothing is approximated but addresses, which the driver chooses; they
only break ties between equal blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainer.memory.allocator.blocks import (
    ADDRESS,
    ADDRESS_BITS,
    AllocatorSnapshot,
    Block,
    ExpandableBlocks,
    Pool,
    SegmentState,
    is_segment,
    segment_state,
)
from trainer.memory.allocator.settings import AllocatorSettings

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


class OutOfMemory(Exception):
    """The allocator cannot give what was asked for, not even after it returned all that it could."""

    def __init__(self, requested: int, allocated: int, reserved: int, capacity: int) -> None:
        super().__init__(f"{requested} bytes asked for with {allocated} handed out, {reserved} of {capacity} taken")
        self.requested = requested
        self.allocated = allocated
        self.reserved = reserved
        self.capacity = capacity


@dataclass(frozen=True, slots=True)
class Account:
    """What events did, up to where memory ran out; arrays have an entry for each event, of bytes after it."""

    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    requested: NDArray[np.int64]
    alive: dict[int, int]
    """The handles of the storages that live in the end, by storage."""
    failure: OutOfMemory | None


class Allocator(ExpandableBlocks):
    """Hands out blocks and keeps the books as PyTorch does, in bytes.

    ``place`` says at which address the driver puts a new segment of the size it is given; absent: one after the other.
    """

    def __init__(self, settings: AllocatorSettings | None = None, place: Callable[[int], int] | None = None) -> None:
        super().__init__()
        settings = settings or AllocatorSettings()
        self._apply(settings)
        self.allocated = 0
        """Bytes of all blocks in use, with what could not be split off them (torch.cuda.memory_allocated)."""
        self.requested = 0
        """Bytes that were asked for and are in use."""
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0
        """How often everything returnable was returned to make room (num_alloc_retries)."""
        self.admitted = 0
        """The most that segments would have summed to, of those that the limit admitted."""
        self.refused: int | None = None
        """The least, of those that it refused: from ``admitted`` to below here every limit would have done the same,
        as long as no threshold for garbage depends on it."""
        self._place = place or self._append
        self._end = 0
        large_rest = SMALLEST_BLOCK if settings.expandable else LARGEST_SMALL + 1
        self._small = Pool("small", SMALLEST_BLOCK, SMALL_SEGMENT)
        self._large = Pool("large", large_rest, settings.large_segment_size)
        self._private = Pool("small", SMALLEST_BLOCK, SMALL_SEGMENT), Pool("large", large_rest, self._large.page)
        if settings.expandable:
            self._reserve_addresses((self._small, self._large, *self._private))
        self._recording = False

    def _apply(self, settings: AllocatorSettings) -> None:
        """Works by these settings from here on."""
        self.settings = settings
        unlimited = 2**ADDRESS_BITS
        self._oversize = settings.max_split_size or unlimited
        self._split_below = unlimited if settings.expandable else self._oversize
        self._collects = settings.capacity is not None and settings.garbage_collection_threshold > 0
        self._plain = not (settings.expandable or settings.max_split_size or self._collects)
        self._power2 = settings.roundup_power2_divisions not in (0, 1)

    # Handing out and taking back

    def allocate(self, requested: int) -> int:
        """Hands out a block for ``requested`` (at least 1) bytes; returns its address, which is its handle.

        Raises OutOfMemory where PyTorch would.
        """
        size = self._round(requested) if self._power2 else (requested + 511) & -512
        pool = self._small if size <= LARGEST_SMALL else self._large
        free = pool.free
        # Best fit: the smallest free block that is large enough, of equal ones that with the lowest address.
        index = bisect_left(free, size << ADDRESS_BITS)
        if not self._plain:
            index = self._choose(pool, index, size)
        found = index < len(free)
        block = self._blocks[free.pop(index) & ADDRESS] if found else self._allocate_from_driver(pool, size, requested)
        rest = block.size - size
        # What is not split off is handed out with the block and counts as allocated.
        if rest >= pool.least_rest and size < self._split_below:
            block.size = size
            insort(free, rest << ADDRESS_BITS | self._insert_after(block, rest).address)
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
                block = self._blocks[key & ADDRESS]
                if self.settings.expandable:
                    self._unmap(block)
                elif is_segment(block):
                    self._release(block)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, memory is handed out as while a CUDA graph is recorded; all recordings share one private pool.

        Its segments serve nothing else and stay for good; what is freed of them serves the next recording. Nothing is
        given back to make room meanwhile.
        """
        shared = self._small, self._large
        (self._small, self._large), self._recording = self._private, True
        try:
            yield
        finally:
            (self._small, self._large), self._recording = shared, False

    def reset_peaks(self) -> None:
        """Lets the peaks begin again at what is held now (torch.cuda.reset_peak_memory_stats)."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    # Many events at once

    def play(self, events: NDArray[np.int32], sizes: Sequence[int], alive: Mapping[int, int]) -> Account:
        """Does in order what ``events`` say: ``i`` asks for storage i, ``~i`` frees it; storages of 0 bytes do nothing.

        ``sizes`` are the storages' bytes, ``alive`` the handles of those that live already. Ends early where memory
        runs out.
        """
        live: list[Block | None] = [None] * len(sizes)
        taken = [0] * len(sizes)
        for storage, handle in alive.items():
            live[storage] = block = self._blocks[handle]
            taken[storage] = block.size
        levels = [(0, self.reserved)]
        play = self._play_plain if self._plain and not self._power2 else self._play_any
        before = self.allocated, self.requested
        count, failure = play(events.tolist(), sizes, live, taken, levels)
        allocated, requested = (
            _running_sum(events[:count], each, start) for each, start in zip((taken, sizes), before, strict=True)
        )
        reserved = np.empty(count, dtype=np.int64)
        for event, level in levels:
            reserved[event:] = level
        if count:
            self.allocated, self.requested = int(allocated[-1]), int(requested[-1])
            self.peak_allocated = max(self.peak_allocated, int(allocated.max()))
        left = {storage: block.address for storage, block in enumerate(live) if block is not None}
        return Account(allocated, reserved, requested, left, failure)

    def _play_any(
        self,
        events: Sequence[int],
        sizes: Sequence[int],
        live: list[Block | None],
        taken: list[int],
        levels: list[tuple[int, int]],
    ) -> tuple[int, OutOfMemory | None]:
        """How many events were done, and why no more; ``levels`` are (event, bytes reserved from then on)."""
        for number, event in enumerate(events):
            if event < 0:
                if (block := live[event := ~event]) is not None:
                    self.free(block.address)
                    live[event] = None
            elif sizes[event]:
                try:
                    live[event] = block = self._blocks[self.allocate(sizes[event])]
                except OutOfMemory as error:
                    return number, error
                taken[event] = block.size
                levels.append((number, self.reserved))
        return len(events), None

    def _play_plain(
        self,
        events: Sequence[int],
        sizes: Sequence[int],
        live: list[Block | None],
        taken: list[int],
        levels: list[tuple[int, int]],
    ) -> tuple[int, OutOfMemory | None]:
        """The same where no setting asks for more than best fit: ``allocate`` and ``free``, written out.

        Calls and books kept for each event are a third of the time, and every plan waits for this.
        """
        blocks, small, large = self._blocks, self._small, self._large
        allocated = self.allocated
        for number, event in enumerate(events):
            if event >= 0:
                if not (requested := sizes[event]):
                    continue
                size = (requested + 511) & -512
                pool = small if size <= LARGEST_SMALL else large
                free = pool.free
                index = bisect_left(free, size << ADDRESS_BITS)
                if index < len(free):
                    block = blocks[free.pop(index) & ADDRESS]
                else:
                    self.allocated = allocated
                    try:
                        block = self._allocate_from_driver(pool, size, requested)
                    except OutOfMemory as error:
                        return number, error
                    levels.append((number, self.reserved))
                rest = block.size - size
                if rest >= pool.least_rest:
                    block.size = size
                    address, after = block.address + size, block.after
                    blocks[address] = block.after = new = Block(address, rest, pool, block, after)
                    if after is not None:
                        after.before = new
                    insort(free, rest << ADDRESS_BITS | address)
                else:
                    size += rest
                block.requested = requested
                live[event], taken[event] = block, size
                allocated += size
            elif (freed := live[event := ~event]) is not None:
                block, live[event] = freed, None
                size, free = block.size, block.pool.free
                allocated -= size
                block.requested = None
                after = block.after
                if after is not None and after.requested is None:
                    del free[bisect_left(free, after.size << ADDRESS_BITS | after.address)], blocks[after.address]
                    size += after.size
                    block.after = after = after.after
                    if after is not None:
                        after.before = block
                before = block.before
                if before is not None and before.requested is None:
                    del free[bisect_left(free, before.size << ADDRESS_BITS | before.address)], blocks[block.address]
                    size += before.size
                    before.after = after
                    if after is not None:
                        after.before = before
                    block = before
                block.size = size
                insort(free, size << ADDRESS_BITS | block.address)
        return len(events), None

    # The whole state

    def copy(self, capacity: int | None) -> Allocator:
        """Another in the same state, down to the addresses: what is handed out here can be freed there.

        From here on its segments may sum to ``capacity`` bytes.
        """
        twin = copy(self)
        twin._apply(replace(self.settings, capacity=capacity))
        if self._place == self._append:
            twin._place = twin._append
        pools = {id(pool): pool.copy() for pool in (self._small, self._large, *self._private)}
        twin._small, twin._large, *private = pools.values()
        twin._private = private[0], private[1]
        twin._blocks = blocks = {}
        for address, block in self._blocks.items():
            blocks[address] = new = Block(address, block.size, pools[id(block.pool)], None, None)
            new.requested, new.mapped, new.since = block.requested, block.mapped, block.since
        for address, block in self._blocks.items():
            if (after := block.after) is not None:
                blocks[address].after, blocks[after.address].before = blocks[after.address], blocks[address]
        return twin

    def snapshot(self) -> AllocatorSnapshot:
        """All segments with their blocks, by address."""
        runs: list[list[Block]] = []
        for address in sorted(self._blocks):
            block = self._blocks[address]
            if block.mapped:
                if block.before is None or not block.before.mapped:
                    runs.append([])
                runs[-1].append(block)
        return AllocatorSnapshot(tuple(segment_state(blocks) for blocks in runs))

    @classmethod
    def restored(
        cls,
        snapshot: AllocatorSnapshot,
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
        before: Block | None = None
        for state in segment.blocks:
            block = Block(state.address, state.bytes, pool, before, None)
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
        divisions = self.settings.divisions(requested)
        if divisions < 2 or requested <= SMALLEST_BLOCK * divisions:
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

    def _choose(self, pool: Pool, index: int, size: int) -> int:
        """The index of the free block to take where settings make more of it than best fit; past the end for none."""
        pool.searches += 1
        free = pool.free
        if index == len(free):
            return index
        if self.settings.expandable:
            # A block before unmapped pages counts as large as it can grow, so that the end is used last.
            while index + 1 < len(free) and self._growable_size(free[index + 1]) < self._growable_size(free[index]):
                index += 1
        found = free[index] >> ADDRESS_BITS
        small_takes_oversize = size < self._oversize <= found
        wastes_oversize = size >= self._oversize and found >= size + OVERSIZE_SLACK
        return len(free) if small_takes_oversize or wastes_oversize else index

    def _growable_size(self, key: int) -> int:
        """Bytes of a free block of an expandable segment, with the unmapped ones that follow it."""
        block = self._blocks[key & ADDRESS]
        after = block.after
        return block.size + (after.size if after and not after.mapped else 0)

    # The driver

    def _allocate_from_driver(self, pool: Pool, size: int, requested: int) -> Block:
        """New memory from the driver for a block that found no place; gives back what it can when the limit is hit.

        The order is PyTorch's: collect garbage, ask, return oversize blocks, ask, return all that is free, ask.
        """
        segment = self._segment_size(size)
        if self._collects and not self._recording:
            self._collect_garbage()
        if not self._admits(segment) and not (self._release_oversize(pool, size) and self._admits(segment)):
            if not self._recording:
                self.empty_cache()
                self.retries += 1
            if self._recording or not self._admits(segment):
                raise OutOfMemory(requested, self.allocated, self.reserved, self.settings.capacity or 0)
        block = self._expand(pool, size) if self.settings.expandable else self._open_segment(pool, segment)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _admits(self, segment: int) -> bool:
        """Whether the memory fraction admits a segment; PyTorch asks this of expandable ones too, before it grows."""
        capacity, total = self.settings.capacity, self.reserved + segment
        if capacity is None or total <= capacity:
            self.admitted = max(self.admitted, total)
            return True
        self.refused = total if self.refused is None else min(self.refused, total)
        return False

    def _open_segment(self, pool: Pool, size: int) -> Block:
        """A new segment as one block, which is not filed as free."""
        address = self._place(size)
        self._blocks[address] = block = Block(address, size, pool, None, None)
        self.reserved += size
        return block

    def _append(self, size: int) -> int:
        """Where a segment lies when the driver is not asked: behind the last."""
        self._end += size
        return self._end - size

    def _release(self, block: Block) -> None:
        """Gives a segment that is one free block back to the driver."""
        self._unfile(block)
        del self._blocks[block.address]
        self.reserved -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """With max_split_size: gives back the fitting oversize block, or the largest ones until they make room."""
        if self.settings.max_split_size is None or self.settings.expandable:
            return False
        index = bisect_left(pool.free, size << ADDRESS_BITS)
        if index < len(pool.free):
            self._release(self._blocks[pool.free[index] & ADDRESS])
            return True
        returned = 0
        while returned < size and pool.free and pool.free[-1] >> ADDRESS_BITS >= self._oversize:
            block = self._blocks[pool.free[-1] & ADDRESS]
            returned += block.size
            self._release(block)
        return returned >= size

    def _collect_garbage(self) -> None:
        """Above the threshold, gives back whole large segments unused for longer than average, until below it."""
        pool = self._large
        threshold = int(self.settings.garbage_collection_threshold * (self.settings.capacity or 0))
        unused = [block for key in pool.free if is_segment(block := self._blocks[key & ADDRESS])]
        while unused and self.reserved > threshold:
            mean = sum(pool.searches - block.since for block in unused) / len(unused)
            old = [block for block in unused if pool.searches - block.since >= mean]
            for block in old:
                self._release(block)
            unused = [block for block in unused if pool.searches - block.since < mean]


def _running_sum(events: NDArray[np.int32], sizes: Sequence[int], start: int) -> NDArray[np.int64]:
    """``start`` and the bytes added by the events up to each of them."""
    died = events < 0
    changes = np.array(sizes, dtype=np.int64)[np.where(died, ~events, events)]
    return start + np.cumsum(np.where(died, -changes, changes))
