"""A dataset on disk, a session of edits over it, and faults of the disk: what the tests of captions are played in."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from app.core.edits.backups import Backups
from app.core.edits.history import Edit, History
from app.core.edits.journal import Journal
from app.core.edits.saver import Saver
from app.core.edits.writer import Writer
from app.core.library import Field, Folder, Library, LibraryImage, Value, ValueChange
from trainer.dataset.caption_files import decode_caption, read_metadata
from trainer.dataset.sidecar import read_sidecar

FIELDS = ("caption", "rating", "excluded", "crop")
GIVEN: dict[str, dict[str, bytes]] = {
    "a.jpg": {".txt": b"cat, dog\n"},
    "b.jpg": {".caption": b"bird"},
    "c.jpg": {},
    "d.jpg": {".txt": b"caf\xe9"},
}


class Killed(BaseException):
    """The process ends here: nothing of it may touch the disk any more."""


class Faults:
    """Lets the operating system refuse or end the process at a chosen moment, by Python's audit hooks.

    They see every opening, renaming and removing of this process before it happens, wherever it comes from.
    """

    def __init__(self) -> None:
        self.inside: str = ""
        self.fault: OSError | None = None
        """What every write within the folder `inside` ends in."""
        self.kill_at: int | None = None
        """How many touches of the disk from now the process dies."""
        self.touched: Callable[[str, Path], None] | None = None
        """Is called with the event and its path before every write."""
        self.dead = False
        self.home = ""
        sys.addaudithook(self._hook)

    def clear(self) -> None:
        """Back to a sound disk."""
        self.fault = self.kill_at = self.touched = None
        self.dead = False

    def _hook(self, event: str, values: tuple[object, ...]) -> None:
        if not self.inside or event not in ("open", "os.rename", "os.remove", "sqlite3.connect"):
            return
        path = os.fsdecode(values[0]) if isinstance(values[0], str | bytes | os.PathLike) else ""
        writes = event != "open" or (isinstance(values[2], int) and bool(values[2] & (os.O_WRONLY | os.O_RDWR)))
        if not path.startswith((self.inside, self.home)) or not writes:
            return
        if self.touched:
            self.touched(event, Path(path))
        if self.dead:
            raise Killed
        if self.kill_at is not None:
            self.kill_at -= 1
            if self.kill_at <= 0:
                self.dead = True
                raise Killed
        if self.fault and path.startswith(self.inside):
            raise OSError(self.fault.errno, os.strerror(self.fault.errno or 0), path)


FAULTS = Faults()
DISK_FULL = OSError(errno.ENOSPC, "")
READ_ONLY = OSError(errno.EROFS, "")


class Disk:
    """One look at a folder: all files but the pictures, and what the trainer makes of them, past the app itself."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, bytes] = {}
        """What each holds, by its name."""
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.endswith(".jpg") and entry.is_file():
                    with open(entry.path, "rb") as file:  # noqa: PTH123 (a campaign reads millions of them)
                        self.files[entry.name] = file.read()
        self._notes = read_sidecar(folder)
        self._listed = read_metadata(folder / "metadata.jsonl")[0]

    def value(self, picture: LibraryImage, field: str) -> Value:
        """Return what the trainer reads for a picture of this folder; line ends as it splits them."""
        if field != "caption":
            value: Value = getattr(self._notes.of(picture.name), field)
            return value
        stem = picture.name.rpartition(".")[0]
        files = [self.files[stem + suffix] for suffix in (".txt", ".caption") if stem + suffix in self.files]
        texts = [decode_caption(data).text for data in files]
        texts += [text for name, text in self._listed.items() if name == picture.name]
        text = next((text for text in texts if text.strip()), "" if texts else None)
        return None if text is None else "\n".join(text.replace("\r\n", "\n").split("\r"))


class World:
    """A folder of pictures with captions of every kind, and the app's session over it."""

    def __init__(self, base: Path, names: dict[str, dict[str, bytes]]) -> None:
        """`names`: pictures, each with the files beside it by their endings; made unless they are there."""
        self.home, self.data = base / "home", base / "a folder é"
        self.names = list(names)
        if not self.data.exists():
            self.make(names)
        self.posted: list[Callable[[], None]] = []
        self.begin()

    def make(self, names: dict[str, dict[str, bytes]]) -> None:
        """Put pictures and what lies beside them on disk."""
        self.data.mkdir(parents=True)
        for name, files in names.items():
            (self.data / name).write_bytes(b"a picture")
            for suffix, content in files.items():
                (self.data / name).with_suffix(suffix).write_bytes(content)

    def begin(self) -> None:
        """Start a session: recover, then show what is on disk, and edits that are not on disk yet instead of it."""
        self.open()
        self.recover()

    def open(self) -> None:
        """Make what a session consists of."""
        self.library = Library()
        self.folder = Folder(self.data, self.data)
        self.journal = Journal(self.home / "journal")
        self.backups = Backups(self.home / "backups")
        self.saver = Saver(self.journal, Writer(self.backups), self.posted.append, threaded=False)
        self.history = History(self.library, self.journal, self.saver)

    def recover(self) -> None:
        """Take over what earlier sessions left, then look at the disk."""
        self.saver.recover()
        self.saver.flush()
        self.deliver()
        self.ids = self.library.add((self.folder, name, {}) for name in self.names)
        found = self.disk()
        for picture in self.library.images.values():
            facts = {field: found.value(picture, field) for field in FIELDS}
            self.library.learn({picture.id: {**facts, **self.saver.unsaved(picture)}}, "file")

    def learn_captions(self) -> None:
        """Take over what stands on disk, as after a look at it."""
        found = self.disk()
        for picture in self.library.images.values():
            caption = self.saver.unsaved(picture).get("caption", found.value(picture, "caption"))
            self.library.learn({picture.id: {"caption": caption}}, "caption")

    def crash(self) -> None:
        """End the session as the operating system ends a process: its lock is let go, nothing else happens."""
        FAULTS.clear()
        self.posted.clear()
        self.journal._close_file()
        self.journal._lock.close()

    def close(self) -> None:
        """End the session as quitting does."""
        self.history.finish()
        self.saver.close()
        self.posted.clear()

    def resolve(self, keep: str, place: int = 0) -> None:
        """Choose one of the versions of a conflict, as the dialog does."""
        conflict = self.saver.now.conflicts[place]
        value = conflict.mine if keep == "mine" else conflict.theirs
        self.history.resolve([(conflict, value)], f"Keep {keep}")

    def settle(self) -> None:
        """Let everything be written and told."""
        self.history.finish()
        self.saver.flush()
        self.deliver()

    def deliver(self) -> None:
        """Do what was posted to the library's thread."""
        while self.posted:
            self.posted.pop(0)()

    def picture(self, number: int) -> LibraryImage:
        """One of the pictures, by its place."""
        return self.library.images[self.ids[number]]

    def disk(self) -> Disk:
        """Read all that is there but the pictures."""
        return Disk(self.data)

    def kept(self) -> set[tuple[str, bytes | None]]:
        """Read every content that is backed up, with its file's name, past the app's own functions."""
        path = self.backups.path(str(self.data))
        if not path.exists():
            return set()
        with closing(sqlite3.connect(path)) as database:
            return set(database.execute("SELECT file, bytes FROM versions LEFT JOIN contents USING (hash)"))


@contextmanager
def a_world(base: Path) -> Iterator[World]:
    """A world of the pictures GIVEN whose disk can be made to fault; at the end it is sound and the journal let go."""
    made = World(base, GIVEN)
    FAULTS.inside, FAULTS.home = str(made.data), str(made.home)
    yield made
    FAULTS.clear()
    FAULTS.inside = ""
    made.journal._close_file()
    made.journal._lock.close()


def change(world: World, place: int, value: Value, field: Field = "caption") -> ValueChange:
    picture = world.picture(place)
    return ValueChange(picture.id, field, picture.value(field), value)


def set_to(world: World, place: int, value: Value, field: Field = "caption") -> None:
    world.history.do(Edit("Set", (change(world, place, value, field),)))


def conflicts(world: World) -> list[tuple[Value, Value]]:
    return [(conflict.mine, conflict.theirs) for conflict in world.saver.now.conflicts]
