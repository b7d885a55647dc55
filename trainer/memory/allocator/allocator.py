"""Simulate PyTorch's CUDA caching allocator to find how much memory it takes from the driver for given events.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.10 to 2.13: native backend, one device, one stream,
plus the stream on which CUDA graphs are captured. They are exact except for addresses, which the driver chooses;
addresses only break ties between blocks of equal size.
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
"""Smallest block size in bytes; all block sizes are multiples of it (kMinBlockSize)."""
LARGEST_SMALL = MIB
"""Largest block size in the small pool, in bytes (kSmallSize); the pools never share a segment."""
SMALL_SEGMENT = 2 * MIB
SEGMENT_OF_ITS_OWN = 10 * MIB
"""Smallest block size, in bytes, that gets its own segment, rounded up to SEGMENT_STEP (kMinLargeAlloc)."""
SEGMENT_STEP = 2 * MIB
OVERSIZE_SLACK = 20 * MIB
"""Maximum bytes by which an unsplittable block may exceed the request it serves (max_non_split_rounding)."""


class OutOfMemory(Exception):
    """The allocator cannot serve a request, even after returning all cached memory to the driver."""

    def __init__(self, requested: int, allocated: int, reserved: int, capacity: int) -> None:
        super().__init__(f"{requested} bytes requested; {allocated} allocated, {reserved} of {capacity} reserved")
        self.requested = requested
        self.allocated = allocated
        self.reserved = reserved
        self.capacity = capacity


@dataclass(frozen=True, slots=True)
class Account:
    """Result of simulating events, up to a failure if any; arrays contain the bytes after each event."""

    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    requested: NDArray[np.int64]
    alive: dict[int, int]
    """Handles of the storages still allocated at the end, by storage index."""
    failure: OutOfMemory | None


class Allocator(ExpandableBlocks):
    """Simulated caching allocator: allocates and frees blocks as PyTorch does and counts their bytes.

    ``place`` returns the address at which the driver puts a new segment of the given size; if it is None, segments
    follow each other.
    """

    def __init__(self, settings: AllocatorSettings | None = None, place: Callable[[int], int] | None = None) -> None:
        super().__init__()
        settings = settings or AllocatorSettings()
        self._apply(settings)
        self.allocated = 0
        """Bytes of all blocks in use, including remainders that were not split off (torch.cuda.memory_allocated)."""
        self.requested = 0
        """Bytes requested by the storages in use, before rounding."""
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0
        """Number of allocations tried again after returning all cached memory to the driver (num_alloc_retries)."""
        self.admitted = 0
        """Largest total size of segments, in bytes, that the limit has allowed."""
        self.refused: int | None = None
        """Smallest total size that the limit has refused, or None. Any limit from ``admitted`` to one byte below this
        size gives the same result, unless a garbage collection threshold depends on the limit."""
        self._place = place or self._append
        self._end = 0
        # PyTorch splits a large block only if more than 1 MiB would be left, but always in expandable segments.
        large_rest = SMALLEST_BLOCK if settings.expandable else LARGEST_SMALL + 1
        self._small = Pool("small", SMALLEST_BLOCK, SMALL_SEGMENT)
        self._large = Pool("large", large_rest, settings.large_segment_size)
        # The pools of CUDA graph captures (see recording).
        self._private = Pool("small", SMALLEST_BLOCK, SMALL_SEGMENT), Pool("large", large_rest, self._large.page)
        if settings.expandable:
            self._reserve_addresses((self._small, self._large, *self._private))
        self._recording = False

    def _apply(self, settings: AllocatorSettings) -> None:
        """Use these settings from now on."""
        self.settings = settings
        unlimited = 2**ADDRESS_BITS
        self._oversize = settings.max_split_size or unlimited
        self._split_below = unlimited if settings.expandable else self._oversize
        self._collects = settings.capacity is not None and settings.garbage_collection_threshold > 0
        # Whether best fit is the whole rule, so that _play_plain gives the same result in less time.
        self._plain = not (settings.expandable or settings.max_split_size or self._collects)
        self._power2 = settings.roundup_power2_divisions not in (0, 1)

    # Allocate and free

    def allocate(self, requested: int) -> int:
        """Allocate a block for ``requested`` (at least 1) bytes and return its address, which is its handle.

        Raises OutOfMemory whenever PyTorch would.
        """
        size = self._round(requested) if self._power2 else (requested + 511) & -512
        pool = self._small if size <= LARGEST_SMALL else self._large
        free = pool.free
        # Best fit: the smallest free block that is large enough; among equal ones, the one with the lowest address.
        index = bisect_left(free, size << ADDRESS_BITS)
        if not self._plain:
            index = self._choose(pool, index, size)
        found = index < len(free)
        block = self._blocks[free.pop(index) & ADDRESS] if found else self._allocate_from_driver(pool, size, requested)
        rest = block.size - size
        # What is not split off belongs to the block and counts as allocated.
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
        """Free a block and merge it with free neighbors, without returning memory to the driver."""
        block = self._blocks[handle]
        if block.requested is None:
            raise ValueError(f"the block at {handle} is free already")
        self.allocated -= block.size
        self.requested -= block.requested
        block.requested = None
        self._merge_and_file(block)

    def empty_cache(self) -> None:
        """Release all unused segments, or unused pages of expandable ones, to the driver (torch.cuda.empty_cache)."""
        for pool in (self._large, self._small):
            for key in tuple(pool.free):  # a copy, since both branches change the list
                block = self._blocks[key & ADDRESS]
                if self.settings.expandable:
                    self._unmap(block)
                elif is_segment(block):
                    self._release(block)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, allocate from the private pool of CUDA graphs, as PyTorch does while capturing a graph.

        All captures share one pool. Its segments are used for nothing else and never returned to the driver; memory
        freed in them is available to the next capture. During a capture, no cached memory is returned to the driver.
        """
        shared = self._small, self._large
        (self._small, self._large), self._recording = self._private, True
        try:
            yield
        finally:
            (self._small, self._large), self._recording = shared, False

    def reset_peaks(self) -> None:
        """Reset both peaks to the current values (torch.cuda.reset_peak_memory_stats)."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    # Simulate many events at once

    def play(self, events: NDArray[np.int32], sizes: Sequence[int], alive: Mapping[int, int]) -> Account:
        """Simulate ``events`` in order: ``i`` allocates storage i, and ``~i`` frees it.

        ``sizes`` are the storages' sizes in bytes; storages of 0 bytes are ignored. ``alive`` maps storages that are
        already allocated to their handles. The simulation stops if memory runs out.
        """
        live: list[Block | None] = [None] * len(sizes)
        taken = [0] * len(sizes)
        for storage, handle in alive.items():
            live[storage] = block = self._blocks[handle]
            taken[storage] = block.size
        # Reserved bytes change at few events: (event, level from then on) costs less than an entry per event.
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
        # The fast path counts allocated bytes in a local variable and leaves the totals to be set here.
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
        """Simulate events with any settings; return the number simulated, and the error that stopped them or None.

        Appends (event, bytes reserved after it) to ``levels``.
        """
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
        """Simulate events like ``_play_any``, but only for settings that add no rules to best fit.

        ``allocate`` and ``free`` are inlined here.

        Calls and bookkeeping would account for a third of this method's time, and every plan waits for it. Any change
        here must also be made in ``allocate`` and ``free``; tests compare both with a naive allocator.
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
                    self.allocated = allocated  # for the message of OutOfMemory
                    try:
                        block = self._allocate_from_driver(pool, size, requested)
                    except OutOfMemory as error:
                        return number, error
                    levels.append((number, self.reserved))
                rest = block.size - size
                if rest >= pool.least_rest:
                    # As BlockTable._insert_after.
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
                # As BlockTable._merge_and_file, but every block is mapped here and no age is needed.
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

    # Copies and snapshots

    def copy(self, capacity: int | None) -> Allocator:
        """Return a copy of the allocator in which segments may take up to ``capacity`` bytes in total from now on.

        Addresses stay the same, so blocks allocated in the original can be freed in the copy.
        """
        twin = copy(self)
        twin._apply(replace(self.settings, capacity=capacity))
        if self._place == self._append:  # a bound method, which would keep advancing the original's addresses
            twin._place = twin._append
        # Blocks are linked lists, along which copy.deepcopy would recurse.
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
        """Return all segments with their blocks, sorted by address."""
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
        """Return an allocator in the state of ``snapshot``, with peaks reset; expandable segments are not supported."""
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
        """Return the block size for a request, rounded up to one of the steps of roundup_power2_divisions."""
        divisions = self.settings.divisions(requested)
        if divisions < 2 or requested <= SMALLEST_BLOCK * divisions:
            return (requested + 511) & -512
        # PyTorch uses the next lower power of two when ``divisions`` is not one itself.
        step = 1 << (requested.bit_length() - divisions.bit_length())
        return -(-requested // step) * step

    def _segment_size(self, size: int) -> int:
        """Return the size in bytes of a new segment for a block of ``size`` bytes."""
        if size <= LARGEST_SMALL:
            return SMALL_SEGMENT
        if size < SEGMENT_OF_ITS_OWN:
            return self.settings.large_segment_size
        return -(-size // SEGMENT_STEP) * SEGMENT_STEP

    # Free blocks

    def _choose(self, pool: Pool, index: int, size: int) -> int:
        """Return the index in ``pool.free`` of the block to use for ``size`` bytes, or ``len(pool.free)`` for none.

        ``index`` is that of the best fit; with some settings, a later block or none is used instead.
        """
        pool.searches += 1  # the clock by which garbage collection measures age
        free = pool.free
        if index == len(free):
            return index
        if self.settings.expandable:
            # A block before unmapped pages counts as large as it can grow, so that the segment's end is used last.
            while index + 1 < len(free) and self._growable_size(free[index + 1]) < self._growable_size(free[index]):
                index += 1
        # With max_split_size, oversize blocks serve only oversize requests, and only if little of them is wasted.
        found = free[index] >> ADDRESS_BITS
        small_takes_oversize = size < self._oversize <= found
        wastes_oversize = size >= self._oversize and found >= size + OVERSIZE_SLACK
        return len(free) if small_takes_oversize or wastes_oversize else index

    def _growable_size(self, key: int) -> int:
        """Return the bytes of a free block in an expandable segment plus those of an unmapped block after it."""
        block = self._blocks[key & ADDRESS]
        after = block.after
        return block.size + (after.size if after and not after.mapped else 0)

    # The driver

    def _allocate_from_driver(self, pool: Pool, size: int, requested: int) -> Block:
        """Allocate a new block from the driver, releasing cached memory first if the limit requires it.

        As in PyTorch, garbage is collected first. If the limit still does not allow the block, oversize blocks are
        released, and if that is not enough, all cached memory. Raises OutOfMemory if this is not enough either.
        """
        segment = self._segment_size(size)
        if self._collects and not self._recording:
            self._collect_garbage()
        if not self._admits(segment) and not (self._release_oversize(pool, size) and self._admits(segment)):
            # During a capture PyTorch releases no cached blocks and fails at once.
            if not self._recording:
                self.empty_cache()
                self.retries += 1
            if self._recording or not self._admits(segment):
                raise OutOfMemory(requested, self.allocated, self.reserved, self.settings.capacity or 0)
        block = self._expand(pool, size) if self.settings.expandable else self._open_segment(pool, segment)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _admits(self, segment: int) -> bool:
        """Return whether the limit allows a new segment of ``segment`` bytes; update ``admitted`` or ``refused``.

        PyTorch makes the same check before an expandable segment grows.
        """
        capacity, total = self.settings.capacity, self.reserved + segment
        if capacity is None or total <= capacity:
            self.admitted = max(self.admitted, total)
            return True
        self.refused = total if self.refused is None else min(self.refused, total)
        return False

    def _open_segment(self, pool: Pool, size: int) -> Block:
        """Create a segment and return it as one block, which is not in the pool's free list."""
        address = self._place(size)
        self._blocks[address] = block = Block(address, size, pool, None, None)
        self.reserved += size
        return block

    def _append(self, size: int) -> int:
        """Return the address of a new segment, right after the last one; used if no ``place`` was given."""
        self._end += size
        return self._end - size

    def _release(self, block: Block) -> None:
        """Release a segment that consists of a single free block to the driver."""
        self._unfile(block)
        del self._blocks[block.address]
        self.reserved -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release the best-fitting oversize block, or else the largest ones until ``size`` bytes are released.

        Returns whether enough was released; without max_split_size, nothing is released.
        """
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
        """Release unused large segments until the reserved memory no longer exceeds the threshold.

        As in PyTorch, each round releases the segments that have been unused for at least the average time.
        """
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
    """Return, for each event, ``start`` plus the net bytes allocated by all events up to and including it."""
    died = events < 0
    changes = np.array(sizes, dtype=np.int64)[np.where(died, ~events, events)]
    return start + np.cumsum(np.where(died, -changes, changes))
