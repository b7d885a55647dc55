"""List of jobs: those in the user's jobs folder, and job files that the user opened from elsewhere."""

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
OnError = Callable[[ImpastoError], None]
"""Callback for the error if an action fails; in that case, nothing has changed."""

FILE_NAME = "job.toml"
_RUN_FILES = ("dataset.jsonl", "run.json", "events.jsonl")
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
    """The base, as written in the file."""
    family: str = ""
    """The base's family if the file states it, else ""."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """The tables `recipe` and `dataset` of the job file."""


@dataclass(frozen=True, slots=True)
class TrashedJob:
    """A job that was removed from the list."""

    path: Path
    """Its file before it was removed."""
    moved_to: Path | None
    """Its file in our trash; None for a file outside our folder, which stays in place."""


_ListContent = tuple[Path | None, tuple[Path, ...], tuple[Path, ...]]
"""Content of list.json: the job opened last, job files in other folders, and jobs that may train on the CPU."""
_MAX_AGREED = 200


class Jobs:
    """All jobs and the open one.

    Use it only from the thread of `tasks`. Workers access the disk, so no call except `close` waits for it.
    """

    def __init__(self, tasks: Tasks, folder: Path | None = None) -> None:
        self.folder = folder or places.home() / "jobs"
        self.all: tuple[JobEntry, ...] = ()
        """Jobs in the list, last changed first."""
        self.changed: Emitter[None] = Emitter()
        """Emitted when `all` changes."""
        self.opened_changed: Emitter[Draft | None] = Emitter()
        """Emitted with the newly opened job, or None when the open job was closed."""
        self.rescued: Emitter[Path] = Emitter()
        """Emitted with the new job file to which changes were saved because their own file could not be written."""
        self.resolved: Emitter[ImpastoError] = Emitter()
        """Emitted with an earlier error about writing a job's file when that error no longer applies."""
        self.secured: Emitter[str] = Emitter()
        """Emitted when a password or token was removed from a job's base link; the message says where it is stored."""
        self.closed: Emitter[None] = Emitter()
        """Emitted at the end of `close`, when all changes that can be saved have been written."""
        self.last: Path | None = None
        """Job that was opened last."""
        self._elsewhere: tuple[Path, ...] = ()
        self._agreed: tuple[Path, ...] = ()
        """Jobs that the user agreed to train on the CPU despite the long training time, latest first."""
        self._read_numbers = count(1)
        self._newest_read = 0
        self._tasks = tasks
        self._open: Draft | None = None
        self._requested: Path | None = None
        self._closing: dict[Path, Draft] = {}
        """Closed jobs whose last changes are still being written, by path."""
        self._list = DeferredWriter(self.folder / "list.json", "the list of jobs")
        empty: _ListContent = (None, (), ())
        lost = "Jobs in other folders are no longer listed: open them again."
        content = self._list.load(_decode_list, empty, lost, lambda content: _encode_list(*content))
        self.last, self._elsewhere, self._agreed = content

    # --- one job: workers read and write files; results are delivered on the thread of `tasks`

    @property
    def notice(self) -> str:
        """Return a message about a problem with list.json, or ""."""
        return self._list.notice

    def open(self, path: Path, then: Callable[[Draft], None], on_error: OnError) -> None:
        """Open a job file in any folder and close the open job; for the job of a run, open a copy.

        If the file cannot be read, is damaged or of a newer version, the open job stays open. Of several calls in a
        row, only the last one opens a job.
        """
        path = path.absolute()
        self._requested = path
        if draft := self._opened(path):
            then(draft)
        elif draft := self._closing.pop(path, None):
            self._set_open(draft)
            then(draft)
        else:
            self._read(path, then, on_error)

    def agree_to_cpu(self, path: Path) -> None:
        """Save that the user agreed to train a job on the CPU despite the long training time."""
        if path not in self._agreed:
            self._agreed = (path, *self._agreed)[:_MAX_AGREED]
            self._list.write(_encode_list(self.last, self._elsewhere, self._agreed))

    def has_agreed_to_cpu(self, path: Path) -> bool:
        """Return whether the user agreed to train a job on the CPU."""
        return path in self._agreed

    def close_job(self) -> None:
        """Close the open job and save its changes; if its file cannot be written, save them as a new job."""
        draft, self._open = self._open, None
        if draft is not None:
            draft.withdraw_errors()
            self.opened_changed.emit(None)
        if draft is not None and draft.file.unsaved:
            self._closing[draft.path] = draft
            draft.file.settle(lambda error: self._on_settled(draft, error))

    def create(
        self, name: str, make: Callable[[str, Path], Mapping[str, Any]], then: Callable[[Path], None], on_error: OnError
    ) -> None:
        """Create a job in our jobs folder and call `then` with its file.

        A worker calls `make` to get its values; the arguments are a free name (`name`, with a number if it is taken)
        and the folder of the new file.
        """
        names = {entry.name for entry in self.all}

        def work() -> Path:
            free = _free_name(self.folder, name, names)
            return write_new(self.folder, make(free, self.folder / safe_name(free, "job")))

        self._run(work, then, on_error)

    def duplicate(self, path: Path, then: Callable[[Path], None], on_error: OnError) -> None:
        """Copy a job to our folder under a free name, with absolute paths, and call `then` with the new file.

        A copy of a run's job leaves out its runs folder, and the fit and fallbacks chosen for that run's machine.
        """
        path, draft = path.absolute(), self._draft_of(path.absolute())
        values, names = draft.values if draft else None, {entry.name for entry in self.all}
        self._run(lambda: _copied(self.folder, path, values, names), then, on_error)

    def trash(self, path: Path, then: Callable[[TrashedJob], None], on_error: OnError) -> None:
        """Remove a job from the list.

        A job file in our folder moves to our trash, but its runs stay; files in other folders stay in place.
        """
        path = path.absolute()
        shown = self._opened(path)
        if shown:
            self.close_job()

        def on_moved(moved_to: Path | None) -> None:
            self._save_list(None if self.last == path else self.last, self._without(path))
            # Makes `look` ignore reads in progress, which may still contain the job.
            self._newest_read = next(self._read_numbers)
            self.all = tuple(entry for entry in self.all if entry.path != path)
            self.changed.emit(None)
            then(TrashedJob(path, moved_to))

        def on_failed(error: ImpastoError) -> None:
            if shown and self._open is None:
                self._open = shown
                self.opened_changed.emit(shown)
            on_error(error)

        def move() -> None:
            self._run(lambda: _trash(path) if self._is_ours(path) else None, on_moved, on_failed)

        draft = self._closing.get(path)
        draft.file.settle(lambda _: move()) if draft else move()

    def restore(self, trashed: TrashedJob, then: Callable[[Path], None], on_error: OnError) -> None:
        """Undo `trash`."""

        def on_restored(_: None) -> None:
            if trashed.moved_to is None:
                self._save_list(self.last, (trashed.path, *self._without(trashed.path)))
            self.refresh()
            then(trashed.path)

        self._run(lambda: _restore(trashed), on_restored, on_error)

    # --- all jobs

    def refresh(self, then: Callable[[], None] | None = None) -> None:
        """Reload the list on a worker."""

        def read() -> tuple[int, tuple[JobEntry, ...]]:
            number = next(self._read_numbers)
            return number, _entries(self.folder, self._elsewhere)  # read here: it may have changed since `look`

        def on_listed(result: tuple[int, tuple[JobEntry, ...]]) -> None:
            number, entries = result
            if number > self._newest_read:  # a read that started earlier may finish later
                self._newest_read = number
                if entries != self.all:
                    self.all = entries
                    self.changed.emit(None)
            if then:
                then()

        self._tasks.run(read, on_listed, reraise, kept=False)

    def close(self) -> None:
        """Write pending changes now, because the app is closing."""
        drafts = [*filter(None, (self._open,)), *self._closing.values()]
        self._open, self._closing = None, {}
        for draft in drafts:
            try:
                draft.close()
            except JobError as error:
                self._report_rescued(error, _rescue(self.folder, draft.name, draft.values, draft.path.parent, error))
        self._list.settle()
        self.closed.emit(None)

    # --- internals

    def _run(self, work: Callable[[], _Result], then: Callable[[_Result], None], on_error: OnError) -> None:
        self._tasks.run(work, then, handle_only(ImpastoError, on_error))

    def _read(self, path: Path, then: Callable[[Draft], None], on_error: OnError) -> None:
        names = {entry.name for entry in self.all}

        def work() -> tuple[Path, Values, str | None]:
            from app.core.jobs.job_file import read_values
            from trainer.config.load import secure_job_file

            message = secure_job_file(path)
            real = _copied(self.folder, path, None, names) if _is_frozen(path) else path
            return real, read_values(real), message

        def on_read(found: tuple[Path, Values, str | None]) -> None:
            from app.core.jobs.draft import Draft

            real, values, message = found
            if message:
                self.secured.emit(message)
            if self._requested != path:
                return
            draft = self._opened(real)  # opened meanwhile by an earlier call for the same file
            if draft is None:
                draft = Draft(real, values, self._tasks)
                draft.secured.connect(self.secured.emit)
                draft.file.written.connect(lambda _: self.refresh())
                draft.file.resolved.connect(self.resolved.emit)
                self._set_open(draft)
            then(draft)

        self._run(work, on_read, on_error)

    def _set_open(self, draft: Draft) -> None:
        """Make this the open job."""
        self.close_job()
        self._open, path = draft, draft.path
        self._save_list(path, self._elsewhere if self._is_ours(path) else (path, *self._without(path)))
        if path not in [entry.path for entry in self.all]:
            self.refresh()
        self.opened_changed.emit(draft)

    def _opened(self, path: Path) -> Draft | None:
        return self._open if self._open and self._open.path == path else None

    def _draft_of(self, path: Path) -> Draft | None:
        """Return the open or closing job of a file, or None; its values may be newer than those on disk."""
        return self._opened(path) or self._closing.get(path)

    def _on_settled(self, draft: Draft, error: JobError | None) -> None:
        """Forget a closed job whose last write has ended; on an error, save its values as a new job."""
        if self._closing.get(draft.path) is not draft:  # it is open again
            return
        del self._closing[draft.path]
        if error is not None:
            name, values, folder = draft.name, draft.values, draft.path.parent
            report = partial(self._report_rescued, error)
            self._tasks.run(lambda: _rescue(self.folder, name, values, folder, error), report, reraise)

    def _report_rescued(self, error: JobError, rescued: Path | None) -> None:
        """If the changes were saved as a new job, withdraw the error and report the new file."""
        if rescued is not None:
            self.resolved.emit(error)
            self.rescued.emit(rescued)

    def _is_ours(self, path: Path) -> bool:
        return path.name == FILE_NAME and path.parent.parent == self.folder.absolute()

    def _without(self, path: Path) -> tuple[Path, ...]:
        return tuple(other for other in self._elsewhere if other != path)

    def _save_list(self, last: Path | None, elsewhere: tuple[Path, ...]) -> None:
        if (last, elsewhere) == (self.last, self._elsewhere):
            return
        self.last, self._elsewhere = last, elsewhere
        self._list.write(_encode_list(last, elsewhere, self._agreed))


def _decode_list(content: Any, left_out: list[str]) -> _ListContent:
    elsewhere, agreed = _paths(content["elsewhere"], left_out), _paths(content.get("agreed_to_cpu", []), left_out)
    return Path(content["last"]) if content["last"] else None, elsewhere, agreed


def _paths(texts: Any, left_out: list[str]) -> tuple[Path, ...]:
    if not isinstance(texts, list):
        raise TypeError("not a list of files")
    left_out += [repr(text)[:80] for text in texts if not isinstance(text, str)]
    return tuple(Path(text) for text in texts if isinstance(text, str))


def _encode_list(last: Path | None, elsewhere: tuple[Path, ...], agreed: tuple[Path, ...]) -> str:
    content = {"last": str(last) if last else "", "elsewhere": [*map(str, elsewhere)]}
    if agreed:
        content["agreed_to_cpu"] = [*map(str, agreed)]
    return json.dumps(content, indent=1) + "\n"


def write_new(folder: Path, values: Mapping[str, Any], template: str | None = None) -> Path:
    """Write a new job in `folder` and return its file; callable on any thread. Raises JobError.

    The job gets a new folder, because an existing one may contain runs of an earlier job. Comments and layout are those
    of `template`, the text of another job, if that can be edited.
    """
    from app.core.jobs.job_file import edit_job_text, to_toml

    plain = to_toml(values)
    text = (edit_job_text(template, plain) if template else None) or plain
    for place in (folder.absolute() / each for each in numbered(safe_name(str(values.get("name") or "job"), "job"))):
        try:
            long_path(place).mkdir(parents=True)
            files.write_text(place / FILE_NAME, text)
        except FileExistsError:
            continue
        except OSError as error:
            raise _failed(f"write {place / FILE_NAME}", error.strerror or str(error)) from None
        return place / FILE_NAME
    raise AssertionError("numbers do not end")


def _free_name(folder: Path, name: str, taken: set[str]) -> str:
    free = (each for each in numbered(valid_job_name(name), " ") if each not in taken)
    return next(each for each in free if not long_path(folder / safe_name(each, "job")).exists())


def _copied(folder: Path, path: Path, values: Mapping[str, Any] | None, names: set[str]) -> Path:
    """Copy a job to a new one in `folder` and return the new file.

    The values are those of the job file at `path` unless `values` is given; comments always come from the file.
    """
    from app.core.jobs.job_file import drop, parse_values, with_absolute_paths
    from trainer.config.load import read_job_text

    template: str | None = None
    if values is None:
        template = read_job_text(path)
        values = parse_values(template, path.name)
    else:  # the open job needs its file only for the comments in it
        with suppress(JobError):
            template = read_job_text(path)
    copied = with_absolute_paths(values, path.parent)
    if _is_frozen(path):
        for table in ("fit", "fallbacks", "output.runs"):
            drop(copied, table)
    name = str(copied.get("name") or path.parent.name)
    copied["name"] = _free_name(folder, name, names | {name})
    return write_new(folder, copied, template)


def _rescue(folder: Path, name: str, values: Mapping[str, Any], source: Path, error: JobError) -> Path | None:
    """Save values that could not be written to their own file as a new job; return its file, or None on failure."""
    from app.core.jobs.job_file import with_absolute_paths

    try:
        rescued = write_new(folder, {**with_absolute_paths(values, source), "name": name})
    except JobError as fault:
        _log.error("%s %s", error, fault)  # both places failed, so the changes are lost
        return None
    _log.info("%s Saved as %s instead.", error, rescued)
    return rescued


def _trash(path: Path) -> Path:
    """Move a job file in our jobs folder to our trash and return its new path; remove its folder if it is empty."""
    trash = path.parent.parent.parent / "trash" / "jobs"
    try:
        long_path(trash).mkdir(parents=True, exist_ok=True)
        targets = (trash / f"{stem}.toml" for stem in numbered(path.parent.name))
        target = next(each for each in targets if not long_path(each).exists())
        files.replace(path, target)
    except OSError as error:
        raise _failed(f"move {path} to the trash", error.strerror or str(error)) from None
    with suppress(OSError):  # not empty: it holds runs or files of the user
        long_path(path.parent).rmdir()
    return target


def _restore(trashed: TrashedJob) -> None:
    if trashed.moved_to is None:
        return
    try:
        if long_path(trashed.path).exists():
            raise _failed(f"restore {trashed.path}", "another job is saved there now")
        long_path(trashed.path.parent).mkdir(parents=True, exist_ok=True)
        files.replace(trashed.moved_to, trashed.path)
    except OSError as error:
        raise _failed(f"restore {trashed.path}", error.strerror or str(error)) from None


def _is_frozen(path: Path) -> bool:
    """Return whether a job file is the frozen copy in a run's folder, which must not change."""
    return path.name == FILE_NAME and any(long_path(path.parent / name).exists() for name in _RUN_FILES)


def _entries(folder: Path, elsewhere: tuple[Path, ...]) -> tuple[JobEntry, ...]:
    found = [_entry(path) for path in (*folder.absolute().glob(f"*/{FILE_NAME}"), *elsewhere)]
    return tuple(sorted(found, key=lambda entry: -entry.changed))


def _entry(path: Path) -> JobEntry:
    try:
        changed = long_path(path).stat().st_mtime
        values = read_toml(path, "text")
    except FileNotFoundError:
        return JobEntry(path, path.parent.name, 0.0, "the file no longer exists")
    except (OSError, ValueError) as error:
        return JobEntry(path, path.parent.name, 0.0, f"could not read the file: {reason_of(error)}")
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
    """Return the absolute path of a folder named by a job file in `home`.

    Does the same as `trainer.config.paths.absolute`, without importing pydantic.
    """
    return Path(os.path.abspath(home / os.path.expanduser(folder)))  # noqa: PTH100, PTH111


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = values.get(key)
    return table if isinstance(table, dict) else {}


def _failed(action: str, reason: str) -> JobError:
    return JobError("job.unmoved", f"Could not {action}: {reason}.", "Check the folder, then try again.")
