"""The folders that the user works in: those opened last, and those to be open again at the next start."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from app.core.events import Emitter
from app.core.settings.deferred_writer import DeferredWriter, load
from app.core.tasks import Post, Single, Tasks
from trainer import __version__
from trainer.protocol import files, places

Absence = Literal["gone", "file", "refused"]
"""Why a folder cannot be opened: nothing is there, a file is there, or the system does not let us look."""

_MOST = 10


class RecentFolders:
    """What folders.json of the per-user folder keeps; belongs to the thread that made it.

    It is written at each opening and closing, so that a crash loses nothing. Folders are looked at on threads of their
    own: a network drive that does not answer holds up neither the window nor the work on other folders.
    """

    def __init__(self, post: Post, path: Path | None = None) -> None:
        self.changed: Emitter[None] = Emitter()
        """`folders` are others now."""
        self.looked: Emitter[None] = Emitter()
        """`absent` may be different now."""
        self.folders: tuple[Path, ...] = ()
        """Newest first; one that is gone stays, since it may be back tomorrow."""
        self.absent: dict[Path, Absence] = {}
        """Those that could not be opened when they were last looked at."""
        self._file = DeferredWriter(path or places.home() / "folders.json", "the recent folders were")
        self._open: tuple[Path, ...] = ()
        self._tasks = Tasks(post)
        self._looks: dict[Path, Single] = {}
        self._waiting: dict[Path, list[Callable[[Absence | None], None]]] = {}
        """Who asked for a look at one folder."""
        self._read()

    @property
    def notice(self) -> str:
        """What was wrong with the file, in a sentence."""
        return self._file.notice

    def left_open(self, wanted: bool) -> tuple[Path, ...]:
        """Return what was open when the app ended last; where that is not `wanted`, forget it."""
        if not wanted:
            self._keep(self.folders, ())
        return self._open

    def opened(self, folder: Path) -> None:
        """Put a folder that the user opened first; one that only is open again keeps its place."""
        if folder not in self._open:
            others = (one for one in self.folders if one != folder)
            self._keep((folder, *others)[:_MOST], (*self._open, folder))

    def closed(self, folder: Path) -> None:
        """Do not open it at the next start; it stays among the recent ones."""
        self._keep(self.folders, tuple(one for one in self._open if one != folder))

    def clear(self) -> None:
        """Forget all but what is to be open at the next start."""
        self._keep((), self._open)

    @property
    def looking(self) -> bool:
        """Whether a look is on its way."""
        return any(look.busy for look in self._looks.values())

    def look(self) -> None:
        """Find out which can be opened now."""
        for folder in self.folders:
            self._look(folder)

    def look_at(self, folder: Path, then: Callable[[Absence | None], None]) -> None:
        """Find out whether a folder can be opened, and call `then` with what stands against it."""
        self._waiting.setdefault(folder, []).append(then)
        self._look(folder)

    def close(self) -> None:
        """End the looks; what is remembered is on disk."""
        self._tasks.close()
        self._file.settle()

    def _look(self, folder: Path) -> None:
        look = self._looks.setdefault(folder, Single(self._tasks))
        look.run(partial(_absence, folder), partial(self._find, folder), kept=False)

    def _find(self, folder: Path, absence: Absence | None) -> None:
        self.absent.pop(folder, None)
        if absence:
            self.absent[folder] = absence
        self.looked.emit(None)
        for then in self._waiting.pop(folder, ()):
            then(absence)

    def _keep(self, folders: tuple[Path, ...], now_open: tuple[Path, ...]) -> None:
        """Put these in force, and on disk soon."""
        if (folders, now_open) == (self.folders, self._open):
            return
        other, self.folders, self._open = folders != self.folders, folders, now_open
        self._file.write(_text(folders, now_open))
        if other:
            self.changed.emit(None)

    def _read(self) -> None:
        nothing: tuple[tuple[Path, ...], tuple[Path, ...]] = ((), ())
        lost = "no folder is opened by itself"
        self.folders, self._open = self._file.load(_folders, nothing, lost, lambda both: _text(*both))


def _folders(kept: Any, left_out: list[str]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    return _paths(kept["recent"], left_out)[:_MOST], _paths(kept["open"], left_out)


def _paths(texts: object, left_out: list[str]) -> tuple[Path, ...]:
    if not isinstance(texts, list):
        raise TypeError("not a list of folders")
    left_out += [repr(text)[:80] for text in texts if not isinstance(text, str)]
    return tuple(dict.fromkeys(Path(text) for text in texts if isinstance(text, str)))


def _text(folders: tuple[Path, ...], now_open: tuple[Path, ...]) -> str:
    kept = {"recent": [*map(str, folders)], "open": [*map(str, now_open)]}
    return json.dumps(kept, indent=1) + "\n"  # ASCII, since names on Linux need not be text


def _absence(folder: Path) -> Absence | None:
    try:
        with os.scandir(files.long_path(folder)):
            return None
    except NotADirectoryError:
        return "file"
    except (FileNotFoundError, ValueError):  # ValueError: a name that no file can have
        return "gone"
    except OSError:
        return "refused"


_log = logging.getLogger(__name__)


def window_state_file() -> Path:
    """Return where it is kept."""
    return places.home() / "window.json"


def read_window_state() -> tuple[dict[str, str], str]:
    """Return what was kept, text by name, and a sentence about what was wrong with the file, as `stored.load` does."""
    nothing: dict[str, str] = {}
    return load(window_state_file(), _texts, nothing, "the window has its default size and layout")


def _texts(found: Any, _: list[str]) -> dict[str, str]:
    return {str(name): text for name, text in found.items() if isinstance(text, str)}


def write_window_state(state: dict[str, str]) -> None:
    """Keep it; a disk that refuses is only noted, since nobody should wait for this when closing."""
    try:
        window_state_file().parent.mkdir(parents=True, exist_ok=True)
        files.write_json(window_state_file(), state, durable=False)
    except OSError as error:
        _log.info("the window's place was not kept: %s", error)


def is_first_start() -> bool:
    """Tell whether nobody has used this installation, nor one before it, on this account."""
    return not _welcome_file().exists() and not window_state_file().exists()


def remember_welcome() -> None:
    """Do not show it by itself again; where the disk refuses, it comes once more."""
    with contextlib.suppress(OSError):
        _welcome_file().parent.mkdir(parents=True, exist_ok=True)
        files.write_json(_welcome_file(), {"version": __version__}, durable=False)


def _welcome_file() -> Path:
    return places.home() / "welcome.json"
