"""Tapes on disk: those that ship with Impasto, and those made on this machine, the oldest-used removed."""

from __future__ import annotations

import json
import lzma
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from trainer.files.assets import asset_path
from trainer.memory.tape import Storage, StorageKind, Tape, Work, WorkKind
from trainer.protocol import atomic, places

# Raised when the form of an entry changes, so that entries of older programs are made anew.
FORM = 1
MOST_BYTES = 256 * 2**20  # some thousand entries
SUFFIX = ".npz"
NAMELESS = -1

_STORAGE_KINDS: tuple[StorageKind, ...] = get_args(StorageKind)
_WORK_KINDS: tuple[WorkKind, ...] = get_args(WorkKind)
# What reading a damaged archive of arrays may raise, whichever of its bytes are wrong.
_DAMAGED = (
    OSError, EOFError, ValueError, KeyError, IndexError, TypeError, NotImplementedError, RuntimeError, MemoryError,
    zipfile.BadZipFile, lzma.LZMAError,
)  # fmt: skip


class TapeStore:
    """Entries of a few tapes each, by key."""

    def __init__(self, folder: Path, shipped: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.shipped = shipped
        self.most_bytes = most_bytes

    @staticmethod
    def of_user() -> TapeStore:
        """This user's store, with the tapes that ship with Impasto behind it."""
        return TapeStore(places.cache_folder() / "traces", asset_path("traces"))

    def load(self, key: str) -> tuple[Tape, ...] | None:
        """The tapes under ``key``; None when there are none or the entry is damaged (which removes it)."""
        if self.shipped is not None and (tapes := read(self.shipped / f"{key}{SUFFIX}")) is not None:
            return tapes
        path = self.folder / f"{key}{SUFFIX}"
        tapes = read(path)
        try:
            if tapes is None:
                path.unlink(missing_ok=True)
            else:
                os.utime(path)  # the time of its last use decides what is removed first
        except OSError:
            pass  # a folder that may not be written is still read
        return tapes

    def save(self, key: str, tapes: Iterable[Tape]) -> None:
        """Keeps ``tapes`` under ``key``, atomically; raises OSError when the disk refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / f"{key}{SUFFIX}", tapes)
        self._make_room()

    def _make_room(self) -> None:
        """Removes the entries used longest ago until the rest is within the bound."""
        stamped = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            try:
                facts = path.stat()
            except OSError:  # another process removed it
                continue
            stamped.append((facts.st_mtime_ns, facts.st_size, path))
        total = sum(size for _, size, _ in stamped)
        for _, size, path in sorted(stamped)[:-1]:
            if total <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def write(path: Path, tapes: Iterable[Tape]) -> None:
    """Writes tapes as an npz of plain arrays, packed by LZMA: it finds that tapes repeat each other and themselves."""
    arrays = _arrays_of(list(tapes))
    with atomic.staged(path, durable=False) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            # A fixed date: equal tapes give equal files.
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = zipfile.ZIP_LZMA
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


def read(path: Path) -> tuple[Tape, ...] | None:
    """The tapes of a file that ``write`` made; None when it is absent, damaged, or of another form."""
    if not path.is_file():
        return None
    try:
        # Opened here: numpy leaves the file of a broken archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return tuple(_tapes_of(arrays))
    except _DAMAGED:
        return None


class _Strings:
    """Every text of an entry once, known by its place."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _arrays_of(tapes: Sequence[Tape]) -> dict[str, NDArray[Any]]:
    """Columns over all tapes. Events are kept as distances to the latest birth, which repeat from layer to layer."""
    strings = _Strings()
    place = strings.place
    names = [place(tape.name) for tape in tapes]
    storages = [
        (
            storage.bytes,
            _STORAGE_KINDS.index(storage.kind),
            place(storage.module),
            place(storage.stage),
            NAMELESS if storage.name is None else place(storage.name),
        )
        for tape in tapes
        for storage in tape.storages
    ]
    work = [
        (_WORK_KINDS.index(item.kind), place(item.dtype), place(item.stage), item.flops, item.bytes, item.count)
        for tape in tapes
        for item in tape.work
    ]
    nothing = np.zeros(0, dtype=np.int32)
    died = [tape.events < 0 for tape in tapes]
    distances = [
        np.where(dead, ~tape.events, tape.events) - np.cumsum(~dead) for tape, dead in zip(tapes, died, strict=True)
    ]
    lengths = [(name, len(t.storages), len(t.events), len(t.work)) for name, t in zip(names, tapes, strict=True)]
    return {
        "tapes": np.array(lengths, dtype=np.int64).reshape(-1, 4),
        "storages": np.array(storages, dtype=np.int64).reshape(-1, 5).T,
        "work": np.array(work, dtype=np.int64).reshape(-1, 6).T,
        "died": np.concatenate([nothing.astype(bool), *died]),
        "events": np.concatenate([nothing, *distances]).astype(np.int32),
        "strings": np.frombuffer(json.dumps([FORM, *strings.texts]).encode("utf-8"), dtype=np.uint8),
    }


def _tapes_of(arrays: Mapping[str, NDArray[Any]]) -> Iterator[Tape]:
    """The tapes that columns were made of; raises ValueError for another form or what cannot be."""
    form, *texts = json.loads(arrays["strings"].tobytes().decode("utf-8"))
    if form != FORM:
        raise ValueError(f"the form is {form}")
    storages = iter(zip(*arrays["storages"].tolist(), strict=True))
    work = iter(zip(*arrays["work"].tolist(), strict=True))
    died, distances = arrays["died"], arrays["events"]
    start = 0
    for name, storage_count, event_count, work_count in arrays["tapes"].tolist():
        dead = died[start : start + event_count]
        subjects = distances[start : start + event_count] + np.cumsum(~dead)
        start += event_count
        if len(subjects) != event_count or (event_count and not 0 <= subjects.min() <= subjects.max() < storage_count):
            raise ValueError("an event is missing, or names a storage that is not there")
        yield Tape(
            name=texts[name],
            storages=tuple(
                Storage(size, _STORAGE_KINDS[kind], texts[module], texts[stage], None if named < 0 else texts[named])
                for size, kind, module, stage, named in islice(storages, storage_count)
            ),
            events=np.where(dead, ~subjects, subjects).astype(np.int32),
            work=tuple(
                Work(_WORK_KINDS[kind], texts[dtype], texts[stage], flops, size, count)
                for kind, dtype, stage, flops, size, count in islice(work, work_count)
            ),
        )
