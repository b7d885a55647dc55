"""Back up every version of a user's file that Impasto is about to overwrite and did not write itself.

Each dataset has one SQLite file in the per-user folder. It stores contents by SHA-256, so that identical ones are
stored only once, and records which file had which contents when. The first version of a file is its original and is
never dropped. Later versions, which other programs wrote in between, are dropped oldest first when the database exceeds
a size limit. A damaged database is renamed, never deleted, because its contents may exist nowhere else.
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
"""Maximum size in bytes of a dataset's backups; above it, versions other than originals are dropped."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS contents (hash BLOB PRIMARY KEY, bytes BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (
    id INTEGER PRIMARY KEY, file TEXT NOT NULL, hash BLOB NOT NULL, kept REAL NOT NULL, original INTEGER NOT NULL,
    UNIQUE (file, hash));
CREATE INDEX IF NOT EXISTS originals ON versions (file) WHERE original;
"""
# Stands for an absent file, as opposed to an empty one.
_ABSENT = b""
# SQLite errors for an unusable file: damaged, not a database, or a database with other tables.
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT", "SQLITE_ERROR")  # also prefixes of extended names


class _DamagedError(OSError):
    """Raised when SQLite cannot use the database and trying again will not help."""


class BackupVersion(NamedTuple):
    """A backed-up version of a file."""

    file: str
    """Path within the dataset, with slashes."""
    kept: float
    """Time of the backup in seconds since 1970."""
    original: bool
    data: bytes | None
    """Contents; None if the file did not exist."""


class Written(NamedTuple):
    """Contents of a file before and after a write; None if the file did not exist."""

    file: Path
    before: bytes | None
    after: bytes | None

    def inverse(self) -> Written:
        """Return the write that undoes this one."""
        return Written(self.file, self.after, self.before)

    def write(self, *, durable: bool = True) -> bool:
        """Write the file if it still contains `before`; return whether it was written.

        The caller must back up the old contents first. Raises OSError.
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
    """Backup databases in one folder; each call opens and closes its database, so any thread may use it."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most = folder, most_bytes
        self.damaged: Callable[[str, Path], None] = lambda root, file: None
        """Called with a dataset and the new path of its damaged database, on any thread. Set by the session."""
        self._repairing = threading.Lock()

    def path(self, root: str) -> Path:
        """Return the path of a dataset's backup database: a readable name plus a hash that makes it unique."""
        name = re.sub(r"[^\w-]+", "-", Path(root).name)[:40].strip("-") or "dataset"
        return self._folder / f"{name}-{hashlib.sha256(root.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}.sqlite"

    def keep(self, root: str, files: Iterable[tuple[str, bytes | None]]) -> None:
        """Back up the given contents of files (None for a missing file), either all of them or none.

        A damaged database is renamed and a new one created. Otherwise the dataset could never be saved again, because
        nothing may be overwritten without a backup. Raises OSError with the database's error.
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
        with contextlib.suppress(_DamagedError):  # another thread may have repaired it first
            self._enter(root, rows)
            return
        renamed = self._rename_damaged(self.path(root))
        self._enter(root, rows)
        self.damaged(root, renamed)

    @staticmethod
    def _rename_damaged(path: Path) -> Path:
        """Rename a damaged database to a free name and return the new path; raises OSError."""
        names = (path.with_suffix(f"{ending}{path.suffix}") for ending in numbered(".damaged"))
        renamed = next(name for name in names if not name.exists())
        with contextlib.suppress(FileNotFoundError):  # SQLite would apply a leftover journal to the new database
            replace(Path(f"{path}-journal"), Path(f"{renamed}-journal"))
        replace(path, renamed)
        return renamed

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
        """Return the original version of each file in a dataset, sorted by name; raises OSError.

        Leaves out the temporary files of killed processes, which are backed up only to preserve their contents.
        """
        return [one for one in self._versions(root, "original") if not STRAY.fullmatch(one.file.rpartition("/")[2])]

    def versions(self, root: str, file: str) -> list[BackupVersion]:
        """Return all versions of one file, oldest first; raises OSError."""
        return [version for version in self._versions(root, "file = ?", _stored(file)) if version.file == file]

    def restore(self, root: str, names: Sequence[str] | None = None) -> list[Written]:
        """Restore the originals of all files, or only of those in `names`, after backing up the current versions.

        Files that did not exist originally are removed. A file that another program is changing is left alone.
        Returns the changes; raises OSError.
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
        if path.exists() and not path.is_file():  # SQLite would block forever on a pipe
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
    """Drop versions, oldest first, until `surplus` bytes are freed or only originals are left."""
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
    """Return a file name as stored in SQLite: as bytes if it is not valid Unicode, which Linux allows."""
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
