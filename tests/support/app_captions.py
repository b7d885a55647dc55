"""Random edits, undo, redo, crashes, writes by other programs and failing disks, compared with a model."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from app.core.edits.history import Edit
from app.core.edits.save_state import Key, SaveRequest
from app.core.edits.writer import normalized
from app.core.library import LibraryImage, ValueChange
from tests.support.app_world import DISK_FULL, FAULTS, FIELDS, READ_ONLY, Disk, Killed, World
from trainer.dataset.caption_files import decode_caption
from trainer.dataset.sidecar import FILE_NAME, read_sidecar, write_sidecar

PICTURES = {
    "a.jpg": {".txt": b"cat, dog\n"},
    "b with spaces.jpg": {".caption": b"bird"},
    "c 図 🎨.jpg": {},
    "d.jpg": {".txt": "caf\xe9".encode("cp1252")},
    "e.jpg": {".txt": "\ufeffwide".encode("utf-16-le"), ".caption": b"other"},
}
TEXTS = ["cat", "cat, dog\n", "", "  ", "é 🎨", "one\r\ntwo", "\ufeffmarked", "x" * 70, "bird", "caf\xe9"]
RATINGS = (None, 0, 1, 5)
PLACES = range(len(PICTURES))
SUFFIXES = (".txt", ".caption")
WAYS = ("in place", "rename", "remove")
"""Ways in which other programs change a file."""
MOMENTS = tuple(range(1, 13))
BOTH = (False, True)
CHANGES: dict[Any, Sequence[Any]] = {
    "caption": TEXTS,
    "rating": RATINGS,
    "excluded": BOTH,
    "crop": (None, (0.0, 0.1, 0.5, 1.0)),
}


def some_edits(count: int) -> list[list[tuple[int, Any, Any]]]:
    """Return edits of one to four values, each as image, field and new value; shortest first."""
    chance, edits = random.Random(0), []
    for _ in range(count):
        keys = chance.sample([(place, field) for place in PLACES for field in CHANGES], chance.randint(1, 4))
        edits.append([(*key, chance.choice(CHANGES[key[1]])) for key in keys])
    return sorted(edits, key=len)


def one_of(ways: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for one of these in a single draw; each draw costs hypothesis as much time as the app's work.

    It samples by index, because hypothesis formats every strategy again and again, with everything that it samples
    from.
    """
    return st.integers(0, len(ways) - 1).map(lambda place: ways[place])


def all_ways(**values: Sequence[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for every combination of these values."""
    return one_of([dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())])


edits = one_of(some_edits(5000))
ROOM = "/dev/shm" if Path("/dev/shm").is_dir() else None  # in memory: no waiting for a disk


def same(one: object, other: object) -> bool:
    """Return whether two values are equal as training reads them."""
    if isinstance(one, str) and isinstance(other, str):
        return normalized(one) == normalized(other)
    return one == other


def alike(field: str, one: object, other: object) -> bool:
    """Return whether two values are equal to the trainer, to which an empty caption file is the same as none."""
    if field == "caption":
        return (normalized(str(one or "")) or "") == (normalized(str(other or "")) or "")
    return one == other


class Captions(RuleBasedStateMachine):
    """The model: the values that the user sees, their edits in order, and every content that other programs wrote."""

    @initialize()
    def start(self) -> None:
        self.base = Path(tempfile.mkdtemp(dir=ROOM, prefix="captions "))
        self.world = World(self.base, PICTURES)
        FAULTS.inside, FAULTS.home = str(self.world.data), str(self.world.home)
        self.undos: list[list[ValueChange]] = []
        self.redos: list[list[ValueChange]] = []
        self.last: dict[str, bytes | None] = dict(self.world.disk().files)
        """What other programs last wrote into each file; None if they removed it."""
        self.unseen: dict[str, bytes] = {}
        """Contents by file name that the user has not been shown; they must never be overwritten."""
        self.foreign: set[tuple[str, str]] = set()
        """Values that other programs touched since the user's own were last seen on disk."""
        self.contents = {(normalized(text) or "").encode() for text in TEXTS}
        """What the app's caption files may contain: text that the user wrote or saw."""
        self.files = {name for name in self.last if name.endswith(SUFFIXES)}
        """Caption files that the app did not create in this session: only another program makes them disappear."""
        self.overwritten: dict[str, list[str | None]] = {}
        """What an image's caption files contained when another program wrote while the app was writing."""
        self.own_notes: set[bytes] = set()
        """What the app wrote into impasto.jsonl before another program wrote."""
        self.numbers = count()
        self.look()

    def look(self) -> None:
        """Copy the library's values into the model; from then on it has to predict them."""
        self.values = {}
        for picture in self.world.library.images.values():
            for field in FIELDS:
                self.see(picture.id, field, picture.value(field))

    def see(self, number: int, field: Any, value: Any) -> None:
        if field == "caption":
            self.shown(self.world.library.images[number].name)
        self.values[number, field] = value
        if field == "caption" and value is not None:
            self.contents.add((normalized(value) or "").encode())

    def teardown(self) -> None:
        FAULTS.clear()
        if hasattr(self, "world"):
            self.world.settle()
            self.check_disk()
            self.world.saver.close()
            FAULTS.inside = ""
            shutil.rmtree(self.base)

    def make(self, wanted: list[ValueChange]) -> list[ValueChange]:
        """Return those of these changes that the model allows."""
        made = []
        for change in wanted:
            key = (change.image, change.field)
            if self.values[key] == change.before and change.before != change.after:
                self.values[key] = change.after
                if change.field == "caption" and isinstance(change.after, str):
                    self.contents.add((normalized(change.after) or "").encode())
                made.append(change)
        return made

    @rule(wanted=edits, joins=st.booleans())
    def edit(self, wanted: list[tuple[int, Any, Any]], joins: bool) -> None:
        edit = [
            ValueChange(picture.id, field, picture.value(field), value)
            for place, field, value in wanted
            for picture in [self.world.picture(place)]
        ]
        made = self.make(edit)
        self.world.history.do(Edit("Change", tuple(edit)), joins=joins)
        if made:
            self.redos.clear()
            last = self.undos[-1] if joins and self.undos else []
            if len(last) == len(made) == 1 and last[0][:2] == made[0][:2] and last[0].after == made[0].before:
                made = [ValueChange(*last[0][:3], made[0].after)]
                self.undos.pop()
            self.undos.append(made)
        self.check_library()

    @rule(back=st.booleans())
    def undo_or_redo(self, back: bool) -> None:
        taken, onto = (self.undos, self.redos) if back else (self.redos, self.undos)
        while taken:
            if made := self.make([change.inverse() for change in reversed(taken.pop())]):
                onto.append(made)
                break
        self.world.history.undo() if back else self.world.history.redo()
        self.check_library()

    @rule(how=all_ways(place=PLACES, text=TEXTS, which=SUFFIXES, way=WAYS, seen=BOTH))
    def other_program_writes(self, how: dict[str, Any]) -> None:
        self.write(**how)

    def write(self, place: int, text: str, which: str, *, way: str = "in place", seen: bool = False) -> None:
        picture = self.world.picture(place)
        path = picture.path.with_suffix(which)
        if way == "remove":
            path.unlink(missing_ok=True)
            self.last[path.name] = None
            self.unseen.pop(path.name, None)
            self.files.discard(path.name)
        else:
            self.unseen[path.name] = self.last[path.name] = f"{text} {next(self.numbers)}".encode()
            self.files.add(path.name)
            if way == "rename":
                (self.base / "theirs").write_bytes(self.unseen[path.name])
                (self.base / "theirs").replace(path)
            else:
                path.write_bytes(self.unseen[path.name])
        self.foreign.add((picture.name, "caption"))
        if seen and "caption" not in self.world.saver.unsaved(picture):
            self.learn(picture.id, "caption")

    @rule(how=all_ways(place=PLACES, rating=RATINGS, seen=BOTH))
    def other_program_notes(self, how: dict[str, Any]) -> None:
        self.note(**how)

    def note(self, place: int, rating: int | None, seen: bool) -> None:
        picture, folder = self.world.picture(place), self.world.data
        before = self.world.disk().files.get(FILE_NAME)
        write_sidecar(folder, read_sidecar(folder).with_image(picture.name, rating=rating, other=place))
        after = (folder / FILE_NAME).read_bytes()
        if before and before != self.last.get(FILE_NAME):
            self.own_notes.add(before)
        # What the app itself wrote, byte for byte, needs no backup.
        self.last[FILE_NAME] = None if after in self.own_notes else after
        self.foreign.add((picture.name, "rating"))
        if seen and "rating" not in self.world.saver.unsaved(picture):
            self.learn(picture.id, "rating")

    def learn(self, number: int, field: Any) -> None:
        value = self.world.disk().value(self.world.library.images[number], field)
        self.world.library.set_facts({number: {field: value}}, field)
        self.see(number, field, value)

    @rule()
    def save(self) -> None:
        self.world.settle()
        self.check_disk()

    @rule(fault=st.sampled_from([DISK_FULL, READ_ONLY]))
    def refusing_disk(self, fault: OSError) -> None:
        before = self.world.disk().files
        FAULTS.fault = fault
        self.world.settle()
        FAULTS.clear()
        state = self.world.saver.now
        assert self.world.disk().files == before, "a disk that refuses was written to"
        if state.pending > len(state.conflicts):
            assert state.problems[0].code == ("save.disk_full" if fault is DISK_FULL else "save.read_only")
        self.take_void()
        self.check_library()

    @rule(how=all_ways(place=PLACES, which=SUFFIXES, way=WAYS, moment=MOMENTS))
    def other_program_writes_while_we_do(self, how: dict[str, Any]) -> None:
        """Write from another program at any moment when the app touches the disk, even between check and rename."""
        self.edit([(how["place"], "caption", f"mine {next(self.numbers)}")], joins=False)
        self.interrupt(**how)
        self.world.settle()
        FAULTS.touched = None
        self.save()

    def interrupt(self, place: int, which: str, way: str, moment: int) -> None:
        """Let another program write at one of the app's next disk accesses."""
        left = count(moment, -1)

        def touched(event: str, path: Path) -> None:
            if next(left) <= 0:
                FAULTS.touched = None
                picture = self.world.picture(place)
                self.overwritten[picture.name] = self.texts(self.world.disk(), picture)
                inside, FAULTS.inside = FAULTS.inside, ""  # our kill does not end the other program
                self.write(place, "in between", which, way=way)
                FAULTS.inside = inside

        FAULTS.touched = touched

    @precondition(lambda self: self.world.saver.now.conflicts)
    @rule(mine=st.booleans(), settled=st.booleans())
    def resolve(self, mine: bool, settled: bool) -> None:
        conflict = self.world.saver.now.conflicts[0]
        picture = next(p for p in self.world.library.images.values() if p.path == conflict.path)
        key = (picture.id, conflict.field)
        value, other = (conflict.mine, conflict.theirs) if mine else (conflict.theirs, conflict.mine)
        current = self.values[key] == conflict.mine  # else the user has continued
        for suffix in SUFFIXES if current else ():
            name = picture.path.with_suffix(suffix).name
            if name in self.unseen and same(self.unseen[name].decode(), conflict.theirs):
                del self.unseen[name]
        self.world.history.resolve([(conflict, value)], "Choose")
        if current:
            self.redos.clear()
            self.undos.append([ValueChange(picture.id, conflict.field, other, value)])
            self.values[key] = value
            self.contents.update((normalized(str(one)) or "").encode() for one in (value, other) if one is not None)
        self.check_library()
        if settled:
            self.save()
            again = [(one.key, one.theirs) for one in self.world.saver.now.conflicts]
            assert not current or (conflict.key, conflict.theirs) not in again, "the user's choice was not carried out"

    def shown(self, picture: str) -> None:
        for suffix in SUFFIXES:
            self.unseen.pop(picture.rpartition(".")[0] + suffix, None)

    @rule(how=all_ways(place=PLACES, text=TEXTS, words=TEXTS, which=SUFFIXES, mine=BOTH))
    def both_at_once(self, how: dict[str, Any]) -> None:
        """Let the user and another program write the same caption before either sees the other's text."""
        self.meet(**how)

    def meet(self, place: int, text: str, words: str, which: str, mine: bool) -> None:
        if mine:
            self.edit([(place, "caption", f"{text} {next(self.numbers)}")], joins=False)
        self.write(place, words, which)
        if not mine:
            self.edit([(place, "caption", f"{text} {next(self.numbers)}")], joins=False)
        self.save()

    @rule(wanted=edits, kill_at=st.integers(1, 24), between=st.booleans(), how=all_ways(place=PLACES, moment=MOMENTS))
    def crash(self, wanted: list[tuple[int, Any, Any]], kill_at: int, between: bool, how: dict[str, int]) -> None:
        self.edit(wanted, joins=False)
        before = self.requests()
        if between:
            self.interrupt(**how, which=".txt", way="in place")
        FAULTS.kill_at = kill_at
        with contextlib.suppress(Killed):
            self.world.saver.flush()
        self.world.crash()
        self.check_contents(self.world.disk())  # raises if notes are half written
        self.restart(before)

    @rule(fault=st.sampled_from([None, DISK_FULL, READ_ONLY]))
    def quit(self, fault: OSError | None) -> None:
        self.world.history.finish()
        before = self.requests()
        FAULTS.fault = fault
        self.world.close()
        FAULTS.clear()
        self.check_contents(self.world.disk())
        self.restart(before)

    def requests(self) -> dict[tuple[str, str], SaveRequest | None]:
        """Return what is on its way to the disk, by image and field."""
        self.world.saver._absorb(None)
        root, found = str(self.world.data), {}
        for number, field in self.values:
            name = self.world.library.images[number].name
            found[name, field] = self.world.saver._newest(Key(root, name, field))
        return found

    def restart(self, before: dict[tuple[str, str], SaveRequest | None]) -> None:
        """Start a session: it shows the newest edits, on disk or in conflict."""
        wanted = {(self.world.library.images[n].name, f): value for (n, f), value in self.values.items()}
        self.files = {name for name in self.world.disk().files if name.endswith(SUFFIXES)}
        self.world.begin()
        self.undos, self.redos = [], []
        self.look()
        disk = self.world.disk()
        assert self.files <= disk.files.keys(), "a file that an earlier session left disappeared"
        conflicts = {(one.path.name, one.field): one for one in self.world.saver.now.conflicts}
        for (name, field), value in wanted.items():
            picture = next(p for p in self.world.library.images.values() if p.name == name)
            now, request = picture.value(field), before[name, field]
            conflict = conflicts.get((name, field))
            assert conflict is None or same(now, conflict.mine), f"{now!r} is shown, not {conflict}"
            if request and request.desired not in request.bases[:1]:
                on_disk = disk.value(picture, field)
                if conflict is None and field == "caption" and self.was_written(disk, picture, request.desired):
                    assert same(now, on_disk)
                    continue
                assert alike(field, now, request.desired), f"{request} is lost, {now!r} is shown"
                assert conflict or alike(field, on_disk, now) or (name, field) in self.foreign, (
                    f"{on_disk!r}, not {now!r}"
                )
            elif (name, field) not in self.foreign:
                assert alike(field, now, value), f"{value!r} of {name} is lost, {now!r} is shown"
        self.foreign, self.overwritten = set(conflicts), {}
        self.files = {name for name in disk.files if name.endswith(SUFFIXES)}

    def was_written(self, disk: Disk, picture: LibraryImage, text: object) -> bool:
        """Return whether another program wrote after the app, to the same file or one that takes precedence."""
        # An empty file makes the image's other caption file count.
        later = picture.name in self.overwritten or alike("caption", text, None)
        texts = self.texts(disk, picture) + self.overwritten.get(picture.name, [])
        return later and any(alike("caption", text, one) for one in texts)

    def texts(self, disk: Disk, picture: LibraryImage) -> list[str | None]:
        """Return what an image's caption files contain; None if there is none."""
        files = [disk.files.get(picture.path.with_suffix(suffix).name) for suffix in SUFFIXES]
        return [None if data is None else decode_caption(data).text for data in files]

    def take_void(self) -> None:
        """Let the model follow the library where another program's value rightly won and the disk agrees."""
        for (number, field), value in self.values.items():
            picture = self.world.library.images[number]
            now = picture.value(field)
            if now != value:
                assert field not in self.world.saver.unsaved(picture), f"{now!r} is shown instead of the edit {value!r}"
                assert same(now, self.world.disk().value(picture, field))
                self.see(number, field, now)

    def check_library(self) -> None:
        self.take_void()
        for (number, field), value in self.values.items():
            assert self.world.library.images[number].value(field) == value

    def check_disk(self) -> None:
        """Check that the disk equals the model wherever no error or conflict is reported."""
        self.check_library()
        state, disk = self.world.saver.now, self.world.disk()
        assert not state.problems
        assert state.pending == len(state.conflicts)
        for conflict in state.conflicts:
            picture = next(p for p in self.world.library.images.values() if p.path == conflict.path)
            assert not same(conflict.mine, conflict.theirs)
            assert same(picture.value(conflict.field), conflict.mine), "an edit that is not written is not shown"
            assert same(conflict.theirs, disk.value(picture, conflict.field))
        in_conflict = {(conflict.path.name, conflict.field) for conflict in state.conflicts}
        for (number, field), value in self.values.items():
            picture = self.world.library.images[number]
            if (picture.name, field) not in in_conflict | self.foreign:
                assert same(value, disk.value(picture, field)), f"{picture.name} {field} is not {value!r} on disk"
        self.check_contents(disk)

    def check_contents(self, disk: Disk) -> None:
        """Check that no file is half written, and that what others wrote last is there or backed up."""
        on_disk = disk.files
        for name, content in on_disk.items():
            if name.endswith(SUFFIXES):
                assert content in self.contents or content == self.last.get(name), f"{name} holds {content[:80]!r}"
        # A kill between exchanging two names and exchanging them back leaves another program's text under the temporary
        # name.
        displaced = {content for name, content in on_disk.items() if name.endswith(".tmp")}
        for name, content in self.unseen.items():
            there = on_disk.get(name) == content or content in displaced
            assert there, f"{name} was overwritten although the user had not seen {content[:80]!r}"
        missing = self.files - on_disk.keys()
        assert not missing, f"{missing} disappeared"
        gone = {
            (name, last)
            for name, last in self.last.items()
            if last is not None and on_disk.get(name) != last and last not in displaced
        }
        lost = gone and gone - self.world.kept()
        assert not lost, f"overwritten, and nowhere: {sorted(lost)}"
