"""One entry of the queue: what it says, what its file says, and the job that is frozen in it."""

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
"""A paused or interrupted entry keeps its place; "interrupted" is one whose engine died without a word."""
Wish = Literal["pause", "stop"]

VERSION = 1
ENDED: tuple[State, ...] = ("done", "stopped", "failed")

_LARGEST = 1024 * 1024  # bytes of a job file, as training reads it
_CODES = {"file.size": "large", "file.encoding": "encoding"}
_Kind = TypeVar("_Kind")


@json_keys(
    "id", "job", "run", "state", "lane", "after", "added", "problem", "steps", "hold", "wish", "pid", "attempts",
    "text",
)  # fmt: skip
@dataclass(frozen=True)
class Entry:
    """One thing to be done: a job to be trained, or a run to be gone on with."""

    id: str
    job: Path | None
    """The job file; None where a run is gone on with."""
    run: Path | None
    """The run's folder, as soon as there is one."""
    state: State = "waiting"
    lane: str | None = None
    """The device it was given: "cuda:0", "cpu"; None before it began."""
    after: float | None = None
    """Unix time in seconds that it waits for."""
    added: float = 0.0
    """Unix time in seconds."""
    problem: str = ""
    """Why it failed or broke off, in words."""
    steps: int | None = None
    """How many steps the run shall have in all; None: as many as it has."""
    hold: bool = False
    """Whether the queue is to be held when this fails."""
    wish: Wish | None = None
    """What was asked of it and has not happened yet."""
    pid: int | None = None
    """The engine's process, for information: that it lives the lock tells."""
    attempts: int = 0
    """How often its run had been started before the engine that does it now."""
    text: str | None = dataclasses.field(default=None, repr=False)
    """What the job file said when it was put in; None: an earlier version put it in, and the file itself is read."""

    @property
    def name(self) -> str:
        """What people know it by: the run's name, else the job's, else that of the job's folder, or of its file."""
        if self.run is not None:
            return self.run.name
        assert self.job is not None
        if named := _name_in(self.text or ""):
            return named
        return self.job.parent.name if self.job.name == "job.toml" else self.job.stem

    @property
    def ended(self) -> bool:
        """Whether it has left the queue and is listed for information."""
        return self.state in ENDED


def new_entry(
    job: Path | None, run: Path | None = None, *, after: float | None = None, steps: int | None = None,
    hold: bool = False, name: str = "", text: str | None = None,
) -> Entry:  # fmt: skip
    """Return a waiting entry with an id of its own, or that of `name`, in no queue yet.

    A job is frozen as `text` has it, or as its file is at this moment. Raises JobError when the job file cannot be
    read. Whether it is a sound job, training judges.
    """
    assert (job is None) != (run is None)
    job, run = job and job.absolute(), run and run.absolute()
    if job is not None and text is None:
        text = _job_text(job)
    return Entry(name or new_id(), job, run, after=after, added=time.time(), steps=steps, hold=hold, text=text)


@lru_cache(maxsize=256)  # lists ask again and again
def _name_in(text: str) -> str:
    """Return what a job calls itself; empty where it says nothing, or nothing that can be read."""
    try:
        name = parse_toml(text).get("name")
    except UnusableFileError:
        return ""
    return name.strip() if isinstance(name, str) else ""


def new_id() -> str:
    """Return the id of an entry that is still to be made."""
    return secrets.token_hex(4)


class NewerError(Exception):
    """A file of a later version."""


def again(entry: Entry, steps: int | None = None) -> Entry:
    """Return the entry waiting for its turn; raises RunError when it runs or is done."""
    if entry.state in ("running", "done"):
        raise RunError(
            "queue.state",
            f"This is {entry.state}, so it cannot be gone on with.",
            "Resume its run with more steps to train it longer." if entry.state == "done" else "Nothing to do.",
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
    """Return the frozen text of an entry, or that of its file as it is now where it failed without a run."""
    if entry.state == "failed" and entry.run is None and entry.job is not None:
        with contextlib.suppress(JobError):
            return _job_text(entry.job)
    return entry.text


def _job_text(job: Path) -> str:
    """Return what a job file says, without a byte order mark; raises JobError when it cannot be read as text."""
    remedy = "Check the path, and save the file as UTF-8 text."
    try:
        text = read_text(job, "text")
        if len(text.encode("utf-8")) > _LARGEST:
            raise JobError("job.large", f"{job} is larger than 1 MiB, so it is not a job file.", remedy)
        return text
    except UnusableFileError as error:
        code = f"job.{_CODES.get(error.code, 'unreadable')}"
        raise JobError(code, f"Could not read the job file {job}: {error.reason}.", remedy) from None
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise JobError("job.unreadable", f"The job file {job} cannot be read: {why}.", remedy) from None


def versioned(fields: object) -> Mapping[str, object]:
    """Return what was read of a file, if this version can use it; raises NewerError, TypeError and KeyError."""
    if not isinstance(fields, dict):
        raise TypeError("it is no JSON object")
    if typed(fields, "version", int) > VERSION:
        raise NewerError
    return fields


def entry_of(name: str, fields: Mapping[str, object]) -> Entry:
    """Make an entry of the fields of its file; raises TypeError, ValueError and KeyError for what cannot be."""
    state, wish = typed(fields, "state", str), _optional(fields, "wish", str)
    if state not in get_args(State) or wish not in (None, *get_args(Wish)):
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
        wish=wish,  # type: ignore[arg-type]
        pid=_optional(fields, "pid", int),
        attempts=typed(fields, "attempts", int),
        text=_optional(fields, "text", str),
    )


def typed(fields: Mapping[str, object], key: str, kind: type[_Kind]) -> _Kind:
    """Return a field that is of this kind, a whole number for float too; raises TypeError and KeyError."""
    value = fields[key]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"{key} is {in_json(value)}")
    return value


def _optional(fields: Mapping[str, object], key: str, kind: type[_Kind]) -> _Kind | None:
    return None if fields.get(key) is None else typed(fields, key, kind)
