"""Tapes on disk: those that ship with Impasto, and those made on this machine, the oldest-used removed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from trainer.files.assets import asset_path
from trainer.memory.outline import Outline
from trainer.memory.packing import Archive, read, read_outlines, write
from trainer.memory.tape import Tape
from trainer.protocol import places

T = TypeVar("T")

MOST_BYTES = 256 * 2**20  # some thousand entries
SUFFIX = ".npz"


class TapeStore:
    """Entries of a few tapes each, by key."""

    def __init__(self, folder: Path, shipped: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        """``shipped`` holds archives, which come before what is in ``folder`` and are never changed."""
        self.folder = folder
        self.shipped = shipped
        self.most_bytes = most_bytes

    @staticmethod
    def of_user() -> TapeStore:
        """This user's store, with the tapes that ship with Impasto behind it."""
        return TapeStore(places.cache_folder() / "traces", asset_path("traces"))

    def load(self, key: str) -> tuple[Tape, ...] | None:
        """The tapes under ``key``; None when there are none or the entry is damaged (which removes it)."""
        shipped = self._shipped(key, Archive.read)
        return self._found(key, read) if shipped is None else shipped

    def outlines(self, key: str) -> tuple[Outline, ...] | None:
        """What the tapes under ``key`` add up to, in a tenth of the time; None as for ``load``."""
        shipped = self._shipped(key, Archive.read_outlines)
        return self._found(key, read_outlines) if shipped is None else shipped

    def save(self, key: str, tapes: Sequence[Tape]) -> None:
        """Keeps ``tapes`` under ``key``, atomically; raises OSError when the disk refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / f"{key}{SUFFIX}", tapes)
        self._make_room()

    @cached_property
    def _archives(self) -> list[Archive]:
        return [] if self.shipped is None else [Archive(path) for path in sorted(self.shipped.glob(f"*{SUFFIX}"))]

    def _shipped(self, key: str, reader: Callable[[Archive, str], T | None]) -> T | None:
        """What ships under ``key``; None where nothing does that can be read."""
        return next((reader(archive, key) for archive in self._archives if key in archive), None)

    def _found(self, key: str, reader: Callable[[Path], T | None]) -> T | None:
        path = self.folder / f"{key}{SUFFIX}"
        found = reader(path)
        with suppress(OSError):  # a folder that may not be written is still read
            if found is None:
                path.unlink(missing_ok=True)
            else:
                os.utime(path)  # the time of its last use decides what is removed first
        return found

    def _make_room(self) -> None:
        """Removes the entries used longest ago until the rest is within the bound."""
        stamped = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process removed it
                facts = path.stat()
                stamped.append((facts.st_mtime_ns, facts.st_size, path))
        total = sum(size for _, size, _ in stamped)
        for _, size, path in sorted(stamped)[:-1]:
            if total <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
