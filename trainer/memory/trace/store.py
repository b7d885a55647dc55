"""Tapes, and what runs come to, on disk: what ships with Impasto, and what was made here, the oldest-used removed.

Tapes as plain arrays in one file, small and quick to read: as a whole, or only what they add up to. No torch.

An entry is some tapes under a key. It has a file of its own, or lies in an archive of entries that are alike.
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
    sums,
)
from trainer.protocol import files, places
from trainer.protocol.reading import open_file, parse_json

T = TypeVar("T")
Arrays = Mapping[str, NDArray[Any]]

# Raised when the form of a file changes, so that those of older programs are made anew.
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
OF_OTHERS = "others"
SHIPPED_OUTCOMES = "outcomes.zip"
# A temporary file that nobody has written to for so long was left by a process that ended in the middle.
STRAY_SECONDS = 3600.0


def write(path: Path, traces: Sequence[MemoryTrace]) -> None:
    """Writes one entry as an npz of plain arrays, atomically."""
    _write(path, _arrays_of(traces), zipfile.ZIP_DEFLATED)


def write_archive(path: Path, entries: Mapping[str, Sequence[MemoryTrace]]) -> None:
    """Writes many entries, atomically; those that are alike best lie side by side.

    LZMA finds that they repeat each other: they take a tenth of the bytes of files of their own, and longer to write.
    """
    arrays = _arrays_of([trace for traces in entries.values() for trace in traces])
    counts = {key: len(traces) for key, traces in entries.items()}
    _write(path, {**arrays, "entries": _as_array(counts)}, zipfile.ZIP_LZMA)


def read(path: Path) -> tuple[MemoryTrace, ...] | None:
    """The tapes of a file that ``write`` made; None when it is absent, damaged, or of another form."""
    return _read(path, _Columns.tapes)


def read_outlines(path: Path) -> tuple[TraceSummary, ...] | None:
    """What the tapes of a file add up to, without reading their storages; None as for ``read``."""
    return _read(path, _Columns.outlines)


class Archive:
    """A file that ``write_archive`` made; what of it was read once is kept."""

    def __init__(self, path: Path) -> None:
        self._columns = _Columns(_LazyArrays(path))

    @cached_property
    def _places(self) -> dict[str, slice]:
        """Where the tapes of each entry lie among all; none where the file is of no use."""
        try:
            counts: dict[str, int] = _from_array(self._columns.arrays["entries"])
            _require_form(self._columns.arrays)
            ends = accumulate(counts.values())
            return {key: slice(end - count, end) for (key, count), end in zip(counts.items(), ends, strict=True)}
        except DAMAGED:
            return {}

    def __contains__(self, key: str) -> bool:
        """Whether there is an entry under a key."""
        return key in self._places

    def read(self, key: str) -> tuple[MemoryTrace, ...] | None:
        """The tapes under ``key``; None when there are none or the file is damaged."""
        return self._found(key, self._columns.tapes)

    def read_outlines(self, key: str) -> tuple[TraceSummary, ...] | None:
        """What the tapes under ``key`` add up to; None as for ``read``."""
        return self._found(key, self._columns.outlines)

    def _found(self, key: str, parse: Callable[[slice], Iterator[T]]) -> tuple[T, ...] | None:
        try:
            return tuple(parse(self._places[key])) if key in self else None
        except DAMAGED:
            return None


class _LazyArrays(Mapping[str, NDArray[Any]]):
    """The arrays of a file, each read when it is asked for; the file stays closed between."""

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
            # A fixed date: equal tapes give equal files.
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = compression
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


def _read(path: Path, parse: Callable[[_Columns, slice], Iterator[T]]) -> tuple[T, ...] | None:
    if not path.is_file():
        return None
    try:
        # Opened here: numpy leaves the file of a broken archive open.
        with open_file(path, "listing") as file, np.load(file, allow_pickle=False) as arrays:
            _require_form(arrays)
            return tuple(parse(_Columns(arrays), slice(None)))
    except DAMAGED:
        return None


def _require_form(arrays: Arrays) -> None:
    if arrays["form"].tolist() != [FORM]:
        raise ValueError("written by another version")


class _Strings:
    """Every text once, known by its place."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _as_array(content: Any) -> NDArray[Any]:
    """JSON as bytes."""
    return np.frombuffer(json.dumps(content).encode("utf-8"), dtype=np.uint8)


def _from_array(array: NDArray[Any]) -> Any:
    return parse_json(array.tobytes())


def _arrays_of(traces: Sequence[MemoryTrace]) -> dict[str, NDArray[Any]]:
    """Columns over all tapes; storages once each and then by number.

    Events are kept as distances to the latest birth, which repeat from layer to layer.
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
    nothing = np.zeros(0, dtype=np.int32)
    died = [trace.events < 0 for trace in traces]
    distances = [
        np.where(dead, ~trace.events, trace.events) - np.cumsum(~dead) for trace, dead in zip(traces, died, strict=True)
    ]
    added = [sums(trace) for trace in traces]
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
    """What columns say of the tapes that they were made of; each column is read when it is needed, and then kept.

    Raises ValueError for what cannot be.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._known: dict[int, Storage] = {}

    def outlines(self, which: slice) -> Iterator[TraceSummary]:
        """Of the tapes in ``which`` places."""
        words, work = self._words, self._work
        for (name, _, _, count, net, peak), (_, _, start) in zip(self._rows[which], self._starts[which], strict=True):
            columns = work[:, start : start + count].tolist()
            items = tuple(
                Work(_WORK_KINDS[kind], words[dtype], words[stage], flops, size, times)
                for kind, dtype, stage, flops, size, times in zip(*columns, strict=True)
            )
            yield TraceSummary(words[name], Totals(net, peak), items)

    def tapes(self, which: slice) -> Iterator[MemoryTrace]:
        """Those in ``which`` places."""
        rows, starts = self._rows[which], self._starts[which]
        for summary, row, (first, start, _) in zip(self.outlines(which), rows, starts, strict=True):
            numbers = self._numbers[first : first + row[1]]
            events = self._events(start, row[2], len(numbers))
            yield MemoryTrace(summary.name, self._storages(numbers), events, summary.work)

    def _storages(self, numbers: NDArray[np.int32]) -> tuple[Storage, ...]:
        """Those with these numbers; equal ones are one object, made when it is first needed."""
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
        """Where each tape's storages, events and work begin."""
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
        """Which storages the tapes have, those of all tapes in a row."""
        return _absolute(self.arrays["numbers"])

    @cached_property
    def _strings(self) -> list[str]:
        strings: list[str] = _from_array(self.arrays["strings"])
        return strings

    @cached_property
    def _table(self) -> NDArray[Any]:
        """A column for every storage that differs from all others."""
        return self.arrays["storages"]


def _relative(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Numbers given out in the order of their first use, as how long ago they were; 0: now. That repeats more."""
    given = np.maximum.accumulate(np.concatenate([[-1], numbers]))[:-1] + 1
    return (given - numbers).astype(np.int32)


def _absolute(relative: NDArray[np.int32]) -> NDArray[np.int32]:
    new = relative == 0
    absolute: NDArray[np.int32] = (np.cumsum(new) - new - relative).astype(np.int32)
    return absolute


class TraceStore:
    """Entries of a few tapes each, by key."""

    def __init__(self, folder: Path, shipped: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        """``shipped`` holds archives, which come before what is in ``folder`` and are never changed.

        Those in its folder "others" come last: they are seldom asked for, and to look into many takes time.
        """
        self.folder = folder
        self.shipped = shipped
        self.most_bytes = most_bytes
        self.outcomes = folder / "outcomes"
        """Where `OutcomeStore` keeps what runs on these tapes came to."""
        self.shipped_outcomes = shipped and shipped / SHIPPED_OUTCOMES

    @staticmethod
    def of_user() -> TraceStore:
        """This user's store, with the tapes that ship with Impasto behind it."""
        return TraceStore(places.cache_folder() / "traces", asset_path("traces"))

    def load(self, key: str) -> tuple[MemoryTrace, ...] | None:
        """The tapes under ``key``; None when there are none or the entry is damaged (which removes it)."""
        return self._found(key, Archive.read, read)

    def outlines(self, key: str) -> tuple[TraceSummary, ...] | None:
        """What the tapes under ``key`` add up to, in a tenth of the time; None as for ``load``."""
        return self._found(key, Archive.read_outlines, read_outlines)

    def save(self, key: str, traces: Sequence[MemoryTrace]) -> None:
        """Keeps ``tapes`` under ``key``, atomically; raises OSError when the disk refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / f"{key}{SUFFIX}", traces)
        make_room(self.folder, SUFFIX, self.most_bytes)

    @cached_property
    def _archives(self) -> list[Archive]:
        return _archives_in(self.shipped)

    @cached_property
    def _other_archives(self) -> list[Archive]:
        return _archives_in(self.shipped and self.shipped / OF_OTHERS)

    def _found(
        self, key: str, look: Callable[[Archive, str], T | None], reader: Callable[[Path], T | None]
    ) -> T | None:
        found = _find_in(self._archives, key, look)
        if found is None:
            found = self._load_own(key, reader)
        return _find_in(self._other_archives, key, look) if found is None else found

    def _load_own(self, key: str, reader: Callable[[Path], T | None]) -> T | None:
        path = self.folder / f"{key}{SUFFIX}"
        if not path.is_file():  # and is not removed either: another process may be just about to put it there
            return None
        found = reader(path)
        if found is not None:
            mark_used(path)
        else:
            with suppress(OSError):  # a folder that may not be written is still read
                path.unlink(missing_ok=True)
        return found


def _archives_in(folder: Path | None) -> list[Archive]:
    return [] if folder is None else [Archive(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def _find_in(archives: Sequence[Archive], key: str, look: Callable[[Archive, str], T | None]) -> T | None:
    """What ships under ``key``; None where nothing does that can be read."""
    return next((look(archive, key) for archive in archives if key in archive), None)


def make_room(folder: Path, suffix: str, most_bytes: int) -> None:
    """Removes the files used longest ago until the rest is within the bound, or one is left; and what writers left."""
    with suppress(OSError):  # what resists is tried again the next time
        files.remove_strays(folder, idle=STRAY_SECONDS)
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
    """The time of its last use decides what is removed first."""
    with suppress(OSError):  # a folder that may not be written is still read
        os.utime(path)
