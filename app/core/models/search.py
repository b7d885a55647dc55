"""Search this PC for models on a worker thread and report results as they are found.

A cache stores the models' descriptions and the tools found, which lets the next search read only new files. If the
cache is lost or damaged, everything is read again.
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
from app.core.models.verdict import BaseDescription, FoundBase, Tool, describe_base, models_in, state_of
from trainer import __version__
from trainer.files.assets import asset_path
from trainer.protocol import files, places
from trainer.protocol.reading import UnusableFileError, read_record, read_text
from trainer.protocol.records import build, to_record
from trainer.protocol.row_store import checksum

_DEEPEST = 4
"""Maximum depth below a home folder or drive; enough for D:/AI/Packages/ComfyUI_windows_portable/ComfyUI."""
_MOST_FOLDERS = 30_000
_SECONDS = 20.0
# No tool is installed in these folders, yet they contain most of the folders of a PC.
_PASSED_OVER = {
    "$recycle.bin", "appdata", "library", "node_modules", "perflogs", "program files", "program files (x86)",
    "programdata", "recovery", "site-packages", "snap", "system volume information", "windows", "windows.old",
    "__pycache__", "proc", "sys", "dev", "lost+found", "steamapps", "venv",
}  # fmt: skip


def bases_of_hub(cache: Path) -> Iterator[tuple[Path, str]]:
    """Yield the diffusers folders and .safetensors files in a Hub cache, each as (path, Hub id)."""
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
    """Yield the bases that Impasto downloaded, each as (path, Hub id); the id is "" for a download from a link."""
    folder = places.models_folder()
    yield from bases_of_hub(folder / "hub")
    yield from ((path, "") for path in _glob(folder / "links", "*/*.safetensors"))


def _snapshot(repository: Path) -> Path | None:
    """Return the cached snapshot of the `main` branch, or the latest snapshot if `main` is not cached."""
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


class ModelCache:
    """Cache of model descriptions and tools. Use it only on the worker that runs the search."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or places.cache_folder() / "models.json"
        self._descriptions, self.installations = self._read()
        self._requested: dict[str, list[Any]] = {}

    def describe(self, path: Path) -> tuple[BaseDescription, int]:
        """Return the description of a base and its size in bytes. Raises OSError if the base is gone."""
        size, changed = state_of(path)
        entry = self._descriptions.get(str(path))
        if entry is None or entry[:2] != [size, changed]:
            entry = [size, changed, to_record(describe_base(path))]
        self._requested[str(path)] = entry
        return build(BaseDescription, entry[2]), size

    def write(self, installations: Iterable[Installation]) -> None:
        """Write the entries used in this search. Errors are ignored: without the cache, a search only takes longer."""
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
    if found["version"] != __version__:  # another version may describe models differently
        return {}, []
    if found.pop("checksum", "") != checksum(json.dumps(found, sort_keys=True)):
        return {}, []
    descriptions = {
        path: [size, changed, to_record(build(BaseDescription, record))]
        for path, (size, changed, record) in found["told"].items()
    }
    return descriptions, [_installation(one) for one in found["tools"]]


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


def installations(roots: SearchRoots, stopped: Callable[[], bool]) -> Iterator[Installation]:
    """Yield each tool once, as it is found; stop when `stopped` returns True or after 20 seconds."""
    deadline = time.monotonic() + _SECONDS
    seen: set[str] = set()
    for found in _candidates(roots, lambda: stopped() or time.monotonic() > deadline):
        name = os.path.normcase(os.path.realpath(found.folder))
        if name not in seen:
            seen.add(name)
            yield found


def _candidates(roots: SearchRoots, stopped: Callable[[], bool]) -> Iterator[Installation]:
    for folder in roots.asked:
        yield from _at(folder)
    waiting = deque((folder, 0) for folder in dict.fromkeys(roots.searched))
    looked = 0
    while waiting and looked < _MOST_FOLDERS and not stopped():
        folder, depth = waiting.popleft()
        looked += 1
        found = list(_at(folder))
        yield from found
        if not found and depth < _DEEPEST:
            waiting.extend((below, depth + 1) for below in _below(folder))


def _at(folder: Path) -> Iterator[Installation]:
    """Yield the tool in a folder, if any, and the tools that it installed."""
    try:
        found = recognize(folder)
    except (OSError, ValueError):  # gone, or no permission
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
    """Return whether to search a folder; links are skipped, since they can form cycles."""
    if entry.name.startswith(".") or entry.name.lower() in _PASSED_OVER:
        return False
    try:
        return entry.is_dir(follow_symlinks=False) and not _is_junction(entry)
    except OSError:
        return False


def _is_junction(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a Windows junction; Stability Matrix creates junctions.

    `DirEntry.is_junction` needs Python 3.12.
    """
    if sys.platform == "win32":
        return entry.stat(follow_symlinks=False).st_reparse_tag == stat.IO_REPARSE_TAG_MOUNT_POINT
    return False


Share = Callable[[tuple[Installation, ...], tuple[FoundBase, ...]], None]


class Search:
    """A single search of Impasto's bases, Hub caches, the user's folders, known tools, and new tools, in this order.

    After each folder, `share` is called on the worker with everything found so far.
    """

    def __init__(self, roots: SearchRoots, folders: Iterable[Path], stopped: Callable[[], bool], share: Share) -> None:
        self._roots = roots
        self._folders = tuple(folders)
        self._stopped = stopped
        self._share = share
        self._found: dict[str, FoundBase] = {}
        self._tools: dict[Path, Installation] = {}

    def run(self) -> None:
        """Run the search. The cache is not written if `stopped` ends the search early."""
        known = ModelCache()
        self._take(known, "Impasto", self._own())
        for cache in self._roots.hubs:
            self._take(known, "Hugging Face", bases_of_hub(cache))
        for folder in self._folders:
            self._look_into(known, _recognized(folder) or Installation("", folder, (folder,)))
        for before in known.installations:
            if before.tool and (again := _recognized(before.folder)):
                self._look_into(known, again)
        for new in installations(self._roots, self._stopped):
            self._look_into(known, new)
        if not self._stopped():
            known.write(self._tools.values())

    def _own(self) -> Iterator[tuple[Path, str]]:
        yield asset_path("demo", "base"), "Demo"
        yield from own_bases()

    def _look_into(self, known: ModelCache, tool: Installation) -> None:
        if tool.folder in self._tools:
            return
        self._tools[tool.folder] = tool
        for place in tool.bases:
            self._take(known, tool.tool, ((path, "") for path in models_in(place, self._stopped)))

    def _take(self, known: ModelCache, tool: Tool, paths: Iterable[tuple[Path, str]]) -> None:
        for path, name in paths:
            if self._stopped():
                return
            if str(path) not in self._found:
                try:
                    description, size = known.describe(path)
                except OSError:  # deleted during the search, or no permission
                    continue
                plain = path.stem if path.suffix else path.name
                self._found[str(path)] = FoundBase(path, tool, size, description, name or plain)
        self._share(tuple(self._tools.values()), tuple(self._found.values()))


def _recognized(folder: Path) -> Installation | None:
    try:
        return recognize(folder)
    except (OSError, ValueError):
        return None
