"""Keeps every content of a user's file that is about to be overwritten and that we did not write ourselves.

One SQLite file a dataset in the per-user folder: contents by their SHA-256, so that equal ones are stored once, and
which file held which, when. The first one kept of a file is its original and is never dropped; later ones, written by
other programs in between, go, oldest first, when the whole passes a limit. A damaged database is renamed and never
deleted: what it holds may exist nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.core.edits.safe_files import STRAY, ChangedMeanwhileError, FileSeen, remove_file, replace_file
from trainer.protocol.files import numbered, replace
from trainer.protocol.reading import read_bytes

if TYPE_CHECKING:
    import sqlite3

MOST_BYTES = 512_000_000
"""What the backups of one dataset may take before versions that are no originals are dropped."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS contents (hash BLOB PRIMARY KEY, bytes BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (
    id INTEGER PRIMARY KEY, file TEXT NOT NULL, hash BLOB NOT NULL, kept REAL NOT NULL, original INTEGER NOT NULL,
    UNIQUE (file, hash));
CREATE INDEX IF NOT EXISTS originals ON versions (file) WHERE original;
"""
# A file that was not there has no content; this hash distinguishes it from an empty one.
_ABSENT = b""
# What SQLite calls a file that it cannot use: damaged, not a database, or one with other tables.
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT", "SQLITE_ERROR")  # also begin extended names


class _DamagedError(OSError):
    """A database that SQLite cannot use, now or ever."""


class BackupVersion(NamedTuple):
    """One content of one file."""

    file: str
    """Within the dataset, parts divided by slashes."""
    kept: float
    """When, in seconds since 1970."""
    original: bool
    data: bytes | None
    """None: there was no file."""


class Written(NamedTuple):
    """What a file held before and after it was written; None where there was no file."""

    file: Path
    before: bytes | None
    after: bytes | None

    def inverse(self) -> Written:
        """Return the writing that takes this one back."""
        return Written(self.file, self.after, self.before)

    def write(self, *, durable: bool = True) -> bool:
        """Write it, unless the file holds something else than `before` by now; return whether it was written.

        What it replaces has to be kept before. Raises OSError.
        """
        try:
            if self.after is None:
                remove_file(str(self.file), FileSeen(self.before))
            else:
                replace_file(str(self.file), FileSeen(self.before), self.after, durable=durable)
        except ChangedMeanwhileError:
            return False
        return True


class Backups:
    """All backups in one folder; every call opens and closes its file, so any thread may use it."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most = folder, most_bytes
        self.damaged: Callable[[str, Path], None] = lambda root, file: None
        """Called on the thread that found the database of a dataset damaged, with its new name. Set by the session."""
        self._repairing = threading.Lock()

    def path(self, root: str) -> Path:
        """Return where the backups of a dataset lie, by its folder: a name to read and a hash to tell apart."""
        name = re.sub(r"[^\w-]+", "-", Path(root).name)[:40].strip("-") or "dataset"
        return self._folder / f"{name}-{hashlib.sha256(root.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}.sqlite"

    def keep(self, root: str, files: Iterable[tuple[str, bytes | None]]) -> None:
        """Keep what files hold now, None where there is none; on the disk when this returns, or nothing is.

        Without a backup nothing may be overwritten, so a damaged database is set aside and a new one begun: otherwise
        nothing in that dataset could ever be saved again. Raises OSError, saying what the database said.
        """
        rows = [(file, _ABSENT if data is None else hashlib.sha256(data).digest(), data) for file, data in files]
        if not rows:
            return
        try:
            self._enter(root, rows)
        except _DamagedError:
            with self._repairing:
                self._enter_after_repair(root, rows)

    def _enter_after_repair(self, root: str, rows: Sequence[tuple[str, bytes, bytes | None]]) -> None:
        with contextlib.suppress(_DamagedError):  # another thread may have been first
            self._enter(root, rows)
            return
        aside = self._set_aside(self.path(root))
        self._enter(root, rows)
        self.damaged(root, aside)

    @staticmethod
    def _set_aside(path: Path) -> Path:
        """Rename a damaged database to a free name, and return that; raises OSError."""
        names = (path.with_suffix(f"{ending}{path.suffix}") for ending in numbered(".damaged"))
        aside = next(name for name in names if not name.exists())
        with contextlib.suppress(FileNotFoundError):  # left behind, it would be rolled back into the new database
            replace(Path(f"{path}-journal"), Path(f"{aside}-journal"))
        replace(path, aside)
        return aside

    def _enter(self, root: str, rows: Sequence[tuple[str, bytes, bytes | None]]) -> None:
        now = time.time()
        with self._opened(root) as database:
            database.executemany(
                "INSERT OR IGNORE INTO contents VALUES (?, ?)",
                ((key, data) for _, key, data in rows if data is not None),
            )
            database.executemany(
                "INSERT OR IGNORE INTO versions (file, hash, kept, original)"
                " VALUES (?1, ?2, ?3, NOT EXISTS (SELECT 1 FROM versions WHERE file = ?1 AND original))",
                ((_stored(file), key, now) for file, key, _ in rows),
            )
            if self._bytes(database) > self._most:
                _drop_oldest(database, self._bytes(database) - self._most * 3 // 4)

    def originals(self, root: str) -> list[BackupVersion]:
        """Return what each file of a dataset held before we first wrote it, by name; raises OSError.

        Without the temporary files of killed writers, which are kept only so that nothing in them is lost.
        """
        return [one for one in self._versions(root, "original") if not STRAY.fullmatch(one.file.rpartition("/")[2])]

    def versions(self, root: str, file: str) -> list[BackupVersion]:
        """Return all that is kept of one file, oldest first; raises OSError."""
        return [version for version in self._versions(root, "file = ?", _stored(file)) if version.file == file]

    def restore(self, root: str, names: Sequence[str] | None = None) -> list[Written]:
        """Write originals back, byte for byte, of all files or of these; what is there now is kept first.

        Files that were absent then are removed. What another program writes at that moment stays. Returns what
        changed; raises OSError.
        """
        wanted = [version for version in self.originals(root) if names is None or version.file in names]
        present = {version.file: _read(Path(root, version.file)) for version in wanted}
        changed = [version for version in wanted if present[version.file] != version.data]
        self.keep(root, ((version.file, present[version.file]) for version in changed))
        files = [Written(Path(root, version.file), present[version.file], version.data) for version in changed]
        return [written for written in files if written.write()]

    def _versions(self, root: str, where: str, *values: str | bytes) -> list[BackupVersion]:
        if not self.path(root).exists():
            return []
        query = (
            "SELECT file, kept, original, bytes FROM versions LEFT JOIN contents USING (hash)"
            f" WHERE {where} ORDER BY file, versions.id"
        )
        with self._opened(root) as database:
            return [
                BackupVersion(_named(file), kept, bool(first), data)
                for file, kept, first, data in database.execute(query, values)
            ]

    @contextlib.contextmanager
    def _opened(self, root: str) -> Iterator[sqlite3.Connection]:
        import sqlite3

        path = self.path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # SQLite would wait forever at a pipe
            raise _DamagedError(None, "it is not a file", str(path))
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=30.0)) as database, database:
                database.executescript(_SCHEMA)
                yield database
        except sqlite3.Error as fault:
            kind = _DamagedError if getattr(fault, "sqlite_errorname", "").startswith(_DAMAGE) else OSError
            raise kind(None, str(fault), str(path)) from fault

    @staticmethod
    def _bytes(database: sqlite3.Connection) -> int:
        pages, free, size = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


def _drop_oldest(database: sqlite3.Connection, surplus: int) -> None:
    """Drop versions that are no originals, oldest first, until so many bytes are free or none is left."""
    dropped = []
    for number, size in database.execute(
        "SELECT versions.id, length(bytes) FROM versions JOIN contents USING (hash)"
        " WHERE NOT original ORDER BY versions.id"
    ):
        if surplus <= 0:
            break
        dropped.append((number,))
        surplus -= size
    database.executemany("DELETE FROM versions WHERE id = ?", dropped)
    database.execute("DELETE FROM contents WHERE hash NOT IN (SELECT hash FROM versions)")


def _stored(file: str) -> str | bytes:
    """Return a file's name as SQLite takes it: bytes where it is no Unicode, which Linux allows."""
    try:
        file.encode("utf-8")
    except UnicodeEncodeError:
        return file.encode("utf-8", "surrogatepass")
    return file


def _named(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")


def _read(path: Path) -> bytes | None:
    try:
        return read_bytes(path, "image")  # masks too
    except FileNotFoundError:
        return None
