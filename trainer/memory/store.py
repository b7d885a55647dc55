"""Tapes, and what runs come to, on disk: what ships with Impasto, and what was made here, the oldest-used removed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from trainer.files.assets import asset_path
from trainer.memory.outcomes import Hindered, Outcome, at_length, in_brief, read_hindered, read_outcome, write_outcomes
from trainer.memory.outline import Outline
from trainer.memory.packing import Archive, read, read_outlines, write
from trainer.memory.tape import Tape
from trainer.protocol import atomic, places

T = TypeVar("T")

MOST_BYTES = 256 * 2**20  # some thousand entries
SUFFIX = ".npz"
OF_OTHERS = "others"
MOST_OUTCOME_BYTES = 16 * 2**20  # some thousand, too
OUTCOME_SUFFIX = ".zip"
SHIPPED_OUTCOMES = "outcomes.zip"
HINDERED_SUFFIX = f".hindered{OUTCOME_SUFFIX}"
# A temporary file that nobody has written to for so long was left by a process that ended in the middle.
STRAY_SECONDS = 3600.0
# Of one run so many are kept that limits hindered, the latest: a card has a bit more or less to give each time.
MOST_HINDERED = 16


class TapeStore:
    """Entries of a few tapes each, by key."""

    def __init__(self, folder: Path, shipped: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        """``shipped`` holds archives, which come before what is in ``folder`` and are never changed.

        Those in its folder "others" come last: they are seldom asked for, and to look into many takes time.
        """
        self.folder = folder
        self.shipped = shipped
        self.most_bytes = most_bytes
        self.outcomes = OutcomeStore(folder / "outcomes", shipped and shipped / SHIPPED_OUTCOMES)

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
            _mark_used(path)
        else:
            with suppress(OSError):  # a folder that may not be written is still read
                path.unlink(missing_ok=True)
        return found


def _archives_in(folder: Path | None) -> list[Archive]:
    return [] if folder is None else [Archive(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def _in_any(archives: Sequence[Archive], key: str, look: Callable[[Archive, str], T | None]) -> T | None:
    """What ships under ``key``; None where nothing does that can be read."""
    return next((look(archive, key) for archive in archives if key in archive), None)


class OutcomeStore:
    """What runs come to, by key."""

    def __init__(self, folder: Path, shipped: Path | None = None) -> None:
        """``shipped`` is an archive, which comes before what is in ``folder`` and is never changed."""
        self.folder = folder
        self.shipped = shipped

    def load(self, key: str, *, brief: bool) -> Outcome | None:
        """The outcome under ``key``; None where none is sound and, if it is not to be ``brief``, at length."""
        own = self.folder / f"{key}{OUTCOME_SUFFIX}"
        for path in (own,) if self.shipped is None else (self.shipped, own):
            found = read_outcome(path, key)
            if found is not None and (brief or at_length(found)):
                if path == own:
                    _mark_used(own)
                return in_brief(found) if brief else found
        return None

    def save(self, key: str, outcome: Outcome) -> None:
        """Keeps ``outcome`` under ``key``, atomically; raises OSError when the disk refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_outcomes(self.folder / f"{key}{OUTCOME_SUFFIX}", {key: outcome})
        make_room(self.folder, OUTCOME_SUFFIX, MOST_OUTCOME_BYTES)

    def hindered(self, key: str) -> tuple[Hindered, ...]:
        """What came of limits under ``key``."""
        own = self.folder / f"{key}{HINDERED_SUFFIX}"
        shipped = () if self.shipped is None else read_hindered(self.shipped, key)
        if found := read_hindered(own, key):
            _mark_used(own)
        return (*shipped, *found)

    def save_hindered(self, key: str, found: Hindered) -> None:
        """Keeps what came of one more limit, as ``save`` does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}{HINDERED_SUFFIX}"
        others = [other for other in read_hindered(path, key) if other != found]
        write_outcomes(path, {}, {key: [*others, found][-MOST_HINDERED:]})
        make_room(self.folder, OUTCOME_SUFFIX, MOST_OUTCOME_BYTES)


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


def _mark_used(path: Path) -> None:
    """The time of its last use decides what is removed first."""
    with suppress(OSError):  # a folder that may not be written is still read
        os.utime(path)
