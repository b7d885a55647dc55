"""Captions and notes reach their files whole, with backups; large edits do not hold up the window."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.edits import backups as backups_module
from app.core.edits import saver as saver_module
from app.core.edits.backups import Backups
from app.core.edits.history import Edit
from app.core.edits.save_state import DiskValue, Key, SaveRequest
from app.core.edits.saver import Saver
from app.core.library import FolderChange, ValueChange
from tests.support.app_world import World, a_world, change, conflicts, set_to
from trainer.dataset.sidecar import read_sidecar


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


def kept(world: World, name: str) -> list[bytes | None]:
    return [version.data for version in world.backups.versions(str(world.data), name)]


def test_each_caption_stays_in_the_file_it_was_in(world: World) -> None:
    for place in range(4):
        set_to(world, place, "é 🎨\r\nx\n")
    world.settle()
    written = "é 🎨\nx\n".encode()
    assert world.disk().files == {"a.txt": written, "b.caption": written, "c.txt": written, "d.txt": written}
    assert [kept(world, name) for name in ("a.txt", "b.caption", "c.txt", "d.txt")] == [
        [b"cat, dog\n"], [b"bird"], [None], [b"caf\xe9"],
    ]  # fmt: skip


def test_converted_files_are_told_once(world: World) -> None:
    told = list[str]()
    world.saver.notices.connect(lambda notice: told.append(notice.code))
    set_to(world, 3, "tea")
    world.settle()
    assert told == ["notice.converted"]


def test_undoing_a_first_caption_removes_its_file_into_the_backup(world: World) -> None:
    set_to(world, 2, "new")
    world.settle()
    world.history.undo()
    world.settle()
    assert not (world.data / "c.txt").exists()
    assert kept(world, "c.txt") == [None, b"new"]
    world.history.redo()
    world.settle()
    assert (world.data / "c.txt").read_bytes() == b"new"


def test_a_listed_caption_gets_a_file_that_wins_and_undo_takes_it_away(tmp_path: Path, world: World) -> None:
    (world.data / "metadata.jsonl").write_text('{"file_name": "c.jpg", "text": "listed"}\n', encoding="utf-8")
    world.learn_captions()
    told = list[str]()
    world.saver.notices.connect(lambda notice: told.append(notice.code))
    set_to(world, 2, "mine")
    world.settle()
    assert (world.data / "c.txt").read_bytes() == b"mine"
    assert told == ["notice.replaces_list"]
    world.history.undo()
    world.settle()
    assert not (world.data / "c.txt").exists()
    assert not world.saver.now.conflicts


def test_variants_keep_their_lines(world: World) -> None:
    set_to(world, 0, "one\n\ntwo\n")
    world.settle()
    assert (world.data / "a.txt").read_bytes() == b"one\n\ntwo\n"


def test_undo_empties_a_file_that_this_session_did_not_see_absent(world: World) -> None:
    """A session wrote the first caption of an image and was killed before it could undo that."""
    set_to(world, 2, "new")
    world.settle()
    world.history.undo()
    world.crash()
    world.begin()
    world.settle()
    assert (world.data / "c.txt").read_bytes() == b""
    assert kept(world, "c.txt") == [None, b"new"]
    assert world.picture(2).caption == ""


def test_notes_are_merged_into_what_others_noted(world: World) -> None:
    notes = world.data / "impasto.jsonl"
    set_to(world, 0, 3, "rating")
    notes.write_text('{"impasto":1,"trigger":"tok"}\n{"file":"b.jpg","rating":5,"their":[1]}\n', encoding="utf-8")
    set_to(world, 2, (0.0, 0.25, 1.0, 1.0), "crop")
    set_to(world, 1, 1, "rating")
    world.settle()
    lines = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"impasto": 1, "trigger": "tok"},
        {"file": "b.jpg", "rating": 5, "their": [1]},
        {"file": "a.jpg", "rating": 3},
        {"file": "c.jpg", "crop": [0.0, 0.25, 1.0, 1.0]},
    ]
    assert [(conflict.path.name, conflict.mine, conflict.theirs) for conflict in world.saver.now.conflicts] == [
        ("b.jpg", 1, 5)
    ]


def test_facts_of_a_folder_are_noted_and_undone(world: World) -> None:
    world.folder.repeats = 10  # by its name, which notes know nothing of
    edit = Edit(
        "Repeat", (), (FolderChange(world.folder, "repeats", 10, 3), FolderChange(world.folder, "trigger", None, "tok"))
    )
    world.history.do(edit)
    world.settle()
    assert (read_sidecar(world.data).folder.repeats, read_sidecar(world.data).folder.trigger) == (3, "tok")
    assert world.history.undo() is not None
    world.settle()
    assert (world.folder.repeats, read_sidecar(world.data).folder.repeats) == (10, 10)
    assert not world.saver.now.conflicts


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are Unicode")
def test_a_picture_whose_name_is_no_unicode_keeps_its_caption_and_its_notes(tmp_path: Path) -> None:
    """Neither SQLite nor pydantic took its name, and no change of any picture was saved beside one of it."""
    odd = os.fsdecode(b"caf\xe9")
    world = World(tmp_path, {f"{odd}.jpg": {".txt": b"before"}, "a.jpg": {}})
    for place, rating in enumerate((3, 4)):
        set_to(world, place, "words")
        set_to(world, place, rating, "rating")
    world.settle()
    set_to(world, 0, (0.0, 0.0, 0.5, 1.0), "crop")
    world.settle()
    assert world.saver.now.clean
    assert world.disk().files[f"{odd}.txt"] == world.disk().files["a.txt"] == b"words"
    notes = read_sidecar(world.data)
    assert (notes.of(f"{odd}.jpg").rating, notes.of(f"{odd}.jpg").crop) == (3, (0.0, 0.0, 0.5, 1.0))
    assert notes.of("a.jpg").rating == 4
    assert kept(world, f"{odd}.txt") == [b"before"]
    world.backups.restore(str(world.data))
    assert world.disk().files[f"{odd}.txt"] == b"before"
    world.crash()


def linked(world: World, name: str, target: Path) -> None:
    (world.data / name).unlink(missing_ok=True)
    try:
        (world.data / name).symlink_to(target)
    except OSError:
        pytest.skip("this user may not make symbolic links")


def test_a_link_within_the_dataset_stays_a_link(world: World) -> None:
    target = world.data / "shared.txt"
    target.write_bytes(b"cat, dog\n")
    linked(world, "a.txt", target)
    set_to(world, 0, "through")
    world.settle()
    assert (world.data / "a.txt").is_symlink()
    assert target.read_bytes() == b"through"


@pytest.mark.parametrize("name", ["a.txt", "impasto.jsonl"])
def test_nothing_is_written_through_a_link_that_leads_out_of_the_dataset(
    name: str, world: World, tmp_path: Path
) -> None:
    target = tmp_path / "private"
    target.write_bytes(b"")
    linked(world, name, target)
    if name == "a.txt":
        set_to(world, 0, "through")
    else:
        set_to(world, 0, 4, "rating")
    world.settle()
    assert target.read_bytes() == b""
    assert (world.data / name).is_symlink()
    (problem,) = world.saver.now.problems
    assert (problem.code, problem.waiting) == ("save.outside", 1)
    (world.data / name).unlink()
    if name == "a.txt":
        (world.data / name).write_bytes(b"cat, dog\n")
    world.settle()
    assert world.saver.now.clean
    assert not (world.data / name).is_symlink()
    assert target.read_bytes() == b""


def test_what_a_killed_writer_left_is_swept_but_nothing_recent_and_nothing_of_others(world: World) -> None:
    ours, recent = (world.data / f".impasto-{digit * 16}.tmp" for digit in "ab")
    others = world.data / ".impasto-mine.tmp"
    for path in (ours, recent, others):
        path.write_bytes(b"half")
        if path != recent:
            os.utime(path, (1_000_000_000, 1_000_000_000))
    set_to(world, 0, "written")
    world.settle()
    assert [path.exists() for path in (ours, recent, others)] == [False, True, True]


def test_originals_come_back_byte_for_byte(world: World) -> None:
    before = world.disk().files
    for place in range(4):
        set_to(world, place, "other")
    world.settle()
    assert len(world.backups.restore(str(world.data))) == 4
    assert world.disk().files == before
    assert b"other" in kept(world, "a.txt")


def test_originals_are_kept_when_versions_have_to_go(tmp_path: Path) -> None:
    backups = Backups(tmp_path, most_bytes=300_000)
    for number in range(20):
        backups.keep("/root", [("a.txt", bytes([number]) * 50_000)])
    versions = backups.versions("/root", "a.txt")
    assert versions[0].original and versions[0].data == bytes(50_000)
    assert versions[-1].data == bytes([19]) * 50_000
    assert len(versions) < 8
    assert backups_module.MOST_BYTES > 100_000_000


@pytest.mark.parametrize("damage", ["text", "pages", "cut", "tables", "folder"])
def test_damaged_backups_are_set_aside_and_saving_continues(world: World, damage: str) -> None:
    """They are user data, so they are kept; without a new file nothing in the dataset could be saved ever again."""
    found: list[tuple[str, Path]] = []
    world.backups.damaged = lambda root, file: found.append((root, file))
    set_to(world, 0, "first")
    world.settle()
    file = world.backups.path(str(world.data))
    whole = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    elif damage == "tables":
        with contextlib.closing(sqlite3.connect(file)) as database:
            database.executescript("DROP TABLE versions; CREATE TABLE versions (other)")
    else:
        changed = {"text": b"{}" * 4000, "pages": whole[:100] + b"\xa5" * (len(whole) - 100), "cut": whole[:5000]}
        file.write_bytes(changed[damage])
    for place, text in enumerate(("second", "third")):
        set_to(world, place, text)
    world.settle()
    assert world.saver.now.clean and not world.saver.now.problems
    assert (world.data / "a.txt").read_bytes() == b"second"
    ((root, aside),) = found
    assert root == str(world.data) and aside.exists() and ".damaged" in aside.name
    assert kept(world, "b.caption") == [b"bird"]


def test_of_a_large_edit_no_more_is_entered_at_once_than_the_window_may_wait_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 100,000 captions a look at the disk asked for each of them, and the first to be asked entered them all."""
    monkeypatch.setattr(saver_module, "_BATCH", 1)
    entered: list[int] = []
    absorb, add = Saver._absorb, Saver._add

    def noted(saver: Saver, most: int | None) -> None:
        entered.append(0)
        absorb(saver, most)

    def counted(saver: Saver, request: SaveRequest, due: float) -> None:
        entered[-1] += 1
        add(saver, request, due)

    monkeypatch.setattr(Saver, "_absorb", noted)
    monkeypatch.setattr(Saver, "_add", counted)
    changes = [ValueChange(one.id, "caption", one.caption, "mine") for one in map(world.picture, range(3))]
    world.history.do(Edit("Set", tuple(changes)))
    unsaved = [dict(world.saver.unsaved(world.picture(place))) for place in (0, 2, 3)]
    assert unsaved == [{"caption": "mine"}, {"caption": "mine"}, {}]
    assert sum(entered) == 0
    world.saver._step()
    assert sum(entered) == 3 and max(entered) == 1
    world.settle()
    assert not world.saver.unsaved(world.picture(0))


def test_a_fact_of_a_folder_behind_a_large_edit_does_not_have_that_entered_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[SaveRequest] = []
    monkeypatch.setattr(Saver, "_add", lambda saver, request, due: entered.append(request))
    world.history.do(Edit("Repeat", (), (FolderChange(world.folder, "repeats", None, 3),)))
    world.history.do(Edit("Set", tuple(change(world, place, "new") for place in (0, 1))))
    rated = SaveRequest(Key(str(world.data), "d.jpg", "rating"), (None,), 4)  # left by a session that crashed
    world.saver.take([rated])
    assert world.saver.unsaved_of_folder(world.folder) == {"repeats": 3}
    assert [world.saver.unsaved(world.picture(place)) for place in range(4)] == [
        {"caption": "new"},
        {"caption": "new"},
        {},
        {"rating": 4},
    ]
    assert not entered


def test_a_later_edit_of_another_value_is_no_later_request_for_this_one(world: World) -> None:
    """Of what a session that crashed left, edits of many numbers arrive at once."""
    first, other = (Key(str(world.data), name, "caption") for name in ("a.jpg", "b.jpg"))
    world.saver.take([SaveRequest(first, (None,), "x", number=1), SaveRequest(other, (None,), "y", number=5)])
    asked = [DiskValue(first, 0, ""), DiskValue(first, 1, ""), DiskValue(other, 4, ""), DiskValue(other, 5, "")]
    assert [world.saver.wants_more(learned) for learned in asked] == [True, False, True, False]


def test_nothing_that_the_window_asks_of_a_large_edit_enters_all_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 100,000 captions each of these held up the window for up to a second."""
    set_to(world, 0, "mine")
    set_to(world, 3, "mine")
    for name in ("a.txt", "d.txt"):
        (world.data / name).write_bytes(b"theirs")
    world.settle()
    first, last = world.saver.now.conflicts
    world.history.do(Edit("Set", tuple(change(world, place, "new") for place in (0, 1, 2))))
    entered: list[str] = []
    add = Saver._add

    def noted(saver: Saver, request: SaveRequest, due: float) -> None:
        entered.append(request.key.name)
        add(saver, request, due)

    monkeypatch.setattr(Saver, "_add", noted)
    assert [world.saver.wants_more(DiskValue(key, 0, "theirs")) for key in (first.key, last.key)] == [True, True]
    assert not world.saver.wants_more(DiskValue(first.key, 99, "theirs"))
    world.saver.hurry()
    world.history.resolve([(last, last.theirs)], "Keep theirs")
    assert entered == []
    world.history.resolve([(first, first.theirs)], "Keep theirs")  # the user went on since: his choice is void
    assert entered == []
    assert not world.saver.is_open(first)
    assert entered == ["a.jpg"]
    world.settle()
    assert sorted(entered) == ["a.jpg", "b.jpg", "c.jpg"]
    assert conflicts(world) == [("new", "theirs")]  # he went on from it, so it is judged anew
    assert world.disk().files == {"a.txt": b"theirs", "b.caption": b"new", "c.txt": b"new", "d.txt": b"theirs"}


def test_a_picture_of_the_longest_name_gets_its_caption(tmp_path: Path) -> None:
    """Its name leaves room for .txt, not for .caption, which is asked for too."""
    world = World(tmp_path, {"x" * 250 + ".jpg": {}})
    set_to(world, 0, "cat")
    world.saver.flush()
    assert (world.data / ("x" * 250 + ".txt")).read_text(encoding="utf-8") == "cat"
    world.journal._close_file()
    world.journal._lock.close()
