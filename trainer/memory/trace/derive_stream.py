"""Derive the traces of a base of which only some blocks are streamed. Does not require torch.

Streaming only inserts allocations, frees and copies of weights between the events of a resident base. Where it inserts
them shows in the traces of a base that is streamed completely, so those of any number of blocks follow from two traces.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from trainer.base.stream_order import Pass, exchanged, following, streamed_places
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, Work

Event = tuple[bool, int]
"""Whether it is an allocation, and the storage's index."""

# Residual and transformer blocks, as in trainer.base.streaming.streamed_modules: a transformer follows the residual
# block of its number, also in the middle block.
_BLOCK = re.compile(
    r"^unet\.(?:(down|up)_blocks\.(\d+)|(mid)_block)\."
    r"(?:resnets\.(\d+)|attentions\.(\d+)\.transformer_blocks\.(\d+))\."
)
_PARTS = ("down", "mid", "up")
END = -1
"""Place of no block: the end of a step."""
Block = tuple[int, int, int, int]
"""A block's sort key in the order of a forward."""


@dataclass(frozen=True)
class Exchange:
    """Blocks that are freed and fetched when a block is needed."""

    index: int
    """Block that is needed; `END` at the end of a step."""
    now: Pass
    freed: Sequence[int]
    fetched: Sequence[int]


@dataclass
class _Split:
    """Trace of a completely streamed base, split into the events of a resident base and what streaming inserts."""

    trace: MemoryTrace
    plain: list[Event] = field(default_factory=list)
    inserted: list[tuple[int, list[Event]]] = field(default_factory=list)
    """Consecutive events of streamed weights, each with the number of plain events before them."""

    def __post_init__(self) -> None:
        """Split the events; within a step, only streamed weights are allocated and freed."""
        for event in _events(self.trace):
            if self.trace.storages[event[1]].kind != "weights":
                self.plain.append(event)
            elif self.inserted and self.inserted[-1][0] == len(self.plain):
                self.inserted[-1][1].append(event)
            else:
                self.inserted.append((len(self.plain), [event]))

    def weights(self) -> Iterator[tuple[bool, Storage]]:
        """Yield the storages of streamed weights as they are allocated and freed."""
        for _, events in self.inserted:
            yield from ((is_birth, self.trace.storages[index]) for is_birth, index in events)


@dataclass(frozen=True)
class _Located:
    """Where a completely streamed base exchanges blocks."""

    idle: int
    """Number of first blocks that have no backward."""
    at: Mapping[tuple[int, Pass], tuple[int, Sequence[str]]]
    """By the block that is needed: the number of plain events before, and the stage of each allocation."""


def exchanges(count: int, idle: int) -> Iterator[Exchange]:
    """Yield what moves in a micro-batch of ``count`` streamed blocks, as `WeightStream` moves it.

    The first ``idle`` blocks have no backward, because nothing before them is trained.
    """
    steps: list[tuple[int, Pass]] = [(index, "forward") for index in range(count)]
    steps += [(index, "backward") for index in reversed(range(idle, count))]
    held: Sequence[int] = []
    for index, now in (*steps, (END, "forward")):
        needed = [] if index == END else [index, *following(index, count, now)]
        freed, fetched = exchanged(held, needed)
        held = needed
        if freed or fetched:
            yield Exchange(index, now, freed, fetched)


def stream_some(resident: MemoryTrace, streamed: MemoryTrace, amount: int) -> MemoryTrace | None:
    """Return the trace of a part of the training step with ``amount`` streamed blocks; None if a rule does not hold.

    ``resident`` and ``streamed`` are the traces without streaming and with all blocks streamed. Every block must have
    streamed weights, as in published UNets.
    """
    if resident.name == "weights":
        return _placed(resident, streamed, amount)
    split = _Split(streamed)
    same = list(_numbered(streamed, split.plain)) == list(_numbered(resident, _events(resident)))
    if not same or [work for work in streamed.work if work.kind != "copy"] != list(resident.work):
        return None
    places = _places(storage for _, storage in split.weights())
    located = next(filter(None, (_located(split, places, idle) for idle in range(len(places) + 1))), None)
    # If all blocks are chosen, the rules must give the trace that they are applied to.
    if located is None or not _are_equal(_with_blocks(split, located, list(range(len(places)))), streamed):
        return None
    return _with_blocks(split, located, streamed_places(len(places), amount))


def _placed(resident: MemoryTrace, streamed: MemoryTrace, amount: int) -> MemoryTrace:
    """Return the trace of placing the weights: those of streamed blocks have no memory."""
    lasting = {storage.name for storage in streamed.storages}
    places = _places(resident.storages)
    chosen = set(streamed_places(len(places), amount))
    storages = tuple(
        storage
        for storage in resident.storages
        if storage.name in lasting or places.get(_block_of(storage)) not in chosen
    )
    return replace(resident, storages=storages, events=np.arange(len(storages), dtype=np.int32))


def _located(split: _Split, places: Mapping[Block | None, int], idle: int) -> _Located | None:
    """Return where blocks are exchanged if the first ``idle`` ones have no backward; None if others are exchanged."""
    moved = [
        (position, is_birth, places[block], [split.trace.storages[index].stage for _, index in events])
        for position, inserted in split.inserted
        for (is_birth, block), events in _grouped(split.trace, inserted)
    ]
    at: dict[tuple[int, Pass], tuple[int, list[str]]] = {}
    for each in exchanges(len(places), idle):
        wanted = [*((False, block) for block in each.freed), *((True, block) for block in each.fetched)]
        found, moved = moved[: len(wanted)], moved[len(wanted) :]
        positions = {position for position, *_ in found}
        if [(is_birth, block) for _, is_birth, block, _ in found] != wanted or len(positions) != 1:
            return None
        stages = [stage for _, is_birth, _, stages in found if is_birth for stage in stages]
        at[each.index, each.now] = positions.pop(), stages
    return None if moved else _Located(idle, at)


def _with_blocks(split: _Split, located: _Located, chosen: Sequence[int]) -> MemoryTrace | None:
    """Return the trace with only the ``chosen`` blocks streamed; None if it is not known where they are needed."""
    places = _places(storage for _, storage in split.weights())
    blocks: list[dict[str | None, Storage]] = [{} for _ in places]
    for is_birth, storage in split.weights():
        if is_birth:
            blocks[places[_block_of(storage)]].setdefault(storage.name, storage)
    moves: dict[int, list[tuple[bool, Storage]]] = {}
    copies: Counter[tuple[str, int]] = Counter()
    for each in exchanges(len(chosen), sum(block < located.idle for block in chosen)):
        block = END if each.index == END else chosen[each.index]
        position, stages = located.at.get((block, each.now), (-1, []))
        if position < 0 or (each.fetched and not stages):
            return None
        fetched = [storage for index in each.fetched for storage in blocks[chosen[index]].values()]
        here = moves.setdefault(position, [])
        here += [(False, storage) for index in each.freed for storage in blocks[chosen[index]].values()]
        # Only the first allocation may still belong to the stage before.
        here += [
            (True, replace(storage, stage=stages[0] if number == 0 else stages[-1]))
            for number, storage in enumerate(fetched)
        ]
        copies.update((each.now, storage.bytes) for storage in fetched)
    return _merged(split, moves, copies)


def _merged(
    split: _Split, moves: Mapping[int, Sequence[tuple[bool, Storage]]], copies: Mapping[tuple[str, int], int]
) -> MemoryTrace:
    """Return the plain events with ``moves`` of weights inserted, each by the number of plain events before it."""
    earlier = next((storage.stage for is_birth, storage in split.weights() if not is_birth), "")
    storages: list[Storage] = []
    events: list[int] = []
    plain: dict[int, int] = {}
    alive: dict[str | None, int] = {}
    for number in range(len(split.plain) + 1):
        for is_birth, storage in moves.get(number, ()):
            if is_birth:
                alive[storage.name] = len(storages)
                events.append(len(storages))
                storages.append(storage)
            elif storage.name in alive:
                events.append(~alive.pop(storage.name))
            else:  # on the device since the step before
                events.append(~len(storages))
                storages.append(replace(storage, stage=earlier))
        for is_birth, index in split.plain[number : number + 1]:
            if index not in plain:
                plain[index] = len(storages)
                storages.append(split.trace.storages[index])
            events.append(plain[index] if is_birth else ~plain[index])
    work = [item for item in split.trace.work if item.kind != "copy"]
    first = next((place for place, item in enumerate(split.trace.work) if item.kind == "copy"), len(work))
    work[first:first] = [Work("copy", "uint8", stage, 0, size, times) for (stage, size), times in copies.items()]
    return MemoryTrace(split.trace.name, tuple(storages), np.array(events, dtype=np.int32), tuple(work))


def _events(trace: MemoryTrace) -> Iterator[Event]:
    return ((event >= 0, event if event >= 0 else ~event) for event in trace.events.tolist())


def _numbered(trace: MemoryTrace, events: Iterable[Event]) -> Iterator[tuple[bool, int, Storage]]:
    """Yield events with storages numbered in the order of their first event."""
    numbers: dict[int, int] = {}
    for is_birth, index in events:
        yield is_birth, numbers.setdefault(index, len(numbers)), trace.storages[index]


def _grouped(trace: MemoryTrace, events: Iterable[Event]) -> Iterator[tuple[tuple[bool, Block | None], list[Event]]]:
    """Yield consecutive events of one block."""
    for key, group in groupby(events, key=lambda event: (event[0], _block_of(trace.storages[event[1]]))):
        yield key, list(group)


def _places(storages: Iterable[Storage]) -> dict[Block | None, int]:
    """Return the place of each block in a forward, counted from 0, by the blocks of these weights."""
    found = {block for storage in storages if (block := _block_of(storage)) is not None}
    return {block: place for place, block in enumerate(sorted(found))}


def _block_of(storage: Storage) -> Block | None:
    """Return a sort key of the block that a weight belongs to; None for weights that are not in a streamed block."""
    found = _BLOCK.match(storage.name or "")
    if found is None:
        return None
    part, number, middle, resnet, attention, transformer = found.groups()
    place = 2 * int(resnet) if attention is None else 2 * int(attention) + 1
    return _PARTS.index(part or middle), int(number or 0), place, int(transformer or 0)


def _are_equal(one: MemoryTrace | None, other: MemoryTrace) -> bool:
    return (
        one is not None
        and one.storages == other.storages
        and np.array_equal(one.events, other.events)
        and one.work == other.work
    )
