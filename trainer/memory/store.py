"""Tapes, and what runs come to, on disk: what ships with Impasto, and what was made here, the oldest-used removed."""

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
from trainer.protocol import atomic, places

T = TypeVar("T")

MOST_BYTES = 256 * 2**20  # some thousand entries
SUFFIX = ".npz"
OF_OTHERS = "others"
SHIPPED_OUTCOMES = "outcomes.zip"
# A temporary file that nobody has written to for so long was left by a process that ended in the middle.
STRAY_SECONDS = 3600.0


class TapeStore:
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
    def of_user() -> TapeStore:
        """This user's store, with the tapes that ship with Impasto behind it."""
        return TapeStore(places.cache_folder() / "traces", asset_path("traces"))

    def load(self, key: str) -> tuple[Tape, ...] | None:
        """The tapes under ``key``; None when there are none or the entry is damaged (which removes it)."""
        return self._found(key, Archive.read, read)

    def outlines(self, key: str) -> tuple[Outline, ...] | None:
        """What the tapes under ``key`` add up to, in a tenth of the time; None as for ``load``."""
        return self._found(key, Archive.read_outlines, read_outlines)

    def save(self, key: str, tapes: Sequence[Tape]) -> None:
        """Keeps ``tapes`` under ``key``, atomically; raises OSError when the disk refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / f"{key}{SUFFIX}", tapes)
        make_room(self.folder, SUFFIX, self.most_bytes)

    @cached_property
    def _archives(self) -> list[Archive]:
        return _archives_in(self.shipped)

    @cached_property
    def _archives_of_others(self) -> list[Archive]:
        return _archives_in(self.shipped and self.shipped / OF_OTHERS)

    def _found(
        self, key: str, look: Callable[[Archive, str], T | None], reader: Callable[[Path], T | None]
    ) -> T | None:
        found = _in_any(self._archives, key, look)
        if found is None:
            found = self._own(key, reader)
        return _in_any(self._archives_of_others, key, look) if found is None else found

    def _own(self, key: str, reader: Callable[[Path], T | None]) -> T | None:
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


def _in_any(archives: Sequence[Archive], key: str, look: Callable[[Archive, str], T | None]) -> T | None:
    """What ships under ``key``; None where nothing does that can be read."""
    return next((look(archive, key) for archive in archives if key in archive), None)


def make_room(folder: Path, suffix: str, most_bytes: int) -> None:
    """Removes the files used longest ago until the rest is within the bound, or one is left; and what writers left."""
    with suppress(OSError):  # what resists is tried again the next time
        atomic.remove_strays(folder, idle=STRAY_SECONDS)
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
