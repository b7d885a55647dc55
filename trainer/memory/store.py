"""Tapes on disk: those that ship with Impasto, and those made on this machine, the oldest-used removed."""

from __future__ import annotations

import json
import lzma
import os
import zipfile
from collections.abc import Iterable, Mapping
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
    """Writes tapes as an npz of plain arrays, packed by LZMA: the layers of a network repeat, which it finds."""
    strings = _Strings()
    arrays: dict[str, NDArray[Any]] = {}
    for index, tape in enumerate(tapes):
        arrays |= {f"{index}.{name}": array for name, array in _arrays_of(tape, strings).items()}
    arrays["strings"] = np.frombuffer(json.dumps([FORM, *strings.texts]).encode("utf-8"), dtype=np.uint8)
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
            form, *texts = json.loads(arrays["strings"].tobytes().decode("utf-8"))
            if form != FORM:
                return None
            count = sum(name.endswith(".events") for name in arrays.files)
            return tuple(_tape_of(index, arrays, texts) for index in range(count))
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


def _arrays_of(tape: Tape, strings: _Strings) -> dict[str, NDArray[Any]]:
    """A tape's columns. Events are kept as distances to the latest birth, which repeat from layer to layer."""
    place = strings.place
    storages = [
        (
            storage.bytes,
            _STORAGE_KINDS.index(storage.kind),
            place(storage.module),
            place(storage.stage),
            NAMELESS if storage.name is None else place(storage.name),
        )
        for storage in tape.storages
    ]
    work = [
        (_WORK_KINDS.index(item.kind), place(item.dtype), place(item.stage), item.flops, item.bytes, item.count)
        for item in tape.work
    ]
    died = tape.events < 0
    subjects = np.where(died, ~tape.events, tape.events)
    return {
        "name": np.array([place(tape.name)]),
        "storages": np.array(storages, dtype=np.int64).reshape(-1, 5).T,
        "work": np.array(work, dtype=np.int64).reshape(-1, 6).T,
        "died": died,
        "events": (subjects - np.cumsum(~died)).astype(np.int32),
    }


def _tape_of(index: int, arrays: Mapping[str, NDArray[Any]], texts: list[str]) -> Tape:
    storages, work = arrays[f"{index}.storages"].tolist(), arrays[f"{index}.work"].tolist()
    died = arrays[f"{index}.died"]
    subjects = arrays[f"{index}.events"] + np.cumsum(~died)
    if len(subjects) and not 0 <= subjects.min() <= subjects.max() < len(storages[0]):
        raise ValueError("an event names a storage that is not there")
    return Tape(
        name=texts[int(arrays[f"{index}.name"][0])],
        storages=tuple(
            Storage(size, _STORAGE_KINDS[kind], texts[module], texts[stage], None if name < 0 else texts[name])
            for size, kind, module, stage, name in zip(*storages, strict=True)
        ),
        events=np.where(died, ~subjects, subjects).astype(np.int32),
        work=tuple(
            Work(_WORK_KINDS[kind], texts[dtype], texts[stage], flops, size, count)
            for kind, dtype, stage, flops, size, count in zip(*work, strict=True)
        ),
    )
