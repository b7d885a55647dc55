"""Tapes as plain arrays in one file, small and quick to read: as a whole, or only what they add up to. No torch."""

from __future__ import annotations

import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from trainer.memory.outline import Outline, Sums, sums
from trainer.memory.tape import Storage, StorageKind, Tape, Work, WorkKind
from trainer.protocol import atomic

T = TypeVar("T")
Arrays = Mapping[str, NDArray[Any]]

# Raised when the form of a file changes, so that those of older programs are made anew.
FORM = 3
NAMELESS = -1

_STORAGE_KINDS: tuple[StorageKind, ...] = get_args(StorageKind)
_WORK_KINDS: tuple[WorkKind, ...] = get_args(WorkKind)
# What reading a damaged archive of arrays may raise, whichever of its bytes are wrong.
_DAMAGED = (
    OSError, EOFError, ValueError, KeyError, IndexError, TypeError, NotImplementedError, RuntimeError, MemoryError,
    zipfile.BadZipFile, lzma.LZMAError, zlib.error,
)  # fmt: skip


def write(path: Path, tapes: Sequence[Tape], *, smallest: bool = False) -> None:
    """Writes tapes as an npz of plain arrays, atomically; with ``smallest`` in a third of the bytes, ten times slower.

    That is by LZMA, which finds that tapes repeat each other and themselves.
    """
    arrays = _arrays_of(tapes)
    with atomic.staged(path, durable=False) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            # A fixed date: equal tapes give equal files.
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = zipfile.ZIP_LZMA if smallest else zipfile.ZIP_DEFLATED
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


def read(path: Path) -> tuple[Tape, ...] | None:
    """The tapes of a file that ``write`` made; None when it is absent, damaged, or of another form."""
    return _read(path, _tapes_of)


def read_outlines(path: Path) -> tuple[Outline, ...] | None:
    """What the tapes of a file add up to, without reading their storages; None as for ``read``."""
    return _read(path, _outlines_of)


def _read(path: Path, parse: Callable[[Arrays], Iterator[T]]) -> tuple[T, ...] | None:
    if not path.is_file():
        return None
    try:
        # Opened here: numpy leaves the file of a broken archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if arrays["form"].tolist() != [FORM]:
                return None
            return tuple(parse(arrays))
    except _DAMAGED:
        return None


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

    @property
    def array(self) -> NDArray[Any]:
        return np.frombuffer(json.dumps(self.texts).encode("utf-8"), dtype=np.uint8)


def _texts(array: NDArray[Any]) -> list[str]:
    texts: list[str] = json.loads(array.tobytes().decode("utf-8"))
    return texts


def _arrays_of(tapes: Sequence[Tape]) -> dict[str, NDArray[Any]]:
    """Columns over all tapes; storages once each and then by number.

    Events are kept as distances to the latest birth, which repeat from layer to layer.
    """
    strings, words = _Strings(), _Strings()
    place, word = strings.place, words.place
    kinds: dict[tuple[int, ...], int] = {}
    numbers = [kinds.setdefault(_row(storage, place), len(kinds)) for tape in tapes for storage in tape.storages]
    work = [
        (_WORK_KINDS.index(item.kind), word(item.dtype), word(item.stage), item.flops, item.bytes, item.count)
        for tape in tapes
        for item in tape.work
    ]
    nothing = np.zeros(0, dtype=np.int32)
    died = [tape.events < 0 for tape in tapes]
    distances = [
        np.where(dead, ~tape.events, tape.events) - np.cumsum(~dead) for tape, dead in zip(tapes, died, strict=True)
    ]
    added = [sums(tape) for tape in tapes]
    rows = [
        (word(tape.name), len(tape.storages), len(tape.events), len(tape.work), one.net, one.peak)
        for tape, one in zip(tapes, added, strict=True)
    ]
    return {
        "form": np.array([FORM]),
        "tapes": np.array(rows, dtype=np.int64).reshape(-1, 6),
        "words": words.array,
        "work": np.array(work, dtype=np.int64).reshape(-1, 6).T,
        "strings": strings.array,
        "storages": np.array(list(kinds), dtype=np.int64).reshape(-1, 5).T,
        "numbers": _relative(np.array(numbers, dtype=np.int32)),
        "died": np.concatenate([nothing.astype(bool), *died]),
        "events": np.concatenate([nothing, *distances]).astype(np.int32),
    }


def _row(storage: Storage, place: Callable[[str], int]) -> tuple[int, ...]:
    name = NAMELESS if storage.name is None else place(storage.name)
    kind = _STORAGE_KINDS.index(storage.kind)
    return storage.bytes, kind, place(storage.module), place(storage.stage), name


def _outlines_of(arrays: Arrays) -> Iterator[Outline]:
    words = _texts(arrays["words"])
    work = iter(zip(*arrays["work"].tolist(), strict=True))
    for name, _, _, count, net, peak in arrays["tapes"].tolist():
        items = tuple(
            Work(_WORK_KINDS[kind], words[dtype], words[stage], flops, size, times)
            for kind, dtype, stage, flops, size, times in islice(work, count)
        )
        yield Outline(words[name], Sums(net, peak), items)


def _tapes_of(arrays: Arrays) -> Iterator[Tape]:
    """The tapes that columns were made of; raises ValueError for what cannot be."""
    storages = _storages_of(arrays)
    died, distances = arrays["died"], arrays["events"]
    start = 0
    for outline, row in zip(_outlines_of(arrays), arrays["tapes"].tolist(), strict=True):
        storage_count, event_count = row[1], row[2]
        dead = died[start : start + event_count]
        subjects = distances[start : start + event_count] + np.cumsum(~dead)
        start += event_count
        if len(subjects) != event_count or (event_count and not 0 <= subjects.min() <= subjects.max() < storage_count):
            raise ValueError("an event is missing, or names a storage that is not there")
        events = np.where(dead, ~subjects, subjects).astype(np.int32)
        yield Tape(outline.name, tuple(islice(storages, storage_count)), events, outline.work)


def _storages_of(arrays: Arrays) -> Iterator[Storage]:
    """Those of all tapes in a row; equal ones are one object."""
    texts = _texts(arrays["strings"])
    known = [
        Storage(size, _STORAGE_KINDS[kind], texts[module], texts[stage], None if name == NAMELESS else texts[name])
        for size, kind, module, stage, name in zip(*arrays["storages"].tolist(), strict=True)
    ]
    return (known[number] for number in _absolute(arrays["numbers"]).tolist())


def _relative(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Numbers given out in the order of their first use, as how long ago they were; 0: now. That repeats more."""
    given = np.maximum.accumulate(np.concatenate([[-1], numbers]))[:-1] + 1
    return (given - numbers).astype(np.int32)


def _absolute(relative: NDArray[np.int32]) -> NDArray[np.int32]:
    new = relative == 0
    return (np.cumsum(new) - new - relative).astype(np.int32)
