"""Random sequences of edits, undo, redo, crashes, other programs' writes and refusing disks, held against a model."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from app.core.edits.captions import plain
from app.core.edits.edit import Edit
from app.core.edits.saving import Conflict
from app.core.pictures import Change
from tests.support.app_world import DISK_FULL, FAULTS, FIELDS, READ_ONLY, Killed, World, read_value
from trainer.dataset.sidecar import FILE_NAME, read_sidecar, write_sidecar

PICTURES = {
    "a.jpg": {".txt": b"cat, dog\n"},
    "b with spaces.jpg": {".caption": b"bird"},
    "c 図 🎨.jpg": {},
    "d.jpg": {".txt": "caf\xe9".encode("cp1252")},
    "e.jpg": {".txt": "\ufeffwide".encode("utf-16-le"), ".caption": b"other"},
}
TEXTS = ["cat", "cat, dog\n", "", "  ", "é 🎨", "one\r\ntwo", "\ufeffmarked", "x" * 70, "bird", "caf\xe9"]
places = st.integers(0, len(PICTURES) - 1)
texts = st.sampled_from(TEXTS)
ratings = st.sampled_from([None, 0, 1, 5])
changes = st.one_of(
    st.tuples(places, st.just("caption"), texts),
    st.tuples(places, st.just("rating"), ratings),
    st.tuples(places, st.just("excluded"), st.booleans()),
    st.tuples(places, st.just("crop"), st.sampled_from([None, (0.0, 0.1, 0.5, 1.0)])),
)
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
        self.last: dict[str, bytes | None] = dict(self.world.on_disk())
        """What other programs wrote last into each file; None where they removed it."""
        self.unseen: dict[Path, bytes] = {}
        """What of that the user has not been shown: it must never be overwritten."""
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
            for suffix in (".txt", ".caption"):
                self.unseen.pop(self.world.library.pictures[number].path.with_suffix(suffix), None)
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

    @rule(wanted=st.lists(changes, min_size=1, max_size=4, unique_by=lambda change: change[:2]), joins=st.booleans())
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

    @rule(place=places, text=texts, which=st.sampled_from([".txt", ".caption"]), gone=st.booleans(), seen=st.booleans())
    def other_program_writes(self, place: int, text: str, which: str, gone: bool, seen: bool) -> None:
        picture = self.world.picture(place)
        path = picture.path.with_suffix(which)
        if gone:
            path.unlink(missing_ok=True)
            self.last[path.name] = None
            self.unseen.pop(path, None)
        else:
            self.unseen[path] = f"{text} {next(self.numbers)}".encode()
            self.last[path.name] = self.unseen[path]
            path.write_bytes(self.unseen[path])
        self.foreign.add((picture.name, "caption"))
        if seen and "caption" not in self.world.saver.unsaved(picture):
            self.learn(picture.id, "caption")

    @rule(place=places, rating=ratings, seen=st.booleans())
    def other_program_notes(self, place: int, rating: int | None, seen: bool) -> None:
        picture, folder = self.world.picture(place), self.world.data
        before = self.world.on_disk().get(FILE_NAME)
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
        value = read_value(self.world.library.pictures[number], field)
        self.world.library.learn({number: {field: value}}, field)
        self.see(number, field, value)

    @rule()
    def save(self) -> None:
        self.world.settle()
        self.check_disk()

    @rule(fault=st.sampled_from([DISK_FULL, READ_ONLY]))
    def refusing_disk(self, fault: OSError) -> None:
        before = self.world.on_disk()
        FAULTS.fault = fault
        self.world.settle()
        FAULTS.clear()
        state = self.world.saver.now
        assert self.world.on_disk() == before, "a disk that refuses was written to"
        if state.pending > len(state.conflicts):
            assert state.problems[0].code == ("save.disk_full" if fault is DISK_FULL else "save.read_only")
        self.take_void()
        self.check_library()

    @precondition(lambda self: self.world.saver.now.conflicts)
    @rule(mine=st.booleans())
    def resolve(self, mine: bool) -> None:
        conflict = self.world.saver.now.conflicts[0]
        self.world.saver.unsaved(self.world.picture(0))  # takes in what the user did since
        if conflict.key not in self.world.saver._conflicts:  # the user went on, and it is to be judged anew
            return
        self.shown(conflict)
        waited = self.waiting.get((conflict.path.name, conflict.field), [])
        waited[:] = [one for one in waited if not same(one, conflict.mine)]
        self.world.saver.resolve(conflict, "mine" if mine else "theirs")
        self.world.settle()
        self.take_void()
        if conflict.key not in [other.key for other in self.world.saver.now.conflicts]:
            picture = next(p for p in self.world.library.pictures.values() if p.path == conflict.path)
            if mine:
                found = read_value(picture, conflict.field)
                # Where a picture has two caption files and the first falls silent, the other one speaks.
                assert conflict.mine in (None, "") or same(conflict.mine, found), f"{found!r}, not {conflict.mine!r}"
                self.learn(picture.id, conflict.field)
        self.check_disk()

    def shown(self, conflict: Conflict) -> None:
        for suffix in (".txt", ".caption"):
            self.unseen.pop(conflict.path.with_suffix(suffix), None)

    @rule(place=places, text=texts, words=texts, which=st.sampled_from([".txt", ".caption"]), mine=st.booleans())
    def both_at_once(self, place: int, text: str, words: str, which: str, mine: bool) -> None:
        """The user and another program write the same caption before either is seen by the other."""
        if mine:
            self.edit([(place, "caption", f"{text} {next(self.numbers)}")], joins=False)
        self.other_program_writes(place, words, which, gone=False, seen=False)
        if not mine:
            self.edit([(place, "caption", f"{text} {next(self.numbers)}")], joins=False)
        self.save()

    @rule(
        wanted=st.lists(changes, min_size=1, max_size=4, unique_by=lambda change: change[:2]),
        kill_at=st.integers(1, 24),
    )
    def crash(self, wanted: list[tuple[int, Any, Any]], kill_at: int) -> None:
        self.edit(wanted, joins=False)
        FAULTS.kill_at = kill_at
        with contextlib.suppress(Killed):
            self.world.saver.flush()
        wanted = {(self.world.library.pictures[n].name, f): value for (n, f), value in self.values.items()}
        self.world.crash()
        self.check_contents()
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
            waited[:] = [one for one in waited if not same(one, read_value(picture, field))]
        for (number, field), value in self.values.items():
            picture = self.world.library.pictures[number]
            now = picture.value(field)
            if now != value and (
                field not in self.world.saver.unsaved(picture)
                or (picture.path, field) in [(c.path, c.field) for c in self.world.saver.now.conflicts]
            ):
                assert same(now, read_value(picture, field))
                self.see(number, field, now)

    def check_library(self) -> None:
        self.take_void()
        for (number, field), value in self.values.items():
            assert self.world.library.pictures[number].value(field) == value

    def check_disk(self) -> None:
        """The disk equals the model wherever nothing is said to stand in the way."""
        self.take_void()
        self.check_library()
        state = self.world.saver.now
        assert not state.problems
        assert state.pending == len(state.conflicts)
        for conflict in state.conflicts:
            picture = next(p for p in self.world.library.pictures.values() if p.path == conflict.path)
            assert not same(conflict.mine, conflict.theirs)
            assert same(conflict.theirs, read_value(picture, conflict.field))
        in_conflict = {conflict.key.path: conflict.key.field for conflict in state.conflicts}
        for (number, field), value in self.values.items():
            picture = self.world.library.pictures[number]
            if in_conflict.get(picture.path) != field and (picture.name, field) not in self.foreign:
                assert same(value, read_value(picture, field)), f"{picture.name} {field} is not {value!r} on disk"
        self.check_contents()

    def check_contents(self) -> None:
        """No file is half written, and what others wrote last is there, or backed up."""
        on_disk = self.world.on_disk()
        for name, content in on_disk.items():
            if name.endswith((".txt", ".caption")):
                assert content in self.contents or content == self.last.get(name), f"{name} holds {content[:80]!r}"
        for path, content in self.unseen.items():
            assert path.read_bytes() == content, f"{path.name} was overwritten though nobody had seen {content[:80]!r}"
        read_sidecar(self.world.data)  # raises where it is half written
        for name, last in self.last.items():
            if last is not None and on_disk.get(name) != last:
                kept = [version.data for version in self.world.backups.versions(str(self.world.data), name)]
                assert last in kept, f"{name} was overwritten, and {last[:80]!r} is nowhere"
