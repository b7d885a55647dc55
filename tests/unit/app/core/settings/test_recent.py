"""Which folders are remembered and opened again: sessions one after the other over one per-user folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from app.core.session import Session
from app.core.settings.preferences import Preferences, Settings, StartupPreferences
from app.core.settings.recent import RecentFolders
from tests.support.desk import Desk, a_desk
from tests.support.waiting import until


class Sitting:
    """A session, from its start to its end."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.missed = desk, list[Path]()
        self.session = Session(desk.post)
        self.session.folder_missing.connect(self.missed.append)

    def open(self, *folders: Path) -> None:
        for folder in folders:
            self.session.datasets.open(folder)
            self.desk.until(lambda folder=folder: folder in self.session.recent.folders)

    def reopen(self) -> set[Path]:
        self.session.reopen()
        self.desk.until(lambda: not self.session.recent.is_checking)
        return set(self.session.datasets.folders)


@contextmanager
def a_sitting() -> Iterator[Sitting]:
    with a_desk() as desk:
        sitting = Sitting(desk)
        try:
            yield sitting
        finally:
            sitting.session.close()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"Bilder {number} 猫" for number in range(12)]
    for folder in made:
        folder.mkdir()
        Image.new("RGB", (8, 8)).save(folder / "a.png")
    return made


def test_what_was_open_at_the_end_is_opened_again(folders: list[Path]) -> None:
    with a_sitting() as first:
        first.open(*folders[:3])
        first.session.datasets.close(folders[1])
    with a_sitting() as second:
        assert second.session.datasets.folders == ()
        assert second.reopen() == {folders[0], folders[2]}
        second.desk.until(lambda: len(second.session.library.images) == 2)
        assert second.session.recent.folders == (folders[2], folders[1], folders[0])


def test_a_session_that_crashed_is_opened_again(folders: list[Path], per_user_folder: Path) -> None:
    with a_sitting() as first:
        first.open(folders[0])
        until((per_user_folder / "folders.json").exists)
        kept = (per_user_folder / "folders.json").read_bytes()
    (per_user_folder / "folders.json").write_bytes(kept)
    with a_sitting() as second:
        assert second.reopen() == {folders[0]}


def test_a_folder_that_is_not_listed_yet_when_the_app_ends_is_opened_again(folders: list[Path]) -> None:
    with a_sitting() as first:
        first.session.datasets.open(folders[0])
    with a_sitting() as second:
        assert second.reopen() == {folders[0]}


def test_who_does_not_want_it_begins_with_nothing_and_later_too(folders: list[Path]) -> None:
    with a_sitting() as first:
        first.open(folders[0])
    chosen = Settings()
    chosen.change(Preferences(starting=StartupPreferences(reopen=False)))
    chosen.file.settle()
    with a_sitting() as second:
        assert second.reopen() == set()
        assert second.session.recent.folders == (folders[0],)
    chosen.change(Preferences())
    chosen.file.settle()
    with a_sitting() as third:
        assert third.reopen() == set()


def test_a_folder_that_is_gone_is_told_once_and_stays_among_the_recent_ones(folders: list[Path]) -> None:
    with a_sitting() as first:
        first.open(*folders[:2])
    folders[0].rename(folders[0].with_name("elsewhere"))
    with a_sitting() as second:
        assert second.reopen() == {folders[1]}
        assert second.missed == [folders[0]]
        assert second.session.recent.absent == {folders[0]: "gone"}
        assert folders[0] in second.session.recent.folders
    with a_sitting() as third:
        third.reopen()
        assert third.missed == []


def test_what_the_user_opens_besides_wins_and_is_not_refused_every_day(folders: list[Path]) -> None:
    with a_sitting() as first:
        first.open(folders[0])
    for told in (1, 0):
        with a_sitting() as later:
            problems = []
            later.session.datasets.problems.connect(problems.append)
            later.open(folders[0].parent)
            assert later.reopen() == {folders[0].parent}
            later.desk.until(lambda problems=problems, told=told: len(problems) >= told)
            assert len(problems) == told


def test_the_newest_ten_come_first_and_clearing_leaves_the_open_ones_open(folders: list[Path]) -> None:
    with a_sitting() as first:
        first.open(*folders)
        assert first.session.recent.folders == tuple(reversed(folders[2:]))
        first.session.datasets.close(folders[5])
        first.session.datasets.open(folders[5])
        first.desk.until(lambda: first.session.recent.folders[0] == folders[5])
        first.session.recent.clear()
        assert first.session.recent.folders == ()
    with a_sitting() as second:
        assert second.session.recent.folders == ()
        assert second.reopen() == set(folders)


def test_each_look_says_what_stands_against_a_folder_now(folders: list[Path]) -> None:
    with a_sitting() as sitting:
        recent = sitting.session.recent
        sitting.open(*folders[:2])
        (folders[0] / "a.png").unlink()
        folders[0].rmdir()
        folders[0].write_text("a file", encoding="utf-8")
        recent.check()
        sitting.desk.until(lambda: not recent.is_checking)
        assert recent.absent == {folders[0]: "file"}
        folders[0].unlink()
        folders[0].mkdir()
        recent.check()
        sitting.desk.until(lambda: not recent.is_checking)
        assert recent.absent == {}


@pytest.mark.skipif(sys.platform == "win32", reason="rights are not taken by a mode there")
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may look everywhere")
def test_a_folder_that_must_not_be_read_is_said_to_be_so(folders: list[Path]) -> None:
    with a_sitting() as sitting:
        sitting.open(folders[0])
        folders[0].chmod(0)
        try:
            sitting.session.recent.check()
            sitting.desk.until(lambda: not sitting.session.recent.is_checking)
        finally:
            folders[0].chmod(0o700)
        assert sitting.session.recent.absent == {folders[0]: "refused"}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"recent": ["a"]}', '{"recent": [3], "open": []}', '{"recent": "a", "open": []}']
)
def test_a_damaged_file_is_set_aside_and_told(text: str, per_user_folder: Path) -> None:
    path = per_user_folder / "folders.json"
    path.write_text(text, encoding="utf-8")
    with a_desk() as desk:
        recent = RecentFolders(desk.post)
        assert (recent.folders, recent.folders_to_reopen(True)) == ((), ())
        aside = path.with_name("folders.damaged.json")
        assert str(aside) in recent.notice
        assert aside.read_text(encoding="utf-8") == text
        recent.opened(per_user_folder)
        recent.close()
        assert RecentFolders(desk.post).folders_to_reopen(True) == (per_user_folder,)


def test_names_that_no_file_can_have_are_gone_and_a_disk_that_refuses_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    strange = [tmp_path / "a\0b", tmp_path / "\udcff"]
    with a_desk() as desk:
        recent = RecentFolders(desk.post, tmp_path / "here" / "folders.json")
        for folder in strange:
            recent.opened(folder)
        recent.check()
        desk.until(lambda: len(recent.absent) == 2)
        assert set(recent.absent.values()) == {"gone"}
        recent.close()
        assert RecentFolders(desk.post, tmp_path / "here" / "folders.json").folders == (strange[1], strange[0])
        refused = RecentFolders(desk.post, tmp_path / "file" / "folders.json")
        refused.opened(tmp_path)
        assert refused.folders == (tmp_path,)
        refused.close()
