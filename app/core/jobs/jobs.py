"""List of jobs: those in the user's jobs folder, and opened files elsewhere."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.core.events import Emitter
from app.core.settings.deferred_writer import DeferredWriter
from app.core.tasks import Tasks, handle_only, reraise
from trainer.errors import ImpastoError, JobError
from trainer.protocol import files, places
from trainer.protocol.files import long_path, numbered, safe_name, valid_job_name
from trainer.protocol.reading import read_toml, reason_of

if TYPE_CHECKING:  # imports pydantic and the schema, which would delay the window
    from app.core.jobs.draft import Draft
    from app.core.jobs.job_file import Values

_Result = TypeVar("_Result")
Refused = Callable[[ImpastoError], None]
"""Hears why something was not done; then all is as it was."""

FILE_NAME = "job.toml"
_OF_RUNS = ("dataset.jsonl", "run.json", "events.jsonl")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job in the list."""

    path: Path
    name: str
    changed: float
    """Unix time of the file's last change, in seconds."""
    problem: str = ""
    """Reason why it cannot be opened, or ""."""
    folders: tuple[Path, ...] = ()
    """The folders of its dataset."""
    base: str = ""
    """The base as the file names it."""
    family: str = ""
    """The base's family where the file states it."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """Its tables `recipe` and `dataset`."""


@dataclass(frozen=True, slots=True)
class TrashedJob:
    """A job that was put into the trash, or, where its file lies elsewhere, only taken off the list."""

    path: Path
    lies: Path | None


_Kept = tuple[Path | None, tuple[Path, ...], tuple[Path, ...]]
"""The job that was open last, the files in other folders, and the jobs to train on the CPU however long it takes."""
_MOST_AGREED = 200


class Jobs:
    """Belongs to the thread of `tasks`; the disk is read and written on workers, a slow one holds up nobody."""

    def __init__(self, tasks: Tasks, folder: Path | None = None) -> None:
        self.folder = folder or places.home() / "jobs"
        self.all: tuple[JobEntry, ...] = ()
        """Latest first."""
        self.changed: Emitter[None] = Emitter()
        """Emitted when `all` changes."""
        self.turned: Emitter[Draft | None] = Emitter()
        """Another job is the open one, whoever asked for it; None: no job is open."""
        self.rescued: Emitter[Path] = Emitter()
        """Changes that a job's own place refused are kept in this file."""
        self.resolved: Emitter[ImpastoError] = Emitter()
        """What a job's file told by `failed` is over, of a job that was let go too."""
        self.secured: Emitter[str] = Emitter()
        """A password or token was taken out of a job's base link; the message says where it is now."""
        self.closed: Emitter[None] = Emitter()
        """The app ends, and every job is on disk."""
        self.last: Path | None = None
        """Job that was open last."""
        self._elsewhere: tuple[Path, ...] = ()
        self._agreed: tuple[Path, ...] = ()
        """Those that the user wants to train on the CPU however long it takes."""
        self._readings = count(1)
        self._newest = 0
        self._tasks = tasks
        self._open: Draft | None = None
        self._wanted: Path | None = None
        self._leaving: dict[Path, Draft] = {}
        """Those let go whose last change is still on its way to the disk."""
        self._list = DeferredWriter(self.folder / "list.json", "the list of jobs was")
        nothing: _Kept = (None, (), ())
        lost = "open jobs in other folders again"
        kept = self._list.load(_listed, nothing, lost, lambda kept: _list_text(*kept))
        self.last, self._elsewhere, self._agreed = kept

    # --- one job: files are read and written by workers, and what is asked for comes back on this thread

    @property
    def notice(self) -> str:
        """What was wrong with the list of files in other folders, in a sentence."""
        return self._list.notice

    def open(self, path: Path, then: Callable[[Draft], None], refused: Refused) -> None:
        """Open a job file, wherever it lies, in place of the one that is open; of a run's frozen job a copy.

        Where it cannot be read, is damaged or of a newer version, all stays as it was. Of several that are asked for
        in a row the last is opened.
        """
        path = path.absolute()
        self._wanted = path
        if draft := self._opened(path):
            then(draft)
        elif draft := self._leaving.pop(path, None):
            self._turn_to(draft)
            then(draft)
        else:
            self._read(path, then, refused)

    def agree_to_cpu(self, path: Path) -> None:
        """Remember that the user wants to train a job on the CPU however long it takes."""
        if path not in self._agreed:
            self._agreed = (path, *self._agreed)[:_MOST_AGREED]
            self._list.write(_list_text(self.last, self._elsewhere, self._agreed))

    def agreed_to_cpu(self, path: Path) -> bool:
        """Return whether the user was asked about a job and wants to train it on the CPU."""
        return path in self._agreed

    def shut(self) -> None:
        """Let go of the open job; what is not on disk yet goes there, or else among our own jobs."""
        draft, self._open = self._open, None
        if draft is not None:
            draft.leave()
            self.turned.emit(None)
        if draft is not None and draft.file.unsaved:
            self._leaving[draft.path] = draft
            draft.file.settle(lambda error: self._left(draft, error))

    def create(
        self, name: str, make: Callable[[str, Path], Mapping[str, Any]], then: Callable[[Path], None], refused: Refused
    ) -> None:
        """Write a new job of ours and tell its file.

        `make` says on a worker what it holds, of a name that no job of ours has (this one, or with a number behind it)
        and the folder that it will lie in.
        """
        names = {entry.name for entry in self.all}

        def work() -> Path:
            free = _free_name(self.folder, name, names)
            return write_new(self.folder, make(free, self.folder / safe_name(free, "job")))

        self._do(work, then, refused)

    def duplicate(self, path: Path, then: Callable[[Path], None], refused: Refused) -> None:
        """Copy a job among our own under a free name, its relative paths made absolute, and tell its file.

        Of a run's frozen job comes a new job: how that one was made to fit its machine stays behind.
        """
        path, draft = path.absolute(), self._held(path.absolute())
        values, names = draft.values if draft else None, {entry.name for entry in self.all}
        self._do(lambda: _copied(self.folder, path, values, names), then, refused)

    def trash(self, path: Path, then: Callable[[TrashedJob], None], refused: Refused) -> None:
        """Take a job off the list: one of ours moves to our trash without its runs, others stay where they lie."""
        path = path.absolute()
        shown = self._opened(path)
        if shown:
            self.shut()

        def thrown(lies: Path | None) -> None:
            self._keep(None if self.last == path else self.last, self._without(path))
            self._newest = next(self._readings)  # whoever reads the list by now may have found it there
            self.all = tuple(entry for entry in self.all if entry.path != path)
            self.changed.emit(None)
            then(TrashedJob(path, lies))

        def stays(error: ImpastoError) -> None:
            if shown and self._open is None:
                self._open = shown
                self.turned.emit(shown)
            refused(error)

        def throw() -> None:
            self._do(lambda: _trash(path) if self._is_ours(path) else None, thrown, stays)

        draft = self._leaving.get(path)
        draft.file.settle(lambda _: throw()) if draft else throw()

    def bring_back(self, thrown: TrashedJob, then: Callable[[Path], None], refused: Refused) -> None:
        """Undo `trash`."""

        def back(_: None) -> None:
            if thrown.lies is None:
                self._keep(self.last, (thrown.path, *self._without(thrown.path)))
            self.look()
            then(thrown.path)

        self._do(lambda: _bring_back(thrown), back, refused)

    # --- all jobs

    def look(self, then: Callable[[], None] | None = None) -> None:
        """Reload the list on a worker."""

        def read() -> tuple[int, tuple[JobEntry, ...]]:
            number = next(self._readings)
            return number, _entries(self.folder, self._elsewhere)  # as they are now: it may have waited for its turn

        def found(came: tuple[int, tuple[JobEntry, ...]]) -> None:
            number, entries = came
            if number > self._newest:  # of two workers the one that began earlier may come later
                self._newest = number
                if entries != self.all:
                    self.all = entries
                    self.changed.emit(None)
            if then:
                then()

        self._tasks.run(read, found, reraise, kept=False)

    def close(self) -> None:
        """Write pending changes now, because the app is closing."""
        drafts = [*filter(None, (self._open,)), *self._leaving.values()]
        self._open, self._leaving = None, {}
        for draft in drafts:
            try:
                draft.close()
            except JobError as error:
                self._tell_rescued(error, _rescue(self.folder, draft.name, draft.values, draft.path.parent, error))
        self._list.settle()
        self.closed.emit(None)

    # --- internals

    def _do(self, work: Callable[[], _Result], then: Callable[[_Result], None], refused: Refused) -> None:
        self._tasks.run(work, then, handle_only(ImpastoError, refused))

    def _read(self, path: Path, then: Callable[[Draft], None], refused: Refused) -> None:
        names = {entry.name for entry in self.all}

        def work() -> tuple[Path, Values, str | None]:
            from app.core.jobs.job_file import read_values
            from trainer.config.load import secure_job_file

            message = secure_job_file(path)
            real = _copied(self.folder, path, None, names) if _is_frozen(path) else path
            return real, read_values(real), message

        def come(found: tuple[Path, Values, str | None]) -> None:
            from app.core.jobs.draft import Draft

            real, values, message = found
            if message:
                self.secured.emit(message)
            if self._wanted != path:
                return
            draft = self._opened(real)  # by now, where it was asked for twice
            if draft is None:
                draft = Draft(real, values, self._tasks)
                draft.secured.connect(self.secured.emit)
                draft.file.written.connect(lambda _: self.look())
                draft.file.resolved.connect(self.resolved.emit)
                self._turn_to(draft)
            then(draft)

        self._do(work, come, refused)

    def _turn_to(self, draft: Draft) -> None:
        """Make this the open job."""
        self.shut()
        self._open, path = draft, draft.path
        self._keep(path, self._elsewhere if self._is_ours(path) else (path, *self._without(path)))
        if path not in [entry.path for entry in self.all]:
            self.look()
        self.turned.emit(draft)

    def _opened(self, path: Path) -> Draft | None:
        return self._open if self._open and self._open.path == path else None

    def _held(self, path: Path) -> Draft | None:
        """The draft of a file that the app knows better than the disk does."""
        return self._opened(path) or self._leaving.get(path)

    def _left(self, draft: Draft, error: JobError | None) -> None:
        """Nothing of a job that was let go is on its way any more."""
        if self._leaving.get(draft.path) is not draft:  # it is open again
            return
        del self._leaving[draft.path]
        if error is not None:
            name, values, folder = draft.name, draft.values, draft.path.parent
            tell = partial(self._tell_rescued, error)
            self._tasks.run(lambda: _rescue(self.folder, name, values, folder, error), tell, reraise)

    def _tell_rescued(self, error: JobError, rescued: Path | None) -> None:
        """Say where changes are kept, instead of what stood against them."""
        if rescued is not None:
            self.resolved.emit(error)
            self.rescued.emit(rescued)

    def _is_ours(self, path: Path) -> bool:
        return path.name == FILE_NAME and path.parent.parent == self.folder.absolute()

    def _without(self, path: Path) -> tuple[Path, ...]:
        return tuple(one for one in self._elsewhere if one != path)

    def _keep(self, last: Path | None, elsewhere: tuple[Path, ...]) -> None:
        if (last, elsewhere) == (self.last, self._elsewhere):
            return
        self.last, self._elsewhere = last, elsewhere
        self._list.write(_list_text(last, elsewhere, self._agreed))


def _listed(kept: Any, left_out: list[str]) -> _Kept:
    elsewhere, agreed = _paths(kept["elsewhere"], left_out), _paths(kept.get("agreed_to_cpu", []), left_out)
    return Path(kept["last"]) if kept["last"] else None, elsewhere, agreed


def _paths(texts: Any, left_out: list[str]) -> tuple[Path, ...]:
    if not isinstance(texts, list):
        raise TypeError("not a list of files")
    left_out += [repr(text)[:80] for text in texts if not isinstance(text, str)]
    return tuple(Path(text) for text in texts if isinstance(text, str))


def _list_text(last: Path | None, elsewhere: tuple[Path, ...], agreed: tuple[Path, ...]) -> str:
    content = {"last": str(last) if last else "", "elsewhere": [*map(str, elsewhere)]}
    if agreed:
        content["agreed_to_cpu"] = [*map(str, agreed)]
    return json.dumps(content, indent=1) + "\n"


def write_new(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write a new job among ours and return its file; on any thread. Raises JobError.

    Its folder is one that nothing lies in yet, runs of a former job included.
    """
    from app.core.jobs.job_file import to_toml

    for place in (folder.absolute() / each for each in numbered(safe_name(str(values.get("name") or "job"), "job"))):
        try:
            long_path(place).mkdir(parents=True)
            files.write_text(place / FILE_NAME, to_toml(values))
        except FileExistsError:
            continue
        except OSError as error:
            raise _failed(place / FILE_NAME, "written", error.strerror or str(error)) from None
        return place / FILE_NAME
    raise AssertionError("numbers do not end")


def _free_name(folder: Path, name: str, taken: set[str]) -> str:
    free = (each for each in numbered(valid_job_name(name), " ") if each not in taken)
    return next(each for each in free if not long_path(folder / safe_name(each, "job")).exists())


def _copied(folder: Path, path: Path, values: Mapping[str, Any] | None, names: set[str]) -> Path:
    """Copy the job that a file holds, or that `values` say, into a new one among ours."""
    from app.core.jobs.job_file import drop, read_values, with_absolute_paths

    copied = with_absolute_paths(read_values(path) if values is None else values, path.parent)
    if _is_frozen(path):
        for table in ("fit", "fallbacks", "output.runs"):
            drop(copied, table)
    name = str(copied.get("name") or path.parent.name)
    copied["name"] = _free_name(folder, name, names | {name})
    return write_new(folder, copied)


def _rescue(folder: Path, name: str, values: Mapping[str, Any], former: Path, error: JobError) -> Path | None:
    """Write what its own place refused among our jobs; return the file."""
    from app.core.jobs.job_file import with_absolute_paths

    try:
        rescued = write_new(folder, {**with_absolute_paths(values, former), "name": name})
    except JobError as fault:
        _log.error("%s %s", error, fault)  # neither place can be written: nothing is left to be done
        return None
    _log.info("%s; it is kept as %s", error, rescued)
    return rescued


def _trash(path: Path) -> Path:
    """Move a job of ours into our trash; return where it lies. Its folder stays where runs lie in it."""
    trash = path.parent.parent.parent / "trash" / "jobs"
    try:
        long_path(trash).mkdir(parents=True, exist_ok=True)
        targets = (trash / f"{stem}.toml" for stem in numbered(path.parent.name))
        target = next(each for each in targets if not long_path(each).exists())
        files.replace(path, target)
    except OSError as error:
        raise _failed(path, "put into the trash", error.strerror or str(error)) from None
    with suppress(OSError):  # runs lie in it, or what the user put there
        long_path(path.parent).rmdir()
    return target


def _bring_back(thrown: TrashedJob) -> None:
    if thrown.lies is None:
        return
    try:
        if long_path(thrown.path).exists():
            raise _failed(thrown.path, "brought back", "another job has taken its place")
        long_path(thrown.path.parent).mkdir(parents=True, exist_ok=True)
        files.replace(thrown.lies, thrown.path)
    except OSError as error:
        raise _failed(thrown.path, "brought back", error.strerror or str(error)) from None


def _is_frozen(path: Path) -> bool:
    """Tell whether a job file is that of a run, which nobody may change."""
    return path.name == FILE_NAME and any(long_path(path.parent / name).exists() for name in _OF_RUNS)


def _entries(folder: Path, elsewhere: tuple[Path, ...]) -> tuple[JobEntry, ...]:
    found = [_entry(path) for path in (*folder.absolute().glob(f"*/{FILE_NAME}"), *elsewhere)]
    return tuple(sorted(found, key=lambda entry: -entry.changed))


def _entry(path: Path) -> JobEntry:
    try:
        changed = long_path(path).stat().st_mtime
        values = read_toml(path, "text")
    except FileNotFoundError:
        return JobEntry(path, path.parent.name, 0.0, "the file is not there")
    except (OSError, ValueError) as error:
        return JobEntry(path, path.parent.name, 0.0, f"the file cannot be read: {reason_of(error)}")
    name = values.get("name")
    dataset, base, recipe = (_table(values, key) for key in ("dataset", "base", "recipe"))
    listed = dataset.get("folders")
    folders = [each.get("path") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return JobEntry(
        path,
        name if isinstance(name, str) and name.strip() else path.parent.name,
        changed,
        folders=tuple(_absolute(each, path.parent) for each in folders if isinstance(each, str) and each),
        base=str(base.get("model") or ""),
        family=str(base.get("family") or ""),
        stated={"recipe": recipe, "dataset": dataset},
    )


def _absolute(folder: str, home: Path) -> Path:
    """Return a folder that a job file in `home` names, as trainer.config.paths does; that module brings pydantic."""
    return Path(os.path.abspath(home / os.path.expanduser(folder)))  # noqa: PTH100, PTH111


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = values.get(key)
    return table if isinstance(table, dict) else {}


def _failed(path: Path, what: str, why: str) -> JobError:
    return JobError("job.unmoved", f"{path} cannot be {what}: {why}.", "Look at the folder, and try again.")
