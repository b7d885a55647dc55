"""Queue entries: their fields, their file format, and the job text stored in them."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar, get_args

from trainer.errors import JobError, RunError
from trainer.protocol.reading import UnusableFileError, parse_toml, path_of, read_text
from trainer.protocol.records import json_keys, moment
from trainer.protocol.text import in_json

State = Literal["waiting", "running", "paused", "interrupted", "done", "stopped", "failed"]
"""State of an entry. Paused and interrupted ones keep their place; "interrupted": the engine ended unexpectedly."""
EndRequest = Literal["pause", "stop"]

VERSION = 1
ENDED: tuple[State, ...] = ("done", "stopped", "failed")

_LARGEST = 1024 * 1024  # bytes of a job file, the same limit as in training
_CODES = {"file.size": "large", "file.encoding": "encoding"}
_Kind = TypeVar("_Kind")


@json_keys(
    "id", "job", "run", "state", "lane", "after", "added", "problem", "steps", "hold", "wish", "pid", "attempts",
    "text",
)  # fmt: skip
@dataclass(frozen=True)
class Entry:
    """Entry of the queue: a job to train, or a run to continue."""

    id: str
    job: Path | None
    """The job file; None if the entry continues a run."""
    run: Path | None
    """Folder of the run; None before it exists."""
    state: State = "waiting"
    lane: str | None = None
    """Device assigned to the entry, "cuda:0" or "cpu"; None before it starts."""
    after: float | None = None
    """Unix time in seconds before which the entry does not start; None: no limit."""
    added: float = 0.0
    """Unix time in seconds at which the entry was added."""
    problem: str = ""
    """Sentence that says why the entry failed or was interrupted."""
    steps: int | None = None
    """New total number of steps of the run; None: unchanged."""
    hold: bool = False
    """Whether a failure of this entry puts the queue on hold."""
    wish: EndRequest | None = None
    """Pending pause or stop request."""
    pid: int | None = None
    """Process id of the engine, for information only; the lock shows whether it is alive."""
    attempts: int = 0
    """Number of attempts that the run had before the current engine started."""
    text: str | None = dataclasses.field(default=None, repr=False)
    """Text of the job file when the entry was added; None in older entries, which use the current file."""

    @property
    def name(self) -> str:
        """Return the name to show: the run's, else the job's, else the name of the job's folder or file."""
        if self.run is not None:
            return self.run.name
        assert self.job is not None
        if named := _name_in(self.text or ""):
            return named
        return self.job.parent.name if self.job.name == "job.toml" else self.job.stem

    @property
    def ended(self) -> bool:
        """Return whether the entry has ended and is listed for information only."""
        return self.state in ENDED


def new_entry(
    job: Path | None, run: Path | None = None, *, after: float | None = None, steps: int | None = None,
    hold: bool = False, name: str = "", text: str | None = None,
) -> Entry:  # fmt: skip
    """Return a waiting entry with a new id, or with `name` as its id; it is not in a queue yet.

    The entry stores `text` as its job, or the job file's current content if `text` is None. Raises JobError if the
    file cannot be read. The job itself is not validated until training starts.
    """
    assert (job is None) != (run is None)
    job, run = job and job.absolute(), run and run.absolute()
    if job is not None and text is None:
        text = _job_text(job)
    return Entry(name or new_id(), job, run, after=after, added=time.time(), steps=steps, hold=hold, text=text)


@lru_cache(maxsize=256)  # called for every entry when a list is refreshed
def _name_in(text: str) -> str:
    """Return the name set in a job's text; empty if there is none or the text cannot be parsed."""
    try:
        name = parse_toml(text).get("name")
    except UnusableFileError:
        return ""
    return name.strip() if isinstance(name, str) else ""


def new_id() -> str:
    """Return a random id for a new entry."""
    return secrets.token_hex(4)


class NewerVersionError(Exception):
    """Error for a file that was written by a newer version."""


def requeued(entry: Entry, steps: int | None = None) -> Entry:
    """Return a copy of the entry that waits again; raises RunError if the entry is running or done."""
    if entry.state in ("running", "done"):
        raise RunError(
            "queue.state",
            f"Could not resume the entry: it is {entry.state}.",
            "To train longer, resume its run with more steps." if entry.state == "done" else "There is nothing to do.",
        )
    return dataclasses.replace(
        entry,
        state="waiting",
        after=None,
        problem="",
        wish=None,
        pid=None,
        steps=entry.steps if steps is None else steps,
        text=_corrected(entry),
    )


def _corrected(entry: Entry) -> str | None:
    """Return an entry's stored text, or the current text of its file if the entry failed before it had a run."""
    if entry.state == "failed" and entry.run is None and entry.job is not None:
        with contextlib.suppress(JobError):
            return _job_text(entry.job)
    return entry.text


def _job_text(job: Path) -> str:
    """Return the text of a job file without a byte order mark; raises JobError if it cannot be read."""
    remedy = "Check the path, and save the file as UTF-8 text."
    try:
        text = read_text(job, "text")
        if len(text.encode("utf-8")) > _LARGEST:
            raise JobError("job.large", f"Could not read the job file {job}: it is larger than 1 MiB.", remedy)
        return text
    except UnusableFileError as error:
        code = f"job.{_CODES.get(error.code, 'unreadable')}"
        raise JobError(code, f"Could not read the job file {job}: {error.reason}.", remedy) from None
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise JobError("job.unreadable", f"Could not read the job file {job}: {why}.", remedy) from None


def versioned(fields: object) -> Mapping[str, object]:
    """Return a file's fields if this version can read them; raises NewerVersionError, TypeError or KeyError."""
    if not isinstance(fields, dict):
        raise TypeError("it is not a JSON object")
    if typed(fields, "version", int) > VERSION:
        raise NewerVersionError
    return fields


def entry_of(name: str, fields: Mapping[str, object]) -> Entry:
    """Return the entry from the fields in its file; raises TypeError, ValueError or KeyError if they are invalid."""
    state, request = typed(fields, "state", str), _optional(fields, "wish", str)
    if state not in get_args(State) or request not in (None, *get_args(EndRequest)):
        raise ValueError(f"{'state' if state not in get_args(State) else 'wish'} has an unknown value")
    job, run = (None if fields.get(key) is None else path_of(fields[key]) for key in ("job", "run"))
    if job is None and run is None:
        raise ValueError("it names neither a job nor a run")
    return Entry(
        id=name,
        job=job,
        run=run,
        state=state,  # type: ignore[arg-type]
        lane=_optional(fields, "lane", str),
        after=None if fields.get("after") is None else moment(fields["after"]),
        added=moment(fields["added"]),
        problem=typed(fields, "problem", str),
        steps=_optional(fields, "steps", int),
        hold=typed(fields, "hold", bool),
        wish=request,  # type: ignore[arg-type]
        pid=_optional(fields, "pid", int),
        attempts=typed(fields, "attempts", int),
        text=_optional(fields, "text", str),
    )


def typed(fields: Mapping[str, object], key: str, kind: type[_Kind]) -> _Kind:
    """Return a field that must be of type `kind`; an integer is accepted as a float. Raises TypeError or KeyError."""
    value = fields[key]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f'"{key}" has the invalid value {in_json(value)}')
    return value


def _optional(fields: Mapping[str, object], key: str, kind: type[_Kind]) -> _Kind | None:
    return None if fields.get(key) is None else typed(fields, key, kind)
