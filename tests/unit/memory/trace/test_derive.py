"""Tapes joined and carried over to other micro-batches and shapes, on tapes written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.memory.trace.derive import Size, join, reshape, scale
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, Work


def storage(size: int, name: str | None = None) -> Storage:
    return Storage(size, "temporary", "", "forward", name)


def tape(name: str, storages: list[Storage], events: list[int], work: tuple[Work, ...] = ()) -> MemoryTrace:
    return MemoryTrace(name, tuple(storages), np.array(events, dtype=np.int32), work)


def test_joined_tapes_know_each_others_storages_by_name() -> None:
    first = tape("first", [storage(1), storage(2, "passed"), storage(3, "kept")], [0, 1, ~0, 2])
    second = tape("second", [storage(4), storage(2, "passed"), storage(5, "older")], [0, ~1, ~2, ~0])
    both = join("both", (first, second))
    assert both.storages == (storage(1), storage(2, "passed"), storage(3, "kept"), storage(4), storage(5, "older"))
    assert both.events.tolist() == [0, 1, ~0, 2, 3, ~1, ~4, ~3]


def test_a_name_can_be_taken_again_once_its_storage_is_gone() -> None:
    first = tape("first", [storage(1, "x")], [0])
    second = tape("second", [storage(1, "x"), storage(2, "x")], [~0, 1])
    assert join("both", (first, second, second)).events.tolist() == [0, ~0, 1, ~1, 2]


WORK = Work("gemm", "bfloat16", "forward", flops=100, bytes=10, count=2)
TWO = tape("step", [storage(20), storage(7, "weight"), storage(40)], [0, 1, ~0, 2], (WORK,))
THREE = tape("step", [storage(30), storage(7, "weight"), storage(55)], [0, 1, ~0, 2], (replace(WORK, flops=150),))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_every_size_follows_from_two_with_like_events(size: int) -> None:
    result = scale(TWO, THREE, (2, 3), size)
    assert result is not None
    assert [item.bytes for item in result.storages] == [10 * size, 7, 10 + 15 * size]
    assert [(item.flops, item.bytes, item.count) for item in result.work] == [(50 * size, 10, 2)]
    assert result.events.tolist() == TWO.events.tolist()


@pytest.mark.parametrize(
    "other",
    [
        tape("step", list(THREE.storages), [0, 1, 2, ~0], THREE.work),
        tape("step", [*THREE.storages[:2], replace(THREE.storages[2], module="other")], [0, 1, ~0, 2], THREE.work),
        tape("step", list(THREE.storages), [0, 1, ~0, 2], (replace(WORK, count=3),)),
        tape("step", list(THREE.storages), [0, 1, ~0, 2]),
    ],
)
def test_nothing_follows_from_tapes_that_differ_in_more_than_size(other: MemoryTrace) -> None:
    assert scale(TWO, other, (2, 3), 4) is None


def test_nothing_follows_where_a_size_would_be_no_whole_number() -> None:
    """Rounding would hide that it does not grow so."""
    one, other = (tape("step", [storage(size)], [0]) for size in (16, 33))
    assert scale(one, other, (16, 32), 24) is None


def in_backward(size: int) -> Storage:
    return Storage(size, "temporary", "", "backward")


def of_shape(places: int, padded: int, deeper: int) -> MemoryTrace:
    """What a picture of so many places takes: 7 bytes each and 100 more, and 8 each of what is padded at two depths."""
    own = Work("attention", "bfloat16", "forward", flops=3 * places**2, bytes=2 * places, count=1)
    text = replace(own, flops=5 * 77 * places)
    storages = [storage(7 * places + 100), in_backward(7 * places), in_backward(8 * padded), in_backward(8 * deeper)]
    return tape("step", storages, [0, 1, 2, 3], (own, text))


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((512, 512), of_shape(4096, 4096, 1024)),
        ((640, 640), of_shape(6400, 6400, 1664)),  # 1600 places in blocks of 128
        ((448, 576), of_shape(4032, 4096, 1024)),  # 4032 and 1008
        ((64, 128), of_shape(128, 128, 128)),  # 128 and 32
    ],
)
def test_every_shape_follows_from_two_by_its_pixels_and_whole_blocks_of_attention(
    shape: Size, made: MemoryTrace
) -> None:
    known = of_shape(4096, 4096, 1024), of_shape(10816, 10880, 2816)
    result = reshape(*known, ((512, 512), (832, 832)), shape)
    assert result is not None
    assert (result.storages, result.work) == (made.storages, made.work)
