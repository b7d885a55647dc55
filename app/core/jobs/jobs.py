"""All jobs at hand: those in the per-user folder, and files elsewhere that were opened."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.core.events import Event
from app.core.settings.aside import set_aside
from app.core.tasks import Tasks, raise_again
from trainer.errors import JobError
from trainer.protocol import atomic, places
from trainer.protocol.atomic import long_path
from trainer.protocol.naming import numbered, safe_name

if TYPE_CHECKING:  # brings pydantic and the schema, for which the window does not wait
    from app.core.jobs.draft import Draft

FILE_NAME = "job.toml"
_OF_RUNS = ("dataset.jsonl", "run.json", "events.jsonl")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job of the list."""

    path: Path
    name: str
    changed: float
    """When its file was last written, in seconds since 1970."""
    problem: str = ""
    """Why it cannot be opened, in words."""


@dataclass(frozen=True, slots=True)
class Thrown:
    """A job that was put into the trash, or, where its file lies elsewhere, only taken off the list."""

    path: Path
    lies: Path | None


class Jobs:
    """Belongs to the thread of `tasks`; the disk is read on workers, but for the one file that is opened."""

    def __init__(self, tasks: Tasks, folder: Path | None = None) -> None:
        self.folder = folder or places.home() / "jobs"
        self.all: tuple[JobEntry, ...] = ()
        """Latest first."""
        self.changed: Event[None] = Event()
        """`all` is another now."""
        self.rescued: Event[Path] = Event()
        """Changes that a job's own place refused are kept in this file."""
        self.notice = ""
        """What was wrong with the list of files elsewhere, in a sentence."""
        self.last: Path | None = None
        """The job that was open last."""
        self._elsewhere: tuple[Path, ...] = ()
        self._tasks = tasks
        self._open: Draft | None = None
        self._list = self.folder / "list.json"
        self._read_list()

    # --- one job

    def open(self, path: Path) -> Draft:
        """Open a job file, wherever it lies, in place of the one that is open.

        Raises JobError when it cannot be read, is damaged, or of a newer version; then all stays as it was.
        """
        from app.core.jobs.draft import Draft

        path = path.absolute()
        if self._open is None or self._open.path != path:
            draft = Draft(path, self._tasks)
            self.shut()
            self._open = draft
            draft.file.written.connect(lambda _: self.look())
        self._keep(path, self._elsewhere if self._is_ours(path) else (path, *self._without(path)))
        return self._open

    def shut(self) -> None:
        """Put the open job on disk and let go of it; one that its place refuses is put among our own jobs."""
        draft, self._open = self._open, None
        if draft is None:
            return
        try:
            draft.close()
        except JobError as error:
            self._rescue(draft, error)

    def free_name(self, name: str, *taken: str) -> str:
        """Return a name that no job of ours has: this one, or with a number behind it."""
        names = {entry.name for entry in self.all}.union(taken)
        free = (each for each in numbered(name, " ") if each not in names)
        return next(each for each in free if not long_path(self.folder / safe_name(each, "job")).exists())

    def create(self, values: Mapping[str, Any]) -> Path:
        """Write a new job of ours, named after what `values` call it; return its file. Raises JobError."""
        path = self._place(str(values.get("name") or "job"))
        self._write(path, values)
        self.look()
        return path

    def duplicate(self, path: Path) -> Path:
        """Copy a job among our own under a free name, its relative paths made absolute; raises JobError.

        Of a run's frozen job comes a new job: how that one was made to fit its machine stays behind.
        """
        from app.core.jobs.file import read_values

        path = path.absolute()
        values = self._open.values if self._open and self._open.path == path else read_values(path)
        values = _moved(values, path.parent)
        if is_frozen(path):
            for table in ("fit", "ladder", "output.runs"):
                _drop(values, table)
        name = str(values.get("name") or path.parent.name)
        values["name"] = self.free_name(name, name)
        return self.create(values)

    def trash(self, path: Path) -> Thrown:
        """Take a job off the list: one of ours moves to our trash without its runs, others stay where they lie.

        Raises JobError when it cannot be moved.
        """
        path = path.absolute()
        if self._open and self._open.path == path:
            self.shut()
        lies = self._throw(path) if self._is_ours(path) else None
        self._keep(None if self.last == path else self.last, self._without(path))
        self.all = tuple(entry for entry in self.all if entry.path != path)
        self.changed.emit(None)
        return Thrown(path, lies)

    def bring_back(self, thrown: Thrown) -> None:
        """Undo `trash`; raises JobError when the place is taken or refuses."""
        if thrown.lies is None:
            self._keep(self.last, (thrown.path, *self._without(thrown.path)))
        else:
            if long_path(thrown.path).exists():
                raise _failed(thrown.path, "brought back", "another job has taken its place")
            try:
                long_path(thrown.path.parent).mkdir(parents=True, exist_ok=True)
                atomic.replace(thrown.lies, thrown.path)
            except OSError as error:
                raise _failed(thrown.path, "brought back", error.strerror or str(error)) from None
        self.look()

    # --- all jobs

    def look(self, then: Callable[[], None] | None = None) -> None:
        """Read the list again on a worker."""
        elsewhere = self._elsewhere

        def found(entries: tuple[JobEntry, ...]) -> None:
            if entries != self.all:
                self.all = entries
                self.changed.emit(None)
            if then:
                then()

        self._tasks.run(lambda: _entries(self.folder, elsewhere), found, raise_again)

    def close(self) -> None:
        """Put what is not on disk there."""
        self.shut()

    # --- inside

    def _rescue(self, draft: Draft, error: JobError) -> None:
        rescued = self._place(draft.name)
        try:
            self._write(rescued, _moved(draft.values, draft.path.parent))
        except JobError as fault:
            _log.error("%s %s", error, fault)  # neither place can be written: nothing is left to be done
        else:
            _log.info("%s; it is kept as %s", error, rescued)
            self.rescued.emit(rescued)

    def _is_ours(self, path: Path) -> bool:
        return path.name == FILE_NAME and path.parent.parent == self.folder.absolute()

    def _without(self, path: Path) -> tuple[Path, ...]:
        return tuple(one for one in self._elsewhere if one != path)

    def _place(self, name: str) -> Path:
        """The file of a new job: its folder is one that nothing lies in yet, runs of a former job included."""
        folders = (self.folder.absolute() / each for each in numbered(safe_name(name, "job")))
        return next(folder for folder in folders if not long_path(folder).exists()) / FILE_NAME

    def _write(self, path: Path, values: Mapping[str, Any]) -> None:
        from app.core.jobs.values import to_toml

        try:
            long_path(path.parent).mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, to_toml(values))
        except OSError as error:
            raise _failed(path, "written", error.strerror or str(error)) from None

    def _throw(self, path: Path) -> Path:
        trash = self.folder.parent / "trash" / "jobs"
        try:
            trash.mkdir(parents=True, exist_ok=True)
            targets = (trash / f"{stem}.toml" for stem in numbered(path.parent.name))
            target = next(each for each in targets if not each.exists())
            atomic.replace(path, target)
        except OSError as error:
            raise _failed(path, "put into the trash", error.strerror or str(error)) from None
        with suppress(OSError):  # runs lie in it, or what the user put there
            long_path(path.parent).rmdir()
        return target

    def _keep(self, last: Path | None, elsewhere: tuple[Path, ...]) -> None:
        if (last, elsewhere) == (self.last, self._elsewhere):
            return
        self.last, self._elsewhere = last, elsewhere
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = {"last": str(last) if last else "", "elsewhere": [*map(str, elsewhere)]}
            atomic.write_text(self._list, json.dumps(kept, indent=1) + "\n", durable=False)
        except OSError as error:
            _log.info("the list of jobs was not kept: %s", error)

    def _read_list(self) -> None:
        try:
            kept = json.loads(atomic.read_text(self._list))
            self.last = Path(kept["last"]) if kept["last"] else None
            self._elsewhere = tuple(Path(text) for text in kept["elsewhere"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            fault = f"{type(error).__name__}: {error}"
            self.notice = set_aside(self._list, f"could not be read ({fault}), so open jobs elsewhere again")


def is_frozen(path: Path) -> bool:
    """Tell whether a job file is that of a run, which nobody may change."""
    return path.name == FILE_NAME and any(long_path(path.parent / name).exists() for name in _OF_RUNS)


def _entries(folder: Path, elsewhere: tuple[Path, ...]) -> tuple[JobEntry, ...]:
    found = [_entry(path) for path in (*folder.absolute().glob(f"*/{FILE_NAME}"), *elsewhere)]
    return tuple(sorted(found, key=lambda entry: -entry.changed))


def _entry(path: Path) -> JobEntry:
    try:
        changed = long_path(path).stat().st_mtime
        name = tomllib.loads(atomic.read_text(path)).get("name")
    except FileNotFoundError:
        return JobEntry(path, path.parent.name, 0.0, "the file is not there")
    except (OSError, ValueError, RecursionError) as error:
        return JobEntry(path, path.parent.name, 0.0, f"the file cannot be read: {error}")
    return JobEntry(path, name if isinstance(name, str) and name.strip() else path.parent.name, changed)


def _moved(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a job in `folder` for a file elsewhere."""
    from app.core.jobs.values import with_absolute_paths

    return with_absolute_paths(values, folder)


def _drop(values: dict[str, Any], key: str) -> None:
    from app.core.jobs.values import drop

    drop(values, key)


def _failed(path: Path, what: str, why: str) -> JobError:
    return JobError("job.unmoved", f"{path} cannot be {what}: {why}.", "Look at the folder, and try again.")
