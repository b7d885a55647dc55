"""Copying pictures into a dataset: nothing overwritten, companions along, faults told."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from app.core.disk.importing import copy_in, keep_pasted


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_pictures_bring_their_captions_and_masks_under_names_that_are_free(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(data / "a.png", "old")
    write(data / "b.txt", "an old caption without a picture")
    sources = [write(tmp_path / "one" / name, name) for name in ("a.png", "B.jpg", "c.webp")]
    write(tmp_path / "one" / "a.txt", "caption a")
    write(tmp_path / "one" / "a-masklabel.png", "mask a")
    write(tmp_path / "one" / "B.caption", "caption b")
    second = write(tmp_path / "two" / "a.jpg", "another a")
    done = copy_in([*sources, second, write(tmp_path / "one" / "notes.doc", "")], data)
    assert contents(data) == {
        "a.png": "old",
        "b.txt": "an old caption without a picture",
        "a-2.png": "a.png",
        "a-2.txt": "caption a",
        "a-2-masklabel.png": "mask a",
        "B-2.jpg": "B.jpg",
        "B-2.caption": "caption b",
        "c.webp": "c.webp",
        "a-3.jpg": "another a",
    }
    assert [path.name for path in done.copied] == ["a-2.png", "B-2.jpg", "c.webp", "a-3.jpg"]
    assert (done.problems, done.skipped) == ((), 1)


def test_a_folder_comes_with_the_folders_inside(tmp_path: Path) -> None:
    write(tmp_path / "3_cats" / "a.png", "a")
    write(tmp_path / "3_cats" / "in" / "a.png", "b")
    copy_in([tmp_path / "3_cats"], tmp_path / "data")
    assert contents(tmp_path / "data") == {"3_cats/a.png": "a", "3_cats/in/a.png": "b"}


def test_pictures_that_lie_there_already_stay_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", "a")
    done = copy_in([path], tmp_path)
    assert contents(tmp_path) == {"a.png": "a"} and done.skipped == 1


def test_what_cannot_be_copied_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    good = write(tmp_path / "one" / "good.png", "good")
    done = copy_in([tmp_path / "one" / "gone.png", good], tmp_path / "data")
    assert contents(tmp_path / "data") == {"good.png": "good"}
    assert [(error.code, "gone.png" in error.sentence) for error in done.problems] == [("import.failed", True)]


def test_a_full_disk_ends_the_import_and_leaves_no_half_of_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [write(tmp_path / "one" / f"{n}.png", "x" * 100) for n in range(3)]
    copy = shutil.copy2

    def full(source: Path, target: Path) -> None:
        if Path(source).name == "1.png":
            Path(target).write_text("half", encoding="utf-8")
            raise OSError(errno.ENOSPC, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(shutil, "copy2", full)
    done = copy_in(sources, tmp_path / "data")
    assert contents(tmp_path / "data") == {"0.png": "x" * 100}
    assert [error.code for error in done.problems] == ["import.disk_full"]


def test_very_long_names_stay_within_what_disks_allow(tmp_path: Path) -> None:
    name = "猫" * 83 + ".png"
    write(tmp_path / "data" / name, "old")
    done = copy_in([write(tmp_path / "one" / name, "new")], tmp_path / "data")
    assert done.problems == () and done.copied[0].name.endswith("-2.png")
    assert len(done.copied[0].name.encode()) <= 255 and done.copied[0].read_text(encoding="utf-8") == "new"


def test_pasted_pictures_get_names_of_their_own(tmp_path: Path) -> None:
    names = [keep_pasted(b"png", tmp_path, "pasted").copied[0].name for _ in range(3)]
    assert names == ["pasted.png", "pasted-2.png", "pasted-3.png"]
    assert [error.code for error in keep_pasted(b"png", tmp_path / "pasted.png", "x").problems] == ["import.failed"]
