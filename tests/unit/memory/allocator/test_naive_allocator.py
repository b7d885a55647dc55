"""The allocator's model against a second implementation of the same rules, on sequences that hypothesis makes up."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.naive_allocator import NaiveAllocator, NaiveExpandable
from trainer.memory.allocator.allocator import MIB, Allocator, OutOfMemory
from trainer.memory.allocator.settings import AllocatorSettings

# Sizes cluster around the rules' borders and repeat, so that blocks fit exactly, nearly, and not at all.
SIZES = st.one_of(
    st.sampled_from([1, 512, 513, 4096, 256 * 1024, MIB - 512, MIB, MIB + 1, 2 * MIB, 5 * MIB, 9 * MIB, 10 * MIB]),
    st.sampled_from([11 * MIB, 11 * MIB - 512, 12 * MIB, 19 * MIB, 20 * MIB, 25 * MIB, 33 * MIB, 45 * MIB, 64 * MIB]),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 60 * MIB),
)
# A number is an allocation; a negative one frees one of those that live; None empties the cache.
FREES = st.integers(-(10**6), -1)
ACTS = st.lists(st.one_of(SIZES, SIZES, SIZES, FREES, FREES, st.none()), min_size=40, max_size=120)
CAPACITIES = st.one_of(st.none(), st.integers(20, 160).map(lambda mebibytes: mebibytes * MIB))


def agree(model: Allocator, naive: NaiveAllocator | NaiveExpandable, acts: list[int | None]) -> None:
    """Does the same to both and compares everything after each act."""
    live: list[tuple[int, int, int]] = []
    for act in acts:
        if act is None:
            model.empty_cache()
            naive.empty_cache()
        elif act > 0:
            try:
                mine = model.allocate(act)
            except OutOfMemory as error:
                assert error.requested == act
                mine = -1
            try:
                theirs = naive.allocate(act)
            except MemoryError:
                theirs = -1
            assert (mine < 0) == (theirs < 0)
            if mine >= 0:
                live.append((mine, theirs, act))
        elif live:
            mine, theirs, _ = live.pop(act % len(live))
            model.free(mine)
            naive.free(theirs)
        layout = [[(b.bytes, b.requested is not None) for b in segment.blocks] for segment in model.snapshot().segments]
        assert layout == naive.layout()
        assert (model.allocated, model.reserved, model.retries) == (naive.allocated, naive.reserved, naive.retries)
        assert model.requested == sum(size for _, _, size in live)
        assert 0 <= model.requested <= model.allocated <= model.reserved
        assert model.allocated <= model.peak_allocated
        assert model.reserved <= model.peak_reserved
    for mine, theirs, _ in live:
        model.free(mine)
        naive.free(theirs)
    assert model.allocated == model.requested == model.snapshot().fragmented == 0
    model.empty_cache()
    assert (model.reserved, model.snapshot().segments) == (0, ())


@settings(max_examples=100)
@given(acts=ACTS, capacity=CAPACITIES, max_split=st.sampled_from([None, None, 22 * MIB, 30 * MIB]))
def test_segments(acts: list[int | None], capacity: int | None, max_split: int | None) -> None:
    model = Allocator(AllocatorSettings(capacity=capacity, max_split_size=max_split))
    agree(model, NaiveAllocator(capacity, max_split), acts)


@settings(max_examples=100)
@given(acts=ACTS, capacity=CAPACITIES)
def test_expandable_segments(acts: list[int | None], capacity: int | None) -> None:
    agree(Allocator(AllocatorSettings(expandable=True, capacity=capacity)), NaiveExpandable(capacity), acts)


@settings(max_examples=60)
@given(acts=ACTS, capacity=CAPACITIES, expandable=st.booleans(), cut=st.integers(0, 40))
def test_many_events_at_once_do_what_single_ones_do(
    acts: list[int | None], capacity: int | None, expandable: bool, cut: int
) -> None:
    """Played in two pieces, so that the second frees what the first left."""
    settings = AllocatorSettings(capacity=capacity, expandable=expandable)
    single, at_once = Allocator(settings), Allocator(settings)
    sizes, events = as_events(acts)
    told: list[tuple[int, int, int]] = []
    failure: OutOfMemory | None = None
    handles: dict[int, int] = {}
    try:
        for event in events:
            if event >= 0:
                handles[event] = single.allocate(sizes[event])
            else:
                single.free(handles.pop(~event))
            told.append((single.allocated, single.reserved, single.requested))
    except OutOfMemory as error:
        failure = error
    alive: dict[int, int] = {}
    found: list[tuple[int, int, int]] = []
    for piece in (events[:cut], events[cut:]):
        account = at_once.play(np.array(piece, dtype=np.int32), sizes, alive)
        columns = (account.allocated, account.reserved, account.requested)
        found += zip(*(column.tolist() for column in columns), strict=True)
        alive = account.alive
        if account.failure is not None:
            break
    assert found == told
    assert str(account.failure) == str(failure)
    if failure is None:
        assert alive == handles
        assert at_once.snapshot() == single.snapshot()
    for name in ("allocated", "reserved", "requested", "peak_allocated", "peak_reserved", "retries"):
        assert getattr(at_once, name) == getattr(single, name)


def as_events(acts: list[int | None]) -> tuple[list[int], list[int]]:
    """Sizes of storages, and their births and deaths."""
    sizes: list[int] = []
    events: list[int] = []
    live: list[int] = []
    for act in acts:
        if act is not None and act > 0:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(act)
        elif act is not None and live:
            events.append(~live.pop(act % len(live)))
    return sizes, events
