"""Recordings of the real CUDA caching allocator: reading them, and replaying them through the model event by event."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from trainer.memory.allocator.allocator import LARGEST_SMALL, Allocator, OutOfMemory
from trainer.memory.allocator.blocks import EXPANDABLE_RANGE, AllocatorSnapshot, BlockState, PoolName, SegmentState
from trainer.memory.allocator.settings import AllocatorSettings, settings_of

SnapshotDict = dict[str, Any]
EventKind = Literal["alloc", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"]
# The names in torch.cuda.memory._snapshot(); a block whose free was requested becomes free once its streams are done.
_KINDS: dict[str, EventKind] = {
    "alloc": "alloc",
    "free_completed": "free",
    "segment_alloc": "segment_alloc",
    "segment_free": "segment_free",
    "segment_map": "segment_map",
    "segment_unmap": "segment_unmap",
    "oom": "oom",
}
_RETURNS = ("segment_free", "segment_unmap")
_GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class Event(NamedTuple):
    """An event of the allocator; consecutive segment_free events are one empty_cache, or what a retry released."""

    kind: EventKind
    address: int
    """Shifted address; 0 for an oom."""
    bytes: int
    """Requested bytes; for a segment, its size."""


@dataclass(frozen=True)
class Recording:
    """What a real allocator held when the recording started, and everything it did afterwards."""

    start: AllocatorSnapshot
    events: tuple[Event, ...]
    peak_reserved: int
    peak_allocated: int | None = None
    """Not in every recording."""
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    retries: int | None = None
    cublas_bytes: int = 0
    """Bytes of one cuBLAS workspace; not in every recording."""


@dataclass
class Comparison:
    """How the model's replay of a recording compares with it."""

    allocations: int = 0
    same_address: int = 0
    wrong: list[str] = field(default_factory=list)
    """Each decision to allocate segments from the driver, or to free them, that differs."""
    peak_reserved: int = 0
    peak_allocated: int = 0
    retries: int = 0
    end: AllocatorSnapshot = field(default_factory=lambda: AllocatorSnapshot(()))
    """What the model holds after the last event."""


def read_recording(path: Path) -> Recording:
    """Read the gzipped JSON that tests/benchmarks/record_traces.py writes, and that older recordings use."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    return Recording(
        start=start_state(data["start_segments"], data["start_blocks"]),
        events=tuple(Event(*event) for event in data["events"]),
        peak_reserved=data["peak_reserved"],
        peak_allocated=data.get("peak_allocated"),
        settings=_settings(data["settings"]),
        retries=data.get("retries"),
        cublas_bytes=data.get("cublas_bytes", 0),
    )


def _settings(recorded: dict[str, Any] | str) -> AllocatorSettings:
    if isinstance(recorded, str):
        return settings_of(recorded)
    divisions = recorded.get("roundup_power2_divisions", 0)
    return AllocatorSettings(
        **{**recorded, "roundup_power2_divisions": divisions if isinstance(divisions, int) else tuple(divisions)}
    )


def start_state(segments: Sequence[Sequence[int | str]], blocks: Sequence[Sequence[int | None]]) -> AllocatorSnapshot:
    """Return the state at the start, from the segments and their live blocks; the gaps between those are free."""
    states = []
    remaining = deque(sorted(cast("Sequence[tuple[int, int | None, int]]", blocks)))
    for address, size, pool in sorted(cast("Sequence[tuple[int, int, PoolName]]", segments)):
        inside = []
        while remaining and remaining[0][0] < address + size:
            inside.append(remaining.popleft())
        states.append(SegmentState(address, size, pool, tuple(_with_gaps(address, size, pool, inside))))
    assert not remaining, "a live block is in no segment"
    return AllocatorSnapshot(tuple(states))


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
    """Return the size of a block whose size was not recorded: a large one keeps a remainder of 1 MiB or less."""
    rounded = -(-requested // 512) * 512
    return room if pool == "large" and room - rounded <= LARGEST_SMALL else rounded


class Driver:
    """Replacement for cudaMalloc: puts each segment where the next real segment of its size was."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.places: dict[int, deque[int]] = defaultdict(deque)
        self.asked: list[tuple[int, int]] = []
        self.elsewhere = 2**47
        for event in events:
            if event.kind == "segment_alloc":
                self.places[event.bytes].append(event.address)

    def __call__(self, size: int) -> int:
        """Return the address, or one far from all others if the recording has no further segment of this size."""
        self.elsewhere += size
        address = self.places[size].popleft() if self.places[size] else self.elsewhere - size
        self.asked.append((address, size))
        return address


def compare(recording: Recording) -> Comparison:
    """Replay the allocations and frees of a recording; the model makes every other decision."""
    driver = Driver(recording.events)
    model = Allocator.restored(recording.start, recording.settings, driver)
    result = Comparison(peak_reserved=model.peak_reserved)
    handles = {block.address: block.address for part in recording.start.segments for block in part.blocks}
    bases: dict[bool, int] = {}
    reserved = model.reserved
    opened: list[tuple[int, int]] = []
    for number, event in enumerate(recording.events):
        reserved += _GROWTH.get(event.kind, 0) * event.bytes
        if event.kind in ("alloc", "oom"):
            driver.asked = []
            handle = _attempt(model, event.bytes)
            if handle is not None:
                handles[event.address] = handle
                # An expandable segment may be anywhere; both pools' segments start with their first block.
                base = (
                    bases.setdefault(handle < EXPANDABLE_RANGE, event.address) if recording.settings.expandable else 0
                )
                result.same_address += handle % EXPANDABLE_RANGE == event.address - base
                result.allocations += 1
            right = driver.asked == opened and model.reserved == reserved and (handle is None) == (event.kind == "oom")
            if not right:
                held = f"holds {reserved}, the model {model.reserved}"
                result.wrong.append(f"event {number}, {event.kind}: opened {opened}, the model {driver.asked}; {held}")
            opened = []
        elif event.kind == "free":
            model.free(handles.pop(event.address))
        elif event.kind == "segment_alloc":
            opened.append((event.address, event.bytes))
        elif event.kind in _RETURNS:
            _give_back(recording, number, model, result)
    return _ended(model, result)


def _ended(model: Allocator, result: Comparison) -> Comparison:
    result.peak_reserved, result.peak_allocated = model.peak_reserved, model.peak_allocated
    result.retries, result.end = model.retries, model.snapshot()
    return result


@dataclass
class _Stretch:
    """Events that the model replays at once: all between two emptied caches."""

    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    """The model's handles of older memory that is freed here, by position."""
    born: dict[int, int] = field(default_factory=dict)
    """Positions of what was allocated here and stays alive, by its recorded address."""
    reserved: list[int] = field(default_factory=list)
    """Reserved bytes after each event."""
    opened: list[tuple[int, int]] = field(default_factory=list)

    def take(self, address: int, size: int) -> None:
        self.born[address] = len(self.sizes)
        self.events.append(len(self.sizes))
        self.sizes.append(size)

    def give(self, address: int, handles: dict[int, int]) -> None:
        place = self.born.pop(address, None)
        if place is None:  # older memory; the requested size no longer matters
            place = len(self.sizes)
            self.sizes.append(0)
            self.alive[place] = handles.pop(address)
        self.events.append(~place)


def compare_played(recording: Recording) -> Comparison:
    """Compare like :func:`compare`, but through the loop that forecasts use, which replays many events at once.

    Addresses are compared only by their effects.
    """
    driver = Driver(recording.events)
    model = Allocator.restored(recording.start, recording.settings, driver)
    result = Comparison()
    handles = {block.address: block.address for part in recording.start.segments for block in part.blocks}
    reserved, stretch = model.reserved, _Stretch()
    for number, event in enumerate(recording.events):
        if event.kind in _RETURNS and not _retried(recording, number):
            _play(model, driver, stretch, handles, result)
            stretch = _Stretch()
            _give_back(recording, number, model, result)
        reserved += _GROWTH.get(event.kind, 0) * event.bytes
        if event.kind == "segment_alloc":
            stretch.opened.append((event.address, event.bytes))
        elif event.kind == "free":
            stretch.give(event.address, handles)
            stretch.reserved.append(reserved)
        elif event.kind in ("alloc", "oom"):
            stretch.take(event.address, event.bytes)
            stretch.reserved.append(reserved)
            result.allocations += event.kind == "alloc"
            if event.kind == "oom":
                _play(model, driver, stretch, handles, result, fails=True)
                stretch = _Stretch()
    _play(model, driver, stretch, handles, result)
    return _ended(model, result)


def _play(
    model: Allocator,
    driver: Driver,
    stretch: _Stretch,
    handles: dict[int, int],
    result: Comparison,
    *,
    fails: bool = False,
) -> None:
    """Replay a stretch and note where it differs; ``fails``: it ends in an allocation that does not fit."""
    if not stretch.events:
        return
    driver.asked = []
    account = model.play(np.array(stretch.events, dtype=np.int32), stretch.sizes, stretch.alive)
    held = account.reserved.tolist()
    if fails and account.failure is not None:
        held.append(model.reserved)  # after the retry
    if held != stretch.reserved or (account.failure is not None) != fails:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, stretch.reserved, strict=False)))
        result.wrong.append(f"event {same} of a stretch of {len(stretch.events)} differs: {account.failure}")
    if driver.asked != stretch.opened:
        result.wrong.append(f"opened {stretch.opened}, the model {driver.asked}")
    handles |= {address: account.alive[place] for address, place in stretch.born.items() if place in account.alive}


def _attempt(model: Allocator, size: int) -> int | None:
    try:
        return model.allocate(size)
    except OutOfMemory:
        return None


def _give_back(recording: Recording, number: int, model: Allocator, result: Comparison) -> None:
    """At the first of consecutive segment_free events, empty the cache unless the model's own retry has to."""
    events, end = recording.events, _end_of_returns(recording, number)
    if (number and events[number - 1].kind in _RETURNS) or _retried(recording, number):
        return
    before = {segment.address: segment.bytes for segment in model.snapshot().segments}
    held = model.reserved
    model.empty_cache()
    after = {segment.address for segment in model.snapshot().segments}
    freed = {(address, size) for address, size in before.items() if address not in after}
    real = {(event.address, event.bytes) for event in events[number:end]}
    same = freed == real or recording.settings.expandable
    if not same or held - model.reserved != sum(event.bytes for event in events[number:end]):
        result.wrong.append(f"event {number}: {len(real)} segments returned, by the model {len(freed)}")


def _retried(recording: Recording, number: int) -> bool:
    """Return whether consecutive segment_free events are what the model's own retry releases."""
    events, end = recording.events, _end_of_returns(recording, number)
    went_on = end < len(events) and events[end].kind in ("segment_alloc", "segment_map", "oom")
    return recording.settings.capacity is not None and went_on


def _end_of_returns(recording: Recording, number: int) -> int:
    events = recording.events
    return next((at for at in range(number, len(events)) if events[at].kind not in _RETURNS), len(events))


def recording_of(
    before: SnapshotDict, after: SnapshotDict, settings: AllocatorSettings, peaks: Mapping[str, int]
) -> dict[str, object]:
    """Return what :func:`read_recording` reads, from snapshots (torch.cuda.memory._snapshot) before and after.

    ``peaks`` holds peak_reserved, peak_allocated and retries as torch counted them, and cublas_bytes. Raises ValueError
    if more than one stream allocated, or if a live block's allocation is missing because the history was too short.
    """
    entries = [entry for entry in after["device_traces"][0] if entry["action"] in _KINDS]
    streams = {entry["stream"] for entry in entries if entry["action"] != "oom"}
    if len(streams) > 1:
        raise ValueError(f"{len(streams)} streams allocated; the model knows one")
    addresses = [entry["addr"] for entry in entries if entry["action"] != "oom"]
    addresses += [segment["address"] for segment in before["segments"]]
    base = min(addresses, default=0)
    _require_whole_history(before, after, entries)
    return {
        "start_segments": [
            [part["address"] - base, part["total_size"], part["segment_type"]] for part in before["segments"]
        ],
        "start_blocks": [
            [address - base, size, requested] for address, size, requested in _live_blocks(before["segments"])
        ],
        "events": [
            [_KINDS[entry["action"]], 0 if entry["action"] == "oom" else entry["addr"] - base, entry["size"]]
            for entry in entries
        ],
        "settings": {field.name: getattr(settings, field.name) for field in fields(settings)},
        **peaks,
    }


def write_recording(path: Path, recording: Mapping[str, object]) -> None:
    """Write a recording; equal recordings give equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(recording, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))


def _live_blocks(segments: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    live = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                live.append((address, block["size"], block["requested_size"]))
            address += block["size"]
    return live


def _require_whole_history(before: SnapshotDict, after: SnapshotDict, entries: Sequence[dict[str, Any]]) -> None:
    """Replay only allocations and frees: what is alive at the end has to be what the last snapshot shows."""
    live = {address for address, _, _ in _live_blocks(before["segments"])}
    for entry in entries:
        if entry["action"] == "alloc":
            live.add(entry["addr"])
        elif entry["action"] == "free_completed":
            live.discard(entry["addr"])
    if live != {address for address, _, _ in _live_blocks(after["segments"])}:
        raise ValueError("the recorded history does not lead from the first snapshot to the last")
