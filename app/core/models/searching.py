"""Finds the tools that are installed on this PC, nearest folders first, in bounded time."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from app.core.models.ground import Ground
from app.core.models.tools import Installation, recognise
from trainer.protocol import files

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


def installations(ground: Ground, stopped: Callable[[], bool]) -> Iterator[Installation]:
    """Yield each tool once, as it is found; ends early when `stopped` says so, or after 20 seconds."""
    deadline = time.monotonic() + _SECONDS
    seen: set[str] = set()
    for found in _candidates(ground, lambda: stopped() or time.monotonic() > deadline):
        name = os.path.normcase(os.path.realpath(found.folder))
        if name not in seen:
            seen.add(name)
            yield found


def _candidates(ground: Ground, stopped: Callable[[], bool]) -> Iterator[Installation]:
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
        found = recognise(folder)
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
    """Windows' junctions count as folders; Stability Matrix makes them. (`DirEntry.is_junction` is Python 3.12's.)"""
    if sys.platform == "win32":
        return entry.stat(follow_symlinks=False).st_reparse_tag == stat.IO_REPARSE_TAG_MOUNT_POINT
    return False
