"""Tapes joined and carried over to other micro-batches, on tapes written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.memory.splicing import joined, scaled
from trainer.memory.tape import Storage, Tape, Work


def storage(size: int, name: str | None = None) -> Storage:
    return Storage(size, "temporary", "", "forward", name)


def tape(name: str, storages: list[Storage], events: list[int], work: tuple[Work, ...] = ()) -> Tape:
    return Tape(name, tuple(storages), np.array(events, dtype=np.int32), work)


def test_joined_tapes_know_each_others_storages_by_name() -> None:
    first = tape("first", [storage(1), storage(2, "passed"), storage(3, "kept")], [0, 1, ~0, 2])
    second = tape("second", [storage(4), storage(2, "passed"), storage(5, "older")], [0, ~1, ~2, ~0])
    both = joined("both", (first, second))
    assert both.storages == (storage(1), storage(2, "passed"), storage(3, "kept"), storage(4), storage(5, "older"))
    assert both.events.tolist() == [0, 1, ~0, 2, 3, ~1, ~4, ~3]


def test_a_name_can_be_taken_again_once_its_storage_is_gone() -> None:
    first = tape("first", [storage(1, "x")], [0])
    second = tape("second", [storage(1, "x"), storage(2, "x")], [~0, 1])
    assert joined("both", (first, second, second)).events.tolist() == [0, ~0, 1, ~1, 2]


WORK = Work("gemm", "bfloat16", "forward", flops=100, bytes=10, count=2)
TWO = tape("step", [storage(20), storage(7, "weight"), storage(40)], [0, 1, ~0, 2], (WORK,))
THREE = tape("step", [storage(30), storage(7, "weight"), storage(55)], [0, 1, ~0, 2], (replace(WORK, flops=150),))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_every_size_follows_from_two_with_like_events(size: int) -> None:
    result = scaled(TWO, THREE, (2, 3), size)
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
def test_nothing_follows_from_tapes_that_differ_in_more_than_size(other: Tape) -> None:
    assert scaled(TWO, other, (2, 3), 4) is None
