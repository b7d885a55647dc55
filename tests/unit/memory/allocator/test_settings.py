"""What the allocator does under each of its settings, worked out by hand, and how the settings are read."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.memory.allocator.test_allocator import KIB, state
from trainer.memory.allocator.allocator import MIB, Allocator, OutOfMemory
from trainer.memory.allocator.settings import AllocatorSettings, settings_here, settings_of

# Sizes


@pytest.mark.parametrize(
    ("divisions", "asked", "given"),
    [
        (4, 1200 * KIB, 1280 * KIB),  # between 1024 and 2048 KiB lie the steps 1280, 1536, 1792
        (4, 1280 * KIB, 1280 * KIB),
        (4, 1281 * KIB, 1536 * KIB),
        (4, 2047 * KIB, 2048 * KIB),
        (4, 1024 * KIB, 1024 * KIB),
        (8, 1200 * KIB, 1280 * KIB),
        (8, 1281 * KIB, 1408 * KIB),
        (6, 1281 * KIB, 1536 * KIB),  # no power of two: the one below, 4, is taken
        (4, 2048, 2048),  # up to 512 times the divisions, multiples of 512
        (4, 1100, 1536),
        (4, 2049, 2560),  # steps of 512 from here
        (1, 1200 * KIB + 1, 1200 * KIB + 512),
    ],
)
def test_sizes_are_rounded_up_to_parts_of_a_power_of_two(divisions: int, asked: int, given: int) -> None:
    # With expandable segments every remainder is split off, so that what is allocated is what was rounded to.
    allocator = Allocator(AllocatorSettings(roundup_power2_divisions=divisions, expandable=True))
    allocator.allocate(asked)
    assert allocator.allocated == given


def test_steps_of_sizes_may_differ_between_powers_of_two() -> None:
    """No rounding below 4 MiB; from 4 to below 8 halves: 6 or 8; from 8 on quarters: 10, 12, 14, 16."""
    settings = AllocatorSettings(expandable=True, roundup_power2_divisions=(0, 0, 2, 4))
    for asked, given in ((3 * MIB + 1, 3 * MIB + 512), (4 * MIB + 1, 6 * MIB), (7 * MIB, 8 * MIB), (9 * MIB, 10 * MIB)):
        allocator = Allocator(settings)
        allocator.allocate(asked)
        assert allocator.allocated == given
    allocator = Allocator(settings)
    allocator.play(np.array([0], dtype=np.int32), [33 * MIB], {})
    assert allocator.allocated == 40 * MIB  # the last holds for all above: 40, 48, 56


def test_the_shared_large_segments_may_be_set() -> None:
    allocator = Allocator(AllocatorSettings(large_segment_size=64 * MIB))
    allocator.allocate(2 * MIB)
    allocator.allocate(12 * MIB)
    assert state(allocator) == [[(2 * MIB, True), (12 * MIB, True), (50 * MIB, False)]]


# max_split_size


def test_oversize_blocks_are_neither_split_nor_given_to_smaller_ones() -> None:
    allocator = Allocator(AllocatorSettings(max_split_size=30 * MIB))
    big = allocator.allocate(60 * MIB)
    allocator.free(big)
    small = allocator.allocate(25 * MIB)  # under the limit: does not take the 60
    assert small != big
    assert allocator.reserved == 86 * MIB
    assert allocator.allocate(50 * MIB) == big  # takes it whole, less than 20 MiB are wasted
    assert allocator.allocated == 25 * MIB + 60 * MIB + MIB  # 26 for 25: one mebibyte is not split off
    allocator.free(big)
    assert allocator.allocate(40 * MIB) != big  # 20 MiB would be wasted
    assert allocator.reserved == 126 * MIB


def test_at_the_limit_the_fitting_oversize_block_is_returned_first() -> None:
    allocator = Allocator(AllocatorSettings(max_split_size=30 * MIB, capacity=200 * MIB))
    blocks = [allocator.allocate(size * MIB) for size in (60, 80, 12)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(25 * MIB)  # 152 + 26
    allocator.allocate(58 * MIB)  # fits into the 60
    allocator.free(allocator.allocate(60 * MIB))  # the 80 is returned for it (wastes 20), the 12 is not
    assert allocator.retries == 0
    assert sorted(segment.bytes // MIB for segment in allocator.snapshot().segments) == [12, 26, 60, 60]


@pytest.mark.parametrize(
    ("capacity", "cached", "retries", "left"),
    [(150, (40, 50, 32, 12), 0, [12, 32, 90]), (100, (40, 24, 12), 1, [90])],
    ids=["the largest oversize blocks, until they make room", "all that is free, when oversize blocks are not enough"],
)
def test_at_the_limit_oversize_blocks_are_returned_where_none_is_as_large(
    capacity: int, cached: tuple[int, ...], retries: int, left: list[int]
) -> None:
    allocator = Allocator(AllocatorSettings(max_split_size=30 * MIB, capacity=capacity * MIB))
    for block in [allocator.allocate(size * MIB) for size in cached]:
        allocator.free(block)
    allocator.allocate(90 * MIB)  # in the first case 50 and 40 make up for it
    assert allocator.retries == retries
    assert sorted(segment.bytes // MIB for segment in allocator.snapshot().segments) == left


# garbage_collection_threshold


def test_above_the_threshold_segments_unused_for_long_are_returned_before_a_new_one() -> None:
    allocator = Allocator(AllocatorSettings(capacity=100 * MIB, garbage_collection_threshold=0.5))
    old, young, used = (allocator.allocate(size * MIB) for size in (20, 22, 12))
    allocator.free(old)
    allocator.free(young)
    # Both were freed after the third search: both are as old as the mean, and go.
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 42 * MIB
    allocator.free(used)
    assert allocator.retries == 0


@pytest.mark.parametrize(("threshold", "left"), [(0.5, [12, 22, 40]), (0.3, [12, 40])])
def test_the_younger_segments_stay_when_the_old_ones_are_enough(threshold: float, left: list[int]) -> None:
    allocator = Allocator(AllocatorSettings(capacity=100 * MIB, garbage_collection_threshold=threshold))
    old, young, _ = (allocator.allocate(size * MIB) for size in (20, 22, 12))
    allocator.free(old)
    allocator.allocate(20 * MIB)
    allocator.free(young)  # one search later
    allocator.free(old)
    allocator.allocate(21 * MIB)  # takes the 22
    allocator.free(young)
    # The 20 waits since search 4, the 22 since search 5: at the sixth the mean age is 1.5. Without the 20, 34 are held.
    allocator.allocate(40 * MIB)
    assert sorted(segment.bytes // MIB for segment in allocator.snapshot().segments) == left


def test_below_the_threshold_nothing_is_returned() -> None:
    allocator = Allocator(AllocatorSettings(capacity=100 * MIB, garbage_collection_threshold=0.5))
    allocator.free(allocator.allocate(50 * MIB))
    allocator.allocate(20 * MIB)
    allocator.free(allocator.allocate(12 * MIB))
    assert allocator.reserved == 50 * MIB


# Expandable segments


def expandable(capacity: int | None = None) -> Allocator:
    return Allocator(AllocatorSettings(expandable=True, capacity=capacity))


def test_an_expandable_segment_grows_by_pages() -> None:
    allocator = expandable()
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(15 * MIB)  # 5 are free; one page more holds it
    assert allocator.reserved == 40 * MIB
    allocator.allocate(512)
    assert allocator.reserved == 42 * MIB
    assert state(allocator) == [
        [(512, True), (2 * MIB - 512, False)],
        [(15 * MIB, True), (15 * MIB, True), (10 * MIB, False)],
    ]


def test_an_expandable_segment_splits_large_blocks_from_512_bytes_on() -> None:
    allocator = expandable()
    allocator.allocate(19 * MIB)
    assert allocator.allocated == 19 * MIB
    allocator.allocate(MIB + 512)
    assert (allocator.allocated, allocator.reserved) == (20 * MIB + 512, 40 * MIB)


def test_the_end_of_an_expandable_segment_is_used_last() -> None:
    allocator = expandable()
    hole, _ = allocator.allocate(18 * MIB), allocator.allocate(8 * MIB)
    allocator.free(hole)
    # 14 MiB are free at the end, 18 at the start: the best fit could grow without end, so the hole is taken.
    assert allocator.allocate(13 * MIB) == hole
    assert allocator.reserved == 40 * MIB


def test_of_blocks_that_may_grow_alike_the_smaller_is_taken() -> None:
    allocator = expandable()
    first, _, third, _ = (allocator.allocate(size * MIB) for size in (4, 5, 4, 4))
    allocator.free(third)
    allocator.free(first)
    assert allocator.allocate(3 * MIB) == first


def test_empty_cache_unmaps_whole_pages_which_are_mapped_again_from_the_lowest() -> None:
    allocator = expandable()
    blocks = [allocator.allocate(size * MIB) for size in (10, 50, 10, 30)]
    assert allocator.reserved == 100 * MIB
    allocator.free(blocks[1])  # from 10 to 60: pages 1 and 2 of five are empty
    allocator.free(blocks[3])  # from 70 to 100: page 4
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    assert [part.bytes // MIB for part in allocator.snapshot().segments] == [20, 20]
    assert allocator.allocate(45 * MIB) == blocks[1]  # 10 free, 40 unmapped: both pages come back
    assert allocator.reserved == 80 * MIB
    assert allocator.allocate(45 * MIB) == blocks[3]
    assert allocator.reserved == 120 * MIB


def test_an_emptied_expandable_segment_begins_anew() -> None:
    allocator = expandable()
    blocks = [allocator.allocate(30 * MIB), allocator.allocate(512)]
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.snapshot().segments) == (0, ())
    assert [allocator.allocate(30 * MIB), allocator.allocate(512)] == blocks


def test_an_expandable_segment_needs_leave_for_more_than_it_takes() -> None:
    """15 of 60 MiB are free at the end when 30 are asked for: one page of 20 is taken, but leave asked for 30."""
    allocator = expandable()
    allocator.allocate(45 * MIB)
    allocator.allocate(30 * MIB)
    assert (allocator.reserved, allocator.admitted) == (80 * MIB, 90 * MIB)
    for capacity, fits in ((90 * MIB, True), (90 * MIB - 1, False)):
        allocator = expandable(capacity)
        allocator.allocate(45 * MIB)
        if fits:
            allocator.allocate(30 * MIB)
        else:
            with pytest.raises(OutOfMemory):
                allocator.allocate(30 * MIB)


def test_at_the_limit_free_pages_are_unmapped() -> None:
    allocator = expandable(capacity=100 * MIB)
    blocks = [allocator.allocate(size * MIB) for size in (30, 10, 40)]
    allocator.free(blocks[0])  # page 0 is empty, half of page 1
    assert allocator.reserved == 80 * MIB
    # 60 wants a segment of 60: 140 is refused, 120 after a page was unmapped too.
    with pytest.raises(OutOfMemory):
        allocator.allocate(60 * MIB)
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 1)
    assert allocator.allocate(40 * MIB) == blocks[2] + 40 * MIB
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 1)


def test_a_recording_s_own_expandable_segment_grows_and_stays() -> None:
    """Shared: one page of 20 MiB, 8 used. Recorded: 15 and 15 in two pages of its own, freed, and kept when all is."""
    allocator = expandable()
    allocator.allocate(8 * MIB)
    with allocator.recording():
        first, second = allocator.allocate(15 * MIB), allocator.allocate(15 * MIB)
        assert second == first + 15 * MIB
        assert allocator.reserved == 60 * MIB
        allocator.free(first)
        allocator.free(second)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (8 * MIB, 60 * MIB)
    allocator.allocate(30 * MIB)  # 12 are left of the shared page: one more
    assert allocator.reserved == 80 * MIB
    with allocator.recording():
        assert allocator.allocate(40 * MIB) == first
    assert allocator.reserved == 80 * MIB


# What is told in PYTORCH_ALLOC_CONF


@pytest.mark.parametrize(
    ("conf", "settings"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable": True}),
        (" expandable_segments : False ,", {}),
        ("max_split_size_mb:128,garbage_collection_threshold:0.6",
         {"max_split_size": 128 * MIB, "garbage_collection_threshold": 0.6}),
        ("backend:native,large_segment_size_mb:12", {"large_segment_size": 12 * MIB}),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": 4}),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_split_size_mb:64",
         {"roundup_power2_divisions": (1,) * 9 + (2,) + (8,) * 6, "max_split_size": 64 * MIB}),
        ("roundup_power2_divisions:[64:8,256:4]",
         {"roundup_power2_divisions": (8,) * 7 + (0, 4) + (0,) * 7}),
        # What PyTorch would not take, and what the model does not know.
        ("max_split_size_mb:5,garbage_collection_threshold:1.5,expandable_segments:yes,x:1", {}),
        ("roundup_power2_divisions:3,max_split_size_mb:many,expandable_segments,:,large_segment_size_mb:2,[", {}),
        ("roundup_power2_divisions:[3:2,>:],pinned_use_background_threads:True", {}),
    ],
)  # fmt: skip
def test_settings_are_read_as_pytorch_reads_them(conf: str, settings: dict[str, object]) -> None:
    assert settings_of(conf) == AllocatorSettings(**settings)  # type: ignore[arg-type]


def test_what_holds_here_is_told_by_the_environment() -> None:
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.6"}
    assert settings_here(conf, "Linux") == AllocatorSettings(expandable=True)
    assert settings_here(conf, "Windows") == settings_here({}, "Linux") == AllocatorSettings()
    newer = {**conf, "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert settings_here(newer, "Windows") == AllocatorSettings(max_split_size=64 * MIB)
