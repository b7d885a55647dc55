"""Each rule of the allocator on a sequence small enough to follow by hand; the numbers are worked out, not copied."""

from __future__ import annotations

import random

import pytest

from trainer.memory.allocator.allocator import MIB, Allocator, OutOfMemory
from trainer.memory.allocator.blocks import AllocatorSnapshot, BlockState, SegmentState
from trainer.memory.allocator.settings import AllocatorSettings

KIB = 2**10


def state(allocator: Allocator) -> list[list[tuple[int, bool]]]:
    """The segments as lists of (bytes, in use)."""
    segments = allocator.snapshot().segments
    return [[(block.bytes, block.requested is not None) for block in segment.blocks] for segment in segments]


@pytest.mark.parametrize(
    ("asked", "given"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1000 * KIB, 1000 * KIB), (MIB - 1, MIB)]
)
def test_sizes_are_rounded_up_to_512(asked: int, given: int) -> None:
    allocator = Allocator()
    allocator.allocate(asked)
    assert (allocator.requested, allocator.allocated) == (asked, given)


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (100 * MIB, 100 * MIB),
    ],
)
def test_segments_have_the_size_of_their_class(asked: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(asked)
    assert allocator.reserved == allocator.peak_reserved == segment


def test_pools_never_mix() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(MIB)  # 20 MiB are free, but in the large pool
    assert allocator.reserved == 22 * MIB
    allocator.allocate(MIB + 1)
    assert allocator.reserved == 22 * MIB


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() -> None:
    allocator = Allocator()
    handles = [allocator.allocate(size * MIB) for size in (16, 12, 14, 12)]
    for handle in handles:
        allocator.free(handle)
    assert allocator.allocate(11 * MIB + 1) == handles[1]
    assert allocator.allocate(12 * MIB) == handles[3]
    assert allocator.allocate(12 * MIB) == handles[2]
    assert allocator.allocate(15 * MIB) == handles[0]
    assert allocator.reserved == 54 * MIB


def test_a_small_block_is_split_from_512_bytes_on() -> None:
    allocator = Allocator()
    allocator.allocate(MIB - 512)
    allocator.allocate(MIB)
    assert state(allocator) == [[(MIB - 512, True), (MIB, True), (512, False)]]
    allocator.allocate(512)
    assert allocator.allocated == allocator.reserved == 2 * MIB


def test_a_large_remainder_of_a_mebibyte_is_not_split_off_and_counts() -> None:
    allocator = Allocator()
    allocator.allocate(11 * MIB)  # of a segment of 12: exactly 1 MiB is left
    assert (allocator.requested, allocator.allocated) == (11 * MIB, 12 * MIB)
    allocator = Allocator()
    allocator.allocate(11 * MIB - 512)  # 512 bytes more are left
    assert allocator.allocated == 11 * MIB - 512
    assert state(allocator) == [[(11 * MIB - 512, True), (MIB + 512, False)]]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_freed_blocks_merge_with_free_neighbours(order: tuple[int, int, int]) -> None:
    allocator = Allocator()
    handles = [allocator.allocate(4 * MIB) for _ in range(3)]
    allocator.free(handles[order[0]])
    allocator.free(handles[order[1]])
    allocator.free(handles[order[2]])
    assert state(allocator) == [[(20 * MIB, False)]]
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (0, 0, 20 * MIB)


def test_a_block_in_use_keeps_its_neighbours_apart() -> None:
    allocator = Allocator()
    first, _, third = (allocator.allocate(4 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    assert state(allocator) == [[(4 * MIB, False), (4 * MIB, True), (12 * MIB, False)]]
    assert allocator.snapshot().fragmented == 16 * MIB
    assert allocator.snapshot().largest_free == 12 * MIB


def test_adjacent_segments_do_not_merge() -> None:
    allocator = Allocator()
    for handle in [allocator.allocate(12 * MIB), allocator.allocate(12 * MIB)]:
        allocator.free(handle)
    assert state(allocator) == [[(12 * MIB, False)], [(12 * MIB, False)]]
    assert allocator.snapshot().fragmented == 0


def test_empty_cache_returns_segments_that_are_one_free_block() -> None:
    allocator = Allocator()
    free = allocator.allocate(12 * MIB)
    allocator.allocate(512)
    half = [allocator.allocate(4 * MIB) for _ in range(2)]
    allocator.free(free)
    allocator.free(half[0])
    allocator.empty_cache()
    assert allocator.reserved == 22 * MIB
    assert allocator.peak_reserved == 34 * MIB
    allocator.free(half[1])
    allocator.empty_cache()
    assert allocator.reserved == 2 * MIB


def test_peaks_begin_again_at_what_is_held() -> None:
    allocator = Allocator()
    kept = allocator.allocate(12 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (42 * MIB, 42 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (12 * MIB, 42 * MIB)
    allocator.free(kept)
    assert allocator.peak_allocated == 12 * MIB


def test_freeing_twice_is_an_error() -> None:
    allocator = Allocator()
    handle = allocator.allocate(512)
    allocator.free(handle)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(handle)


# A limit


def test_at_the_limit_free_segments_are_returned_and_the_retry_is_counted() -> None:
    allocator = Allocator(AllocatorSettings(capacity=40 * MIB))
    allocator.free(allocator.allocate(12 * MIB))
    kept = allocator.allocate(20 * MIB)
    assert allocator.reserved == 32 * MIB
    allocator.allocate(20 * MIB)  # 52 would be too much; without the 12 it is 40
    assert (allocator.reserved, allocator.retries) == (40 * MIB, 1)
    allocator.free(kept)
    allocator.allocate(18 * MIB)  # takes the free 20, of which too much is left to keep
    assert (allocator.reserved, allocator.allocated, allocator.retries) == (40 * MIB, 38 * MIB, 1)


def test_a_segment_with_a_live_byte_is_not_returned_so_memory_runs_out_with_bytes_free() -> None:
    allocator = Allocator(AllocatorSettings(capacity=30 * MIB))
    handles = [allocator.allocate(5 * MIB) for _ in range(4)]
    for handle in handles[1:]:
        allocator.free(handle)
    assert allocator.snapshot().fragmented == 15 * MIB
    with pytest.raises(OutOfMemory) as raised:
        allocator.allocate(16 * MIB)
    error = raised.value
    assert (error.requested, error.allocated, error.reserved, error.capacity) == (16 * MIB, 5 * MIB, 20 * MIB, 30 * MIB)
    assert allocator.retries == 1
    # The attempt changed nothing that lives: what fits is still handed out.
    assert allocator.allocate(15 * MIB) == handles[1]


def test_the_bounds_within_which_every_limit_does_the_same_are_known() -> None:
    allocator = Allocator(AllocatorSettings(capacity=40 * MIB))
    first, _ = allocator.allocate(12 * MIB), allocator.allocate(12 * MIB)
    assert (allocator.admitted, allocator.refused) == (24 * MIB, None)
    allocator.free(first)
    allocator.allocate(18 * MIB)  # refused beside both, admitted beside the second
    assert (allocator.admitted, allocator.refused) == (30 * MIB, 42 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(14 * MIB)
    assert (allocator.admitted, allocator.refused) == (30 * MIB, 42 * MIB)


def test_what_the_free_blocks_hold_needs_no_leave() -> None:
    allocator = Allocator(AllocatorSettings(capacity=20 * MIB))
    for _ in range(4):
        allocator.allocate(5 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(1)  # the small pool needs a segment of 2 MiB
    assert allocator.reserved == 20 * MIB


# Snapshots


def test_a_restored_allocator_goes_on_as_the_first_would() -> None:
    first = Allocator()
    blocks = [first.allocate(size) for size in (512, 700 * KIB, 4 * MIB, 5 * MIB, 13 * MIB)]
    first.free(blocks[1])
    first.free(blocks[2])
    second = Allocator.restored(first.snapshot())
    assert second.snapshot() == first.snapshot()
    assert second.peak_reserved == 36 * MIB
    for allocator in (first, second):
        allocator.free(blocks[3])
        assert allocator.allocate(19 * MIB) == blocks[2]
        assert allocator.allocate(30 * MIB) == 36 * MIB
    assert second.snapshot() == first.snapshot()
    assert (second.allocated, second.requested) == (first.allocated, first.requested)


def test_the_driver_places_segments() -> None:
    allocator = Allocator(place=lambda size: 2**40 - size)
    assert allocator.allocate(12 * MIB) == 2**40 - 12 * MIB
    assert allocator.snapshot() == AllocatorSnapshot(
        (SegmentState(2**40 - 12 * MIB, 12 * MIB, "large", (BlockState(2**40 - 12 * MIB, 12 * MIB, 12 * MIB),)),)
    )


@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable=True)])
def test_a_copy_goes_on_alike_and_apart(settings: AllocatorSettings) -> None:
    chance = random.Random(3)

    def play(allocator: Allocator, live: list[int], moves: list[float]) -> None:
        for move in moves:
            if live and move < 0.45:
                allocator.free(live.pop(int(move * 1000) % len(live)))
            else:
                live.append(allocator.allocate(int(move**4 * 50 * MIB) + 1))

    before, after = ([chance.random() for _ in range(400)] for _ in range(2))
    original, live = Allocator(settings), list[int]()
    play(original, live, before)
    original.empty_cache()
    copy, copied = original.copy(original.settings.capacity), list(live)
    state = original.snapshot()
    play(copy, copied, after)
    assert original.snapshot() == state
    assert copy.snapshot() != state
    play(original, live, after)
    assert (copy.snapshot(), copied) == (original.snapshot(), live)
    assert (copy.peak_reserved, copy.allocated) == (original.peak_reserved, original.allocated)


def test_without_its_limit_an_allocator_goes_on() -> None:
    allocator = Allocator(AllocatorSettings(capacity=40 * MIB))
    allocator.allocate(30 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.copy(40 * MIB).allocate(30 * MIB)
    free = allocator.copy(None)
    free.allocate(30 * MIB)
    assert free.reserved == 60 * MIB
    with pytest.raises(OutOfMemory):
        free.copy(80 * MIB).allocate(30 * MIB)


# Graphs are recorded into a pool of their own.


def test_what_is_recorded_takes_nothing_from_others_and_gives_nothing_back() -> None:
    """16 MiB lie free outside; inside, 12 are taken anew, freed, and stay, for the next recording only."""
    allocator = Allocator()
    allocator.free(allocator.allocate(16 * MIB))
    with allocator.recording():
        first = allocator.allocate(12 * MIB)
        assert (allocator.allocated, allocator.reserved) == (12 * MIB, 28 * MIB)
        allocator.free(first)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 12 * MIB)
    allocator.allocate(11 * MIB)  # beside them, in 12 of its own
    assert allocator.reserved == 24 * MIB
    with allocator.recording():
        again = [allocator.allocate(8 * MIB), allocator.allocate(512)]
    # 8 of the 12 that the first left, and a small segment of the pool's own.
    assert again[0] == first and allocator.reserved == 26 * MIB
    allocator.free(again[0])
    allocator.allocate(12 * MIB)
    assert allocator.reserved == 38 * MIB, "what a recording left is no one else's"


def test_no_room_is_made_while_something_is_recorded() -> None:
    """20 of 30 MiB lie free; outside they would be given back for 16."""
    allocator = Allocator(AllocatorSettings(capacity=30 * MIB))
    allocator.free(allocator.allocate(20 * MIB))
    with allocator.recording():
        assert allocator.allocate(10 * MIB) is not None
        with pytest.raises(OutOfMemory):
            allocator.allocate(16 * MIB)
    assert (allocator.retries, allocator.refused) == (0, 46 * MIB)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 30 * MIB


def test_a_copy_has_what_was_recorded_too() -> None:
    allocator = Allocator()
    with allocator.recording():
        kept = allocator.allocate(4 * MIB)
    twin = allocator.copy(None)
    twin.free(kept)
    with twin.recording():
        assert twin.allocate(19 * MIB) == kept
    assert (allocator.allocated, twin.allocated, twin.reserved) == (4 * MIB, 20 * MIB, 20 * MIB)
