"""Remembers what pictures turned out to be, so that a second check of an unchanged dataset takes a moment."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainer.protocol.places import cache_folder

State = tuple[int, int]
"""Size in bytes and modification time in nanoseconds: a file is taken as unchanged while both are."""

# Raised whenever PictureFacts or what fills it changes: older memories are then forgotten.
_VERSION = 1
# A file changed this short a time ago may change again within one tick of the file system's clock.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """What does not change while the file does not; sizes are upright pixels, the fingerprint is in hex."""

    id: str
    width: int
    height: int
    format: str
    animated: bool
    rotated: bool
    transparent: bool
    profile: Literal["none", "good", "broken"]
    fingerprint: str


class PictureMemory:
    """Facts by path and state, in a small database; without one (None) nothing is remembered.

    One that fails is done without from then on: another check may be writing, or the disk be full or gone.
    """

    def __init__(self, database: sqlite3.Connection | None) -> None:
        self._database = database

    def recall(self, path: Path, state: State) -> PictureFacts | None:
        """Return what is remembered of a file in this state."""
        query = "SELECT facts FROM pictures WHERE path = ? AND size = ? AND changed = ?"
        row = self._ask(query, os.fsencode(path), *state)
        return PictureFacts(**json.loads(row[0])) if row else None

    def keep(self, path: Path, state: State, facts: PictureFacts) -> None:
        """Remember a file, unless it changed so recently that its state says little."""
        if time.time_ns() - state[1] > _SETTLED_NS:
            row = (os.fsencode(path), *state, json.dumps(asdict(facts)))
            self._ask("INSERT OR REPLACE INTO pictures VALUES (?, ?, ?, ?)", *row)

    def _ask(self, query: str, *values: bytes | int | str) -> tuple[str] | None:
        if self._database is None:
            return None
        try:
            row: tuple[str] | None = self._database.execute(query, values).fetchone()
        except sqlite3.Error:
            self._database = None
            return None
        return row


@contextmanager
def picture_memory() -> Iterator[PictureMemory]:
    """Open the memory in the per-user cache folder; a damaged one is begun anew, an impossible one done without."""
    database = _open(cache_folder() / "pictures.sqlite")
    try:
        yield PictureMemory(database)
    finally:
        if database is not None:
            # Another check may be writing, or the disk be full: the next check then takes longer, nothing else.
            with suppress(sqlite3.Error):
                database.commit()
            database.close()


def _open(path: Path) -> sqlite3.Connection | None:
    for attempt in range(2):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _prepared(sqlite3.connect(path, timeout=5.0))
        except sqlite3.OperationalError:  # no such folder, no permission, a full disk, or in use for long
            return None
        except sqlite3.DatabaseError:  # not a database
            with suppress(OSError):
                path.unlink(missing_ok=attempt == 0)
    return None


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    try:
        if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            database.executescript(
                "DROP TABLE IF EXISTS pictures;"
                "CREATE TABLE pictures (path BLOB PRIMARY KEY, size INTEGER, changed INTEGER, facts TEXT);"
                f"PRAGMA user_version = {_VERSION};"
            )
    except sqlite3.Error:
        database.close()
        raise
    return database
