"""Random sequences of edits, undo, redo, crashes, other programs' writes and refusing disks, held against a model."""

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

from app.core.edits.captions import plain
from app.core.edits.edit import Edit
from app.core.pictures import Change
from tests.support.app_world import DISK_FULL, FAULTS, FIELDS, READ_ONLY, Disk, Killed, World
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
BOTH = (False, True)
CHANGES: dict[Any, Sequence[Any]] = {
    "caption": TEXTS,
    "rating": RATINGS,
    "excluded": BOTH,
    "crop": (None, (0.0, 0.1, 0.5, 1.0)),
}


def some_edits(count: int) -> list[list[tuple[int, Any, Any]]]:
    """Return edits of one to four values, each as picture, field and what it shall be; shortest first."""
    chance, edits = random.Random(0), []
    for _ in range(count):
        keys = chance.sample([(place, field) for place in PLACES for field in CHANGES], chance.randint(1, 4))
        edits.append([(*key, chance.choice(CHANGES[key[1]])) for key in keys])
    return sorted(edits, key=len)


def one_of(ways: Sequence[Any]) -> st.SearchStrategy[Any]:
    """One of these in a single draw: hypothesis takes as long for each as the app takes for what is tested with it.

    By its number, as hypothesis words every strategy over and over, with all that it samples from.
    """
    return st.integers(0, len(ways) - 1).map(lambda place: ways[place])


def all_ways(**values: Sequence[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Every combination of these."""
    return one_of([dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())])


edits = one_of(some_edits(5000))
ROOM = "/dev/shm" if Path("/dev/shm").is_dir() else None  # without waiting for a disk: what is tested is the order


def same(one: object, other: object) -> bool:
    """Equal as training reads it."""
    if isinstance(one, str) and isinstance(other, str):
        return plain(one) == plain(other)
    return one == other


class Captions(RuleBasedStateMachine):
    """The model: the values that the user sees, his edits in order, and every content that other programs wrote."""

    @initialize()
    def start(self) -> None:
        self.base = Path(tempfile.mkdtemp(dir=ROOM, prefix="captions "))
        self.world = World(self.base, PICTURES)
        FAULTS.inside, FAULTS.home = str(self.world.data), str(self.world.home)
        self.waiting: dict[tuple[str, str], list[object]] = {}
        """What sessions that crashed wanted and is in conflict since: only the user's choice ends that."""
        self.undos: list[list[Change]] = []
        self.redos: list[list[Change]] = []
        self.last: dict[str, bytes | None] = dict(self.world.disk().files)
        """What other programs wrote last into each file; None where they removed it."""
        self.unseen: dict[str, bytes] = {}
        """What of that the user has not been shown, by the file's name: it must never be overwritten."""
        self.foreign: set[tuple[str, str]] = set()
        """Values that they touched since the user's own were last seen to be on disk."""
        self.contents = {(plain(text) or "").encode() for text in TEXTS}
        """What our own caption files may hold: what the user wrote, or saw."""
        self.own_notes: set[bytes] = set()
        """What the app wrote into impasto.jsonl before another program wrote."""
        self.numbers = count()
        self.look()

    def look(self) -> None:
        """The model takes over what the library holds; later it has to know by itself."""
        self.values = {}
        for picture in self.world.library.pictures.values():
            for field in FIELDS:
                self.see(picture.id, field, picture.value(field))

    def see(self, number: int, field: Any, value: Any) -> None:
        if field == "caption":
            self.shown(self.world.library.pictures[number].name)
        self.values[number, field] = value
        if field == "caption" and value is not None:
            self.contents.add((plain(value) or "").encode())

    def teardown(self) -> None:
        FAULTS.clear()
        if hasattr(self, "world"):
            self.world.settle()
            self.check_disk()
            self.world.saver.close()
            FAULTS.inside = ""
            shutil.rmtree(self.base)

    def make(self, wanted: list[Change]) -> list[Change]:
        """What of these the model lets happen."""
        made = []
        for change in wanted:
            key = (change.picture, change.field)
            if self.values[key] == change.before and change.before != change.after:
                self.values[key] = change.after
                if change.field == "caption" and isinstance(change.after, str):
                    self.contents.add((plain(change.after) or "").encode())
                made.append(change)
        return made

    @rule(wanted=edits, joins=st.booleans())
    def edit(self, wanted: list[tuple[int, Any, Any]], joins: bool) -> None:
        edit = [
            Change(picture.id, field, picture.value(field), value)
            for place, field, value in wanted
            for picture in [self.world.picture(place)]
        ]
        made = self.make(edit)
        self.world.history.do(Edit("Change", tuple(edit)), joins=joins)
        if made:
            self.redos.clear()
            last = self.undos[-1] if joins and self.undos else []
            if len(last) == len(made) == 1 and last[0][:2] == made[0][:2] and last[0].after == made[0].before:
                made = [Change(*last[0][:3], made[0].after)]
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

    @rule(how=all_ways(place=PLACES, text=TEXTS, which=SUFFIXES, gone=BOTH, seen=BOTH))
    def other_program_writes(self, how: dict[str, Any]) -> None:
        self.write(**how)

    def write(self, place: int, text: str, which: str, *, gone: bool = False, seen: bool = False) -> None:
        picture = self.world.picture(place)
        path = picture.path.with_suffix(which)
        if gone:
            path.unlink(missing_ok=True)
            self.last[path.name] = None
            self.unseen.pop(path.name, None)
        else:
            self.unseen[path.name] = self.last[path.name] = f"{text} {next(self.numbers)}".encode()
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
        write_sidecar(folder, read_sidecar(folder).with_picture(picture.name, rating=rating, other=place))
        after = (folder / FILE_NAME).read_bytes()
        if before and before != self.last.get(FILE_NAME):
            self.own_notes.add(before)
        # Byte for byte our own writing nobody needs to keep.
        self.last[FILE_NAME] = None if after in self.own_notes else after
        self.foreign.add((picture.name, "rating"))
        if seen and "rating" not in self.world.saver.unsaved(picture):
            self.learn(picture.id, "rating")

    def learn(self, number: int, field: Any) -> None:
        value = self.world.disk().value(self.world.library.pictures[number], field)
        self.world.library.learn({number: {field: value}}, field)
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

    @precondition(lambda self: self.world.saver.now.conflicts)
    @rule(mine=st.booleans())
    def resolve(self, mine: bool) -> None:
        conflict = self.world.saver.now.conflicts[0]
        self.world.saver._absorb(None)  # what the user did since
        if conflict.key not in self.world.saver._conflicts:  # the user went on, and it is to be judged anew
            return
        self.shown(conflict.path.name)
        self.world.saver.resolve(conflict, "mine" if mine else "theirs")
        self.world.settle()
        self.take_void()
        again = {other.key: other.mine for other in self.world.saver.now.conflicts}
        if conflict.key not in again or not same(again[conflict.key], conflict.mine):
            waited = self.waiting.get((conflict.path.name, conflict.field), [])
            waited[:] = [one for one in waited if not same(one, conflict.mine)]
        if conflict.key not in again:
            picture = next(p for p in self.world.library.pictures.values() if p.path == conflict.path)
            if mine:
                found = self.world.disk().value(picture, conflict.field)
                # Where a picture has two caption files and the first falls silent, the other one speaks.
                silent = conflict.field == "caption" and plain(conflict.mine) in (None, "")
                assert silent or same(conflict.mine, found), f"{found!r}, not {conflict.mine!r}"
                shown = picture.value(conflict.field)
                assert same(shown, found), f"{shown!r} is shown, {found!r} stands on disk"
                self.see(picture.id, conflict.field, shown)
        self.check_disk()

    def shown(self, picture: str) -> None:
        for suffix in SUFFIXES:
            self.unseen.pop(picture.rpartition(".")[0] + suffix, None)

    @rule(how=all_ways(place=PLACES, text=TEXTS, words=TEXTS, which=SUFFIXES, mine=BOTH))
    def both_at_once(self, how: dict[str, Any]) -> None:
        """The user and another program write the same caption before either is seen by the other."""
        self.meet(**how)

    def meet(self, place: int, text: str, words: str, which: str, mine: bool) -> None:
        if mine:
            self.edit([(place, "caption", f"{text} {next(self.numbers)}")], joins=False)
        self.write(place, words, which)
        if not mine:
            self.edit([(place, "caption", f"{text} {next(self.numbers)}")], joins=False)
        self.save()

    @rule(wanted=edits, kill_at=st.integers(1, 24))
    def crash(self, wanted: list[tuple[int, Any, Any]], kill_at: int) -> None:
        self.edit(wanted, joins=False)
        FAULTS.kill_at = kill_at
        with contextlib.suppress(Killed):
            self.world.saver.flush()
        wanted = {(self.world.library.pictures[n].name, f): value for (n, f), value in self.values.items()}
        self.world.crash()
        self.check_contents(self.world.disk())  # raises where notes are half written
        self.world.begin()
        self.undos, self.redos = [], []
        self.look()
        recovered = self.in_conflict()
        for (name, field), value in wanted.items():
            picture = next(p for p in self.world.library.pictures.values() if p.name == name)
            now = picture.value(field)
            mine, waited = recovered.get((name, field), []), self.waiting.get((name, field), [])
            for one in waited:
                assert any(same(one, other) for other in [now, *mine]), f"{one!r} waited, and is forgotten: {mine}"
            if (mine and not waited) or (name, field) not in self.foreign:
                blank = field == "caption" and plain(value) in (None, "")  # None and empty mean the same on disk
                assert blank or any(same(value, other) for other in [now, *mine]), f"{value!r} of {name} is lost"
        self.foreign = set(recovered)
        self.waiting = recovered

    def in_conflict(self) -> dict[tuple[str, str], list[object]]:
        """What the user wants and another program's words stand in the way of, what waits behind that included."""
        found = {(c.path.name, c.field): [c.mine] for c in self.world.saver.now.conflicts}
        for key, wishes in self.world.saver._behind.items():
            found[key.path.name, key.field] += [wish.desired for wish in wishes]
        return found

    def take_void(self) -> None:
        """Where another program's value won by right, the model follows the library, if the disk says the same."""
        for (name, field), waited in self.waiting.items():
            picture = next(p for p in self.world.library.pictures.values() if p.name == name)
            if waited:
                found = self.world.disk().value(picture, field)
                waited[:] = [one for one in waited if not same(one, found)]
        for (number, field), value in self.values.items():
            picture = self.world.library.pictures[number]
            now = picture.value(field)
            if now != value and (
                field not in self.world.saver.unsaved(picture)
                or (picture.path, field) in [(c.path, c.field) for c in self.world.saver.now.conflicts]
            ):
                assert same(now, self.world.disk().value(picture, field))
                self.see(number, field, now)

    def check_library(self) -> None:
        self.take_void()
        for (number, field), value in self.values.items():
            assert self.world.library.pictures[number].value(field) == value

    def check_disk(self) -> None:
        """The disk equals the model wherever nothing is said to stand in the way."""
        self.check_library()
        state, disk = self.world.saver.now, self.world.disk()
        assert not state.problems
        assert state.pending == len(state.conflicts)
        for conflict in state.conflicts:
            picture = next(p for p in self.world.library.pictures.values() if p.path == conflict.path)
            assert not same(conflict.mine, conflict.theirs)
            assert same(conflict.theirs, disk.value(picture, conflict.field))
        in_conflict = {(conflict.path.name, conflict.field) for conflict in state.conflicts}
        for (number, field), value in self.values.items():
            picture = self.world.library.pictures[number]
            if (picture.name, field) not in in_conflict | self.foreign:
                assert same(value, disk.value(picture, field)), f"{picture.name} {field} is not {value!r} on disk"
        self.check_contents(disk)

    def check_contents(self, disk: Disk) -> None:
        """No file is half written, and what others wrote last is there, or backed up."""
        on_disk = disk.files
        for name, content in on_disk.items():
            if name.endswith(SUFFIXES):
                assert content in self.contents or content == self.last.get(name), f"{name} holds {content[:80]!r}"
        for name, content in self.unseen.items():
            assert on_disk.get(name) == content, f"{name} was overwritten though nobody had seen {content[:80]!r}"
        gone = {(name, last) for name, last in self.last.items() if last is not None and on_disk.get(name) != last}
        lost = gone and gone - self.world.kept()
        assert not lost, f"overwritten, and nowhere: {sorted(lost)}"
