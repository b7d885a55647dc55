"""Read and write a job file; writes run on a worker, and other programs' changes are backed up first."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.core.events import Emitter
from app.core.tasks import Tasks, handle_only
from trainer.config.credentials import safe_link
from trainer.config.edit import edit_toml
from trainer.config.job import Job
from trainer.config.load import JOB_FILE, migrate, read_job_text
from trainer.config.paths import make_absolute
from trainer.config.resolve import flatten
from trainer.config.schema import fields
from trainer.config.toml_file import is_table, parse_toml, table_lines, toml_key
from trainer.errors import JobError
from trainer.protocol import files
from trainer.protocol.files import long_path, numbered
from trainer.protocol.places import is_disk_full, write_remedy
from trainer.protocol.reading import read_bytes
from trainer.protocol.records import RENAMED_KEYS

Values = dict[str, Any]

_HEADING = "# A job for Impasto: python -m trainer train THIS_FILE\n"


def value_at(values: Mapping[str, Any] | list[Any], key: str) -> Any:
    """Return the value at a dotted key, with list indices from 0; None if absent."""
    place: Any = values
    for step in key.split("."):
        if isinstance(place, list):
            place = place[int(step)] if step.isdigit() and int(step) < len(place) else None
        else:
            place = place.get(step) if isinstance(place, Mapping) else None
    return place


def put(values: Values, key: str, value: Any) -> None:
    """Set the value at a dotted key, in place; a missing or plain value on its path becomes a table.

    Raises KeyError for an index beyond the end of a list.
    """
    *tables, last = key.split(".")
    place: Any = values
    for step in tables:
        inner = value_at(place, step)
        if not isinstance(inner, dict | list):
            inner = {}
            _set(place, step, inner)
        place = inner
    _set(place, last, value)


def drop(values: Values, key: str) -> None:
    """Remove a dotted key and any tables that this leaves empty, in place; a missing key is ignored."""
    table, _, last = key.rpartition(".")
    place = value_at(values, table) if table else values
    if isinstance(place, dict):
        place.pop(last, None)
    elif isinstance(place, list) and last.isdigit() and int(last) < len(place):
        del place[int(last)]
    if table and not place:
        drop(values, table)


def changed_keys(before: Values, after: Values) -> frozenset[str]:
    """Return the dotted keys whose values differ, or which only one of the two has."""
    old, new = dict(flatten(before, "")), dict(flatten(after, ""))
    missing = object()
    return frozenset(key for key in {*old, *new} if old.get(key, missing) != new.get(key, missing))


def with_absolute_paths(values: Mapping[str, Any], folder: Path) -> Values:
    """Return a copy of the values of a job in `folder` with absolute paths, for a file in another folder.

    If the job does not state a runs folder, none is added: the default is next to the job file.
    """
    moved = copy.deepcopy(dict(values))
    stated = value_at(values, "output.runs")
    make_absolute(moved, folder)
    if stated is None:
        drop(moved, "output.runs")
    return moved


def to_toml(values: Mapping[str, Any]) -> str:
    """Return the text of a job file, with keys in schema order and unknown keys at the end of their table."""
    return _HEADING + "\n".join(table_lines(_in_schema_order(values, ""), "")).rstrip() + "\n"


def _set(place: Any, step: str, value: Any) -> None:
    if isinstance(place, list):
        if not step.isdigit() or int(step) >= len(place):
            raise KeyError(step)
        place[int(step)] = value
    else:
        place[step] = value


def _in_schema_order(table: Mapping[str, Any], path: str) -> Values:
    names = sorted(table, key=lambda name: _key_order().get(f"{path}{name}", len(_key_order())))
    ordered: Values = {}
    for name in names:
        value, inner = table[name], f"{path}{toml_key(name)}."
        if is_table(value):
            many = isinstance(value, list)
            value = [_in_schema_order(each, inner) for each in value] if many else _in_schema_order(value, inner)
        ordered[name] = value
    return ordered


@lru_cache(maxsize=1)
def _key_order() -> Mapping[str, int]:
    """Return the position of each key in the schema; the keys leave out list indices and optimizer names."""
    return {re.sub(r"\.\*|\[.*?\]", "", found.key): number for number, found in enumerate(fields(Job))}


def parse_values(text: str, source: str) -> Values:
    """Return the values of a job file's text, migrated to the current schema; raise JobError if damaged or newer."""
    return migrate(parse_toml(text, source, JOB_FILE))


def read_values(path: Path) -> Values:
    """Return the values of a job file, migrated to the current schema.

    A password or token in its base link is first removed from the file. Raises JobError when the file is missing,
    unreadable, damaged or of a newer version.
    """
    return parse_values(read_job_text(path), path.name)


@dataclass(frozen=True, slots=True)
class _KnownFile:
    """What is known about a job file on disk."""

    plain: str | None = None
    """Its values, as `to_toml` writes them."""
    text: str | None = None
    """Its exact text; None before the first write."""
    base: str | None = None
    """Text that each write starts from: the file before the app changed it, so that undoing restores it exactly."""


@dataclass(frozen=True, slots=True)
class _WrittenFile:
    """Result of a write."""

    known: _KnownFile
    backup: Path | None
    """Copy of the previous file."""


class JobFile:
    """Writes a job file on a worker, one write at a time. Use it only from the thread of `tasks`.

    Invalid values are written too: the form shows them when the job is opened again, and the trainer reports the same
    problems as the form. The text of the file is edited, so that comments and layout stay; undoing a change
    restores it exactly. Before a write that would lose comments, or values that another program wrote, the file is
    backed up next to it.
    """

    def __init__(self, path: Path, tasks: Tasks) -> None:
        self.path = path
        self.written: Emitter[None] = Emitter()
        """Emitted when all values are on disk."""
        self.failed: Emitter[JobError] = Emitter()
        """Emitted when the file could not be written; the next change or `retry` tries again."""
        self.resolved: Emitter[JobError] = Emitter()
        """Emitted when the last error no longer applies: the file was written, or writing fails for another reason."""
        self.backed_up: Emitter[Path] = Emitter()
        """Emitted with the path of the backup of the previous file."""
        self._tasks = tasks
        self._known = _KnownFile()
        self._pending: str | None = None
        self._writing: tuple[str, Future[_WrittenFile]] | None = None
        self._error: JobError | None = None
        """Last error that `failed` emitted; None once it is resolved."""
        self._is_retry = False
        """Whether the current write is only a retry, whose failure for the same reason is not reported again."""

    @property
    def unsaved(self) -> bool:
        """Return whether there are values that are not on disk yet."""
        return self._pending is not None or self._writing is not None

    @property
    def error(self) -> JobError | None:
        """Return the error of the last write; None if it did not fail."""
        return self._error

    def parse(self, text: str) -> Values:
        """Return the values in this text, which was read from the file; raises JobError."""
        return parse_values(text, self.path.name)

    def set_known_values(self, values: Values) -> None:
        """Set the values that the file is known to contain; any others found in it later come from another program."""
        self._known = _KnownFile(to_toml(values))

    def is_own(self, text: str) -> bool:
        """Return whether a text is what this app last wrote, or the known values as `to_toml` writes them."""
        known = self._known
        return text == known.plain or (known.text is not None and text == known.text.removeprefix("\ufeff"))

    def write(self, values: Values) -> None:
        """Write these values on a worker; of several calls during a write, only the last one is written."""
        self._pending, self._is_retry = to_toml(values), False
        if self._writing is None:
            self._begin()

    def retry(self) -> None:
        """Try a failed write again; another failure for the same reason is not reported again."""
        if self._pending is not None and self._writing is None:
            self._is_retry = True
            self._begin()

    def settle(self, then: Callable[[JobError | None], None]) -> None:
        """Call `then` with None when all values are written, or with the error if writing fails.

        A write that has already failed is first repeated.
        """
        if not self.unsaved:
            then(None)
            return

        def on_end(error: JobError | None) -> None:
            for disconnect in disconnects:
                disconnect()
            then(error)

        disconnects = [self.written.connect(on_end), self.failed.connect(on_end)]
        self._is_retry = False
        if self._writing is None:
            self._begin()

    def flush(self) -> None:
        """Write pending values now, blocking; raises JobError if that fails. Call it only when the app closes."""
        if self._writing is not None:
            _, future = self._writing
            if not future.cancelled() and future.exception() is None:  # waits
                self._known = future.result().known
        text, self._pending = self._pending, None
        if text is not None and text != self._known.plain:
            try:
                self._known = _replace(self.path, text, self._known).known
            except OSError as error:
                raise _unwritable(self.path, error) from None
        self.written.emit(None)  # calls the callbacks of `settle`

    def _begin(self) -> None:
        text, known = self._pending, self._known
        assert text is not None
        future = self._tasks.run(
            lambda: _replace(self.path, text, known), lambda written: self._done(text, written), self._fail
        )
        self._writing = text, future

    def _done(self, text: str, written: _WrittenFile) -> None:
        self._writing, self._known = None, written.known
        if written.backup:
            self.backed_up.emit(written.backup)
        if self._pending == text:
            self._pending = None
        fault, self._error = self._error, None
        if fault:
            self.resolved.emit(fault)
        if self._pending is None:
            self.written.emit(None)
        else:
            self._begin()

    def _fail(self, fault: BaseException) -> None:
        self._writing = None
        handle_only(OSError, self._report)(fault)

    def _report(self, error: OSError) -> None:
        previous, fault = self._error, _unwritable(self.path, error)
        is_new = previous is None or previous.sentence != fault.sentence
        if self._is_retry and not is_new:
            return
        self._error = fault
        if previous and is_new:
            self.resolved.emit(previous)
        self.failed.emit(fault)


def edit_job_text(text: str, plain: str) -> str | None:
    """Return a job file's text with the values of `plain`, keeping its comments and layout; None if impossible.

    `plain` is a text that `to_toml` returned. Takes up to a second for the longest text.
    """
    try:
        return edit_toml(text, parse_toml(plain, "job", JOB_FILE), RENAMED_KEYS)
    except JobError:  # larger than the reader allows
        return None


def _replace(path: Path, plain: str, known: _KnownFile) -> _WrittenFile:
    """Write the values of `plain` to a job file atomically, and back it up first if necessary."""
    long_path(path.parent).mkdir(parents=True, exist_ok=True)
    try:
        previous = read_bytes(path, "text")
    except FileNotFoundError:
        previous = None
    base, backup = known.base, None
    if previous is not None and not (known.text and previous == known.text.encode()):
        base = _editable(previous)
    text = edit_job_text(base, plain) if base else None
    if previous is not None and not _is_kept(previous, known, has_comments=text is not None):
        backup = _back_up(path, previous)
    files.write_text(path, text or plain)
    return _WrittenFile(_KnownFile(plain, text or plain, base if text else plain), backup)


def _editable(data: bytes) -> str | None:
    """Return the text of a job file; None if it cannot be edited, or if its base link contains a password or token.

    Editing keeps the comments, which may repeat such a secret.
    """
    try:
        text = data.decode()
        model = value_at(parse_values(text, "job"), "base.model")
        return text if not isinstance(model, str) or safe_link(model).text == model else None
    except (JobError, ValueError):
        return None


def _is_kept(previous: bytes, known: _KnownFile, *, has_comments: bool) -> bool:
    """Return whether overwriting a file loses nothing: its values are known, and any comments are kept."""
    if known.plain is None or previous == known.plain.encode():
        return known.plain is not None
    try:
        return has_comments and to_toml(parse_values(previous.decode(), "job")) == known.plain
    except (JobError, ValueError):
        return False


def _back_up(path: Path, data: bytes) -> Path:
    names = (path.with_name(f"{stem}{path.suffix}") for stem in numbered(f"{path.stem}.before"))
    target = next(name for name in names if not long_path(name).exists())
    files.write_bytes(target, data)
    return target


def _unwritable(path: Path, error: OSError) -> JobError:
    reason = "the disk is full" if is_disk_full(error) else error.strerror or error
    return JobError(
        "job.unwritable",
        f"Could not save {path}: {reason}.",
        f"{write_remedy(error)} Your changes stay open and will be saved as soon as possible. "
        "You can also duplicate the job.",
    )
