"""Read and write a job file; writes run in the background and never overwrite foreign changes without a backup."""

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
    """Set a dotted key, in place; tables on the way are made, a single value in the way gives way.

    Raises KeyError for a place in a list that is not there.
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
    """Take a dotted key out, in place, with the tables that it leaves empty; a key that is not there is passed over."""
    table, _, last = key.rpartition(".")
    place = value_at(values, table) if table else values
    if isinstance(place, dict):
        place.pop(last, None)
    elif isinstance(place, list) and last.isdigit() and int(last) < len(place):
        del place[int(last)]
    if table and not place:
        drop(values, table)


def changed_keys(before: Values, after: Values) -> frozenset[str]:
    """Return every dotted key whose value is another one, or which only one of the two has."""
    old, new = dict(flatten(before, "")), dict(flatten(after, ""))
    missing = object()
    return frozenset(key for key in {*old, *new} if old.get(key, missing) != new.get(key, missing))


def with_absolute_paths(values: Mapping[str, Any], folder: Path) -> Values:
    """Return the values of a job in `folder` as a file elsewhere holds them; runs stay beside the file."""
    moved = copy.deepcopy(dict(values))
    stated = value_at(values, "output.runs")
    make_absolute(moved, folder)
    if stated is None:
        drop(moved, "output.runs")
    return moved


def to_toml(values: Mapping[str, Any]) -> str:
    """Return the text of the job file, keys in the order of the schema; what is no job's key comes after them."""
    return _HEADING + "\n".join(_lines(values, "")).rstrip() + "\n"


def _set(place: Any, step: str, value: Any) -> None:
    if isinstance(place, list):
        if not step.isdigit() or int(step) >= len(place):
            raise KeyError(step)
        place[int(step)] = value
    else:
        place[step] = value


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """First a table's own keys, then the tables in it, as TOML demands."""
    names = sorted(table, key=lambda name: _order().get(f"{path}{name}", len(_order())))
    yield from (f"{_bare(name)} = {_value(table[name])}" for name in names if not _is_table(table[name]))
    for name in filter(lambda name: _is_table(table[name]), names):
        many = isinstance(table[name], list)
        for item in table[name] if many else (table[name],):
            key = path + _bare(name)
            yield f"\n[[{key}]]" if many else f"\n[{key}]"
            yield from _lines(item, f"{key}.")


def _is_table(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, dict) for item in items)


def _value(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_bare(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return toml_value(value)


def _bare(key: str) -> str:
    """A key as TOML writes it: in quotes unless it is made of plain letters, digits, - and _."""
    plain = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if plain else toml_value(key)


@lru_cache(maxsize=1)
def _order() -> Mapping[str, int]:
    """The place of each key in the schema, without the places in lists and the kinds of optimizers."""
    return {re.sub(r"\.\*|\[.*?\]", "", found.key): number for number, found in enumerate(fields(Job))}


def parse_values(text: str, source: str) -> Values:
    """Return what a job file's text holds, in the present schema's form; JobError for broken and newer ones."""
    return migrate(parse_toml(text, source, JOB_FILE))


def read_values(path: Path) -> Values:
    """Return what a job file holds, without a password or token in its base link.

    Raises JobError when the file is missing, unreadable, damaged or of a newer version.
    """
    return parse_values(read_job_text(path), path.name)


class JobFile:
    """Writes a job's values on a worker, the latest last; belongs to the thread of `tasks`.

    The file holds what was typed, wrong or not: opened again, the form shows the same, and the trainer names what is
    wrong as the form does. What the app did not write itself (comments, another program's changes) is kept beside
    before it is written over.
    """

    def __init__(self, path: Path, tasks: Tasks) -> None:
        self.path = path
        self.written: Emitter[None] = Emitter()
        """Emitted when all values are on disk."""
        self.failed: Emitter[JobError] = Emitter()
        """It cannot be written now; the next change tries again, and so does `retry`."""
        self.resolved: Emitter[JobError] = Emitter()
        """What `failed` told is over: all is on disk, or something else stands against it."""
        self.kept: Emitter[Path] = Emitter()
        """Emitted with the path of the backup of the previous file."""
        self._tasks = tasks
        self._own: str | None = None
        self._waiting: str | None = None
        self._writing: tuple[str, Future[Path | None]] | None = None
        self._fault: JobError | None = None
        """What `failed` told last, until it is over."""
        self._quiet = False
        """Whether nobody waits for what comes of the writing that is under way: it is only tried again."""

    @property
    def unsaved(self) -> bool:
        """Return whether a write is pending."""
        return self._waiting is not None or self._writing is not None

    @property
    def fault(self) -> JobError | None:
        """What stands against writing it; None where nothing does that is known."""
        return self._fault

    def parse(self, text: str) -> Values:
        """Return what a text of this file holds; raises JobError."""
        return parse_values(text, self.path.name)

    def own(self, values: Values) -> None:
        """Take these values for what the file holds, so that another file is told from it."""
        self._own = to_toml(values)

    def is_own(self, text: str) -> bool:
        """Tell whether a text is what this app wrote, or would have written."""
        return text == self._own

    def write(self, values: Values) -> None:
        """Write these values in the background."""
        self._waiting, self._quiet = to_toml(values), False
        if self._writing is None:
            self._begin()

    def retry(self) -> None:
        """Try again what could not be written; that it fails once more for the same reason is not told again."""
        if self._waiting is not None and self._writing is None:
            self._quiet = True
            self._begin()

    def settle(self, then: Callable[[JobError | None], None]) -> None:
        """Call `then` when nothing is on its way to the disk any more, with what stands against it, tried once more."""
        if not self.unsaved:
            then(None)
            return

        def over(error: JobError | None) -> None:
            for stop in stops:
                stop()
            then(error)

        stops = [self.written.connect(over), self.failed.connect(over)]
        self._quiet = False
        if self._writing is None:
            self._begin()

    def flush(self) -> None:
        """Put on disk what is not there yet, now; raises JobError when it cannot be. Only for the app's end."""
        if self._writing is not None:
            sent, future = self._writing
            if not future.cancelled() and future.exception() is None:  # waits
                self._own = sent
        text, self._waiting = self._waiting, None
        if text is not None and text != self._own:
            try:
                _replace(self.path, text, self._own)
            except OSError as error:
                raise _unwritable(self.path, error) from None
            self._own = text
        self.written.emit(None)  # for whoever waits in `settle`

    def _begin(self) -> None:
        text, former = self._waiting, self._own
        assert text is not None
        future = self._tasks.run(
            lambda: _replace(self.path, text, former), lambda kept: self._done(text, kept), self._fail
        )
        self._writing = text, future

    def _done(self, text: str, kept: Path | None) -> None:
        self._writing, self._own = None, text
        if kept:
            self.kept.emit(kept)
        if self._waiting == text:
            self._waiting = None
        fault, self._fault = self._fault, None
        if fault:
            self.resolved.emit(fault)
        if self._waiting is None:
            self.written.emit(None)
        else:
            self._begin()

    def _fail(self, fault: BaseException) -> None:
        self._writing = None
        handle_only(OSError, self._tell)(fault)

    def _tell(self, error: OSError) -> None:
        former, fault = self._fault, _unwritable(self.path, error)
        another = former is None or former.sentence != fault.sentence
        if self._quiet and not another:
            return
        self._fault = fault
        if former and another:
            self.resolved.emit(former)
        self.failed.emit(fault)


def _replace(path: Path, text: str, own: str | None) -> Path | None:
    """Write the file in one step; return where the former one was kept, if it was not what we had written."""
    long_path(path.parent).mkdir(parents=True, exist_ok=True)
    kept = _keep(path, own)
    files.write_text(path, text)
    return kept


def _keep(path: Path, own: str | None) -> Path | None:
    try:
        there = read_bytes(path, "text")
    except FileNotFoundError:
        return None
    if own is not None and there == own.encode():
        return None
    names = (path.with_name(f"{stem}{path.suffix}") for stem in numbered(f"{path.stem}.before"))
    target = next(name for name in names if not long_path(name).exists())
    files.write_bytes(target, there)
    return target


def _unwritable(path: Path, error: OSError) -> JobError:
    reason = "the disk is full" if is_disk_full(error) else error.strerror or error
    return JobError(
        "job.unwritable",
        f"{path} cannot be written: {reason}.",
        f"{write_remedy(error)} Your changes are kept here and saved when that is possible; or duplicate the job.",
    )
