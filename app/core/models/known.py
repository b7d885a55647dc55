"""Keeps what was told of each model and where tools were found, so that the next search asks only what is new.

It is a cache: lost or damaged, everything is looked at again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from app.core.models.found import Told
from app.core.models.telling import state_of, tell
from app.core.models.tools import Installation
from trainer import __version__
from trainer.protocol import atomic, places
from trainer.protocol.fields import build, to_record
from trainer.protocol.reading import UnusableFileError, read_record
from trainer.protocol.row_store import checksum


class Known:
    """Belongs to the worker that searches."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or places.cache_folder() / "models.json"
        self._told, self.installations = self._read()
        self._asked: dict[str, list[Any]] = {}

    def tell(self, path: Path) -> tuple[Told, int]:
        """Return what a base is and its bytes; raises OSError when it is gone."""
        size, changed = state_of(path)
        entry = self._told.get(str(path))
        if entry is None or entry[:2] != [size, changed]:
            entry = [size, changed, to_record(tell(path))]
        self._asked[str(path)] = entry
        return build(Told, entry[2]), size

    def write(self, installations: Iterable[Installation]) -> None:
        """Keep what was asked for since it was made; a disk that refuses costs the next search its head start."""
        kept: dict[str, Any] = {
            "version": __version__,
            "tools": [_plain(one) for one in installations],
            "told": self._asked,
        }
        kept["checksum"] = checksum(json.dumps(kept, sort_keys=True))
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self._path, json.dumps(kept) + "\n", durable=False)

    def _read(self) -> tuple[dict[str, list[Any]], list[Installation]]:
        try:
            return read_record(self._path, "list", _kept)
        except (OSError, UnusableFileError):
            return {}, []


def _kept(found: Any) -> tuple[dict[str, list[Any]], list[Installation]]:
    if found["version"] != __version__:  # another version may say something else
        return {}, []
    if found.pop("checksum", "") != checksum(json.dumps(found, sort_keys=True)):
        return {}, []
    told = {
        path: [size, changed, to_record(build(Told, said))] for path, (size, changed, said) in found["told"].items()
    }
    return told, [_installation(one) for one in found["tools"]]


def _plain(one: Installation) -> dict[str, Any]:
    return {
        "tool": one.tool,
        "folder": str(one.folder),
        "bases": [*map(str, one.bases)],
        "loras": [*map(str, one.loras)],
    }


def _installation(kept: dict[str, Any]) -> Installation:
    bases, loras = (tuple(map(Path, kept[name])) for name in ("bases", "loras"))
    return Installation(kept["tool"], Path(kept["folder"]), bases, loras)
