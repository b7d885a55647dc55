"""Recordings of the real CUDA caching allocator: reading them, and replaying them through the model event by event."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, cast

from trainer.memory.allocator import LARGEST_SMALL, Allocator, AllocatorSettings, OutOfMemory
from trainer.memory.snapshot import BlockState, PoolName, SegmentState, Snapshot

EventKind = Literal["alloc", "free", "segment_alloc", "segment_free", "oom"]


class Event(NamedTuple):
    """One thing the allocator did; a run of segment_free events is one empty_cache, or what a retry returned."""

    kind: EventKind
    address: int
    """Shifted; of an oom, 0."""
    bytes: int
    """As asked for; of a segment, its size."""


@dataclass(frozen=True)
class Recording:
    """What a real allocator held when the recording began and all that it did after."""

    start: Snapshot
    events: tuple[Event, ...]
    peak_reserved: int
    peak_allocated: int | None = None
    """Not in every recording."""
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    retries: int | None = None


@dataclass
class Comparison:
    """How the model's replay of a recording compares with it."""

    allocations: int = 0
    same_address: int = 0
    wrong: list[str] = field(default_factory=list)
    """Each decision to take segments from the driver, or to give them back, that differs."""
    peak_reserved: int = 0
    peak_allocated: int = 0
    retries: int = 0


def read_recording(path: Path) -> Recording:
    """Reads the gzipped JSON that tests/bench/record_traces.py writes and that the older recordings come in."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    settings = data["settings"]
    return Recording(
        start=start_state(data["start_segments"], data["start_blocks"]),
        events=tuple(Event(*event) for event in data["events"]),
        peak_reserved=data["peak_reserved"],
        peak_allocated=data.get("peak_allocated"),
        settings=AllocatorSettings(**settings) if isinstance(settings, dict) else AllocatorSettings(),
        retries=data.get("retries"),
    )


def start_state(segments: Sequence[Sequence[int | str]], blocks: Sequence[Sequence[int | None]]) -> Snapshot:
    """What stood at the beginning, from the segments and their live blocks; the gaps between those are free."""
    states = []
    remaining = deque(sorted(cast("Sequence[tuple[int, int | None, int]]", blocks)))
    for address, size, pool in sorted(cast("Sequence[tuple[int, int, PoolName]]", segments)):
        inside = []
        while remaining and remaining[0][0] < address + size:
            inside.append(remaining.popleft())
        states.append(SegmentState(address, size, pool, tuple(_with_gaps(address, size, pool, inside))))
    assert not remaining, "a live block lies in no segment"
    return Snapshot(tuple(states))


def _with_gaps(
    address: int, size: int, pool: PoolName, blocks: Sequence[tuple[int, int | None, int]]
) -> Iterable[BlockState]:
    end = address + size
    for index, (at, known, requested) in enumerate(blocks):
        if at > address:
            yield BlockState(address, at - address, None)
        following = blocks[index + 1][0] if index + 1 < len(blocks) else end
        block = _block_size(pool, following - at, requested) if known is None else known
        yield BlockState(at, block, requested)
        address = at + block
    if end > address:
        yield BlockState(address, end - address, None)


def _block_size(pool: PoolName, room: int, requested: int) -> int:
    """Of a block whose size was not recorded: a large one keeps a remainder of 1 MiB and less."""
    rounded = -(-requested // 512) * 512
    return room if pool == "large" and room - rounded <= LARGEST_SMALL else rounded


class Driver:
    """Stands for cudaMalloc: puts each segment of a size where the real one was put next."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.places: dict[int, deque[int]] = defaultdict(deque)
        self.asked: list[tuple[int, int]] = []
        self.elsewhere = 2**47
        for event in events:
            if event.kind == "segment_alloc":
                self.places[event.bytes].append(event.address)

    def __call__(self, size: int) -> int:
        """The address; one far from all others where the real allocator asked for no such segment any more."""
        self.elsewhere += size
        address = self.places[size].popleft() if self.places[size] else self.elsewhere - size
        self.asked.append((address, size))
        return address


def compare(recording: Recording) -> Comparison:
    """Replays the allocations and frees of a recording; every other decision is the model's own."""
    driver = Driver(recording.events)
    model = Allocator.restored(recording.start, recording.settings, driver)
    result = Comparison(peak_reserved=model.peak_reserved)
    handles = {block.address: block.address for part in recording.start.segments for block in part.blocks}
    opened: list[tuple[int, int]] = []
    for number, event in enumerate(recording.events):
        if event.kind == "alloc" or event.kind == "oom":
            held, driver.asked = model.reserved, []
            try:
                handles[event.address] = handle = model.allocate(event.bytes)
                result.same_address += handle == event.address
                result.allocations += 1
                failed = False
            except OutOfMemory:
                failed = True
            if driver.asked != opened or failed != (event.kind == "oom"):
                result.wrong.append(f"event {number}: real opened {opened}, model {driver.asked}, held {held}")
            opened = []
        elif event.kind == "free":
            model.free(handles.pop(event.address))
        elif event.kind == "segment_alloc":
            opened.append((event.address, event.bytes))
        else:
            _give_back(recording, number, model, result)
    result.peak_reserved, result.peak_allocated = model.peak_reserved, model.peak_allocated
    result.retries = model.retries
    return result


def _give_back(recording: Recording, number: int, model: Allocator, result: Comparison) -> None:
    """At the first of a run of segment_free: empties the cache, unless the model's own retry has to do so."""
    events = recording.events
    if number and events[number - 1].kind == "segment_free":
        return
    end = next((at for at in range(number, len(events)) if events[at].kind != "segment_free"), len(events))
    if recording.settings.capacity is not None and end < len(events) and events[end].kind in ("segment_alloc", "oom"):
        return
    before = {segment.address: segment.bytes for segment in model.snapshot().segments}
    model.empty_cache()
    after = {segment.address for segment in model.snapshot().segments}
    freed = {(address, size) for address, size in before.items() if address not in after}
    real = {(event.address, event.bytes) for event in events[number:end]}
    if freed != real:
        result.wrong.append(f"event {number}: real returned {len(real)} segments, model {len(freed)}")
