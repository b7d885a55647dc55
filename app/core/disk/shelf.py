"""The thumbnails kept between sittings: one SQLite file of small JPEGs, bounded, rebuilt when damaged."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_SCHEMA = """
create table if not exists thumbnails (key blob primary key, data blob not null, used integer not null) without rowid;
create index if not exists oldest on thumbnails (used);
"""
_WRITES = 32
"""Thumbnails written in one transaction; what a crash loses is made again."""
_DAY = 86_400
_PAGES = ("page_count", "freelist_count", "page_size")


def key_of(path: Path, changed_ns: int, size: int, pixels: int) -> bytes:
    """Return the name of a thumbnail: another one when the file is another, or was only touched."""
    return hashlib.blake2b(os.fsencode(path) + f"|{changed_ns}|{size}|{pixels}".encode(), digest_size=16).digest()


class Shelf:
    """Thumbnails on disk, for several threads. Without a disk that takes them it is empty, and work goes on."""

    def __init__(self, file: Path, limit: int) -> None:
        self._file, self._limit = file, limit
        self._lock = threading.Lock()
        self._unwritten: dict[bytes, bytes] = {}
        self._used: set[bytes] = set()
        self._size = 0
        self._database: sqlite3.Connection | None = None
        self._failed = False

    def get(self, key: bytes) -> bytes | None:
        """Return a thumbnail as JPEG, None where there is none."""
        with self._lock:
            if key in self._unwritten:
                return self._unwritten[key]
            rows = self._ask("select data, used from thumbnails where key = ?", (key,))
            if not rows:
                return None
            data, used = rows[0]
            if used < _today():
                self._used.add(key)
            return bytes(data)

    def has(self, key: bytes) -> bool:
        """Tell whether a thumbnail is there."""
        with self._lock:
            return key in self._unwritten or bool(self._ask("select 1 from thumbnails where key = ?", (key,)))

    def put(self, key: bytes, data: bytes) -> None:
        """Keep a thumbnail; it is on disk after the next few, or when `flush` is called."""
        with self._lock:
            self._unwritten[key] = data
            if len(self._unwritten) >= _WRITES:
                self._write()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write what waits, and let the file go for good: a thread that was stuck may come yet."""
        with self._lock:
            self._write()
            self._failed = True
            if self._database:
                self._database.close()
                self._database = None

    def _write(self) -> None:
        if not (self._unwritten or self._used):
            return
        rows = [(key, data, _today()) for key, data in self._unwritten.items()]
        used = [(_today(), key) for key in self._used]
        self._unwritten, self._used = {}, set()
        with self._mending() as database:
            if database:
                with database:
                    database.executemany("insert or replace into thumbnails values (?, ?, ?)", rows)
                    database.executemany("update thumbnails set used = ? where key = ?", used)
                self._size += sum(len(data) for _, data, _ in rows)
                if self._size > self._limit:
                    self._evict(database)

    def _evict(self, database: sqlite3.Connection) -> None:
        """Let the thumbnails go that were unused for longest, down to nine tenths of the limit."""
        over = _stored(database) - self._limit * 9 // 10
        gone = []
        if over > 0:
            for key, size in database.execute("select key, length(data) from thumbnails order by used"):
                gone.append((key,))
                over -= size
                if over <= 0:
                    break
        with database:
            database.executemany("delete from thumbnails where key = ?", gone)
        # Freed pages are used again, so that the file stays near its limit without being copied.
        self._size = _stored(database)

    def _ask(self, question: str, values: Iterable[object]) -> list[tuple[bytes, int]]:
        rows: list[tuple[bytes, int]] = []
        with self._mending() as database:
            if database:
                rows = database.execute(question, tuple(values)).fetchall()
        return rows

    @contextlib.contextmanager
    def _mending(self) -> Iterator[sqlite3.Connection | None]:
        """Give the open database, or None; a damaged one is thrown away, as all in it can be made again."""
        try:
            yield self._connected()
        except sqlite3.OperationalError:  # locked, full or read-only: go on without
            return
        except sqlite3.DatabaseError:
            self._start_anew()

    def _connected(self) -> sqlite3.Connection | None:
        if self._database is None and not self._failed:
            try:
                self._open()
            except sqlite3.DatabaseError:
                self._start_anew()
        return self._database

    def _open(self) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # One connection for all threads: `_lock` lets in one at a time.
            database = sqlite3.connect(self._file, timeout=1.0, check_same_thread=False)
        except (OSError, sqlite3.OperationalError):
            self._failed = True
            return
        try:
            database.executescript("pragma journal_mode = wal; pragma synchronous = off;" + _SCHEMA)
            self._size = _stored(database)
        except sqlite3.DatabaseError:
            database.close()
            raise
        self._database = database

    def _start_anew(self) -> None:
        if self._database:
            self._database.close()
            self._database = None
        try:
            for ending in ("", "-wal", "-shm"):
                self._file.with_name(self._file.name + ending).unlink(missing_ok=True)
            self._open()
        except (OSError, sqlite3.DatabaseError):
            self._failed = True


def _stored(database: sqlite3.Connection) -> int:
    """Return the bytes of the pages in use."""
    pages, free, size = (database.execute(f"pragma {name}").fetchone()[0] for name in _PAGES)
    return int((pages - free) * size)


def _today() -> int:
    return int(time.time()) // _DAY
