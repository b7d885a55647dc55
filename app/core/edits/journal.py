r"""Keeps every edit on disk from the moment it is made until its files are written, so that no crash loses one.

A journal is a text file of JSON lines in the per-user folder, one a session, held by a lock as long as its process
lives. It says paths, not ids::

    {"impasto": "journal", "version": 1, "closed": false}
    {"edit": 7, "part": 0, "name": "Rename red to blue in 2 captions", "root": "/pictures/cats",
     "changes": [["a.jpg", "caption", ["red"], "blue"], ["b.jpg", "caption", ["red, tall"], "blue, tall"]]}
    {"end": 7}
    {"saved": 7, "root": "/pictures/cats", "values": [["a.jpg", "caption"], ["b.jpg", "caption"]]}

An edit whose end is missing was being made when the process died: its files were not touched, and it counts as never
made. A last line that is torn is cut. What is saved is no longer needed, so the file is rewritten from time to time.

Of each value only the newest edit counts. Edits made on top of each other are one request, which may replace whatever
any of them may have written; an edit that was not made on top of the one before it replaces that, as the user then saw
something else on disk. So an edit that was overtaken by a newer one does not come back after a kill.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_args

from app.core.edits.save_state import Key, SaveRequest
from app.core.library import Field, FolderField
from trainer.protocol import locks
from trainer.protocol.files import replace as replace_file
from trainer.protocol.files import write_bytes
from trainer.protocol.reading import parse_json, read_bytes

_log = logging.getLogger(__name__)
_FIELDS = frozenset((*get_args(Field), *get_args(FolderField)))
_LARGE = 1_000_000  # bytes; read in some 20 ms at the next start


class Journal:
    """The journal of this session. `append` and `end` belong to the library's thread, the rest to the writer's.

    Where it cannot be written, edits go on without it and straight to their files: `fault` says so until `roll` mends
    it. Once it is closed, what a thread still does that the end did not wait for changes nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.fault: OSError | None = None
        self._folder = folder
        # By time, so that the journals of several crashed sessions are read in the order of their edits.
        self._path = folder / f"{time.time_ns():020d}-{secrets.token_hex(4)}.jsonl"
        self._access = threading.Lock()
        self._owned = contextlib.ExitStack()
        self._file: BinaryIO | None = None
        self._closed = False
        self._number = 0
        self._part = 0
        self._owed: list[dict[str, Any]] = []
        """Lines that wait for the end of the edit that is being entered: they would be cut with it if it fails."""
        self._start = 0
        """Where the edit that is being entered begins in the file."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._owned.enter_context(locks.held(_lock_of(self._path), patience=5.0))
            self._renew([])
        except OSError as fault:
            self.fault = fault

    def append(self, name: str, requests: Sequence[SaveRequest]) -> list[SaveRequest]:
        """Enter changes of the edit that `end` will complete; return them with its number.

        They reach the operating system at once, which keeps them whatever happens to this process.
        """
        with self._access:
            number = self._number + 1
            if self._part == 0 and self._file and not self.fault:
                self._start = self._file.tell()
            entered = [replace(request, number=number, first=number) for request in requests]
            self._write(_edit_lines(name, entered, self._part))
            self._part += 1
        return entered

    def end(self) -> None:
        """Complete the edit: from here on it is made."""
        with self._access:
            self._number += 1
            self._write([{"end": self._number}])
            self._part = 0
            self._write_owed()

    def sync(self) -> None:
        """Wait until all entries are on the disk itself, where they outlive a power cut too."""
        try:
            if file := self._file:
                os.fsync(file.fileno())
        except ValueError:  # closed meanwhile
            return
        except OSError as fault:
            self.fault = fault

    def saved(self, requests: Iterable[SaveRequest]) -> None:
        """Note that these are in their files."""
        lines = [
            {"saved": number, "root": root, "values": [request.key[1:] for request in group]}
            for (number, root), group in groupby(requests, lambda request: (request.number, request.key.root))
        ]
        with self._access:
            self._owed += lines
            if self._part == 0:
                self._write_owed()

    def roll(self, requests: Sequence[SaveRequest], taken: int) -> None:
        """Begin the file anew with what is not saved yet, if it has grown large or is at fault.

        Not while an edit is being entered, or made but unknown to `requests`: `taken` is the last that they know of.
        """
        with self._access:
            if self._closed:
                return
            grown = self._file is None or self._file.tell() > max(_LARGE, 1000 * len(requests))
            if self._part == 0 and self._number == taken and (grown or self.fault):
                try:
                    self._renew(requests)
                    self.fault = None
                except OSError as fault:
                    self.fault = fault

    def adopt(self) -> Left:
        """Take over what journals of sessions that ended without saving all hold.

        They are removed once this journal holds it all on the disk; a kill at any moment leaves one or both. On the
        library's thread, and not while an edit is being made.
        """
        found: dict[Key, SaveRequest] = {}
        crashed: set[Key] = set()
        left = []
        for path in sorted(self._folder.glob("*.jsonl")):
            if path != self._path and not locks.is_held(_lock_of(path)):
                requests, closed, damaged = read(path)
                left.append((path, damaged))
                for key, request in requests.items():
                    found[key] = found[key].then(request) if key in found else request
                if not closed:
                    crashed.update(requests)
        adopted = self.append("Not saved before", list(found.values()))
        self.end()
        self.sync()
        if not self.fault:
            for path, damaged in left:
                if damaged:  # behind the damage there may be edits that can be saved by hand
                    _log.info("the journal %s is damaged; it is kept with the ending .damaged", path)
                    replace_file(path, path.with_suffix(".damaged"))
                path.unlink(missing_ok=True)
                _lock_of(path).unlink(missing_ok=True)
        return Left(adopted, crashed)

    def close(self, requests: Sequence[SaveRequest]) -> None:
        """End the session, leaving only what could not be saved for the next start; no file where that is nothing."""
        with self._access:
            self._closed = True
            try:
                self._renew(requests, closed=True)
                self._shut()
                if not requests:
                    self._path.unlink()
            except OSError as fault:  # it stays as it is, which holds more than is needed
                self.fault = fault
            self._shut()
            self._owned.close()
            if not requests:
                _lock_of(self._path).unlink(missing_ok=True)

    def _renew(self, requests: Sequence[SaveRequest], *, closed: bool = False) -> None:
        """Rewrite the file in one step; on an error the old one stays in use."""
        head = {"impasto": "journal", "version": 1, "closed": closed}
        lines: list[dict[str, Any]] = [
            head,
            *_edit_lines("Not saved yet", sorted(requests, key=lambda request: request.number), 0),
        ]
        if requests:
            lines.append({"end": self._number})
        self._shut()  # Windows replaces no file that is open
        try:
            write_bytes(self._path, b"".join(map(_encoded, lines)))
        finally:
            if self._path.exists():
                self._file = self._path.open("r+b", buffering=0)
                self._file.seek(0, os.SEEK_END)

    def _shut(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _write_owed(self) -> None:
        if self._owed:
            self._start = self._file.tell() if self._file else 0
            self._write(self._owed)
            self._owed = []

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines; where that fails, cut the edit that they belong to: all of it is there, or nothing."""
        if self.fault or self._file is None:
            return
        data = b"".join(map(_encoded, lines))
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError as fault:
            self.fault = fault
            with contextlib.suppress(OSError):  # then it stays without an end, and counts as never made
                self._file.truncate(self._start)
                self._file.seek(self._start)


class Left(NamedTuple):
    """What earlier sessions left unwritten."""

    requests: list[SaveRequest]
    """One for each value."""
    crashed: Collection[Key]
    """The values among them whose session was not closed, but stopped."""


def read(path: Path) -> tuple[dict[Key, SaveRequest], bool, bool]:
    """Return what a journal holds that may not be on disk yet, whether its session was closed, whether it is damaged.

    Only complete edits count. A torn last line, and whatever follows a damaged one, is skipped. Raises OSError.
    """
    found: dict[Key, list[SaveRequest]] = {}
    open_edit: list[SaveRequest] = []
    closed = damaged = False
    # The part after the last line end is empty, or torn.
    for line in read_bytes(path, "listing").split(b"\n")[:-1]:
        try:
            entry = _checked(parse_json(line))
        except (ValueError, TypeError):
            damaged = True
            break
        match entry:
            case {"impasto": "journal", "closed": bool(value)}:
                closed = value
            case {"edit": int(number), "part": int(part), "root": str(root), "changes": list(changes)}:
                if part == 0:  # what came before has no end
                    open_edit = []
                open_edit += (_request(root, number, change) for change in changes)
            case {"end": int()}:
                for request in open_edit:
                    before = found.get(request.key, [])
                    found[request.key] = [*before, request] if before and before[-1].leads_to(request) else [request]
                open_edit = []
            case {"saved": int(number), "root": str(root), "values": list(values)}:
                for name, field in values:
                    key = Key(root, name, field)
                    found[key] = [request for request in found.get(key, []) if request.number > number]
    return {key: reduce(SaveRequest.followed_by, chain) for key, chain in found.items() if chain}, closed, damaged


def _checked(entry: Any) -> Any:
    """Return a parsed line; raises ValueError and TypeError for values that would fail whoever writes them later."""
    match entry:
        case {"changes": list(changes)}:
            keys = [(name, field) for name, field, _, _ in changes]
            values = [value for _, _, bases, desired in changes for value in (*bases, desired)]
            if not all(bases for _, _, bases, _ in changes):
                raise ValueError("a change replaces nothing")
        case {"values": list(pairs)}:
            keys, values = [(name, field) for name, field in pairs], []
        case _:
            return entry
    if any(not isinstance(name, str) or "\0" in name or field not in _FIELDS for name, field in keys):
        raise ValueError("it names no value of an image or folder")
    for value in values:
        if isinstance(value, list):
            _, _, _, _ = map(float, value)  # a crop
        elif not isinstance(value, str | int | None):
            raise TypeError("it has a value of another type")
    return entry


def _request(root: str, number: int, change: list[Any]) -> SaveRequest:
    name, field, bases, desired = change
    bases = tuple(map(_value, bases))
    return SaveRequest(Key(root, name, field), bases, _value(desired), number=number, first=number)


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # a crop


def _edit_lines(name: str, requests: Iterable[SaveRequest], part: int) -> Iterable[dict[str, Any]]:
    for (number, root), group in groupby(requests, lambda request: (request.number, request.key.root)):
        changes = [(request.key.name, request.key.field, request.bases, request.desired) for request in group]
        yield {"edit": number, "part": part, "name": name, "root": root, "changes": changes}
        part += 1


def _encoded(line: dict[str, Any]) -> bytes:
    # Escapes carry what UTF-8 cannot, such as half of a pair from a damaged file name.
    return json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")
