"""A whole session over real files: what is wired together does together what each part does alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from app.core.edits.history import Edit
from app.core.library import Field, FolderChange, Value, ValueChange
from app.core.session import Session
from tests.support.desk import Desk, a_desk
from trainer.dataset.sidecar import read_sidecar, write_sidecar


class Sitting:
    """A session with one picture."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        self.desk, self.folder = desk, folder
        Image.new("RGB", (40, 30), "teal").save(folder / "a.png")
        (folder / "a.txt").write_text("one", encoding="utf-8")
        self.session = Session(desk.post)
        self.session.datasets.open(folder)
        self.look()
        (self.number,) = self.session.library.images

    def look(self) -> None:
        self.session.datasets.refresh(whole=True)
        datasets = self.session.datasets._open.values()
        self.desk.until(lambda: not any(each.scanning or each.sizing for each in datasets))

    def value(self, field: Field) -> Value:
        return self.session.library.images[self.number].value(field)

    def set_to(self, field: Field, value: Value) -> None:
        change = ValueChange(self.number, field, self.value(field), value)
        self.session.history.do(Edit("Set", (change,)))

    def note(self, rating: int) -> None:
        """As another program does."""
        write_sidecar(self.folder, read_sidecar(self.folder).with_image("a.png", rating=rating))


@pytest.fixture
def sitting(tmp_path: Path) -> Iterator[Sitting]:
    with a_desk() as desk:
        sitting = Sitting(desk, tmp_path)
        yield sitting
        sitting.session.close()


def test_a_look_at_the_disk_never_takes_what_is_not_saved(sitting: Sitting) -> None:
    session = sitting.session
    (sitting.folder / "a.txt").write_text("theirs", encoding="utf-8")
    sitting.note(5)
    sitting.set_to("caption", "mine")
    sitting.set_to("rating", 3)
    session.saver.flush()
    sitting.desk.until(lambda: len(session.saver.now.conflicts) == 2)
    (sitting.folder / "a.txt").write_text("theirs again", encoding="utf-8")
    sitting.note(4)
    sitting.look()
    assert (sitting.value("caption"), sitting.value("rating")) == ("mine", 3)
    session.saver.hurry()
    sitting.desk.until(lambda: {one.theirs for one in session.saver.now.conflicts} == {"theirs again", 4})
    session.history.resolve([(one, one.theirs) for one in session.saver.now.conflicts], "Keep theirs")
    assert (sitting.value("caption"), sitting.value("rating")) == ("theirs again", 4)
    sitting.desk.until(lambda: session.saver.now.clean)
    sitting.look()
    assert (sitting.value("caption"), sitting.value("rating")) == ("theirs again", 4)


def test_a_look_at_the_disk_never_takes_a_fact_of_a_folder_that_is_not_saved(sitting: Sitting) -> None:
    session, folder = sitting.session, sitting.session.library.images[sitting.number].folder
    write_sidecar(sitting.folder, read_sidecar(sitting.folder).with_folder(trigger="theirs", repeats=4))
    session.history.do(Edit("Set", (), (FolderChange(folder, "trigger", None, "mine"),)))
    session.saver.flush()
    sitting.desk.until(lambda: session.saver.now.conflicts)
    sitting.look()
    assert (folder.trigger, folder.repeats) == ("mine", 4)
    session.history.resolve([(one, one.theirs) for one in session.saver.now.conflicts], "Keep theirs")
    sitting.desk.until(lambda: session.saver.now.clean)
    sitting.look()
    assert folder.trigger == "theirs"


def test_a_fact_edited_during_a_look_wins_over_what_the_look_read(sitting: Sitting) -> None:
    session, folder = sitting.session, sitting.session.library.images[sitting.number].folder
    write_sidecar(sitting.folder, read_sidecar(sitting.folder).with_folder(trigger="theirs", repeats=4))
    session.datasets.refresh(whole=True)
    session.library.apply_to_folders([FolderChange(folder, "trigger", None, "mine")])
    datasets = session.datasets._open.values()
    sitting.desk.until(lambda: not any(each.scanning for each in datasets))
    assert folder.trigger == "mine"
    sitting.look()
    assert (folder.trigger, folder.repeats) == ("theirs", 4)  # nobody said that the edit is still to be saved


def test_whatever_the_user_does_comes_before_thumbnails_that_nobody_asked_for(sitting: Sitting) -> None:
    session = sitting.session
    for act in (
        lambda: session.view.select([], None),
        lambda: session.view.show([]),
        lambda: sitting.set_to("rating", 3),
    ):
        session.view.select([sitting.number], sitting.number)
        session.thumbnails._idle_from = 0.0
        act()
        assert session.thumbnails._idle_from > 0.0
