"""Datasets: what is found on disk when a folder is opened."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.core.disk import datasets, reading
from app.core.disk import roots as forgetting
from app.core.disk.datasets import OpenedDataset
from app.core.disk.reading import read_size
from tests.support.opened import Open, picture, write
from trainer.dataset.pixels import load_upright


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
        '{"impasto": 1, "regularization": true}\n'
        '{"file": "img 10.jpg", "rating": 4, "excluded": true, "crop": [0, 0, 0.5, 1]}\n',
    )
    opened.open(root)
    assert opened.names() == ["top.webp", "img 9.png", "img 10.jpg"]
    top, nine, ten = opened.library.images.values()
    assert (top.caption, top.width, top.height, top.mask) == ("told", 64, 16, False)
    assert (nine.caption, nine.width, nine.height, nine.mask) == ("a cat,\nsitting", 30, 40, True)
    assert (ten.caption, ten.width, ten.height) == ("x", 30, 40)
    assert (ten.rating, ten.excluded, ten.crop, ten.bytes) == (4, True, (0, 0, 0.5, 1), ten.path.stat().st_size)
    assert (ten.folder.repeats, ten.folder.regularization, top.folder.repeats) == (3, True, None)
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
    assert "not an image" in str(opened["fake.jpg"].problem)
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
    assert "stay listed" not in opened.problems[0].remedy


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
    assert {one.name: one.caption for one in opened.library.images.values()} == {name: name for name in names}
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


def test_a_large_dataset_is_forgotten_in_portions_and_comes_back_as_it_was(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 100,000 pictures all who hear of it took half a second."""
    monkeypatch.setattr(forgetting, "_BATCH", 2)
    for number in range(5):
        picture(tmp_path / f"{number}.png")
    opened.open(tmp_path)
    ids = list(opened.library.images)
    left: list[int] = []
    opened.library.altered.connect(lambda altered: left.append(len(opened.library.images)))
    opened.datasets.close(tmp_path)
    assert opened.names() == ["0.png", "1.png", "2.png"] and not opened.datasets.folders
    opened.desk.until(lambda: not opened.library.images)
    assert left == [3, 1, 0]
    opened.open(tmp_path)
    opened.datasets.close(tmp_path)
    opened.datasets.open(tmp_path)
    assert not opened.library.images  # else one whose file is found before it has left would come in twice
    opened.settle()
    assert list(opened.library.images) == ids


def test_opening_a_folder_ends_only_the_forgetting_of_what_lies_there(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "_BATCH", 1)
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        for number in range(3):
            picture(root / "in" / f"{number}.png")
        opened.open(root)
    for root in roots:
        opened.datasets.close(root)
    opened.datasets.open(roots[0] / "in")
    assert {one.folder.root for one in opened.library.images.values()} == {roots[1]}
    opened.settle()
    opened.desk.until(lambda: len(opened.library.images) == 3)
    assert {one.folder.root for one in opened.library.images.values()} == {roots[0] / "in"}


def test_a_dataset_is_known_once_when_every_size_is(opened: Open, tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / "data" / f"{number}.png")
    (tmp_path / "none").mkdir()
    told: list[tuple[str, int, bool]] = []

    def tell(dataset: OpenedDataset) -> None:
        told.append((dataset.folder.name, dataset.images, all(one.width for one in opened.library.images.values())))

    opened.datasets.known.connect(tell)
    opened.open(tmp_path / "data")
    opened.open(tmp_path / "none")
    picture(tmp_path / "data" / "new.png")
    opened.look()
    assert told == [("data", 3, True), ("none", 0, True)]


def test_who_reads_headers_ends_where_the_dataset_is_closed(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        picture(tmp_path / f"{number}.png")
    begun, closed = threading.Event(), threading.Event()
    gone_through: list[object] = []
    in_turns = datasets.iterate_yielding

    def noted(work: Iterable[object], alive: Callable[[], None]) -> Iterator[object]:
        for each in in_turns(work, alive):
            gone_through.append(each)
            yield each

    def slow(path: Path) -> dict[str, Any]:
        begun.set()
        assert closed.wait(60)
        return read_size(path)

    monkeypatch.setattr(datasets, "iterate_yielding", noted)
    monkeypatch.setattr(reading, "read_size", slow)
    opened.datasets.open(tmp_path)
    (dataset,) = opened.datasets._open.values()
    opened.desk.until(lambda: dataset.sizing)
    assert begun.wait(60)
    opened.datasets.close(tmp_path)
    closed.set()
    opened.desk.until(lambda: not dataset.sizing)
    assert len(gone_through) == 1


def test_many_pictures_come_in_batches_in_order(opened: Open, tmp_path: Path) -> None:
    first = picture(tmp_path / "0.png")
    for number in range(1, 1201):
        os.link(first, tmp_path / f"{number}.png")
    opened.open(tmp_path)
    assert opened.names() == [f"{number}.png" for number in range(1201)]
    assert max(len(altered.added) for altered in opened.changes) <= 500
    assert all(one.width == 40 for one in opened.library.images.values())


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
