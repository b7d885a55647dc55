"""Read and write a job file; writes run on a worker, and other programs' changes are backed up first."""

from __future__ import annotations

import copy
import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.core.events import Emitter
from app.core.tasks import Tasks, handle_only
from trainer.config.job import Job
from trainer.config.load import JOB_FILE, migrate, read_job_text
from trainer.config.paths import make_absolute
from trainer.config.resolve import flatten
from trainer.config.schema import fields
from trainer.config.toml_file import parse_toml, toml_value
from trainer.errors import JobError
from trainer.protocol import files
from trainer.protocol.files import long_path, numbered
from trainer.protocol.places import is_disk_full, write_remedy
from trainer.protocol.reading import read_bytes

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
    return _HEADING + "\n".join(_lines(values, "")).rstrip() + "\n"


def _set(place: Any, step: str, value: Any) -> None:
    if isinstance(place, list):
        if not step.isdigit() or int(step) >= len(place):
            raise KeyError(step)
        place[int(step)] = value
    else:
        place[step] = value


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the lines of a table: first its own keys, then its tables, as TOML requires."""
    names = sorted(table, key=lambda name: _key_order().get(f"{path}{name}", len(_key_order())))
    yield from (f"{_encode_key(name)} = {_encode_value(table[name])}" for name in names if not _is_table(table[name]))
    for name in filter(lambda name: _is_table(table[name]), names):
        many = isinstance(table[name], list)
        for item in table[name] if many else (table[name],):
            key = path + _encode_key(name)
            yield f"\n[[{key}]]" if many else f"\n[{key}]"
            yield from _lines(item, f"{key}.")


def _is_table(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, dict) for item in items)


def _encode_value(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_encode_key(key)} = {_encode_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_encode_value, value)) + "]"
    return toml_value(value)


def _encode_key(key: str) -> str:
    """Return a key in TOML notation: quoted unless it consists of ASCII letters, digits, - and _."""
    plain = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if plain else toml_value(key)


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


class JobFile:
    """Writes a job file on a worker, one write at a time. Use it only from the thread of `tasks`.

    Invalid values are written too: the form shows them when the job is opened again, and the trainer reports the same
    problems as the form. A file that the app did not write itself (with comments, or changed by another program) is
    backed up next to it before it is overwritten.
    """

    def __init__(self, path: Path, tasks: Tasks) -> None:
        self.path = path
        self.written: Emitter[None] = Emitter()
        """Emitted when all values are on disk."""
        self.failed: Emitter[JobError] = Emitter()
        """Emitted when the file could not be written; the next change or `retry` tries again."""
        self.resolved: Emitter[JobError] = Emitter()
        """Emitted when the last error no longer applies: the file was written, or writing fails for another reason."""
        self.kept: Emitter[Path] = Emitter()
        """Emitted with the path of the backup of the previous file."""
        self._tasks = tasks
        self._own_text: str | None = None
        self._pending: str | None = None
        self._writing: tuple[str, Future[Path | None]] | None = None
        self._error: JobError | None = None
        """Last error that `failed` emitted; None once it is resolved."""
        self._is_retry = False
        """Whether the current write is only a retry, whose failure for the same reason is not reported again."""

    @property
    def unsaved(self) -> bool:
        """Return whether there are values that are not on disk yet."""
        return self._pending is not None or self._writing is not None

    @property
    def fault(self) -> JobError | None:
        """Return the error for which the last write failed; None if there is none."""
        return self._error

    def parse(self, text: str) -> Values:
        """Return the values in this text, which was read from the file; raises JobError."""
        return parse_values(text, self.path.name)

    def own(self, values: Values) -> None:
        """Set the values that the file is known to contain; a different text was written by another program."""
        self._own_text = to_toml(values)

    def is_own(self, text: str) -> bool:
        """Return whether a text is the one that this app wrote last, or would write for the values passed to `own`."""
        return text == self._own_text

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
        """Write pending values now, blocking; raises JobError if that fails. Only for when the app closes."""
        if self._writing is not None:
            sent, future = self._writing
            if not future.cancelled() and future.exception() is None:  # waits
                self._own_text = sent
        text, self._pending = self._pending, None
        if text is not None and text != self._own_text:
            try:
                _replace(self.path, text, self._own_text)
            except OSError as error:
                raise _unwritable(self.path, error) from None
            self._own_text = text
        self.written.emit(None)  # calls the callbacks of `settle`

    def _begin(self) -> None:
        text, own = self._pending, self._own_text
        assert text is not None
        future = self._tasks.run(
            lambda: _replace(self.path, text, own), lambda backup: self._done(text, backup), self._fail
        )
        self._writing = text, future

    def _done(self, text: str, backup: Path | None) -> None:
        self._writing, self._own_text = None, text
        if backup:
            self.kept.emit(backup)
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


def _replace(path: Path, text: str, own: str | None) -> Path | None:
    """Write the file atomically. If its text was not `own` (our last text), back it up first and return the backup."""
    long_path(path.parent).mkdir(parents=True, exist_ok=True)
    backup = _back_up(path, own)
    files.write_text(path, text)
    return backup


def _back_up(path: Path, own: str | None) -> Path | None:
    try:
        previous = read_bytes(path, "text")
    except FileNotFoundError:
        return None
    if own is not None and previous == own.encode():
        return None
    names = (path.with_name(f"{stem}{path.suffix}") for stem in numbered(f"{path.stem}.before"))
    target = next(name for name in names if not long_path(name).exists())
    files.write_bytes(target, previous)
    return target


def _unwritable(path: Path, error: OSError) -> JobError:
    reason = "the disk is full" if is_disk_full(error) else error.strerror or error
    return JobError(
        "job.unwritable",
        f"Could not save {path}: {reason}.",
        f"{write_remedy(error)} Your changes stay open and are saved as soon as possible. Or duplicate the job.",
    )
