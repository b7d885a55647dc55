"""Captions and notes reach their files whole, or wait with the reason; what others wrote is not overwritten unseen."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.edits import backups as backups_module
from app.core.edits import safe_files
from app.core.edits import saver as saver_module
from app.core.edits.backups import Backups
from app.core.edits.history import Edit
from app.core.edits.save_state import DiskValue, Key, SaveRequest
from app.core.edits.saver import Saver
from app.core.library import FolderChange, ValueChange
from tests.support.app_world import DISK_FULL, FAULTS, World, a_world, change, conflicts, set_to
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
    assert told == ["notice.beside_list"]
    world.history.undo()
    world.settle()
    assert not (world.data / "c.txt").exists()
    assert not world.saver.now.conflicts


def test_variants_keep_their_lines(world: World) -> None:
    set_to(world, 0, "one\n\ntwo\n")
    world.settle()
    assert (world.data / "a.txt").read_bytes() == b"one\n\ntwo\n"


def test_what_another_program_wrote_is_a_conflict_until_the_user_chose(world: World) -> None:
    for keep, expected in (("mine", b"mine"), ("theirs", b"theirs 2")):
        (world.data / "a.txt").write_bytes(b"theirs 1")
        world.learn_captions()
        set_to(world, 0, "mine")
        (world.data / "a.txt").write_bytes(b"theirs 2")
        world.settle()
        (conflict,) = world.saver.now.conflicts
        assert (conflict.mine, conflict.theirs, conflict.path.name) == ("mine", "theirs 2", "a.jpg")
        assert (world.data / "a.txt").read_bytes() == b"theirs 2"
        world.resolve(keep)
        world.settle()
        assert (world.data / "a.txt").read_bytes() == expected
        assert world.picture(0).caption == expected.decode()
        assert not world.saver.now.conflicts
    assert b"theirs 2" in kept(world, "a.txt")


@pytest.mark.parametrize("crashed", [False, True])
def test_an_edit_made_on_top_of_one_in_conflict_takes_its_place(world: World, crashed: bool) -> None:
    set_to(world, 0, "mine")
    (world.data / "a.txt").write_bytes(b"theirs")
    world.settle()
    assert conflicts(world) == [("mine", "theirs")]
    if crashed:
        world.crash()
        world.begin()
        assert world.picture(0).caption == "mine"
    set_to(world, 0, "newer")
    world.settle()
    assert conflicts(world) == [("newer", "theirs")]
    world.resolve("mine")
    world.settle()
    assert ((world.data / "a.txt").read_bytes(), conflicts(world)) == (b"newer", [])
    assert b"theirs" in kept(world, "a.txt")


@pytest.mark.parametrize("rolled", [False, True])
def test_an_older_edit_in_conflict_does_not_come_back_over_a_newer_one_after_a_kill(world: World, rolled: bool) -> None:
    set_to(world, 0, "older")
    (world.data / "a.txt").write_bytes(b"theirs")
    world.settle()
    world.library.set_facts({world.ids[0]: {"caption": "theirs"}}, "caption")  # he sees what is on disk, and edits that
    set_to(world, 0, "newer")
    if rolled:
        world.settle()
        assert (world.data / "a.txt").read_bytes() == b"newer"
    (world.data / "a.txt").write_bytes(b"cat, dog\n")  # what the older edit was made on top of
    world.crash()
    world.begin()
    assert (world.data / "a.txt").read_bytes() == b"cat, dog\n"
    assert conflicts(world) == ([] if rolled else [("newer", "cat, dog\n")])


@pytest.mark.parametrize("ends", ["crash", "close"])
@pytest.mark.parametrize("place", [0, 2])
def test_what_is_not_written_is_shown_after_a_restart_and_keeping_it_and_undo_lose_no_file(
    world: World, ends: str, place: int
) -> None:
    """It was shown as "No caption file yet", and undoing the user's choice removed the other program's file."""
    file = world.data / f"{world.picture(place).path.stem}.txt"
    set_to(world, place, "mine")
    file.write_bytes(b"theirs")
    world.settle()
    getattr(world, ends)()
    world.begin()
    assert world.picture(place).caption == "mine"
    assert conflicts(world) == [("mine", "theirs")]
    world.resolve("mine")
    world.settle()
    assert (file.read_bytes(), conflicts(world)) == (b"mine", [])
    world.history.undo()
    world.settle()
    assert (file.read_bytes(), world.picture(place).caption) == (b"theirs", "theirs")
    world.history.redo()
    world.settle()
    assert (file.read_bytes(), world.picture(place).caption) == (b"mine", "mine")


def test_keeping_the_other_version_is_undone(world: World) -> None:
    set_to(world, 2, "mine")
    (world.data / "c.txt").write_bytes(b"theirs")
    world.settle()
    world.resolve("theirs")
    world.settle()
    assert ((world.data / "c.txt").read_bytes(), world.picture(2).caption) == (b"theirs", "theirs")
    world.history.undo()
    world.settle()
    assert ((world.data / "c.txt").read_bytes(), world.picture(2).caption) == (b"mine", "mine")
    assert world.history.undo() is None or world.settle() is None
    assert (world.data / "c.txt").exists()


def test_a_choice_between_ratings_and_facts_of_a_folder_is_undone(world: World) -> None:
    notes = world.data / "impasto.jsonl"
    set_to(world, 1, 1, "rating")
    world.history.do(Edit("Repeat", (), (FolderChange(world.folder, "repeats", None, 3),)))
    notes.write_text('{"impasto":1,"repeats":7}\n{"file":"b.jpg","rating":5}\n', encoding="utf-8")
    world.settle()
    assert len(conflicts(world)) == 2
    for _ in range(2):
        world.resolve("mine")
        world.settle()
    assert (read_sidecar(world.data).folder.repeats, read_sidecar(world.data).of("b.jpg").rating) == (3, 1)
    for _ in range(2):
        world.history.undo()
    world.settle()
    assert (read_sidecar(world.data).folder.repeats, read_sidecar(world.data).of("b.jpg").rating) == (7, 5)
    assert (world.folder.repeats, world.picture(1).rating) == (7, 5)


@pytest.mark.parametrize(
    "now",
    ["theirs again", "cat, dog\n"],
    ids=["the disk has another version meanwhile", "the disk has again what the first edit was made on top of"],
)
def test_a_choice_replaces_only_the_version_that_was_chosen_against(world: World, now: str) -> None:
    set_to(world, 0, "mine")
    (world.data / "a.txt").write_bytes(b"theirs")
    world.settle()
    (world.data / "a.txt").write_bytes(now.encode())
    world.resolve("mine")
    world.settle()
    assert conflicts(world) == [("mine", now)]
    assert (world.data / "a.txt").read_bytes() == now.encode()


def test_an_edit_of_something_else_on_disk_does_not_replace_what_the_one_before_it_would(world: World) -> None:
    set_to(world, 0, "older")
    world.library.set_facts({world.ids[0]: {"caption": "theirs"}}, "caption")
    set_to(world, 0, "newer")
    world.settle()
    assert conflicts(world) == [("newer", "cat, dog\n")]


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


def test_an_edit_of_a_session_that_crashed_is_shown_when_the_user_chose_it(world: World) -> None:
    set_to(world, 0, "mine")
    (world.data / "a.txt").write_bytes(b"theirs")
    world.settle()
    world.crash()
    world.begin()
    assert len(conflicts(world)) == 1
    world.resolve("mine")
    world.settle()
    assert world.picture(0).caption == (world.data / "a.txt").read_text(encoding="utf-8") == "mine"


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


def test_a_full_disk_says_so_and_keeps_the_edit(world: World) -> None:
    FAULTS.fault = DISK_FULL
    set_to(world, 0, "kept")
    world.settle()
    (problem,) = world.saver.now.problems
    assert (problem.code, problem.waiting, problem.images) == ("save.disk_full", 1, frozenset({world.ids[0]}))
    assert world.saver.unsaved(world.picture(0)) == {"caption": "kept"}
    FAULTS.clear()
    world.settle()
    assert (world.data / "a.txt").read_bytes() == b"kept"
    assert world.saver.now.clean


def test_nothing_is_overwritten_without_a_backup(world: World, tmp_path: Path) -> None:
    blocked = world.home / "backups"
    shutil.rmtree(blocked, ignore_errors=True)
    blocked.write_bytes(b"a file where a folder has to be")
    set_to(world, 0, "kept")
    world.settle()
    assert [problem.code for problem in world.saver.now.problems] == ["save.no_backup"]
    assert not world.saver.now.backed_up
    assert (world.data / "a.txt").read_bytes() == b"cat, dog\n"


def test_a_folder_that_vanished_keeps_its_edits_until_it_is_back(world: World) -> None:
    away = world.data.with_name("away")
    world.data.rename(away)
    set_to(world, 0, "kept")
    set_to(world, 1, 4, "rating")
    world.settle()
    assert world.saver.now.pending == 2
    assert {problem.code for problem in world.saver.now.problems} == {"save.folder_gone"}
    assert [conflict.field for conflict in world.saver.now.conflicts] in ([], ["rating"])
    away.rename(world.data)
    if world.saver.now.conflicts:
        world.resolve("mine")
    world.settle()
    assert (world.data / "a.txt").read_bytes() == b"kept"
    assert read_sidecar(world.data).of("b.jpg").rating == 4


@pytest.mark.parametrize(
    ("text", "words"), [("x" * 100_001, "longer than"), ("a\0b", "a null character"), ("\ud800", "is incomplete")]
)
def test_a_caption_that_training_could_not_read_waits(world: World, text: str, words: str) -> None:
    set_to(world, 0, text)
    world.settle()
    (problem,) = world.saver.now.problems
    assert words in problem.sentence
    assert (world.data / "a.txt").read_bytes() == b"cat, dog\n"


def test_a_trigger_that_could_not_be_read_again_waits(world: World) -> None:
    """It was written as an escape, and of that folder's notes none could be read any more."""
    set_to(world, 0, 3, "rating")
    world.settle()
    world.history.do(Edit("word", (), (FolderChange(world.folder, "trigger", None, "zwx \ud83d"),)))
    world.settle()
    (problem,) = world.saver.now.problems
    assert problem.code == "save.value" and "invalid character" in problem.sentence
    assert read_sidecar(world.data).of(world.names[0]).rating == 3
    world.history.do(Edit("word", (), (FolderChange(world.folder, "trigger", "zwx \ud83d", "zwx"),)))
    world.settle()
    assert world.saver.now.clean and read_sidecar(world.data).folder.trigger == "zwx"


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


def test_a_damaged_sidecar_is_never_written_over(world: World) -> None:
    (world.data / "impasto.jsonl").write_bytes(b"{half")
    set_to(world, 0, 3, "rating")
    world.settle()
    assert [problem.code for problem in world.saver.now.problems] == ["sidecar.damaged"]
    assert (world.data / "impasto.jsonl").read_bytes() == b"{half"


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


@pytest.mark.parametrize("aged", [True, False])
def test_a_write_between_the_look_and_the_replacing_is_spared(world: World, aged: bool) -> None:
    file = world.data / "a.txt"
    if aged:  # so long ago that its times tell a change
        os.utime(file, (1_000_000_000, 1_000_000_000))

    def write_behind(event: str, path: Path) -> None:
        if event == "open" and path.suffix == ".tmp":
            FAULTS.touched = None
            file.write_bytes(b"dog, cat\n")  # as long as what was there

    FAULTS.touched = write_behind
    set_to(world, 0, "mine")
    world.settle()
    assert FAULTS.touched is None
    assert file.read_bytes() == b"dog, cat\n"
    assert conflicts(world) == [("mine", "dog, cat\n")]


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


def test_a_file_that_does_not_read_back_is_not_saved(world: World) -> None:
    def tear(event: str, path: Path) -> None:
        if event == "os.rename":
            path.write_bytes(b"torn")

    FAULTS.touched = tear
    set_to(world, 0, "mine")
    world.saver.flush()
    FAULTS.touched = None
    world.deliver()
    (problem,) = world.saver.now.problems
    assert "does not read back" in problem.sentence
    assert world.saver.unsaved(world.picture(0)).keys() == {"caption"}


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


def test_what_was_refused_is_looked_at_again_in_portions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "_BATCH", 1)
    FAULTS.fault = DISK_FULL
    for place in range(3):
        set_to(world, place, "mine")
    world.settle()
    assert [entry.state for entry in world.saver._entries.values()] == ["refused"] * 3
    FAULTS.clear()
    world.saver.hurry()
    left = []
    while world.saver._entries:
        world.saver._step()
        left.append(len(world.saver._entries))
    assert left == [2, 1, 0]
    world.settle()
    assert world.saver.now.clean and world.disk().files["c.txt"] == b"mine"


def test_what_another_program_writes_right_after_us_is_no_fault_of_the_disk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the disk takes it some milliseconds: long enough to write in."""
    file = world.data / "a.txt"
    monkeypatch.setattr(safe_files, "sync_directory", lambda folder: file.write_bytes(b"theirs"))
    set_to(world, 0, "mine")
    world.saver.flush()
    world.deliver()
    assert world.saver.now.clean and not world.saver.now.problems
    assert file.read_bytes() == b"theirs"


_ROOMLESS = """
import resource, sys
from pathlib import Path
from tests.support.app_world import World
from app.core.edits.history import Edit
from app.core.library import ValueChange
world = World(Path(sys.argv[1]), {"a.jpg": {".txt": b"cat"}})
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
world.history.do(Edit("Set", (ValueChange(world.ids[0], "caption", "cat", "x" * 90_000),)))
world.settle()
sys.stdout.write(" ".join(problem.code for problem in world.saver.now.problems))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file's size")
def test_a_real_limit_of_room_leaves_the_old_caption_whole(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _ROOMLESS, str(tmp_path)], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert "save.disk_full" in run.stdout, run.stderr
    assert (tmp_path / "a folder é" / "a.txt").read_bytes() == b"cat"
    assert [path.name for path in (tmp_path / "a folder é").iterdir() if path.suffix == ".tmp"] == []


def test_a_picture_of_the_longest_name_gets_its_caption(tmp_path: Path) -> None:
    """Its name leaves room for .txt, not for .caption, which is asked for too."""
    world = World(tmp_path, {"x" * 250 + ".jpg": {}})
    set_to(world, 0, "cat")
    world.saver.flush()
    assert (world.data / ("x" * 250 + ".txt")).read_text(encoding="utf-8") == "cat"
    world.journal._close_file()
    world.journal._lock.close()
