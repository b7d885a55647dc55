"""Datasets: what is found on disk, and what other programs do to it while it is open."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.core.disk import looking
from app.core.disk.opening import Datasets, OnDisk, Opened
from app.core.disk.reading import read_size
from app.core.pictures import Altered, Change, Picture
from tests.support.desk import Desk, a_desk
from trainer.dataset.pixels import load_upright
from trainer.errors import ImpastoError


class Open:
    """Datasets on a desk, with what they told."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.library = desk.library
        self.datasets = Datasets(desk.library, desk.tasks)
        self.problems: list[ImpastoError] = []
        self.differs: list[OnDisk] = []
        self.told: list[Altered] = []
        self.datasets.problems.connect(self.problems.append)
        self.datasets.differs.connect(self.differs.append)
        self.library.altered.connect(self.told.append)

    def open(self, folder: Path) -> None:
        self.datasets.open(folder)
        self.settle()

    def look(self, whole: bool = True) -> None:
        self.datasets.refresh(whole=whole)
        self.settle()

    def settle(self) -> None:
        """Until no look and no reading of headers is on its way."""
        datasets = self.datasets._open.values()
        self.desk.until(lambda: not any(each.looking or each.sizing for each in datasets))

    def names(self) -> list[str]:
        return [picture.name for picture in self.library.pictures.values()]

    def __getitem__(self, name: str) -> Picture:
        return next(picture for picture in self.library.pictures.values() if picture.name == name)


@pytest.fixture
def opened() -> Iterator[Open]:
    with a_desk() as desk:
        opened = Open(desk)
        yield opened
        opened.datasets.stop()


def picture(path: Path, size: tuple[int, int] = (40, 30), **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "teal").save(path, **more)
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_folder_gives_its_pictures_with_captions_notes_masks_and_sizes(opened: Open, tmp_path: Path) -> None:
    root = tmp_path / "mes chats"
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(root / "3_cat" / "img 10.jpg", exif=turned)
    picture(root / "3_cat" / "img 9.png", exif=turned)
    picture(root / "3_cat" / "img 9-masklabel.png")
    picture(root / "top.webp", (64, 16))
    picture(root / ".hidden" / "no.png")
    picture(root / ".no.png")
    write(root / "3_cat" / "img 9.txt", " \n")
    write(root / "3_cat" / "img 9.caption", "a cat,\nsitting")
    write(
        root / "metadata.jsonl",
        '{"file_name": "top.webp", "text": "told"}\n{"file_name": "3_cat/img 10.jpg", "text": "x"}\n',
    )
    write(
        root / "3_cat" / "impasto.jsonl",
        '{"impasto": 1, "regularisation": true}\n'
        '{"file": "img 10.jpg", "rating": 4, "excluded": true, "crop": [0, 0, 0.5, 1]}\n',
    )
    opened.open(root)
    assert opened.names() == ["top.webp", "img 9.png", "img 10.jpg"]
    top, nine, ten = opened.library.pictures.values()
    assert (top.caption, top.width, top.height, top.mask) == ("told", 64, 16, False)
    assert (nine.caption, nine.width, nine.height, nine.mask) == ("a cat,\nsitting", 30, 40, True)
    assert (ten.caption, ten.width, ten.height) == ("x", 30, 40)
    assert (ten.rating, ten.excluded, ten.crop, ten.bytes) == (4, True, (0, 0, 0.5, 1), ten.path.stat().st_size)
    assert (ten.folder.repeats, ten.folder.regularisation, top.folder.repeats) == (3, True, None)
    assert not opened.problems


def test_damaged_pictures_and_files_say_why_and_the_rest_opens(opened: Open, tmp_path: Path) -> None:
    picture(tmp_path / "good.png")
    (tmp_path / "empty.png").write_bytes(b"")
    write(tmp_path / "fake.jpg", "no picture at all")
    picture(tmp_path / "vast.png", (20_000, 6_000))
    (tmp_path / "good.txt").write_bytes(b"\0\1\2")
    write(tmp_path / "impasto.jsonl", "{broken")
    opened.open(tmp_path)
    assert len(opened.names()) == 4
    assert opened["good.png"].problem is None
    assert "empty (0 bytes)" in str(opened["empty.png"].problem)
    assert "not a picture" in str(opened["fake.jpg"].problem)
    assert "20000×6000" in str(opened["vast.png"].problem)
    assert sorted(error.code for error in opened.problems) == ["caption.unreadable", "sidecar.damaged"]


def test_a_folder_that_is_not_there_or_open_already_is_said(opened: Open, tmp_path: Path) -> None:
    opened.open(tmp_path / "nowhere")
    (tmp_path / "a" / "b").mkdir(parents=True)
    opened.open(tmp_path / "a")
    for inside in (tmp_path / "a" / "b", tmp_path / "a" / "nothing"):
        opened.open(inside)
        opened.desk.until(lambda inside=inside: str(inside) in opened.problems[-1].sentence)
    opened.open(tmp_path / "a")
    with suppress(OSError):  # Windows asks for a right to make links
        (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
        opened.open(tmp_path / "link")
    assert opened.datasets.folders == (tmp_path / "nowhere", tmp_path / "a")
    assert [error.code for error in opened.problems] == [
        "dataset.folder_lost",
        "dataset.open_already",
        "dataset.folder_lost",
    ]
    assert str(tmp_path / "a" / "nothing") in opened.problems[-1].sentence


def test_opening_asks_nothing_of_the_disk_on_the_thread_that_owns_the_library(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[threading.Thread] = []

    def noted(real: Any) -> Any:
        def note(*values: Any, **more: Any) -> Any:
            asked.append(threading.current_thread())
            return real(*values, **more)

        return note

    for name in ("stat", "lstat", "scandir"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    for folder in (tmp_path / "a", tmp_path / "b", tmp_path / "a" / "inside"):
        opened.datasets.open(folder)
    opened.desk.until(lambda: any("inside" in error.sentence for error in opened.problems))
    opened.settle()
    monkeypatch.undo()
    assert asked and threading.current_thread() not in asked


def test_a_picture_that_is_being_moved_away_is_not_found_again_before_that_is_over(
    opened: Open, tmp_path: Path
) -> None:
    picture(tmp_path / "1.png")
    picture(tmp_path / "2.png")
    opened.open(tmp_path)
    going = opened["1.png"]
    opened.datasets.drop([going.id])
    opened.datasets.moved([going])  # the trash refused it
    opened.datasets.take_back([going])
    opened.datasets.drop([going.id])  # once more, before the next look finds it
    opened.look()
    assert opened.names() == ["2.png"]
    opened.datasets.moved([going])  # refused again
    opened.look()
    assert opened.names() == ["1.png", "2.png"] and opened["1.png"].id == going.id


def test_what_other_programs_do_appears_by_itself(opened: Open, tmp_path: Path) -> None:
    for name in ("1.png", "2.png", "3.png"):
        picture(tmp_path / name)
    write(tmp_path / "1.txt", "one")
    opened.open(tmp_path)
    before = opened["1.png"].id
    opened.told.clear()
    picture(tmp_path / "new" / "10.png")
    write(tmp_path / "1.txt", "uno")
    write(tmp_path / "2.txt", "two")
    picture(tmp_path / "2.png", (80, 80))
    picture(tmp_path / "3-masklabel.png")
    write(tmp_path / "impasto.jsonl", '{"file": "3.png", "rating": 2}\n')
    opened.look()
    assert opened.names() == ["1.png", "2.png", "3.png", "10.png"]
    assert (opened["1.png"].id, opened["1.png"].caption, opened["2.png"].caption) == (before, "uno", "two")
    assert (opened["2.png"].width, opened["3.png"].mask, opened["3.png"].rating) == (80, True, 2)
    opened.told.clear()
    opened.look()
    assert opened.told == []


def test_an_edit_in_place_of_a_picture_in_sight_is_found_without_a_thorough_look(opened: Open, tmp_path: Path) -> None:
    picture(tmp_path / "1.png")
    text = write(tmp_path / "1.txt", "one")
    for path in (text, tmp_path):
        os.utime(path, ns=(10**18, 10**18))
    opened.open(tmp_path)
    text.write_text("uno", encoding="utf-8")
    os.utime(tmp_path, ns=(10**18, 10**18))
    opened.datasets.refresh(near=[opened["1.png"].id])
    opened.settle()
    assert opened["1.png"].caption == "uno"


def test_an_edit_in_place_out_of_sight_is_found_when_its_turn_comes(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "_TURN", 0.0)  # one file at each look
    paths = [picture(tmp_path / f"{n}.png") for n in range(3)] + [write(tmp_path / f"{n}.txt", "one") for n in range(3)]
    for path in (*paths, tmp_path):
        os.utime(path, ns=(10**18, 10**18))
    opened.open(tmp_path)
    (tmp_path / "2.txt").write_text("uno", encoding="utf-8")
    os.utime(tmp_path, ns=(10**18, 10**18))
    seen = []
    for _ in range(2 * len(paths)):
        opened.look(whole=False)
        seen.append(opened["2.png"].caption)
    assert seen[0] == "one" and seen[len(paths)] == "uno"


def test_a_note_reads_no_caption_again(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        picture(tmp_path / f"{n}.png")
        os.utime(write(tmp_path / f"{n}.txt", "one"), ns=(10**18, 10**18))
    write(tmp_path / "impasto.jsonl", '{"file": "0.png", "rating": 4}\n{"file": "1.png", "rating": 2}\n')
    opened.open(tmp_path)
    read = list[object]()
    read_caption = looking.read_caption
    monkeypatch.setattr(looking, "read_caption", lambda *words: read.append(words) or read_caption(*words))
    opened.told.clear()
    write(tmp_path / "impasto.jsonl", '{"file": "1.png", "rating": 2}\n{"file": "2.png", "excluded": true}\n')
    opened.look()
    assert [(opened[f"{n}.png"].rating, opened[f"{n}.png"].excluded) for n in range(3)] == [
        (None, False), (2, False), (None, True),
    ]  # fmt: skip
    assert (read, [len(altered.altered) for altered in opened.told]) == ([], [2])


def test_a_directory_that_takes_long_rests_until_a_thorough_look(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr("time.thread_time", lambda: next(ticks))  # every listing takes a second
    monkeypatch.setattr(looking, "_REST", 1e9)
    picture(tmp_path / "1.png")
    opened.open(tmp_path)
    seen = []
    for place, whole in enumerate((False, False, True)):
        picture(tmp_path / f"new {place}.png")
        opened.look(whole)
        seen.append(len(opened.names()))
    assert seen == [2, 2, 4]


def test_a_removed_picture_is_called_missing_first_and_keeps_its_id_if_it_comes_back(
    opened: Open, tmp_path: Path
) -> None:
    picture(tmp_path / "1.png")
    picture(tmp_path / "2.png")
    opened.open(tmp_path)
    number = opened["1.png"].id
    data = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").unlink()
    opened.look()
    assert "no longer there" in str(opened["1.png"].problem)
    (tmp_path / "1.png").write_bytes(data)
    opened.look()
    assert (opened["1.png"].problem, opened["1.png"].width) == (None, 40)
    (tmp_path / "1.png").unlink()
    opened.look()
    opened.look()
    assert opened.names() == ["2.png"]
    (tmp_path / "1.png").write_bytes(data)
    opened.look()
    assert (opened["1.png"].id, opened["1.png"].width) == (number, 40)


def test_a_folder_inside_that_is_deleted_takes_its_pictures_along(opened: Open, tmp_path: Path) -> None:
    picture(tmp_path / "1.png")
    picture(tmp_path / "in" / "2.png")
    opened.open(tmp_path)
    shutil.rmtree(tmp_path / "in")
    opened.look()
    opened.look()
    assert opened.names() == ["1.png"]
    picture(tmp_path / "in" / "2.png")
    opened.look()
    assert opened.names() == ["1.png", "2.png"]


@pytest.mark.parametrize("empty", [False, True], ids=["deleted", "empty, as an unmounted share"])
def test_a_dataset_that_vanishes_stays_listed_and_comes_back(opened: Open, tmp_path: Path, empty: bool) -> None:
    root, away = tmp_path / "share", tmp_path / "away"
    picture(root / "1.png")
    picture(root / "in" / "2.png")
    write(root / "1.txt", "one")
    opened.open(root)
    root.rename(away)
    if empty:
        root.mkdir()
    for _ in range(3):
        opened.look()
    assert opened.names() == ["1.png", "2.png"]
    assert all(picture.problem for picture in opened.library.pictures.values())
    assert len(opened.problems) == 1 and list(opened.datasets.lost) == [root]
    if empty:
        root.rmdir()
    away.rename(root)
    write(root / "1.txt", "uno")
    opened.look()
    assert opened.names() == ["1.png", "2.png"]
    assert [(one.problem, one.width) for one in opened.library.pictures.values()] == [(None, 40), (None, 40)]
    assert opened["1.png"].caption == "uno" and not opened.datasets.lost


def test_an_unsaved_edit_is_never_overwritten_by_the_disk(opened: Open, tmp_path: Path) -> None:
    picture(tmp_path / "1.png")
    text = write(tmp_path / "1.txt", "one")
    opened.open(tmp_path)
    number = opened["1.png"].id
    opened.library.apply([Change(number, "caption", "one", "mine")])
    pending = {number}
    opened.datasets.unsaved = lambda picture, field: picture in pending and field == "caption"
    write(text, "theirs")
    opened.look()
    assert opened["1.png"].caption == "mine"
    assert opened.differs == [OnDisk(number, "caption", "theirs")]
    (tmp_path / "1.png").unlink()
    opened.look()
    opened.look()
    assert opened["1.png"].caption == "mine"
    pending.clear()
    opened.look()
    picture(tmp_path / "1.png")
    opened.look()
    assert opened["1.png"].caption == "theirs"


def test_an_edit_during_a_look_wins_over_what_the_look_read(opened: Open, tmp_path: Path) -> None:
    picture(tmp_path / "1.png")
    text = write(tmp_path / "1.txt", "one")
    opened.open(tmp_path)
    write(text, "two")
    opened.datasets.refresh(whole=True)
    opened.library.apply([Change(opened["1.png"].id, "caption", "one", "mine")])
    opened.settle()
    assert opened["1.png"].caption == "mine"
    opened.look()
    assert opened["1.png"].caption == "two"  # nobody said that the edit is still to be saved


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("again", [False, True])
def test_a_link_stays_open_where_the_folder_it_leads_to_is_closed_meanwhile(
    opened: Open, tmp_path: Path, again: bool
) -> None:
    picture(tmp_path / "a" / "1.png")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    opened.datasets.open(tmp_path / "a")
    opened.datasets.open(tmp_path / "link")  # what comes of the first looks is heard of only below
    if again:
        opened.datasets.close(tmp_path / "link")
    opened.datasets.close(tmp_path / "a")
    if again:
        opened.datasets.open(tmp_path / "link")
    opened.settle()
    assert opened.datasets.folders == (tmp_path / "link",) and opened.names() == ["1.png"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_links_in_circles_end(opened: Open, tmp_path: Path) -> None:
    picture(tmp_path / "in" / "1.png")
    (tmp_path / "in" / "again").symlink_to(tmp_path)
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    (tmp_path / "nowhere.png").symlink_to(tmp_path / "no")
    opened.open(tmp_path)
    assert opened.names() == ["1.png"]


def test_names_of_any_letters_and_length_open(opened: Open, tmp_path: Path) -> None:
    names = ["猫咪.png", "🐈‍⬛ 🎨.png", "n" * 251 + ".png", "é.png", "#50% & co.png"]
    for name in names:
        picture(tmp_path / name)
        write(tmp_path / (name.removesuffix(".png") + ".txt"), name)
    opened.open(tmp_path)
    assert {one.name: one.caption for one in opened.library.pictures.values()} == {name: name for name in names}
    assert not opened.problems


def test_nothing_and_one_picture_open_and_close(opened: Open, tmp_path: Path) -> None:
    picture(tmp_path / "one" / "1.png")
    (tmp_path / "none").mkdir()
    opened.open(tmp_path / "one")
    opened.open(tmp_path / "none")
    assert opened.names() == ["1.png"] and opened.datasets.folders == (tmp_path / "one", tmp_path / "none")
    opened.datasets.close(tmp_path / "one")
    assert opened.names() == [] and opened.datasets.folders == (tmp_path / "none",)
    assert (tmp_path / "one" / "1.png").is_file()


def test_a_dataset_is_known_once_when_every_size_is(opened: Open, tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / "data" / f"{number}.png")
    (tmp_path / "none").mkdir()
    told: list[tuple[str, int, bool]] = []

    def tell(dataset: Opened) -> None:
        told.append((dataset.folder.name, dataset.pictures, all(one.width for one in opened.library.pictures.values())))

    opened.datasets.known.connect(tell)
    opened.open(tmp_path / "data")
    opened.open(tmp_path / "none")
    picture(tmp_path / "data" / "new.png")
    opened.look()
    assert told == [("data", 3, True), ("none", 0, True)]


def test_many_pictures_come_in_batches_in_order(opened: Open, tmp_path: Path) -> None:
    first = picture(tmp_path / "0.png")
    for number in range(1, 1201):
        os.link(first, tmp_path / f"{number}.png")
    opened.open(tmp_path)
    assert opened.names() == [f"{number}.png" for number in range(1201)]
    assert max(len(altered.added) for altered in opened.told) <= 500
    assert all(one.width == 40 for one in opened.library.pictures.values())


def test_a_picture_on_its_way_to_the_trash_is_none_and_is_there_again_when_it_stayed(
    opened: Open, tmp_path: Path
) -> None:
    picture(tmp_path / "1.png")
    picture(tmp_path / "2.png")
    opened.open(tmp_path)
    one = opened["1.png"]
    opened.datasets.drop([one.id])
    for _ in range(2):
        assert opened.names() == ["2.png"]
        opened.datasets.refresh(whole=True)
        opened.settle()
    opened.datasets.moved([one])
    opened.datasets.refresh()
    opened.settle()
    assert opened.names() == ["1.png", "2.png"] and opened["1.png"].id == one.id


def disturb(chance: random.Random, root: Path) -> None:
    """Do what another program might, anywhere in a dataset."""
    folders = [root, root / "a", root / "a" / "b", root / "7_c"]
    folder, stem = chance.choice(folders), f"p{chance.randrange(6)}"
    file = folder / f"{stem}.png"
    folder.mkdir(parents=True, exist_ok=True)
    match chance.randrange(9):
        case 0 | 1:
            picture(file, (chance.randint(1, 60), chance.randint(1, 60)))
        case 2:
            file.unlink(missing_ok=True)
        case 3 | 4:
            write(folder / (stem + chance.choice([".txt", ".caption"])), chance.choice(["", "cat", "dog, sitting"]))
        case 5:
            (folder / f"{stem}.txt").unlink(missing_ok=True)
        case 6:
            notes = {"file": file.name, "rating": chance.randint(1, 5), "excluded": chance.random() < 0.5}
            head = {"impasto": 1, "repeats": chance.randint(1, 9), "regularisation": chance.random() < 0.5}
            write(folder / "impasto.jsonl", json.dumps(head) + "\n" + json.dumps(notes) + "\n")
        case 7:
            inside = file.relative_to(root).as_posix()
            write(root / "metadata.jsonl", json.dumps({"file_name": inside, "text": f"told {chance.random()}"}) + "\n")
        case 8:
            shutil.rmtree(chance.choice(folders[1:]), ignore_errors=True)


def known(opened: Open, root: Path) -> list[tuple[object, ...]]:
    return [
        (
            *(one.path.relative_to(root).as_posix(), one.bytes, one.width, one.height, one.caption, one.rating),
            *(one.excluded, one.mask, one.problem, one.folder.repeats, one.folder.regularisation),
        )
        for one in opened.library.pictures.values()
    ]


@pytest.mark.parametrize("seed", range(8))
def test_following_changes_ends_where_opening_anew_does(opened: Open, tmp_path: Path, seed: int) -> None:
    chance, root = random.Random(seed), tmp_path / "data"
    picture(root / "stays.png")
    for _ in range(8):
        disturb(chance, root)
    opened.open(root)
    for _ in range(6):
        for _ in range(chance.randrange(1, 6)):
            disturb(chance, root)
        opened.datasets.refresh(whole=chance.random() < 0.5)
        opened.settle()
    opened.look()
    opened.look()
    with a_desk() as desk:
        afresh = Open(desk)
        afresh.open(root)
        assert known(opened, root) == known(afresh, root)
        afresh.datasets.stop()


@pytest.mark.parametrize("where", ["before", "after", "none"])
def test_a_png_is_measured_upright_wherever_its_exif_stands(tmp_path: Path, where: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    path = picture(tmp_path / "a.png", (40, 30), **({} if where == "none" else {"exif": exif}))
    if where == "after":
        data = path.read_bytes()
        start = data.index(b"eXIf") - 4
        end = start + 12 + int.from_bytes(data[start : start + 4], "big")
        path.write_bytes(data[:start] + data[end:-12] + data[start:end] + data[-12:])
    size = read_size(path)
    assert (size["width"], size["height"]) == load_upright(path, "#ffffff", 1.0).size
    assert size["width"] == (40 if where == "none" else 30)
