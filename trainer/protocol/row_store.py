"""Cache of reproducible values in one SQLite file, with a size limit and checksums; a damaged file is replaced."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_VERSION = 2
_SCHEMA = f"""
create table if not exists entries (
    key blob primary key, data blob not null, sum blob not null, used integer not null) without rowid;
create index if not exists oldest on entries (used);
pragma user_version = {_VERSION};
"""
_WRITES = 32
"""Entries per transaction; a crash loses at most that many entries, which can be rebuilt."""
_DAY = 86_400
_PAGES = ("page_count", "freelist_count", "page_size")
# Errors that may be temporary: a busy or full disk, missing permissions. Any other means that the file is damaged.
_TRANSIENT = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip
# Damaged column names, and messages that contain them, are not UTF-8, for which the sqlite3 module raises ValueError.
_FAULTS = (sqlite3.Error, ValueError, TypeError, SystemError)


def key_of(path: Path, *facts: int) -> bytes:
    """Return a key for a value derived from a file; it depends on the path and on all `facts`."""
    named = os.fsencode(path) + "".join(f"|{fact}" for fact in facts).encode()
    return hashlib.blake2b(named, digest_size=16).digest()


def checksum(*parts: object) -> str:
    """Return a short checksum of values with a stable `repr`, for cache entries in JSON."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


class RowStore:
    """Key-value store on disk that several threads and processes can share.

    A value whose checksum does not match counts as missing, and a file that SQLite cannot use is replaced by an empty
    one. If the disk cannot be written, the store stays empty and raises no error.
    """

    def __init__(self, file: Path, limit: int) -> None:
        """Create a store that opens its file on first use.

        If the file grows above ``limit`` bytes, the least recently used values are deleted.
        """
        self._file, self._limit = file, limit
        self._lock = threading.Lock()
        self._unwritten: dict[bytes, bytes] = {}
        self._used: set[bytes] = set()
        self._size = 0
        self._database: sqlite3.Connection | None = None
        self._failed = False

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if it is missing or damaged."""
        with self._lock:
            if key in self._unwritten:
                return self._unwritten[key]
            rows = self._ask("select data, sum, used from entries where key = ?", (key,))
            if not rows:
                return None
            data, checksum, used = rows[0]
            if not isinstance(data, bytes) or checksum != _sum(key, data):
                return None  # the caller computes the value again, and `put` replaces this one
            if not isinstance(used, int) or used < _today():
                self._used.add(key)
            return data

    def has(self, key: bytes) -> bool:
        """Return whether a key has a value, without checking its checksum."""
        with self._lock:
            return key in self._unwritten or bool(self._ask("select 1 from entries where key = ?", (key,)))

    def put(self, key: bytes, data: bytes) -> None:
        """Store a value; it is written to disk in a batch with later ones, or by `flush`."""
        with self._lock:
            self._unwritten[key] = data
            if len(self._unwritten) >= _WRITES:
                self._write()

    def flush(self) -> None:
        """Write all pending values."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write pending values and close the file; later calls, such as from a stuck thread, do not open it again."""
        with self._lock:
            self._write()
            self._failed = True
            if self._database:
                self._database.close()
                self._database = None

    def _write(self) -> None:
        if not (self._unwritten or self._used):
            return
        rows = [(key, data, _sum(key, data), _today()) for key, data in self._unwritten.items()]
        used = [(_today(), key) for key in self._used]
        self._unwritten, self._used = {}, set()
        with self._repairing() as database:
            if database:
                with database:
                    database.executemany("insert or replace into entries values (?, ?, ?, ?)", rows)
                    database.executemany("update entries set used = ? where key = ?", used)
                self._size += sum(len(data) for _, data, _, _ in rows)
                if self._size > self._limit:
                    self._evict(database)

    def _evict(self, database: sqlite3.Connection) -> None:
        """Delete the least recently used values, down to nine tenths of the limit."""
        over = _stored(database) - self._limit * 9 // 10
        gone = []
        if over > 0:
            for key, size in database.execute("select key, length(data) from entries order by used"):
                gone.append((key,))
                over -= size
                if over <= 0:
                    break
        with database:
            database.executemany("delete from entries where key = ?", gone)
        # SQLite reuses freed pages, so the file stays near its limit without a vacuum, which would copy it.
        self._size = _stored(database)

    def _ask(self, request: str, values: Iterable[object]) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        with self._repairing() as database:
            if database:
                rows = database.execute(request, tuple(values)).fetchall()
        return rows

    @contextlib.contextmanager
    def _repairing(self) -> Iterator[sqlite3.Connection | None]:
        """Yield the open database, or None; replace it with an empty one if it turns out to be damaged."""
        try:
            yield self._connected()
        except _FAULTS as error:
            if not _is_transient(error):
                self._start_again()

    def _connected(self) -> sqlite3.Connection | None:
        if self._database is None and not self._failed:
            try:
                self._open()
            except _FAULTS as error:
                if _is_transient(error):
                    self._failed = True
                else:
                    self._start_again()
        return self._database

    def _open(self) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if self._file.exists() and not self._file.is_file():  # SQLite would block forever on a pipe
                self._failed = True
                return
        except OSError:
            self._failed = True
            return
        # One connection for all threads: `_lock` lets in one at a time.
        database = sqlite3.connect(self._file, timeout=1.0, check_same_thread=False)
        try:
            if database.execute("pragma user_version").fetchone()[0] not in (0, _VERSION):
                raise sqlite3.DatabaseError("another version wrote it")
            # In this order, because switching to WAL with synchronous on waits for the disk, 10 ms for a new file.
            database.executescript("pragma synchronous = off; pragma journal_mode = wal;" + _SCHEMA)
            database.execute("select key, data, sum, used from entries limit 1").fetchone()
            self._size = _stored(database)
        except BaseException:
            database.close()
            raise
        self._database = database

    def _start_again(self) -> None:
        if self._database:
            self._database.close()
            self._database = None
        try:
            for ending in ("", "-wal", "-shm"):
                self._file.with_name(self._file.name + ending).unlink(missing_ok=True)
            self._open()
        except (OSError, *_FAULTS):
            self._failed = True


def _sum(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=8).digest()


def _is_transient(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in _TRANSIENT


def _stored(database: sqlite3.Connection) -> int:
    """Return the total size in bytes of the database's used pages."""
    pages, free, size = (database.execute(f"pragma {name}").fetchone()[0] for name in _PAGES)
    return int((pages - free) * size)


def _today() -> int:
    return int(time.time()) // _DAY
