"""A dataset on disk, a session of edits over it, and faults of the disk: what the tests of captions are played in."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from app.core.edits.backups import Backups
from app.core.edits.edit import Edit, History
from app.core.edits.journal import Journal
from app.core.edits.saving import Saver
from app.core.edits.writer import Writer
from app.core.library import Library
from app.core.pictures import Change, Field, Folder, Picture, Value
from trainer.dataset.caption_files import read_caption_file, read_metadata
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


def read_value(picture: Picture, field: str) -> object:
    """What the trainer reads for a picture, by its own functions and none of the app's; line ends as it splits them."""
    folder, path = picture.folder.path, picture.path
    if field != "caption":
        return getattr(read_sidecar(folder).of(picture.name), field)
    files = [file for suffix in (".txt", ".caption") if os.path.exists(file := path.with_suffix(suffix))]  # noqa: PTH110 (no fault for names too long)
    texts = [read_caption_file(file).text for file in files]
    texts += [text for name, text in read_metadata(folder / "metadata.jsonl")[0].items() if name == picture.name]
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
        """Start a session: recover, then read what is on disk."""
        self.library = Library()
        self.folder = Folder(self.data, self.data)
        self.journal = Journal(self.home / "journal")
        self.backups = Backups(self.home / "backups")
        self.saver = Saver(self.journal, Writer(self.backups), self.posted.append, threaded=False)
        self.history = History(self.library, self.journal, self.saver)
        self.saver.recover()
        self.saver.flush()
        self.deliver()
        self.ids = self.library.add((self.folder, name, {}) for name in self.names)
        for picture in self.library.pictures.values():
            self.library.learn({picture.id: {field: read_value(picture, field) for field in FIELDS}}, "file")

    def learn_captions(self) -> None:
        """Take over what stands on disk, as after a look at it."""
        for picture in self.library.pictures.values():
            self.library.learn({picture.id: {"caption": read_value(picture, "caption")}}, "caption")

    def crash(self) -> None:
        """End the session as the operating system ends a process: its lock is let go, nothing else happens."""
        FAULTS.clear()
        self.posted.clear()
        self.journal._shut()
        self.journal._owned.close()

    def settle(self) -> None:
        """Let everything be written and told."""
        self.history.finish()
        self.saver.flush()
        self.deliver()

    def deliver(self) -> None:
        """Do what was posted to the library's thread."""
        while self.posted:
            self.posted.pop(0)()

    def picture(self, number: int) -> Picture:
        """One of the pictures, by its place."""
        return self.library.pictures[self.ids[number]]

    def on_disk(self) -> dict[str, bytes]:
        """All files but the pictures."""
        return {
            path.name: path.read_bytes() for path in self.data.iterdir() if path.suffix != ".jpg" and path.is_file()
        }


@contextmanager
def a_world(base: Path) -> Iterator[World]:
    """A world of the pictures GIVEN whose disk can be made to fault; at the end it is sound and the journal let go."""
    made = World(base, GIVEN)
    FAULTS.inside, FAULTS.home = str(made.data), str(made.home)
    yield made
    FAULTS.clear()
    FAULTS.inside = ""
    made.journal._shut()
    made.journal._owned.close()


def change(world: World, place: int, value: Value, field: Field = "caption") -> Change:
    picture = world.picture(place)
    return Change(picture.id, field, picture.value(field), value)


def set_to(world: World, place: int, value: Value, field: Field = "caption") -> None:
    world.history.do(Edit("Set", (change(world, place, value, field),)))


def conflicts(world: World) -> list[tuple[Value, Value]]:
    return [(conflict.mine, conflict.theirs) for conflict in world.saver.now.conflicts]
