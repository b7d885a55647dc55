"""Tapes played through the allocator's model: peaks, what lives then, names across tapes, running out, fitting."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.memory.allocator.allocator import MIB, Allocator
from trainer.memory.allocator.replay import Moment, SurvivingStorage, by_kind, by_module, replay
from trainer.memory.allocator.settings import AllocatorSettings
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, StorageKind


def storage(size: int, kind: StorageKind = "temporary", module: str = "unet", name: str | None = None) -> Storage:
    return Storage(size, kind, module, "forward", name)


def tape(storages: list[Storage], events: list[int], name: str = "tape") -> MemoryTrace:
    return MemoryTrace(name, tuple(storages), np.array(events, dtype=np.int32), ())


LOAD = tape([storage(30 * MIB, "weights", "unet.conv", "w"), storage(12 * MIB, "adapter", "lora", "a")], [0, 1], "load")
STEP = tape(
    [
        storage(40 * MIB, "activations", "unet.mid"),
        storage(20 * MIB, "temporary", "unet.up"),
        storage(12 * MIB, "gradients", "lora", "g"),
        storage(512),
    ],
    [0, 1, ~1, 2, 3, ~0, ~3],
    "step",
)
UPDATE = tape([storage(12 * MIB, "gradients", "lora", "g")], [~0], "update")


def test_peaks_say_where_they_fall_and_what_lives_there() -> None:
    names: dict[str, SurvivingStorage] = {}
    allocator = Allocator()
    result = replay([LOAD, STEP, UPDATE], allocator, names)
    assert result.failure is None
    peak = result.peak_allocated()
    assert peak == Moment(trace=1, event=1)
    assert result.allocated(peak) == 102 * MIB
    alive = result.alive(peak)
    assert [part.module for part in alive] == ["unet.conv", "lora", "unet.mid", "unet.up"]
    assert by_kind(alive) == {
        "activations": 40 * MIB,
        "weights": 30 * MIB,
        "temporary": 20 * MIB,
        "adapter": 12 * MIB,
    }
    assert list(by_kind(alive)) == ["activations", "weights", "temporary", "adapter"]
    assert by_module(alive)["lora"] == 12 * MIB
    # The gradient takes the freed 20, the half kibibyte a small segment of 2.
    assert result.peak_reserved() == Moment(1, 4)
    assert result.reserved(Moment(1, 4)) == allocator.reserved == 104 * MIB
    assert result.peak_requested() == peak
    assert list(names) == ["w", "a"]
    assert allocator.allocated == 42 * MIB


def test_what_an_earlier_replay_left_is_freed_by_a_later_one_and_counts_as_alive() -> None:
    names: dict[str, SurvivingStorage] = {}
    allocator = Allocator()
    replay([LOAD], allocator, names)
    replay([STEP], allocator, names)
    assert list(names) == ["w", "a", "g"]
    result = replay([UPDATE], allocator, names)
    assert [part.module for part in result.alive(Moment(0, 0))] == ["unet.conv", "lora"]
    assert result.played[0].requested.tolist() == [42 * MIB]


def test_a_name_may_pass_from_one_storage_to_the_next() -> None:
    names: dict[str, SurvivingStorage] = {}
    allocator = Allocator()
    old, new = storage(30 * MIB, name="state"), storage(14 * MIB, name="state")
    replay([tape([old], [0]), tape([old, new], [~0, 1])], allocator, names)
    assert names["state"].storage.bytes == 14 * MIB
    assert allocator.requested == 14 * MIB


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (UPDATE, "frees a storage of lora that is not alive"),
        (tape([storage(512)], [~0]), "frees a storage of unet that is not alive"),
        (tape([storage(512)], [0]), "without a unique name"),
        (tape([storage(512, name="x"), storage(512, name="x")], [0, 1]), "without a unique name"),
    ],
)
def test_a_broken_tape_is_refused(broken: MemoryTrace, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replay([broken], Allocator(), {})


def test_storages_of_no_size_take_nothing() -> None:
    allocator = Allocator()
    names: dict[str, SurvivingStorage] = {}
    result = replay(
        [tape([storage(0), storage(0, name="n")], [0, 1, ~0]), tape([storage(0, name="n")], [~0])], allocator, names
    )
    assert (allocator.peak_reserved, names) == (0, {})
    assert result.timeline(10) == ((0, 0),) * 4


def test_workspaces_are_as_large_as_the_card_makes_them_and_taken_once() -> None:
    cublas = storage(8 * MIB, "workspace", "cublas", "cublas.caller")
    cudnn = storage(100 * MIB, "workspace", "cudnn")
    step = tape([cublas, cudnn, storage(100 * MIB)], [0, 1, ~1, 2, ~2])

    def card(part: Storage) -> int:
        return 32 * MIB if part.module == "cublas" else part.bytes // 10

    names: dict[str, SurvivingStorage] = {}
    allocator = Allocator()
    result = replay([step, step], allocator, names, card)
    assert allocator.allocated == 32 * MIB
    assert allocator.peak_allocated == 132 * MIB
    assert result.played[1].requested.tolist() == [size * MIB for size in (32, 42, 32, 132, 32)]
    assert by_module(result.alive(Moment(1, 1))) == {"cublas": 32 * MIB, "cudnn": 10 * MIB}
    traced = Allocator()
    replay([step], traced, {})
    assert (traced.allocated, traced.peak_allocated) == (8 * MIB, 108 * MIB)


def test_running_out_says_what_was_asked_for_and_where() -> None:
    result = replay([LOAD, STEP], Allocator(AllocatorSettings(capacity=90 * MIB)), {})
    assert result.failure is not None
    assert result.failure.moment == Moment(1, 1)
    assert result.failure.storage.module == "unet.up"
    error = result.failure.error
    assert (error.requested, error.allocated, error.reserved) == (20 * MIB, 82 * MIB, 82 * MIB)
    assert result.peak_allocated() == Moment(1, 0)


def test_less_than_the_peak_of_reserved_bytes_will_do_where_free_segments_can_be_returned() -> None:
    # 30 are freed and cannot hold 40: without a limit 70 are held, at the limit the 30 are returned first.
    phase = tape([storage(30 * MIB), storage(40 * MIB)], [0, ~0, 1, ~1])

    def fits(capacity: int) -> bool:
        return replay([phase], Allocator(AllocatorSettings(capacity=capacity)), {}).failure is None

    allocator = Allocator()
    replay([phase], allocator, {})
    assert allocator.peak_reserved == 70 * MIB
    assert fits(40 * MIB)
    assert not fits(40 * MIB - 1)


def test_a_timeline_keeps_the_peaks() -> None:
    result = replay([LOAD, STEP, UPDATE], Allocator(), {})
    line = result.timeline(4)
    assert len(line) == 4
    assert max(allocated for allocated, _ in line) == 102 * MIB
    assert line[-1][0] < line[1][0]
    assert len(result.timeline(100)) == 10
    assert replay([], Allocator(), {}).timeline(5) == ()


STORAGES = st.lists(st.integers(0, 40 * MIB), min_size=1, max_size=40)


@settings(max_examples=100)
@given(sizes=STORAGES, random=st.randoms(use_true_random=False), expandable=st.booleans())
def test_the_books_balance_at_every_moment(sizes: list[int], random: Random, expandable: bool) -> None:
    """Against sums over what lives, worked out from the events alone."""
    storages = [storage(size, name=f"s{index}") for index, size in enumerate(sizes)]
    events: list[int] = []
    alive: list[int] = []
    for index in range(len(sizes)):
        events.append(index)
        alive.append(index)
        if random.random() < 0.6:
            events.append(~alive.pop(random.randrange(len(alive))))
    allocator = Allocator(AllocatorSettings(expandable=expandable))
    names: dict[str, SurvivingStorage] = {}
    result = replay([tape(storages, events)], allocator, names)
    played = result.played[0]
    for number in range(len(events)):
        living = result.alive(Moment(0, number))
        assert played.requested[number] == sum(part.bytes for part in living)
    assert (played.requested >= 0).all()
    assert (played.allocated >= played.requested).all()
    assert (played.reserved >= played.allocated).all()
    left = [part for part in result.alive(Moment(0, len(events) - 1)) if part.bytes]
    assert [kept.storage for kept in names.values()] == left
    replay([tape(left, [~index for index in range(len(left))])], allocator, names)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved, names) == (0, 0, {})


def test_a_full_step_is_replayed_without_a_search_per_event() -> None:
    """120,000 events, as SDXL has: 0.1 s on an idle core; the bound leaves room for a slow and busy one."""
    sizes = [2048, 81920, 655360, 2621440, 5242880, 10485760, 20971520, 315392]
    storages = [storage(sizes[index * 7 % 8]) for index in range(60_000)]
    events: list[int] = []
    for index in range(60_000):
        events += [index] if index < 500 else [index, ~(index - 500)]
    events += [~index for index in range(59_500, 60_000)]
    assert len(events) == 120_000
    started = time.process_time()
    result = replay([tape(storages, events)], Allocator(), {})
    assert time.process_time() - started < 20.0
    assert result.played[0].allocated[-1] == 0
