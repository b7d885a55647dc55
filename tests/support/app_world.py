"""A dataset on disk, an editing session on it, and disk faults, for tests of captions."""

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
    """Simulated end of the process: nothing of it may touch the disk afterwards."""


class Faults:
    """Make the operating system refuse an access or end the process at a chosen moment, through Python's audit hooks.

    The hooks see every open, rename and remove of this process before it happens, whichever code calls it.
    """

    def __init__(self) -> None:
        self.inside: str = ""
        self.fault: OSError | None = None
        """The error that every write within the folder `inside` raises."""
        self.kill_at: int | None = None
        """The number of disk accesses from now after which the process dies."""
        self.touched: Callable[[str, Path], None] | None = None
        """Called with the event and its path before every write."""
        self.dead = False
        self.home = ""
        sys.addaudithook(self._hook)

    def clear(self) -> None:
        """Make the disk work again."""
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
    """A snapshot of a folder, read without the app: all files except images, and what the trainer reads from them."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, bytes] = {}
        """Contents by file name."""
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.endswith(".jpg") and entry.is_file():
                    with open(entry.path, "rb") as file:  # noqa: PTH123 (a campaign reads millions of them)
                        self.files[entry.name] = file.read()
        self._notes = read_sidecar(folder)
        self._listed = read_metadata(folder / "metadata.jsonl")[0]

    def value(self, picture: LibraryImage, field: str) -> Value:
        """Return what the trainer reads for an image of this folder, with its line endings."""
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
    """A folder of images with captions of every kind, and the app's session on it."""

    def __init__(self, base: Path, names: dict[str, dict[str, bytes]]) -> None:
        """Open a world of `names`: images with their sidecar files by suffix; create them unless they exist."""
        self.home, self.data = base / "home", base / "a folder é"
        self.names = list(names)
        if not self.data.exists():
            self.make(names)
        self.posted: list[Callable[[], None]] = []
        self.begin()

    def make(self, names: dict[str, dict[str, bytes]]) -> None:
        """Write images and their sidecar files to disk."""
        self.data.mkdir(parents=True)
        for name, files in names.items():
            (self.data / name).write_bytes(b"a picture")
            for suffix, content in files.items():
                (self.data / name).with_suffix(suffix).write_bytes(content)

    def begin(self) -> None:
        """Start a session: recover, then show what is on disk, replaced by edits that are not on disk yet."""
        self.open()
        self.recover()

    def open(self) -> None:
        """Create the parts of a session."""
        self.library = Library()
        self.folder = Folder(self.data, self.data)
        self.journal = Journal(self.home / "journal")
        self.backups = Backups(self.home / "backups")
        self.saver = Saver(self.journal, Writer(self.backups), self.posted.append, threaded=False)
        self.history = History(self.library, self.journal, self.saver)

    def recover(self) -> None:
        """Recover what earlier sessions left, then read the disk."""
        self.saver.recover()
        self.saver.flush()
        self.deliver()
        self.ids = self.library.add((self.folder, name, {}) for name in self.names)
        found = self.disk()
        for picture in self.library.images.values():
            facts = {field: found.value(picture, field) for field in FIELDS}
            self.library.set_facts({picture.id: {**facts, **self.saver.unsaved(picture)}}, "file")

    def learn_captions(self) -> None:
        """Read the captions from disk, as after a scan."""
        found = self.disk()
        for picture in self.library.images.values():
            caption = self.saver.unsaved(picture).get("caption", found.value(picture, "caption"))
            self.library.set_facts({picture.id: {"caption": caption}}, "caption")

    def crash(self) -> None:
        """End the session as if the process had been killed: its lock is released, nothing else happens."""
        FAULTS.clear()
        self.posted.clear()
        self.journal._close_file()
        self.journal._lock.close()

    def close(self) -> None:
        """End the session as quitting the app does."""
        self.history.finish()
        self.saver.close()
        self.posted.clear()

    def resolve(self, keep: str, place: int = 0) -> None:
        """Choose one version of a conflict, as the dialog does."""
        conflict = self.saver.now.conflicts[place]
        value = conflict.mine if keep == "mine" else conflict.theirs
        self.history.resolve([(conflict, value)], f"Keep {keep}")

    def settle(self) -> None:
        """Wait until everything is written and reported."""
        self.history.finish()
        self.saver.flush()
        self.deliver()

    def deliver(self) -> None:
        """Run what was posted to the library's thread."""
        while self.posted:
            self.posted.pop(0)()

    def picture(self, number: int) -> LibraryImage:
        """Return an image by its position."""
        return self.library.images[self.ids[number]]

    def disk(self) -> Disk:
        """Read all files except images."""
        return Disk(self.data)

    def kept(self) -> set[tuple[str, bytes | None]]:
        """Return every backed-up content with its file's name, read without the app's own functions."""
        path = self.backups.path(str(self.data))
        if not path.exists():
            return set()
        with closing(sqlite3.connect(path)) as database:
            return set(database.execute("SELECT file, bytes FROM versions LEFT JOIN contents USING (hash)"))


@contextmanager
def a_world(base: Path) -> Iterator[World]:
    """Yield a world of the images GIVEN whose disk can fail; at the end, repair the disk and release the journal."""
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
