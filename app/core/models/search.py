"""One search for models on this PC, on a worker; what it finds is told piece by piece.

Keeps what was told of each model and where tools were found, so that the next search asks only what is new.

It is a cache: lost or damaged, everything is looked at again.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from app.core.models.tools import Installation, SearchRoots, recognize
from app.core.models.verdict import BaseDescription, FoundBase, Tool, models_in, state_of, tell
from trainer import __version__
from trainer.files.assets import asset_path
from trainer.protocol import files, places
from trainer.protocol.reading import UnusableFileError, read_record, read_text
from trainer.protocol.records import build, to_record
from trainer.protocol.row_store import checksum

_DEEPEST = 4
"""Levels below a home folder or drive: D:/AI/Packages/ComfyUI_windows_portable/ComfyUI."""
_MOST_FOLDERS = 30_000
_SECONDS = 20.0
# Folders in which nobody installs such a tool, and which hold most of the folders of a PC.
_PASSED_OVER = {
    "$recycle.bin", "appdata", "library", "node_modules", "perflogs", "program files", "program files (x86)",
    "programdata", "recovery", "site-packages", "snap", "system volume information", "windows", "windows.old",
    "__pycache__", "proc", "sys", "dev", "lost+found", "steamapps", "venv",
}  # fmt: skip


def bases_of_hub(cache: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, Hub id) of each base of a Hub cache: a diffusers folder, else single files that are large."""
    for repository in _glob(cache, "models--*--*"):
        snapshot = _snapshot(repository)
        if snapshot is None:
            continue
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        if (snapshot / "model_index.json").is_file():
            if (snapshot / "unet").is_dir():
                yield snapshot, name
        else:
            yield from ((path, name) for path in _glob(snapshot, "*.safetensors"))


def own_bases() -> Iterator[tuple[Path, str]]:
    """Yield what Impasto downloaded: from the Hub with its id, and files of links."""
    folder = places.models_folder()
    yield from bases_of_hub(folder / "hub")
    yield from ((path, "") for path in _glob(folder / "links", "*/*.safetensors"))


def _snapshot(repository: Path) -> Path | None:
    """Return the files of the branch `main` where the cache knows it, else of the commit that came last."""
    try:
        commit = read_text(repository / "refs" / "main", "record").strip()
    except (OSError, ValueError):
        commit = ""
    named = repository / "snapshots" / commit
    if commit and named.is_dir():
        return named
    snapshots = [path for path in _glob(repository / "snapshots", "*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime_ns, default=None)


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


class Known:
    """Belongs to the worker that searches."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or places.cache_folder() / "models.json"
        self._descriptions, self.installations = self._read()
        self._requested: dict[str, list[Any]] = {}

    def tell(self, path: Path) -> tuple[BaseDescription, int]:
        """Return what a base is and its bytes; raises OSError when it is gone."""
        size, changed = state_of(path)
        entry = self._descriptions.get(str(path))
        if entry is None or entry[:2] != [size, changed]:
            entry = [size, changed, to_record(tell(path))]
        self._requested[str(path)] = entry
        return build(BaseDescription, entry[2]), size

    def write(self, installations: Iterable[Installation]) -> None:
        """Keep what was asked for since it was made; a disk that refuses costs the next search its head start."""
        kept: dict[str, Any] = {
            "version": __version__,
            "tools": [_plain(one) for one in installations],
            "told": self._requested,
        }
        kept["checksum"] = checksum(json.dumps(kept, sort_keys=True))
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(self._path, json.dumps(kept) + "\n", durable=False)

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
        path: [size, changed, to_record(build(BaseDescription, said))]
        for path, (size, changed, said) in found["told"].items()
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


def installations(ground: SearchRoots, stopped: Callable[[], bool]) -> Iterator[Installation]:
    """Yield each tool once, as it is found; ends early when `stopped` says so, or after 20 seconds."""
    deadline = time.monotonic() + _SECONDS
    seen: set[str] = set()
    for found in _candidates(ground, lambda: stopped() or time.monotonic() > deadline):
        name = os.path.normcase(os.path.realpath(found.folder))
        if name not in seen:
            seen.add(name)
            yield found


def _candidates(ground: SearchRoots, stopped: Callable[[], bool]) -> Iterator[Installation]:
    for folder in ground.asked:
        yield from _at(folder)
    waiting = deque((folder, 0) for folder in dict.fromkeys(ground.searched))
    looked = 0
    while waiting and looked < _MOST_FOLDERS and not stopped():
        folder, depth = waiting.popleft()
        looked += 1
        found = list(_at(folder))
        yield from found
        if not found and depth < _DEEPEST:
            waiting.extend((below, depth + 1) for below in _below(folder))


def _at(folder: Path) -> Iterator[Installation]:
    """Yield the tool in a folder, and those that it installed."""
    try:
        found = recognize(folder)
    except (OSError, ValueError):  # gone, or not ours to look into
        return
    if found:
        yield found
        for place in found.within:
            for below in _below(place):
                yield from _at(below)


def _below(folder: Path) -> Iterable[Path]:
    try:
        with os.scandir(files.long_path(folder)) as entries:
            names = [entry.name for entry in entries if _is_worth(entry)]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def _is_worth(entry: os.DirEntry[str]) -> bool:
    """Real folders only: a link would lead in circles, and what it leads to is found by its own path."""
    if entry.name.startswith(".") or entry.name.lower() in _PASSED_OVER:
        return False
    try:
        return entry.is_dir(follow_symlinks=False) and not _is_junction(entry)
    except OSError:
        return False


def _is_junction(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a Windows junction; Stability Matrix makes them. `DirEntry.is_junction` needs 3.12."""
    if sys.platform == "win32":
        return entry.stat(follow_symlinks=False).st_reparse_tag == stat.IO_REPARSE_TAG_MOUNT_POINT
    return False


Share = Callable[[tuple[Installation, ...], tuple[FoundBase, ...]], None]


class Search:
    """Looks at what is downloaded, at folders that the user named, at the tools of the last search, then for new ones.

    `share` is called from the worker with what has been found so far.
    """

    def __init__(self, ground: SearchRoots, folders: Iterable[Path], stopped: Callable[[], bool], share: Share) -> None:
        self._ground = ground
        self._folders = tuple(folders)
        self._stopped = stopped
        self._share = share
        self._found: dict[str, FoundBase] = {}
        self._tools: dict[Path, Installation] = {}

    def run(self) -> None:
        """Search until the end, or until `stopped` says so; then nothing is kept for the next search."""
        known = Known()
        self._take(known, "Impasto", self._own())
        for cache in self._ground.hubs:
            self._take(known, "Hugging Face", bases_of_hub(cache))
        for folder in self._folders:
            self._look_into(known, _recognized(folder) or Installation("", folder, (folder,)))
        for before in known.installations:
            if before.tool and (again := _recognized(before.folder)):
                self._look_into(known, again)
        for new in installations(self._ground, self._stopped):
            self._look_into(known, new)
        if not self._stopped():
            known.write(self._tools.values())

    def _own(self) -> Iterator[tuple[Path, str]]:
        yield asset_path("demo", "base"), "Demo"
        yield from own_bases()

    def _look_into(self, known: Known, tool: Installation) -> None:
        if tool.folder in self._tools:
            return
        self._tools[tool.folder] = tool
        for place in tool.bases:
            self._take(known, tool.tool, ((path, "") for path in models_in(place, self._stopped)))

    def _take(self, known: Known, tool: Tool, paths: Iterable[tuple[Path, str]]) -> None:
        for path, name in paths:
            if self._stopped():
                return
            if str(path) not in self._found:
                try:
                    told, size = known.tell(path)
                except OSError:  # gone while we looked, or not ours
                    continue
                plain = path.stem if path.suffix else path.name
                self._found[str(path)] = FoundBase(path, tool, size, told, name or plain)
        self._share(tuple(self._tools.values()), tuple(self._found.values()))


def _recognized(folder: Path) -> Installation | None:
    try:
        return recognize(folder)
    except (OSError, ValueError):
        return None
