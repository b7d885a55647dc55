"""Replay memory traces on the simulated allocator to determine bytes and live storages at any moment."""

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
"""Function that returns the bytes of a workspace on a certain GPU; traces cannot contain them, as GPUs differ."""


class SurvivingStorage(NamedTuple):
    """A named storage that was still allocated at the end of its trace."""

    handle: int
    storage: Storage


class Moment(NamedTuple):
    """Moment right after an event, as the indices of the trace and of the event in it."""

    trace: int
    event: int


@dataclass(frozen=True, slots=True)
class SimulatedTrace:
    """Effect of one trace on memory; each array contains the bytes after each event."""

    trace: MemoryTrace
    before: Mapping[str, Storage]
    """Named storages that were allocated when the trace began."""
    allocated: Bytes
    reserved: Bytes
    requested: Bytes
    retries: int
    """Number of times the allocator had to return all cached memory to the driver and try again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The event at which memory ran out."""

    moment: Moment
    storage: Storage
    """The storage that could not be allocated."""
    error: OutOfMemory


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of replaying traces; if memory ran out, the last trace contains only the events before the failure."""

    played: tuple[SimulatedTrace, ...]
    failure: Failure | None

    def peak_allocated(self) -> Moment:
        """Return the first moment with the most bytes allocated."""
        return _highest([played.allocated for played in self.played])

    def peak_reserved(self) -> Moment:
        """Return the first moment with the most bytes reserved from the driver."""
        return _highest([played.reserved for played in self.played])

    def peak_requested(self) -> Moment:
        """Return the first moment with the most bytes requested by live storages."""
        return _highest([played.requested for played in self.played])

    def allocated(self, moment: Moment) -> int:
        """Return the bytes allocated at a moment."""
        return int(self.played[moment.trace].allocated[moment.event])

    def reserved(self, moment: Moment) -> int:
        """Return the bytes reserved from the driver at a moment."""
        return int(self.played[moment.trace].reserved[moment.event])

    def alive(self, moment: Moment) -> tuple[Storage, ...]:
        """Return the storages allocated at a moment, those from earlier traces first."""
        played = self.played[moment.trace]
        trace = played.trace
        events = trace.events[: moment.event + 1]
        born = np.zeros(len(trace.storages), dtype=bool)
        born[events[events >= 0]] = True
        died = ~events[events < 0]
        # Freed but not allocated in this trace: storages from earlier traces, known only by name.
        ended = {trace.storages[index].name for index in died[~born[died]]}
        born[died] = False
        earlier = [storage for name, storage in played.before.items() if name not in ended]
        return (*earlier, *(trace.storages[index] for index in np.flatnonzero(born)))

    def timeline(self, samples: int) -> tuple[tuple[int, int], ...]:
        """Return the maximum bytes (allocated, reserved) in each of up to ``samples`` equal intervals of events."""
        allocated = np.concatenate([np.zeros(0, np.int64), *(played.allocated for played in self.played)])
        reserved = np.concatenate([np.zeros(0, np.int64), *(played.reserved for played in self.played)])
        count = min(samples, len(allocated))
        if not count:
            return ()
        # Equal numbers of events, not equal times; maxima, so that no peak is lost between samples.
        starts = np.arange(count) * len(allocated) // count
        highest = np.maximum.reduceat(allocated, starts).tolist(), np.maximum.reduceat(reserved, starts).tolist()
        return tuple(zip(*highest, strict=True))


def by_kind(storages: Iterable[Storage]) -> dict[StorageKind, int]:
    """Return the total requested bytes by kind of storage, largest first."""
    totals: defaultdict[StorageKind, int] = defaultdict(int)
    for storage in storages:
        totals[storage.kind] += storage.bytes
    return _largest_first(totals)


def by_module(storages: Iterable[Storage]) -> dict[str, int]:
    """Return the total requested bytes of storages by module, largest first."""
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
    """Replay traces in order on an allocator until they end or memory runs out.

    ``names`` contains the storages still allocated after earlier traces and is updated in place; start with an empty
    dict. After a failure, neither ``names`` nor the allocator is usable. A workspace with a name that is already
    allocated is not allocated again, since libraries keep their workspaces. Raises ValueError for a trace that frees a
    storage that is not allocated, or leaves one allocated that has no unique name.
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
    """Return the trace with workspaces sized for the GPU, or 0 bytes if they are already allocated."""
    # Resized instead of removed, so that the events keep their indices; storages of 0 bytes do nothing.
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
    retries = allocator.retries  # a running total, from which this trace's part is computed
    account = allocator.play(trace.events, [storage.bytes for storage in storages], alive)
    if account.failure is None:  # otherwise storages without a name are still allocated
        _record_survivors(trace, account.alive, names)
    played = SimulatedTrace(
        trace=trace,
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
    """Yield the indices of storages that are freed in a trace but were not allocated in it."""
    born = np.zeros(len(trace.storages), dtype=bool)
    born[trace.events[trace.events >= 0]] = True
    died = ~trace.events[trace.events < 0]
    return (place for place in died[~born[died]].tolist() if trace.storages[place].bytes)


def _handle_of(names: dict[str, SurvivingStorage], storage: Storage, trace: MemoryTrace) -> int:
    kept = names.pop(storage.name, None) if storage.name is not None else None
    if kept is None:
        raise ValueError(f"the trace {trace.name} frees a storage of {storage.module} that is not alive")
    return kept.handle


def _record_survivors(trace: MemoryTrace, left: Mapping[int, int], names: dict[str, SurvivingStorage]) -> None:
    """Add the storages still allocated after a trace to ``names``."""
    for place, handle in left.items():
        storage = trace.storages[place]
        if storage.name is None or storage.name in names:
            raise ValueError(f"the trace {trace.name} leaves a storage of {storage.module} without a unique name")
        names[storage.name] = SurvivingStorage(handle, storage)


def _highest(series: Sequence[Bytes]) -> Moment:
    peaks = [int(values.max()) if len(values) else -1 for values in series]
    trace = peaks.index(max(peaks))
    return Moment(trace, int(series[trace].argmax()))


def _largest_first(totals: Mapping[K, int]) -> dict[K, int]:
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
