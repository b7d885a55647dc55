"""Store traces on disk: read-only ones that ship with Impasto, and a cache of new ones.

Traces are stored as plain arrays, which are small and quick to read; summaries can be read without the rest. An entry
is a few traces under one key, in a file of its own or in an archive of similar entries. The cache has a size limit;
the least recently used files are removed first. Does not require torch.
"""

from __future__ import annotations

import json
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from trainer.files.assets import asset_path
from trainer.memory.trace.memory_trace import (
    MemoryTrace,
    Storage,
    StorageKind,
    Totals,
    TraceSummary,
    Work,
    WorkKind,
    totals,
)
from trainer.protocol import files, places
from trainer.protocol.reading import open_file, parse_json

T = TypeVar("T")
Arrays = Mapping[str, NDArray[Any]]

# Incremented when the file format changes, so files of older versions are made again.
FORM = 3
NAMELESS = -1

_STORAGE_KINDS: tuple[StorageKind, ...] = get_args(StorageKind)
_WORK_KINDS: tuple[WorkKind, ...] = get_args(WorkKind)
# What reading a damaged archive of arrays may raise, whichever of its bytes are wrong.
DAMAGED = (
    OSError, EOFError, ValueError, KeyError, IndexError, TypeError, NotImplementedError, RuntimeError, MemoryError,
    zipfile.BadZipFile, lzma.LZMAError, zlib.error,
)  # fmt: skip
MOST_BYTES = 256 * 2**20  # some thousand entries
SUFFIX = ".npz"
SOURCES_FOLDER = "others"
SHIPPED_OUTCOMES = "outcomes.zip"
# A temporary file not written to for this many seconds was left by a process that ended while writing.
STRAY_SECONDS = 3600.0


def write(path: Path, traces: Sequence[MemoryTrace]) -> None:
    """Write one entry atomically as an npz file of plain arrays."""
    _write(path, _arrays_of(traces), zipfile.ZIP_DEFLATED)


def write_archive(path: Path, entries: Mapping[str, Sequence[MemoryTrace]]) -> None:
    """Write many entries to one archive atomically; similar ones should be adjacent.

    LZMA compresses what they have in common: an archive takes a tenth of the bytes of separate files, but writing it
    takes longer.
    """
    arrays = _arrays_of([trace for traces in entries.values() for trace in traces])
    counts = {key: len(traces) for key, traces in entries.items()}
    _write(path, {**arrays, "entries": _as_array(counts)}, zipfile.ZIP_LZMA)


def read(path: Path) -> tuple[MemoryTrace, ...] | None:
    """Return the traces in a file written by ``write``; None if it is missing, damaged, or in another format."""
    return _read(path, _Columns.traces)


def read_summaries(path: Path) -> tuple[TraceSummary, ...] | None:
    """Return the summaries of the traces in a file without reading their storages; None if ``read`` returns None."""
    return _read(path, _Columns.summaries)


class Archive:
    """File written by ``write_archive``; each of its arrays is read once, when it is first needed."""

    def __init__(self, path: Path) -> None:
        self._columns = _Columns(_LazyArrays(path))

    @cached_property
    def _places(self) -> dict[str, slice]:
        """Return the positions of each entry's traces among all traces; empty if the file is unusable."""
        try:
            counts: dict[str, int] = _from_array(self._columns.arrays["entries"])
            _require_form(self._columns.arrays)
            ends = accumulate(counts.values())
            return {key: slice(end - count, end) for (key, count), end in zip(counts.items(), ends, strict=True)}
        except DAMAGED:
            return {}

    def __contains__(self, key: str) -> bool:
        """Return whether the archive has an entry under ``key``."""
        return key in self._places

    def read(self, key: str) -> tuple[MemoryTrace, ...] | None:
        """Return the traces under ``key``; None if there are none or the file is damaged."""
        return self._found(key, self._columns.traces)

    def read_summaries(self, key: str) -> tuple[TraceSummary, ...] | None:
        """Return the summaries of the traces under ``key``; None if ``read`` returns None."""
        return self._found(key, self._columns.summaries)

    def _found(self, key: str, parse: Callable[[slice], Iterator[T]]) -> tuple[T, ...] | None:
        try:
            return tuple(parse(self._places[key])) if key in self else None
        except DAMAGED:
            return None


class _LazyArrays(Mapping[str, NDArray[Any]]):
    """Arrays of a file, each read on every access; the file is closed in between."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getitem__(self, name: str) -> NDArray[Any]:
        with open_file(self._path, "listing") as file, np.load(file, allow_pickle=False) as arrays:
            found: NDArray[Any] = arrays[name]
            return found

    def __iter__(self) -> Iterator[str]:
        with open_file(self._path, "listing") as file, np.load(file, allow_pickle=False) as arrays:
            return iter(arrays.files)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _write(path: Path, arrays: Arrays, compression: int) -> None:
    with files.staged(path, durable=False) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            # A fixed date, so that equal traces give equal files.
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = compression
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


def _read(path: Path, parse: Callable[[_Columns, slice], Iterator[T]]) -> tuple[T, ...] | None:
    if not path.is_file():
        return None
    try:
        # Opened here, because numpy does not close the file of a broken archive.
        with open_file(path, "listing") as file, np.load(file, allow_pickle=False) as arrays:
            _require_form(arrays)
            return tuple(parse(_Columns(arrays), slice(None)))
    except DAMAGED:
        return None


def _require_form(arrays: Arrays) -> None:
    if arrays["form"].tolist() != [FORM]:
        raise ValueError("written by another version")


class _Strings:
    """Distinct strings, referred to by their index."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _as_array(content: Any) -> NDArray[Any]:
    """Return a value as JSON in an array of bytes."""
    return np.frombuffer(json.dumps(content).encode("utf-8"), dtype=np.uint8)


def _from_array(array: NDArray[Any]) -> Any:
    return parse_json(array.tobytes())


def _arrays_of(traces: Sequence[MemoryTrace]) -> dict[str, NDArray[Any]]:
    """Return the columns of a file: traces, distinct storages and kinds of work, and the event streams.

    Distinct storages are stored once and referred to by number. Events are stored relative to the latest allocation:
    these distances repeat from layer to layer, so they compress well.
    """
    strings, words = _Strings(), _Strings()
    place, word = strings.place, words.place
    kinds: dict[tuple[int, ...], int] = {}
    numbers = [kinds.setdefault(_row(storage, place), len(kinds)) for trace in traces for storage in trace.storages]
    work = [
        (_WORK_KINDS.index(item.kind), word(item.dtype), word(item.stage), item.flops, item.bytes, item.count)
        for trace in traces
        for item in trace.work
    ]
    nothing = np.zeros(0, dtype=np.int32)  # np.concatenate needs at least one array
    died = [trace.events < 0 for trace in traces]
    distances = [
        np.where(dead, ~trace.events, trace.events) - np.cumsum(~dead) for trace, dead in zip(traces, died, strict=True)
    ]
    added = [totals(trace) for trace in traces]
    rows = [
        (word(trace.name), len(trace.storages), len(trace.events), len(trace.work), one.net, one.peak)
        for trace, one in zip(traces, added, strict=True)
    ]
    return {
        "form": np.array([FORM]),
        "tapes": np.array(rows, dtype=np.int64).reshape(-1, 6),
        "words": _as_array(words.texts),
        "work": np.array(work, dtype=np.int64).reshape(-1, 6).T,
        "strings": _as_array(strings.texts),
        "storages": np.array(list(kinds), dtype=np.int64).reshape(-1, 5).T,
        "numbers": _relative(np.array(numbers, dtype=np.int32)),
        "died": np.concatenate([nothing.astype(bool), *died]),
        "events": np.concatenate([nothing, *distances]).astype(np.int32),
    }


def _row(storage: Storage, place: Callable[[str], int]) -> tuple[int, ...]:
    name = NAMELESS if storage.name is None else place(storage.name)
    kind = _STORAGE_KINDS.index(storage.kind)
    return storage.bytes, kind, place(storage.module), place(storage.stage), name


class _Columns:
    """Traces decoded from the columns of a file; each column is read on first use and kept.

    Raises ValueError for inconsistent columns.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._known: dict[int, Storage] = {}

    def summaries(self, which: slice) -> Iterator[TraceSummary]:
        """Yield the summaries of the traces at positions ``which``."""
        words, work = self._words, self._work
        for (name, _, _, count, net, peak), (_, _, start) in zip(self._rows[which], self._starts[which], strict=True):
            columns = work[:, start : start + count].tolist()
            items = tuple(
                Work(_WORK_KINDS[kind], words[dtype], words[stage], flops, size, times)
                for kind, dtype, stage, flops, size, times in zip(*columns, strict=True)
            )
            yield TraceSummary(words[name], Totals(net, peak), items)

    def traces(self, which: slice) -> Iterator[MemoryTrace]:
        """Yield the traces at positions ``which``."""
        rows, starts = self._rows[which], self._starts[which]
        for summary, row, (first, start, _) in zip(self.summaries(which), rows, starts, strict=True):
            numbers = self._numbers[first : first + row[1]]
            events = self._events(start, row[2], len(numbers))
            yield MemoryTrace(summary.name, self._storages(numbers), events, summary.work)

    def _storages(self, numbers: NDArray[np.int32]) -> tuple[Storage, ...]:
        """Return the storages with these numbers; equal ones share one object, which is created on first use."""
        known = self._known
        texts = self._strings
        new = [number for number in np.unique(numbers).tolist() if number not in known]
        for number, (size, kind, module, stage, name) in zip(new, self._table[:, new].T.tolist(), strict=True):
            named = None if name == NAMELESS else texts[name]
            known[number] = Storage(size, _STORAGE_KINDS[kind], texts[module], texts[stage], named)
        return tuple(map(known.__getitem__, numbers.tolist()))

    def _events(self, start: int, count: int, storages: int) -> NDArray[np.int32]:
        dead = self._died[start : start + count]
        subjects = self._distances[start : start + count] + np.cumsum(~dead)
        if len(subjects) != count or (count and not 0 <= subjects.min() <= subjects.max() < storages):
            raise ValueError("an event is missing, or names a storage that is not there")
        events: NDArray[np.int32] = np.where(dead, ~subjects, subjects).astype(np.int32)
        return events

    @cached_property
    def _rows(self) -> list[list[int]]:
        rows: list[list[int]] = self.arrays["tapes"].tolist()
        return rows

    @cached_property
    def _starts(self) -> list[list[int]]:
        """Return the positions at which each trace's storages, events and work begin."""
        counts = self.arrays["tapes"][:, 1:4]
        starts: list[list[int]] = (np.cumsum(counts, axis=0) - counts).tolist()
        return starts

    @cached_property
    def _words(self) -> list[str]:
        words: list[str] = _from_array(self.arrays["words"])
        return words

    @cached_property
    def _work(self) -> NDArray[Any]:
        return self.arrays["work"]

    @cached_property
    def _died(self) -> NDArray[Any]:
        return self.arrays["died"]

    @cached_property
    def _distances(self) -> NDArray[Any]:
        return self.arrays["events"]

    @cached_property
    def _numbers(self) -> NDArray[np.int32]:
        """Return the storage numbers of all traces, concatenated."""
        return _absolute(self.arrays["numbers"])

    @cached_property
    def _strings(self) -> list[str]:
        strings: list[str] = _from_array(self.arrays["strings"])
        return strings

    @cached_property
    def _table(self) -> NDArray[Any]:
        """Return the distinct storages, one column each."""
        return self.arrays["storages"]


def _relative(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each number as its distance from the next unused number; 0 means that the number itself is new.

    The numbers are assigned in order of first use. Distances repeat more often than numbers, so they compress better.
    """
    given = np.maximum.accumulate(np.concatenate([[-1], numbers]))[:-1] + 1
    return (given - numbers).astype(np.int32)


def _absolute(relative: NDArray[np.int32]) -> NDArray[np.int32]:
    new = relative == 0
    absolute: NDArray[np.int32] = (np.cumsum(new) - new - relative).astype(np.int32)
    return absolute


class TraceStore:
    """Store of entries by key; each entry is a few traces."""

    def __init__(self, folder: Path, shipped: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        """Use the read-only archives in ``shipped`` first, then the cache in ``folder``.

        The archives in a subfolder of ``shipped`` (SOURCES_FOLDER) are searched last, because they are rarely needed
        and opening many takes time.
        """
        self.folder = folder
        self.shipped = shipped
        self.most_bytes = most_bytes
        self.outcomes = folder / "outcomes"
        """Folder in which `ResultStore` stores the forecast results of these traces."""
        self.shipped_outcomes = shipped and shipped / SHIPPED_OUTCOMES

    @staticmethod
    def of_user() -> TraceStore:
        """Return the user's store, including the traces that ship with Impasto."""
        return TraceStore(places.cache_folder() / "traces", asset_path("traces"))

    def load(self, key: str) -> tuple[MemoryTrace, ...] | None:
        """Return the traces under ``key``; None if there are none. A damaged entry is removed and counts as none."""
        return self._found(key, Archive.read, read)

    def summaries(self, key: str) -> tuple[TraceSummary, ...] | None:
        """Return the summaries of the traces under ``key``, or None like ``load``; this is ten times faster."""
        return self._found(key, Archive.read_summaries, read_summaries)

    def save(self, key: str, traces: Sequence[MemoryTrace]) -> None:
        """Store ``traces`` under ``key`` atomically; raises OSError if they cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / f"{key}{SUFFIX}", traces)
        evict(self.folder, SUFFIX, self.most_bytes)

    @cached_property
    def _archives(self) -> list[Archive]:
        return _archives_in(self.shipped)

    @cached_property
    def _other_archives(self) -> list[Archive]:
        return _archives_in(self.shipped and self.shipped / SOURCES_FOLDER)

    def _found(
        self, key: str, look: Callable[[Archive, str], T | None], reader: Callable[[Path], T | None]
    ) -> T | None:
        # Shipped archives first: they are read once and stay in memory, while each own entry is a file to open.
        found = _find_in(self._archives, key, look)
        if found is None:
            found = self._load_own(key, reader)
        return _find_in(self._other_archives, key, look) if found is None else found

    def _load_own(self, key: str, reader: Callable[[Path], T | None]) -> T | None:
        path = self.folder / f"{key}{SUFFIX}"
        if not path.is_file():  # not removed either: another process may be about to write it
            return None
        found = reader(path)
        if found is not None:
            mark_used(path)
        else:
            with suppress(OSError):  # a read-only folder can still be read
                path.unlink(missing_ok=True)
        return found


def _archives_in(folder: Path | None) -> list[Archive]:
    return [] if folder is None else [Archive(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def _find_in(archives: Sequence[Archive], key: str, look: Callable[[Archive, str], T | None]) -> T | None:
    """Return the result of ``look`` in the first archive with ``key``; None if there is none or it is unreadable."""
    return next((look(archive, key) for archive in archives if key in archive), None)


def evict(folder: Path, suffix: str, most_bytes: int) -> None:
    """Remove stray temporary files, then the least recently used files.

    Files are removed until the rest take at most ``most_bytes`` or only one is left.
    """
    with suppress(OSError):  # tried again the next time
        files.remove_temporary_files(folder, idle=STRAY_SECONDS)
    stamped = []
    for path in folder.glob(f"*{suffix}"):
        with suppress(OSError):  # another process removed it
            facts = path.stat()
            stamped.append((facts.st_mtime_ns, facts.st_size, path))
    total = sum(size for _, size, _ in stamped)
    for _, size, path in sorted(stamped)[:-1]:
        if total <= most_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def mark_used(path: Path) -> None:
    """Set a file's time of last use to now; the least recently used files are removed first."""
    with suppress(OSError):  # a read-only folder can still be read
        os.utime(path)
