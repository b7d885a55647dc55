"""Edits that cannot be written yet wait with the reason: conflicts with other programs, and refused writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.edits import safe_files
from app.core.edits import saver as saver_module
from app.core.edits.history import Edit
from app.core.library import FolderChange
from tests.support.app_world import DISK_FULL, FAULTS, World, a_world, conflicts, set_to
from trainer.dataset.sidecar import read_sidecar


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


def kept(world: World, name: str) -> list[bytes | None]:
    return [version.data for version in world.backups.versions(str(world.data), name)]


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


def test_a_damaged_sidecar_is_never_written_over(world: World) -> None:
    (world.data / "impasto.jsonl").write_bytes(b"{half")
    set_to(world, 0, 3, "rating")
    world.settle()
    assert [problem.code for problem in world.saver.now.problems] == ["sidecar.damaged"]
    assert (world.data / "impasto.jsonl").read_bytes() == b"{half"


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
    assert "the data read back differs from the data written" in problem.sentence
    assert world.saver.unsaved(world.picture(0)).keys() == {"caption"}


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
