"""Tapes joined into one, and carried over to other sizes of micro-batch. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from trainer.memory.tape import Storage, Tape, Work


def joined(name: str, tapes: Iterable[Tape]) -> Tape:
    """One tape that does what ``tapes`` do in their order; what passes between them is known by its name."""
    storages: list[Storage] = []
    events: list[int] = []
    work: list[Work] = []
    left: dict[str | None, int] = {}
    for tape in tapes:
        places: dict[int, int] = {}
        for event in tape.events.tolist():
            index = event if event >= 0 else ~event
            if event >= 0:
                places[index] = len(storages)
                storages.append(tape.storages[index])
                events.append(places[index])
                continue
            place = places.pop(index, None)
            if place is None:
                place = left.pop(tape.storages[index].name, None)
            if place is None:  # left by a tape before all of these
                place = len(storages)
                storages.append(tape.storages[index])
            events.append(~place)
        left |= {storages[place].name: place for place in places.values()}
        work += tape.work
    return Tape(name, tuple(storages), np.array(events, dtype=np.int32), tuple(work))


def scaled(one: Tape, other: Tape, sizes: tuple[int, int], size: int) -> Tape | None:
    """The tape for micro-batches of ``size`` from those of two other ``sizes``; None where it does not follow.

    It follows exactly where both have the same events: then every storage and every operation has bytes and flops
    a + b * size. Micro-batches of one picture are no good for this: PyTorch spares itself copies there.
    """
    if not _alike(one, other):
        return None
    share = (size - sizes[0]) / (sizes[1] - sizes[0])

    def between(first: int, second: int) -> int:
        return first + round((second - first) * share)

    return Tape(
        name=one.name,
        storages=tuple(
            Storage(between(a.bytes, b.bytes), a.kind, a.module, a.stage, a.name) if a.bytes != b.bytes else a
            for a, b in zip(one.storages, other.storages, strict=True)
        ),
        events=one.events,
        work=tuple(
            replace(a, flops=between(a.flops, b.flops), bytes=between(a.bytes, b.bytes))
            for a, b in zip(one.work, other.work, strict=True)
        ),
    )


def _alike(one: Tape, other: Tape) -> bool:
    """Whether two tapes have the same events, on storages and with operations that differ in size alone."""
    return (
        np.array_equal(one.events, other.events)
        and len(one.storages) == len(other.storages)
        and all(map(_same_storage, one.storages, other.storages))
        and len(one.work) == len(other.work)
        and all(map(_same_work, one.work, other.work))
    )


def _same_storage(a: Storage, b: Storage) -> bool:
    return a.name == b.name and a.module == b.module and a.stage == b.stage and a.kind == b.kind


def _same_work(a: Work, b: Work) -> bool:
    return (a.kind, a.dtype, a.stage, a.count) == (b.kind, b.dtype, b.stage, b.count)
