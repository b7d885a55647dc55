"""The journal: what was edited outlives a crash of the app, and whatever is in conflict then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.edits.journal import Journal
from app.core.edits.wishes import Key, Wish
from tests.faults.captions import kill
from tests.support.app_world import FAULTS, GIVEN, World, a_world, conflicts, set_to


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


def test_a_torn_last_line_is_cut_and_an_edit_without_end_was_never_made(world: World) -> None:
    set_to(world, 0, "made")
    path = world.journal._path
    content = path.read_bytes()
    world.crash()
    for torn, expected in ((content[:-1], b"cat, dog\n"), (content[:-5], b"cat, dog\n"), (content, b"made")):
        path.write_bytes(torn)
        world.begin()
        assert (world.data / "a.txt").read_bytes() == expected
        assert not path.exists(), "a journal that was taken over stays"
        world.crash()
    world.begin()


def crashed_in_conflict(world: World) -> None:
    """A session wanted "mine" of the first picture, another program wrote "theirs", and the session crashed."""
    set_to(world, 0, "mine")
    (world.data / "a.txt").write_bytes(b"theirs")
    world.settle()
    world.crash()
    world.begin()


@pytest.mark.parametrize("saved", [True, False])
def test_what_a_crashed_session_wanted_outlives_another_crash_though_the_picture_is_edited(
    world: World, saved: bool
) -> None:
    crashed_in_conflict(world)
    set_to(world, 0, "newer")
    if saved:
        world.settle()
        assert conflicts(world) == [("mine", "newer")]
    world.crash()
    world.begin()
    world.settle()
    assert (world.data / "a.txt").read_bytes() == b"newer"
    assert conflicts(world) == [("mine", "newer")]


def test_of_two_wishes_in_conflict_neither_is_forgotten(world: World) -> None:
    crashed_in_conflict(world)
    set_to(world, 0, "newer")
    (world.data / "a.txt").write_bytes(b"theirs again")
    world.settle()
    assert conflicts(world) == [("newer", "theirs again")]
    world.saver.resolve(world.saver.now.conflicts[0], "theirs")
    world.settle()
    assert conflicts(world) == [("mine", "theirs again")]
    world.saver.resolve(world.saver.now.conflicts[0], "mine")
    world.settle()
    assert conflicts(world) == []
    assert (world.data / "a.txt").read_bytes() == b"mine"


def test_what_the_user_chose_against_does_not_come_back_after_a_crash(world: World) -> None:
    crashed_in_conflict(world)
    (conflict,) = world.saver.now.conflicts
    set_to(world, 0, "newer")
    world.saver.resolve(conflict, "mine")
    world.settle()
    assert (world.data / "a.txt").read_bytes() == b"mine"
    world.crash()
    world.begin()
    assert conflicts(world) == []
    assert (world.data / "a.txt").read_bytes() == b"mine"


def test_a_caption_saved_while_a_large_edit_is_entered_is_known_as_saved(world: World) -> None:
    set_to(world, 0, "one")
    world.journal.append("Large", [])
    world.settle()
    world.journal.end()
    (world.data / "a.txt").write_bytes(b"theirs")
    world.crash()
    world.begin()
    assert conflicts(world) == []
    assert (world.data / "a.txt").read_bytes() == b"theirs"


def test_the_journal_is_on_the_disk_before_a_file_is_touched_and_a_single_file_afterwards(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = list[str]()
    waits = os.fsync

    def wait_for_disk(handle: int) -> None:
        same = os.path.samestat(os.fstat(handle), world.journal._path.stat())
        happened.append("journal waited for" if same else "other waited for")
        waits(handle)

    def touched(event: str, path: Path) -> None:
        if path.parent == world.data:
            happened.append(event)

    monkeypatch.setattr(os, "fsync", wait_for_disk)
    set_to(world, 0, "mine")
    happened.clear()
    FAULTS.touched = touched
    world.settle()
    assert [what for what in happened if what != "other waited for"] == ["journal waited for", "open", "os.rename"]
    assert "other waited for" in happened[happened.index("open") : happened.index("os.rename")]


def test_a_session_that_lives_keeps_its_journal(world: World) -> None:
    set_to(world, 0, "theirs to write")
    second = Journal(world.home / "journal")
    assert second.adopt() == []
    second.close([])
    assert world.journal._path.exists()


def test_an_unwritable_journal_is_told_and_captions_are_written_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "journal").write_bytes(b"a file where a folder has to be")
    world = World(tmp_path, GIVEN)
    set_to(world, 0, "written")
    world.settle()
    assert [problem.code for problem in world.saver.now.problems] == ["save.no_journal"]
    assert (world.data / "a.txt").read_bytes() == b"written"


def test_the_journal_does_not_grow_without_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.core.edits.journal._LARGE", 5000)
    for number in range(60):
        set_to(world, 0, f"caption {number} " + "x" * 100)
        world.settle()
    assert world.journal._path.stat().st_size < 10_000


@pytest.mark.parametrize("unsaved", [True, False])
def test_what_a_late_thread_does_after_the_end_changes_nothing(tmp_path: Path, unsaved: bool) -> None:
    journal = Journal(tmp_path)
    (wish,) = journal.append("Set", [Wish(Key("/cats", "a.jpg", "caption"), (None,), "kept")])
    journal.end()
    file = journal._file
    journal.close([wish] if unsaved else [])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    journal._file = file  # as a thread finds it that is between two steps
    journal.sync()
    journal._file = None
    journal.saved([wish])
    journal.roll([], 1)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    after = Journal(tmp_path)
    assert [one.desired for one in after.adopt()] == ["kept"] * unsaved
    after.close([])


def test_processes_killed_while_they_edit_lose_nothing() -> None:
    assert sum(kill(number) for number in range(2)) > 0
