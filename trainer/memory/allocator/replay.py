"""Tapes played through the allocator's model: what is handed out and taken at every moment, and what lives then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.memory.allocator.allocator import Allocator, OutOfMemory
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, StorageKind

K = TypeVar("K", bound=str)
Bytes = NDArray[np.int64]
WorkspaceBytes = Callable[[Storage], int]
"""How large a storage of kind "workspace" is on one card: what a trace on no card cannot know."""


class SurvivingStorage(NamedTuple):
    """A named storage that outlived its tape."""

    handle: int
    storage: Storage


class Moment(NamedTuple):
    """A place in what was replayed: the tape's index and the event's in it, after which this holds."""

    tape: int
    event: int


@dataclass(frozen=True, slots=True)
class SimulatedTrace:
    """What one tape did to memory; arrays have an entry for each of its events, of bytes after that event."""

    tape: MemoryTrace
    before: Mapping[str, Storage]
    """The named storages that lived when it began."""
    allocated: Bytes
    reserved: Bytes
    requested: Bytes
    retries: int
    """How often everything returnable was returned to make room."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Where memory ran out."""

    moment: Moment
    storage: Storage
    """What was being asked for."""
    error: OutOfMemory


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a sequence of tapes did to memory; a tape in which it ran out has only the events before that."""

    played: tuple[SimulatedTrace, ...]
    failure: Failure | None

    def peak_allocated(self) -> Moment:
        """The first moment at which most was handed out."""
        return _highest([played.allocated for played in self.played])

    def peak_reserved(self) -> Moment:
        """The first moment at which most was taken from the driver."""
        return _highest([played.reserved for played in self.played])

    def peak_requested(self) -> Moment:
        """The first moment at which the storages alive summed to most."""
        return _highest([played.requested for played in self.played])

    def allocated(self, moment: Moment) -> int:
        """Bytes handed out at a moment."""
        return int(self.played[moment.tape].allocated[moment.event])

    def reserved(self, moment: Moment) -> int:
        """Bytes taken from the driver at a moment."""
        return int(self.played[moment.tape].reserved[moment.event])

    def alive(self, moment: Moment) -> tuple[Storage, ...]:
        """The storages that live at a moment, those left by earlier tapes first."""
        played = self.played[moment.tape]
        trace = played.tape
        events = trace.events[: moment.event + 1]
        born = np.zeros(len(trace.storages), dtype=bool)
        born[events[events >= 0]] = True
        died = ~events[events < 0]
        ended = {trace.storages[index].name for index in died[~born[died]]}
        born[died] = False
        earlier = [storage for name, storage in played.before.items() if name not in ended]
        return (*earlier, *(trace.storages[index] for index in np.flatnonzero(born)))

    def timeline(self, samples: int) -> tuple[tuple[int, int], ...]:
        """(allocated, reserved) of at most ``samples`` evenly spaced stretches of events, the highest of each."""
        allocated = np.concatenate([np.zeros(0, np.int64), *(played.allocated for played in self.played)])
        reserved = np.concatenate([np.zeros(0, np.int64), *(played.reserved for played in self.played)])
        count = min(samples, len(allocated))
        if not count:
            return ()
        starts = np.arange(count) * len(allocated) // count
        highest = np.maximum.reduceat(allocated, starts).tolist(), np.maximum.reduceat(reserved, starts).tolist()
        return tuple(zip(*highest, strict=True))


def by_kind(storages: Iterable[Storage]) -> dict[StorageKind, int]:
    """Their bytes as asked for, by kind, the largest first."""
    totals: defaultdict[StorageKind, int] = defaultdict(int)
    for storage in storages:
        totals[storage.kind] += storage.bytes
    return _largest_first(totals)


def by_module(storages: Iterable[Storage]) -> dict[str, int]:
    """Their bytes as asked for, by the module they belong to, the largest first."""
    totals: defaultdict[str, int] = defaultdict(int)
    for storage in storages:
        totals[storage.module] += storage.bytes
    return _largest_first(totals)


def replay(
    traces: Iterable[MemoryTrace],
    allocator: Allocator,
    names: dict[str, SurvivingStorage],
    workspace_bytes: WorkspaceBytes | None = None,
) -> Replayed:
    """Plays ``tapes`` in order on ``allocator`` up to where memory runs out, if it does.

    ``names`` holds what earlier tapes left and is changed to what is left in the end; begin with an empty one. After
    a failure neither is of use. A workspace whose name lives already is taken to be that one, as libraries keep them.
    Raises ValueError for a tape that frees what does not live, or leaves a storage without a name.
    """
    done: list[SimulatedTrace] = []
    for number, trace in enumerate(traces):
        played, failed = _play(_resize_workspaces(trace, names, workspace_bytes), allocator, names)
        done.append(played)
        if failed is not None:
            event = len(played.allocated)
            failure = Failure(Moment(number, event), trace.storages[trace.events[event]], failed)
            return Replayed(tuple(done), failure)
    return Replayed(tuple(done), None)


def _resize_workspaces(
    trace: MemoryTrace, names: Mapping[str, SurvivingStorage], workspace_bytes: WorkspaceBytes | None
) -> MemoryTrace:
    """The tape with workspaces as large as they are on the card, and those that live already of no size."""
    storages = list(trace.storages)
    for place in [place for place, storage in enumerate(storages) if storage.kind == "workspace"]:
        storage = storages[place]
        size = 0 if storage.name in names else (workspace_bytes or _as_traced)(storage)
        storages[place] = replace(storage, bytes=size)
    return replace(trace, storages=tuple(storages))


def _play(
    trace: MemoryTrace, allocator: Allocator, names: dict[str, SurvivingStorage]
) -> tuple[SimulatedTrace, OutOfMemory | None]:
    storages = trace.storages
    before = {name: kept.storage for name, kept in names.items()}
    alive = {place: _handle_of(names, storages[place], trace) for place in _freed_from_earlier(trace)}
    retries = allocator.retries
    account = allocator.play(trace.events, [storage.bytes for storage in storages], alive)
    if account.failure is None:
        _record_survivors(trace, account.alive, names)
    played = SimulatedTrace(
        tape=trace,
        before=before,
        allocated=account.allocated,
        reserved=account.reserved,
        requested=account.requested,
        retries=allocator.retries - retries,
    )
    return played, account.failure


def _as_traced(storage: Storage) -> int:
    return storage.bytes


def _freed_from_earlier(trace: MemoryTrace) -> Iterator[int]:
    """The places of storages that die in a tape they were not born in."""
    born = np.zeros(len(trace.storages), dtype=bool)
    born[trace.events[trace.events >= 0]] = True
    died = ~trace.events[trace.events < 0]
    return (place for place in died[~born[died]].tolist() if trace.storages[place].bytes)


def _handle_of(names: dict[str, SurvivingStorage], storage: Storage, trace: MemoryTrace) -> int:
    kept = names.pop(storage.name, None) if storage.name is not None else None
    if kept is None:
        raise ValueError(f"the tape {trace.name} frees a storage of {storage.module} that does not live")
    return kept.handle


def _record_survivors(trace: MemoryTrace, left: Mapping[int, int], names: dict[str, SurvivingStorage]) -> None:
    """Enters what a tape leaves to later ones."""
    for place, handle in left.items():
        storage = trace.storages[place]
        if storage.name is None or storage.name in names:
            raise ValueError(f"the tape {trace.name} leaves a storage of {storage.module} under no name of its own")
        names[storage.name] = SurvivingStorage(handle, storage)


def _highest(series: Sequence[Bytes]) -> Moment:
    peaks = [int(values.max()) if len(values) else -1 for values in series]
    trace = peaks.index(max(peaks))
    return Moment(trace, int(series[trace].argmax()))


def _largest_first(totals: Mapping[K, int]) -> dict[K, int]:
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
