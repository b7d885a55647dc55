"""A disk that does not answer, as a network drive may for ever: it is named, holds nothing else up, and not the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core import tasks
from app.core.disk import datasets, images, reading, scanner, thumbnails
from app.core.disk.thumbnails import Thumbnails
from app.core.edits import saver, writer
from app.core.edits.history import Edit
from app.core.library import Folder, LibraryImage, ValueChange
from app.core.session import Session
from tests.support.desk import a_desk
from tests.support.opened import Open, picture


class Silent:
    """A place of which every question of the app waits until its disk answers again."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.only = ""
        """The name of the one function that has to wait; all of them where it is empty."""
        self.asked = threading.Semaphore(0)
        """Released with each question."""
        self.answers = threading.Event()

    def reader(self, real: Any) -> Any:
        """Return a function that reads as `real` does, and waits where the first it is given lies in the place."""

        def read(path: Path | str, *values: Any, **more: Any) -> Any:
            if Path(path).is_relative_to(self.place) and self.only in ("", real.__name__):
                self.asked.release()
                self.answers.wait()
            return real(path, *values, **more)

        return read


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    silent = Silent(tmp_path / "far away")
    for module, name in (
        (datasets, "identity_of"),
        (scanner, "list_directory"),
        (scanner, "has_changed"),
        (reading, "read_size"),
        (images, "make_thumbnail"),
        (writer, "replace_file"),
    ):
        monkeypatch.setattr(module, name, silent.reader(getattr(module, name)))
    for module in (datasets, tasks, thumbnails, saver):  # no test waits for seconds
        for name in ("_SILENT", "_STUCK_SECONDS", "_CLOSE_TIMEOUT", "_PATIENCE"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, 0.0)
    yield silent
    silent.answers.set()


def test_folders_that_do_not_answer_are_named_and_others_open(opened: Open, silent: Silent) -> None:
    far = [silent.place / "one", silent.place / "two", silent.place / "three"]
    for folder in far:
        picture(folder / f"{folder.name}.png")
        opened.datasets.open(folder)
    near = picture(silent.place.parent / "near" / "near.png").parent
    opened.datasets.open(near)
    opened.desk.until(lambda: opened.datasets._open[near].known)
    assert opened.names() == ["near.png"]
    for _ in far:
        assert silent.asked.acquire(timeout=60)
    assert opened.problems == []
    opened.datasets.refresh()
    assert [(each.code, str(folder) in each.sentence) for each, folder in zip(opened.problems, far, strict=True)] == [
        ("dataset.silent", True)
    ] * 3
    assert list(opened.datasets.lost) == far
    opened.datasets.refresh()
    assert len(opened.problems) == 3  # said once
    silent.answers.set()
    opened.settle()
    assert opened.names() == ["one.png", "two.png", "three.png", "near.png"]  # as they were opened
    assert not opened.datasets.lost


@pytest.mark.parametrize("asked", ["has_changed", "read_size"])
def test_a_dataset_that_falls_silent_stays_listed_and_goes_on_by_itself(
    opened: Open, silent: Silent, asked: str
) -> None:
    path = picture(silent.place / "a.png")
    silent.only = asked
    opened.datasets.open(silent.place)
    opened.desk.until(lambda: opened.names() and not opened.datasets._open[silent.place].scanning)
    if asked == "has_changed":
        opened.settle()
        opened.datasets.refresh()
    assert silent.asked.acquire(timeout=60)
    opened.datasets.refresh()
    assert opened["a.png"].problem == f"The folder {path.parent} does not respond."
    assert opened.problems[0].sentence == opened["a.png"].problem
    silent.answers.set()
    opened.settle()
    assert (opened["a.png"].problem, opened["a.png"].width, opened.datasets.lost) == (None, 40, {})


def test_of_a_silent_dataset_that_was_closed_nothing_is_heard_any_more(
    opened: Open, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def driver(*_: object) -> None:
        silent.asked.release()
        silent.answers.wait()
        raise RuntimeError("a driver that gives up")

    picture(silent.place / "a.png")
    silent.answers.set()
    opened.open(silent.place)
    silent.answers.clear()
    while silent.asked.acquire(blocking=False):
        pass
    monkeypatch.setattr(scanner, "has_changed", driver)
    dataset = opened.datasets._open[silent.place]
    opened.datasets.refresh()
    assert silent.asked.acquire(timeout=60)
    opened.datasets.refresh()
    assert dataset.lost
    opened.datasets.close(silent.place)
    silent.answers.set()
    opened.desk.until(lambda: not dataset.scanning)
    assert opened.names() == []


def test_thumbnails_of_a_disk_that_answers_come_beside_others(silent: Silent, tmp_path: Path) -> None:
    far, near = picture(silent.place / "far.png"), picture(tmp_path / "near" / "near.png")
    one, other = (LibraryImage(n, Folder(path.parent, path.parent), path.name) for n, path in enumerate((far, near)))
    with a_desk() as desk:
        made = Thumbnails(desk.post, tmp_path / "t.sqlite", threads=1)
        made.request(one, 256)
        assert silent.asked.acquire(timeout=60)
        made.request(other, 256)
        desk.until(lambda: made.get(other, 256))
        made.close()  # does not wait


def test_where_all_threads_are_stuck_what_waits_is_made_at_the_next_look(
    silent: Silent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = picture(silent.place / "far.png"), picture(tmp_path / "near" / "near.png")
    one, other = (LibraryImage(n, Folder(path.parent, path.parent), path.name) for n, path in enumerate((far, near)))
    monkeypatch.setattr(thumbnails, "_STUCK_SECONDS", 3600.0)  # not stuck yet when the second is wished for
    with a_desk() as desk:
        made = Thumbnails(desk.post, tmp_path / "t.sqlite", threads=1)
        made.request(one, 256)
        assert silent.asked.acquire(timeout=60)
        made.request(other, 256)
        made.look()
        assert made._threads == 1
        monkeypatch.setattr(thumbnails, "_STUCK_SECONDS", 0.0)
        made.look()
        desk.until(lambda: made.get(other, 256))
        made.close()


def test_the_end_waits_for_no_silent_disk_and_the_next_start_writes_what_was_on_its_way(
    silent: Silent, tmp_path: Path
) -> None:
    path = picture(silent.place / "a.png")
    with a_desk() as desk:
        session = Session(desk.post)
        silent.answers.set()
        session.datasets.open(silent.place)
        desk.until(lambda: session.datasets._open[silent.place].known)
        silent.answers.clear()
        while silent.asked.acquire(blocking=False):
            pass
        (number,) = session.library.images
        session.history.do(Edit("Set", (ValueChange(number, "caption", None, "kept"),)))
        session.datasets.refresh(whole=True)
        session.thumbnails.request(session.library.images[number], 256)
        for _ in ("the file", "the folder", "the picture"):
            assert silent.asked.acquire(timeout=60)
        session.close()
        assert not path.with_suffix(".txt").exists()
        silent.place = tmp_path / "elsewhere"  # for the next start it answers; for what hangs, not before the end
        session = Session(desk.post)
        desk.until(lambda: path.with_suffix(".txt").exists() and session.saver.now.clean)
        assert not session.saver.recovered  # it was closed, and did not stop unexpectedly
        assert path.with_suffix(".txt").read_text(encoding="utf-8") == "kept"
        session.close()
