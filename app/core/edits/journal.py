r"""Journal of edits that are not in their files yet, so that none is lost in a crash.

A journal is a JSON Lines file in the per-user folder, one per session, locked while its process runs. It stores paths,
not ids::

    {"impasto": "journal", "version": 1, "closed": false}
    {"edit": 7, "part": 0, "name": "Rename red to blue in 2 captions", "root": "/images/cats",
     "changes": [["a.jpg", "caption", ["red"], "blue"], ["b.jpg", "caption", ["red, tall"], "blue, tall"]]}
    {"end": 7}
    {"saved": 7, "root": "/images/cats", "values": [["a.jpg", "caption"], ["b.jpg", "caption"]]}

An edit without an "end" line was incomplete when the process died: no files were changed, so it is ignored, as is an
incomplete last line. Saved values are no longer needed, so the file is rewritten from time to time.

Only the newest edit of each value counts. Edits made on top of each other form one request, which may overwrite
any value that one of the earlier edits may have written. An edit that was not made on top of the previous one
supersedes it, because the user edited a different value from disk. A superseded edit therefore does not come back after
a kill.
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
from trainer.protocol.records import RENAMED_KEYS

_log = logging.getLogger(__name__)
_FIELDS = frozenset((*get_args(Field), *get_args(FolderField)))
_LARGE = 1_000_000  # bytes; read in some 20 ms at the next start


class Journal:
    """The journal of this session. `append`, `end` and `adopt` belong to the library's thread.

    If the journal cannot be written, edits are saved without it, and `fault` is set until `roll` succeeds. After
    `close`, calls from a writer thread that is still running have no effect.
    """

    def __init__(self, folder: Path) -> None:
        self.fault: OSError | None = None
        self._folder = folder
        # Named by time, so that journals of several crashed sessions are read in order.
        self._path = folder / f"{time.time_ns():020d}-{secrets.token_hex(4)}.jsonl"
        self._access = threading.Lock()
        self._lock = contextlib.ExitStack()
        self._file: BinaryIO | None = None
        self._closed = False
        self._number = 0
        self._part = 0
        self._deferred: list[dict[str, Any]] = []
        """Lines held back until the current edit ends: if it fails, the file is truncated to where the edit begins."""
        self._start = 0
        """File offset at which the current edit begins."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(locks.hold_lock(_lock_of(self._path), patience=5.0))
            self._rewrite([])
        except OSError as fault:
            self.fault = fault

    def append(self, name: str, requests: Sequence[SaveRequest]) -> list[SaveRequest]:
        """Append changes to the edit that `end` will complete; return them with the edit's number.

        They are passed to the operating system immediately, so they survive a crash of this process.
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
        """Complete the current edit; without this, it is ignored on recovery."""
        with self._access:
            self._number += 1
            self._write([{"end": self._number}])
            self._part = 0
            self._write_deferred()

    def sync(self) -> None:
        """Flush all entries to disk, so that they survive a power failure."""
        try:
            if file := self._file:
                os.fsync(file.fileno())
        except ValueError:  # the file has been closed
            return
        except OSError as fault:
            self.fault = fault

    def saved(self, requests: Iterable[SaveRequest]) -> None:
        """Record that the values of these requests are saved in their files."""
        lines = [
            {"saved": number, "root": root, "values": [request.key[1:] for request in group]}
            for (number, root), group in groupby(requests, lambda request: (request.number, request.key.root))
        ]
        with self._access:
            self._deferred += lines
            if self._part == 0:
                self._write_deferred()

    def roll(self, requests: Sequence[SaveRequest], taken: int) -> None:
        """Rewrite the file with only the unsaved `requests` if it has grown large or could not be written.

        Does nothing while an edit is being appended, or if `requests` do not include the latest edit; `taken` is the
        number of the latest edit that they include.
        """
        with self._access:
            if self._closed:
                return
            grown = self._file is None or self._file.tell() > max(_LARGE, 1000 * len(requests))
            if self._part == 0 and self._number == taken and (grown or self.fault):
                try:
                    self._rewrite(requests)
                    self.fault = None
                except OSError as fault:
                    self.fault = fault

    def adopt(self) -> Left:
        """Take over the unsaved edits in journals of earlier sessions.

        Their journals are removed after all of their edits have been flushed to this one, so a kill at any time leaves
        at least one copy. Do not call it during an edit.
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
                if damaged:  # edits after the damage might still be recovered by hand
                    _log.info("The journal %s is damaged; it is kept with the suffix .damaged", path)
                    replace_file(path, path.with_suffix(".damaged"))
                path.unlink(missing_ok=True)
                _lock_of(path).unlink(missing_ok=True)
        return Left(adopted, crashed)

    def close(self, requests: Sequence[SaveRequest]) -> None:
        """End the session; keep only the unsaved `requests` for the next start, or no file if there are none."""
        with self._access:
            self._closed = True
            try:
                self._rewrite(requests, closed=True)
                self._close_file()
                if not requests:
                    self._path.unlink()
            except OSError as fault:  # the old file stays, which contains more than is needed
                self.fault = fault
            self._close_file()
            self._lock.close()
            if not requests:
                _lock_of(self._path).unlink(missing_ok=True)

    def _rewrite(self, requests: Sequence[SaveRequest], *, closed: bool = False) -> None:
        """Rewrite the file atomically; if that fails, the old file stays in use."""
        head = {"impasto": "journal", "version": 1, "closed": closed}
        lines: list[dict[str, Any]] = [
            head,
            *_edit_lines("Not saved yet", sorted(requests, key=lambda request: request.number), 0),
        ]
        if requests:
            lines.append({"end": self._number})
        self._close_file()  # Windows cannot replace an open file
        try:
            write_bytes(self._path, b"".join(map(_encoded, lines)))
        finally:
            if self._path.exists():
                self._file = self._path.open("r+b", buffering=0)
                self._file.seek(0, os.SEEK_END)

    def _close_file(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _write_deferred(self) -> None:
        if self._deferred:
            self._start = self._file.tell() if self._file else 0
            self._write(self._deferred)
            self._deferred = []

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines; if that fails, cut off the whole edit, so that no partial edit remains."""
        if self.fault or self._file is None:
            return
        data = b"".join(map(_encoded, lines))
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError as fault:
            self.fault = fault
            with contextlib.suppress(OSError):  # otherwise it stays without its end line and is ignored
                self._file.truncate(self._start)
                self._file.seek(self._start)


class Left(NamedTuple):
    """Unsaved edits of earlier sessions."""

    requests: list[SaveRequest]
    """One request per value."""
    crashed: Collection[Key]
    """Keys of requests whose session crashed instead of being closed."""


def read(path: Path) -> tuple[dict[Key, SaveRequest], bool, bool]:
    """Return a journal's possibly unsaved edits, whether its session was closed, and whether it is damaged.

    Incomplete edits, an incomplete last line and anything after a damaged line are skipped. Raises OSError.
    """
    found: dict[Key, list[SaveRequest]] = {}
    open_edit: list[SaveRequest] = []
    closed = damaged = False
    # The part after the last line break is empty or incomplete.
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
                if part == 0:  # the edit before it has no end line
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
    """Check a parsed line and return it with current field names; raises ValueError or TypeError."""
    match entry:
        case {"changes": list(changes)}:
            entry["changes"] = changes = [[name, _present(field), *more] for name, field, *more in changes]
            keys = [(name, field) for name, field, _, _ in changes]
            values = [value for _, _, bases, desired in changes for value in (*bases, desired)]
            if not all(bases for _, _, bases, _ in changes):
                raise ValueError("a change replaces nothing")
        case {"values": list(pairs)}:
            entry["values"] = keys = [(name, _present(field)) for name, field in pairs]
            values = []
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


def _present(field: str) -> str:
    """Return the current name of a field, given that name or its name in version 0.1.0."""
    return RENAMED_KEYS.get(f"folder.{field}", field)


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
    # ASCII escapes can hold what UTF-8 cannot, such as a lone surrogate from a damaged file name.
    return json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")
