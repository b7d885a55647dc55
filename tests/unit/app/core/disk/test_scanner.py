"""What other programs, and this one, do to the files of datasets while they are open."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from app.core.disk import reading, scanner
from app.core.disk.datasets import OnDisk
from app.core.library import ValueChange
from tests.support.desk import a_desk
from tests.support.opened import Open, picture, write
from trainer.errors import ImpastoError


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


def test_a_thorough_look_requested_during_another_runs_after_it(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(tmp_path / "1.png")
    opened.open(tmp_path)
    look = scanner.FolderScanner.scan

    def look_and_be_asked(*arguments: Any) -> None:
        look(*arguments)
        monkeypatch.undo()
        picture(tmp_path / "2.png")  # as by a copy that ends when the running look has passed the folder
        opened.desk.post(lambda: opened.datasets.refresh(whole=True))

    monkeypatch.setattr(scanner.FolderScanner, "scan", look_and_be_asked)
    opened.look()
    assert opened.names() == ["1.png", "2.png"]


def test_what_other_programs_do_appears_by_itself(opened: Open, tmp_path: Path) -> None:
    for name in ("1.png", "2.png", "3.png"):
        picture(tmp_path / name)
    write(tmp_path / "1.txt", "one")
    opened.open(tmp_path)
    before = opened["1.png"].id
    opened.changes.clear()
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
    opened.changes.clear()
    opened.look()
    assert opened.changes == []


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
    monkeypatch.setattr(scanner, "_CHECK_SECONDS", 0.0)  # one file at each look
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
    read_caption = scanner.read_caption
    monkeypatch.setattr(scanner, "read_caption", lambda *words: read.append(words) or read_caption(*words))
    opened.changes.clear()
    write(tmp_path / "impasto.jsonl", '{"file": "1.png", "rating": 2}\n{"file": "2.png", "excluded": true}\n')
    opened.look()
    assert [(opened[f"{n}.png"].rating, opened[f"{n}.png"].excluded) for n in range(3)] == [
        (None, False), (2, False), (None, True),
    ]  # fmt: skip
    assert (read, [len(altered.altered) for altered in opened.changes]) == ([], [2])


def test_a_directory_that_takes_long_rests_until_a_thorough_look(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr("time.thread_time", lambda: next(ticks))  # every listing takes a second
    monkeypatch.setattr(scanner, "_REST_FACTOR", 1e9)
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
    assert "no longer exists" in str(opened["1.png"].problem)
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
    assert all(picture.problem for picture in opened.library.images.values())
    assert len(opened.problems) == 1 and list(opened.datasets.lost) == [root]
    over = list[ImpastoError]()
    opened.datasets.recovered.connect(over.append)
    if empty:
        root.rmdir()
    away.rename(root)
    write(root / "1.txt", "uno")
    opened.look()
    assert opened.names() == ["1.png", "2.png"]
    assert [(one.problem, one.width) for one in opened.library.images.values()] == [(None, 40), (None, 40)]
    assert opened["1.png"].caption == "uno" and not opened.datasets.lost
    assert over == opened.problems


@pytest.mark.parametrize("told", ["before", "after"])
def test_headers_that_were_asked_for_while_a_dataset_was_gone_are_read_when_it_is_back(
    opened: Open, tmp_path: Path, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, real = threading.Event(), reading.read_size

    def late(path: Path) -> Mapping[str, Any]:
        gone.wait(60)
        return real(path)

    monkeypatch.setattr(reading, "read_size", late)
    root, away = tmp_path / "share", tmp_path / "away"
    picture(root / "1.png")
    opened.datasets.open(root)
    dataset = opened.datasets._open[root]
    opened.desk.until(lambda: opened.names() and dataset.sizing and not dataset.scanning)
    root.rename(away)
    if told == "after":
        opened.datasets.refresh(whole=True)
        opened.desk.until(lambda: dataset.lost and not dataset.scanning)
    gone.set()
    opened.desk.until(lambda: not dataset.sizing)
    opened.look()
    assert opened["1.png"].problem == opened.datasets.lost[root].sentence
    away.rename(root)
    opened.look()
    assert (opened["1.png"].problem, opened["1.png"].width) == (None, 40)


@pytest.mark.parametrize("away", [True, False], ids=["with the folder", "alone"])
def test_captions_that_go_while_they_are_read_are_read_when_they_are_back(
    opened: Open, tmp_path: Path, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "share"
    picture(root / "1.png")
    text = write(root / "1.txt", "one")
    for path in (text, root):
        os.utime(path, ns=(10**18, 10**18))
    here = root if away else text
    elsewhere, real = tmp_path / "elsewhere", scanner.read_caption

    def late(*words: Any) -> reading.CaptionRead:
        here.rename(elsewhere)
        return real(*words)

    with monkeypatch.context() as going:
        going.setattr(scanner, "read_caption", late)
        opened.open(root)
    assert opened.problems == []
    if away:
        opened.look()
        assert [error.code for error in opened.problems] == ["dataset.folder_lost"]
    elsewhere.rename(here)
    os.utime(root, ns=(10**18, 10**18))  # as if it had never been away
    opened.look(whole=False)
    assert (opened["1.png"].caption, opened["1.png"].problem) == ("one", None)


@pytest.mark.parametrize("reader", ["read_sidecar", "read_metadata"])
def test_notes_that_go_with_their_folder_while_they_are_read_are_read_when_it_is_back(
    opened: Open, tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, away, real = tmp_path / "share", tmp_path / "away", getattr(scanner, reader)
    picture(root / "1.png")
    write(root / "impasto.jsonl", '{"file": "1.png", "rating": 3}\n')
    write(root / "metadata.jsonl", '{"file_name": "1.png", "text": "told"}\n')

    def late(path: Path) -> Any:
        root.rename(away)
        return real(path)

    with monkeypatch.context() as going:
        going.setattr(scanner, reader, late)
        opened.open(root)
    opened.look()
    away.rename(root)
    opened.look()
    assert (opened["1.png"].rating, opened["1.png"].caption, opened["1.png"].problem) == (3, "told", None)
    assert [error.code for error in opened.problems] == ["dataset.folder_lost"]


def test_an_unsaved_edit_is_never_overwritten_by_the_disk(opened: Open, tmp_path: Path) -> None:
    picture(tmp_path / "1.png")
    text = write(tmp_path / "1.txt", "one")
    opened.open(tmp_path)
    number = opened["1.png"].id
    opened.library.apply([ValueChange(number, "caption", "one", "mine")])
    pending = {"1.png": {"caption": "mine"}}
    opened.datasets.unsaved = lambda folder, name: pending.get(name, {})
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
    opened.library.apply([ValueChange(opened["1.png"].id, "caption", "one", "mine")])
    opened.settle()
    assert opened["1.png"].caption == "mine"
    opened.look()
    assert opened["1.png"].caption == "two"  # nobody said that the edit is still to be saved


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
            head = {"impasto": 1, "repeats": chance.randint(1, 9), "regularization": chance.random() < 0.5}
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
            *(one.excluded, one.mask, one.problem, one.folder.repeats, one.folder.regularization),
        )
        for one in opened.library.images.values()
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
