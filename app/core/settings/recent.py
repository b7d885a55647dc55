"""Remember recent and open folders, the state of the window, and whether the welcome was shown."""

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
from app.core.tasks import ExclusiveTask, Post, Tasks
from trainer import __version__
from trainer.protocol import files, places

OpenFailure = Literal["gone", "file", "refused"]
"""Why a folder cannot be opened: it does not exist, it is a file, or access is denied."""

_MAX_FOLDERS = 10


class RecentFolders:
    """Recent and open folders, stored in folders.json, for the thread that creates it.

    The file is written each time a folder is opened or closed, so a crash loses nothing. Workers check each folder in
    its own task: a network drive that does not respond blocks neither the window nor other folders.
    """

    def __init__(self, post: Post, path: Path | None = None) -> None:
        self.changed: Emitter[None] = Emitter()
        """Emitted when `folders` has changed."""
        self.checked: Emitter[None] = Emitter()
        """Emitted when `absent` may have changed."""
        self.folders: tuple[Path, ...] = ()
        """Recent folders, newest first; missing ones are kept, since a drive may be reconnected."""
        self.absent: dict[Path, OpenFailure] = {}
        """Folders that could not be opened at the last check, with the reason."""
        self._file = DeferredWriter(path or places.home() / "folders.json", "the recent folders")
        self._open: tuple[Path, ...] = ()
        self._tasks = Tasks(post)
        self._checks: dict[Path, ExclusiveTask] = {}
        self._callbacks: dict[Path, list[Callable[[OpenFailure | None], None]]] = {}
        """Callbacks waiting for a check, by folder."""
        self._read()

    @property
    def notice(self) -> str:
        """Return a message about any problem with the file, or ""."""
        return self._file.notice

    def folders_to_reopen(self, wanted: bool) -> tuple[Path, ...]:
        """Return the folders that were open when the app closed; if not `wanted`, forget them and return none."""
        if not wanted:
            self._update(self.folders, ())
        return self._open

    def opened(self, folder: Path) -> None:
        """Move a folder that the user opened to the front; a folder that was only reopened keeps its position."""
        if folder not in self._open:
            others = (other for other in self.folders if other != folder)
            self._update((folder, *others)[:_MAX_FOLDERS], (*self._open, folder))

    def closed(self, folder: Path) -> None:
        """Do not reopen a folder at the next start; it stays a recent folder."""
        self._update(self.folders, tuple(other for other in self._open if other != folder))

    def clear(self) -> None:
        """Clear the recent folders, but not those to reopen at the next start."""
        self._update((), self._open)

    @property
    def is_checking(self) -> bool:
        """Return whether a check is running."""
        return any(check.busy for check in self._checks.values())

    def check(self) -> None:
        """Check which recent folders can be opened now."""
        for folder in self.folders:
            self._check(folder)

    def check_folder(self, folder: Path, then: Callable[[OpenFailure | None], None]) -> None:
        """Check whether a folder can be opened; call `then` with the reason why it cannot, or None."""
        self._callbacks.setdefault(folder, []).append(then)
        self._check(folder)

    def close(self) -> None:
        """Stop the checks and finish writing the file."""
        self._tasks.close()
        self._file.settle()

    def _check(self, folder: Path) -> None:
        check = self._checks.setdefault(folder, ExclusiveTask(self._tasks))
        check.run(partial(_open_failure, folder), partial(self._on_checked, folder), kept=False)

    def _on_checked(self, folder: Path, failure: OpenFailure | None) -> None:
        self.absent.pop(folder, None)
        if failure:
            self.absent[folder] = failure
        self.checked.emit(None)
        for then in self._callbacks.pop(folder, ()):
            then(failure)

    def _update(self, folders: tuple[Path, ...], now_open: tuple[Path, ...]) -> None:
        """Set the recent and open folders, and write them in the background."""
        if (folders, now_open) == (self.folders, self._open):
            return
        recent_changed = folders != self.folders
        self.folders, self._open = folders, now_open
        self._file.write(_text(folders, now_open))
        if recent_changed:
            self.changed.emit(None)

    def _read(self) -> None:
        nothing: tuple[tuple[Path, ...], tuple[Path, ...]] = ((), ())
        lost = "No folders were reopened."
        self.folders, self._open = self._file.load(_folders, nothing, lost, lambda both: _text(*both))


def _folders(content: Any, left_out: list[str]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    return _paths(content["recent"], left_out)[:_MAX_FOLDERS], _paths(content["open"], left_out)


def _paths(texts: object, left_out: list[str]) -> tuple[Path, ...]:
    if not isinstance(texts, list):
        raise TypeError("not a list of folders")
    left_out += [repr(text)[:80] for text in texts if not isinstance(text, str)]
    return tuple(dict.fromkeys(Path(text) for text in texts if isinstance(text, str)))


def _text(folders: tuple[Path, ...], now_open: tuple[Path, ...]) -> str:
    content = {"recent": [*map(str, folders)], "open": [*map(str, now_open)]}
    return json.dumps(content, indent=1) + "\n"  # ASCII, since file names on Linux need not be valid UTF-8


def _open_failure(folder: Path) -> OpenFailure | None:
    try:
        with os.scandir(files.long_path(folder)):
            return None
    except NotADirectoryError:
        return "file"
    except (FileNotFoundError, ValueError):  # ValueError: an impossible name, such as one with a null byte
        return "gone"
    except OSError:
        return "refused"


_log = logging.getLogger(__name__)


_RENAMED_STATE = {"pictures.columns": "images.columns", "pictures.right": "images.right"}
"""Current names of window state values, by the names that 0.1.0 stored."""


def window_state_file() -> Path:
    """Return the file that stores the state of the window."""
    return places.home() / "window.json"


def read_window_state() -> tuple[dict[str, str], str]:
    """Return the stored values by name and, as `load` does, a message about any problem with the file."""
    nothing: dict[str, str] = {}
    return load(window_state_file(), _texts, nothing, "The window has its default size and layout.")


def _texts(found: Any, _: list[str]) -> dict[str, str]:
    return {_RENAMED_STATE.get(name, name): text for name, text in found.items() if isinstance(text, str)}


def write_window_state(state: dict[str, str]) -> None:
    """Write the state of the window; a failure is only logged, so that it never delays closing."""
    try:
        window_state_file().parent.mkdir(parents=True, exist_ok=True)
        files.write_json(window_state_file(), state, durable=False)
    except OSError as error:
        _log.info("could not save the state of the window: %s", error)


def is_first_start() -> bool:
    """Return whether this user account has never used Impasto before."""
    return not _welcome_file().exists() and not window_state_file().exists()


def remember_welcome() -> None:
    """Remember that the welcome was shown; if saving this fails, the next start shows it again."""
    with contextlib.suppress(OSError):
        _welcome_file().parent.mkdir(parents=True, exist_ok=True)
        files.write_json(_welcome_file(), {"version": __version__}, durable=False)


def _welcome_file() -> Path:
    return places.home() / "welcome.json"
