"""Remembers what pictures turned out to be, so that a second check of an unchanged dataset takes a moment."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.protocol.fields import build, json_keys, to_record
from trainer.protocol.places import cache_folder
from trainer.protocol.reading import UnusableFileError, decoded, parse_json
from trainer.protocol.row_store import RowStore, key_of

State = tuple[int, int]
"""Size in bytes and modification time in nanoseconds: a file is taken as unchanged while both are."""

# Raised whenever PictureFacts or what fills it changes: older facts are then not found.
_VERSION = 1
_LARGEST = 512_000_000  # bytes: about a million images
# A file changed this short a time ago may change again within one tick of the file system's clock.
_SETTLED_NS = 2_000_000_000


@json_keys("id", "width", "height", "format", "animated", "rotated", "transparent", "profile", "fingerprint")
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
    """Facts by path and state, in a store that may fail at any time: then the images are looked at again."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def recall(self, path: Path, state: State) -> PictureFacts | None:
        """Return what is remembered of a file in this state; None where that is nothing, or damaged."""
        row = self._store.get(key_of(path, *state, _VERSION))
        if row is None:
            return None
        try:
            return decoded(parse_json(row), lambda found: build(PictureFacts, found), path)
        except UnusableFileError:  # another version wrote it
            return None

    def keep(self, path: Path, state: State, facts: PictureFacts) -> None:
        """Remember a file, unless it changed so recently that its state says little."""
        if time.time_ns() - state[1] > _SETTLED_NS:
            self._store.put(key_of(path, *state, _VERSION), json.dumps(to_record(facts)).encode())


@contextmanager
def picture_memory() -> Iterator[PictureMemory]:
    """Open the memory in the per-user cache folder."""
    store = RowStore(cache_folder() / "pictures.sqlite", _LARGEST)
    try:
        yield PictureMemory(store)
    finally:
        store.close()
