"""The journal: what was edited outlives a crash of the app, and whatever is in conflict then."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from app.core.edits import writer
from app.core.edits.history import Edit
from app.core.edits.journal import Journal
from app.core.edits.save_state import Key, SaveNotice, SaveRequest
from tests.faults.captions import kill
from tests.support.app_world import FAULTS, GIVEN, READ_ONLY, World, a_world, change, conflicts, set_to

pytestmark = pytest.mark.fsync


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


@pytest.mark.parametrize(
    "changes",
    [
        "[5]", '[["a.jpg"]]', '[["a.jpg","caption",5,"x"]]', '[[1,"caption",[null],"x"]]', '[["a","no",[null],"x"]]',
        '[["a.jpg","caption",[{}],{}]]', '[["a\\u0000","caption",[null],"x"]]', '[["a.jpg","caption",[],"x"]]',
        '[["a.jpg","crop",[null],[1,2]]]', "NaN",
    ],
)  # fmt: skip
def test_a_damaged_journal_costs_its_own_end_and_is_kept(world: World, changes: str) -> None:
    """Parsed well, such a line ended every start of the app with an error, and no journal was ever taken over again."""
    set_to(world, 0, "made")
    path = world.journal._path
    bad = f'{{"edit":9,"part":0,"name":"n","root":"/","changes":{changes}}}\n{{"end":9}}\n'
    path.write_bytes(path.read_bytes() + bad.encode())
    content = path.read_bytes()
    world.crash()
    world.begin()
    assert (world.data / "a.txt").read_bytes() == b"made"
    assert not path.exists()
    assert path.with_suffix(".damaged").read_bytes() == content


def crashed_in_conflict(world: World) -> None:
    """A session wanted "mine" of the first picture, another program wrote "theirs", and the session crashed."""
    set_to(world, 0, "mine")
    (world.data / "a.txt").write_bytes(b"theirs")
    world.settle()
    world.crash()
    world.begin()


@pytest.mark.parametrize("saved", [True, False])
def test_what_a_crashed_session_wanted_gives_way_to_what_the_user_made_of_it(world: World, saved: bool) -> None:
    crashed_in_conflict(world)
    set_to(world, 0, "newer")
    if saved:
        world.settle()
    world.crash()
    world.begin()
    world.settle()
    assert conflicts(world) == [("newer", "theirs")]
    assert world.picture(0).caption == "newer"
    assert (world.data / "a.txt").read_bytes() == b"theirs"


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("keep", ["mine", "theirs"])
def test_what_the_user_chose_does_not_come_back_after_a_crash(world: World, keep: str, settled: bool) -> None:
    crashed_in_conflict(world)
    set_to(world, 0, "newer")
    world.settle()
    world.resolve(keep)
    if settled:
        world.settle()
    world.crash()
    world.begin()
    world.settle()
    assert conflicts(world) == []
    chosen = "newer" if keep == "mine" else "theirs"
    assert (world.data / "a.txt").read_text(encoding="utf-8") == world.picture(0).caption == chosen


def test_it_is_known_whether_a_session_was_closed(world: World) -> None:
    said: list[SaveNotice] = []
    for end, code in ((world.close, "notice.left"), (world.crash, "notice.recovered")):
        set_to(world, 0, "mine")
        set_to(world, 1, 3, "rating")
        (world.data / "a.txt").write_text(f"theirs at {code}", encoding="utf-8")
        if end == world.close:
            FAULTS.fault = READ_ONLY  # the rating cannot be written
        else:
            world.posted.clear()
        end()
        FAULTS.clear()
        world.open()
        world.saver.notices.connect(said.append)
        world.recover()
        assert said == [SaveNotice(code, str(world.data), 2, in_conflict=1)]  # type: ignore[arg-type]
        assert len(world.saver.recovered) == (2 if code == "notice.recovered" else 0)
        world.resolve("theirs")
        set_to(world, 1, None, "rating")
        world.settle()
        said.clear()


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
    assert [what for what in happened if what != "other waited for"] == [
        "journal waited for",
        "open",
        "os.rename",
        "os.remove",
    ]
    assert "other waited for" in happened[happened.index("open") : happened.index("os.rename")]


def test_many_files_are_on_the_disk_before_the_journal_calls_them_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose name was exchanged is empty after a power cut, unless its file system was waited for."""
    world = World(tmp_path, {f"{number}.jpg": {".txt": b"cat"} for number in range(12)})
    happened: list[str] = []
    wait = writer.sync_file_system

    def sync(folder: str) -> None:
        texts = {path.read_bytes() for path in Path(folder).glob("*.txt")}
        happened.append(f"waited for {texts}")
        wait(folder)

    def note(requests: Iterable[SaveRequest]) -> None:
        happened.append(f"{len(list(requests))} saved")

    monkeypatch.setattr(writer, "sync_file_system", sync)
    monkeypatch.setattr(world.journal, "saved", note)
    world.history.do(Edit("Set", tuple(change(world, place, "dog") for place in range(12))))
    world.settle()
    assert happened == ["waited for {b'dog'}", "12 saved"]
    world.crash()


def test_a_session_that_lives_keeps_its_journal(world: World) -> None:
    set_to(world, 0, "theirs to write")
    second = Journal(world.home / "journal")
    assert second.adopt().requests == []
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
    (request,) = journal.append("Set", [SaveRequest(Key("/cats", "a.jpg", "caption"), (None,), "kept")])
    journal.end()
    file = journal._file
    journal.close([request] if unsaved else [])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    journal._file = file  # as a thread finds it that is between two steps
    journal.sync()
    journal._file = None
    journal.saved([request])
    journal.roll([], 1)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    after = Journal(tmp_path)
    assert [one.desired for one in after.adopt().requests] == ["kept"] * unsaved
    after.close([])


def test_processes_killed_while_they_edit_lose_nothing() -> None:
    assert sum(kill(number) for number in range(2)) > 0
