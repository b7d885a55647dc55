"""Pictures go to the system's trash with what belongs to them, and come back, on real files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from pytestqt.qtbot import QtBot

from app.core.edits.history import Edit
from app.core.library import ValueChange
from app.core.session import Session
from app.qt.images import deletion
from app.qt.images.views import ImageViews
from tests.support.grid import COUNT, click, current, forty_pictures, named, settle, shown_views
from trainer.dataset.sidecar import read_sidecar
from trainer.errors import ImpastoError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return forty_pictures(tmp_path / "mes chats 🐈")


@pytest.fixture
def views(qtbot: QtBot, session: Session, folder: Path) -> Iterator[ImageViews]:
    with shown_views(qtbot, session, folder) as views:
        yield views


def test_deleting_moves_picture_and_caption_to_the_trash_and_back(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # where Linux has its trash
    click(qtbot, views, 1)
    number = session.view.current
    views.delete()
    assert number not in session.library.images and current(session) == "p2.png"  # at once, its files soon after
    settle(qtbot, session)
    assert not (folder / "p1.png").exists() and not (folder / "p1.txt").exists() and (folder / "p2.txt").exists()
    assert number not in session.library.images and current(session) == "p2.png" and views.has_trashed()
    views.undelete()
    qtbot.waitUntil(lambda: session.view.current == number)
    assert named(session, "p1.png").caption == (folder / "p1.txt").read_text() == "cat, number 1"
    assert not views.has_trashed() and session.history.undo_name == "Restore 1 image"
    session.history.undo()
    settle(qtbot, session)
    assert not (folder / "p1.png").exists() and views.has_trashed()


def test_one_undo_brings_back_deleted_pictures_with_all_that_belongs_to_them_and_goes_on(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    Image.new("L", (301, 200), 9).save(folder / "p1-masklabel.png")
    click(qtbot, views, 1)
    views.rate_4()
    picture = named(session, "p1.png")
    typed = ValueChange(picture.id, "caption", "cat, number 1", "typed")
    session.history.do(Edit("Type", (typed,)), joins=True)  # not on disk yet
    files = {name: (folder / name).read_bytes() for name in ("p1.png", "p1-masklabel.png")}
    views.delete()
    assert session.history.undo_name == "Move 1 image to the trash" and picture.id not in session.library.images
    for _ in range(3):  # without a moment between, nor after the deletion: the picture, what was typed, the rating
        session.history.undo()
    assert session.history.writing
    settle(qtbot, session)
    session.saver.flush()
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert (folder / "p1.txt").read_text() == "cat, number 1" and read_sidecar(folder).of("p1.png").rating is None
    for _ in range(3):
        session.history.redo()
    settle(qtbot, session)
    assert picture.id not in session.library.images and not list(folder.glob("p1[.-]*"))
    session.history.undo()
    settle(qtbot, session)
    session.saver.flush()
    assert (folder / "p1.txt").read_text() == "typed" and read_sidecar(folder).of("p1.png").rating == 4
    told: list[int | None] = []
    session.datasets.refresh(whole=True)
    session.tasks.run(lambda: None, lambda _: told.append(named(session, "p1.png").rating), lambda _: None)
    qtbot.waitUntil(lambda: told == [4])
    assert len(session.library.images) == COUNT


def test_pictures_that_the_trash_refuses_stay_chosen_and_it_is_said(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "no folder"))
    failed: list[ImpastoError] = []
    session.history.failed.connect(failed.append)
    click(qtbot, views, 1)
    views.delete()
    settle(qtbot, session)
    assert failed[0].sentence == "Could not move 1 image(s) to the trash: p1.png."
    assert failed[0].remedy.startswith("They were not changed")
    assert (folder / "p1.txt").is_file() and (folder / "p1.png").is_file() and current(session) == "p1.png"
    assert session.history.undo_name is None and not views.has_trashed()


def test_what_cannot_come_back_from_the_trash_is_said_and_overwrites_nothing(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    failed: list[ImpastoError] = []
    session.history.failed.connect(failed.append)
    click(qtbot, views, 1)
    views.delete()
    settle(qtbot, session)
    (folder / "p1.txt").write_text("another program's", encoding="utf-8")
    session.history.undo()
    settle(qtbot, session)
    assert failed[0].sentence == "Could not restore 1 file(s): p1.txt."
    assert (folder / "p1.txt").read_text() == "another program's" and (folder / "p1.png").is_file()
    assert named(session, "p1.png") and session.history.redo_name is None


def test_who_selects_others_while_files_move_keeps_them_selected(
    qtbot: QtBot, views: ImageViews, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no folder").touch()
    (tmp_path / "data").mkdir()
    other = named(session, "p5.png").id
    for trash in ("no folder", "data"):  # it refuses, and the picture comes back; then it takes it
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / trash))
        qtbot.waitUntil(lambda: len(session.view.ids) == COUNT)
        session.view.select([named(session, "p1.png").id], named(session, "p1.png").id)
        views.delete()
        session.view.select([other], other)
        settle(qtbot, session)
        assert session.view.selected == {other} and current(session) == "p5.png"
    assert len(session.library.images) == COUNT - 1
    third = named(session, "p3.png").id
    session.history.undo()
    session.view.select([third], third)
    settle(qtbot, session)
    assert named(session, "p1.png") and session.view.selected == {third} and current(session) == "p3.png"


def test_a_fault_of_our_own_is_never_told_as_success(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    said: list[str] = []
    failed: list[ImpastoError] = []
    views.message_shown.connect(said.append)
    session.history.failed.connect(failed.append)

    def breaks(*_: object) -> None:
        raise RuntimeError("nobody foresaw it")

    def faulty(name: str, deed: Callable[[], None]) -> None:
        with monkeypatch.context() as patch, qtbot.capture_exceptions() as faults:
            patch.setattr(deletion, name, breaks)
            deed()
            settle(qtbot, session)
        assert [type(fault[1]) for fault in faults] == [RuntimeError] and failed.pop().code == "trash.fault"

    click(qtbot, views, 1)
    faulty("trash_images", views.delete)
    qtbot.waitUntil(lambda: len(session.view.ids) == COUNT)  # it is found again
    assert named(session, "p1.png") and (folder / "p1.png").is_file() and said == []
    assert session.history.undo_name is None and not views.has_trashed()
    click(qtbot, views, 1)
    views.delete()
    settle(qtbot, session)
    said.clear()
    faulty("restore_files", views.undelete)
    assert said == [] and not (folder / "p1.png").exists()
    assert session.history.undo_name is None and session.history.redo_name is None
    looked: list[object] = []
    session.datasets.refresh(whole=True)
    session.tasks.run(lambda: None, looked.append, lambda _: None)
    qtbot.waitUntil(lambda: bool(looked))
    assert len(session.library.images) == COUNT - 1
