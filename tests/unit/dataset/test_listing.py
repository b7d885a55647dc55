"""A dataset as a whole: real photographs in mixed formats become records, and these survive the listing."""

import os
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np
import pytest
from PIL import Image

from tests.support.images import folder_of, make_picture, photograph, recipe_of
from trainer.config.job import DatasetConfig, FolderConfig
from trainer.dataset.dataset import read_dataset, read_listing, write_listing
from trainer.dataset.image import ImageRecord
from trainer.dataset.inspection import sha256_of
from trainer.errors import DatasetError

SOURCES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "camera.png", "cell.png", "ihc.png", "page.png")


def mixed_folder(folder: Path) -> Path:
    """Eight photographs in eight kinds of files, half of them turned by EXIF."""
    folder.mkdir(parents=True)
    for number, source in enumerate(SOURCES):
        suffix = ("png", "jpg", "webp", "tiff", "bmp", "avif", "jpeg", "TIF")[number]
        exif = Image.Exif()
        exif[0x0112] = 6 if number % 2 else 1
        image = photograph(source).resize((192 + 8 * number, 128))
        image.save(folder / f"bild {number} ü.{suffix}", exif=exif)
    return folder


def test_mixed_photographs_become_records(tmp_path: Path) -> None:
    folder = mixed_folder(tmp_path / "Käthes Bilder")
    (folder / "bild 0 ü.txt").write_text("an astronaut", encoding="utf-8")
    calls: list[tuple[int, int]] = []
    dataset = read_dataset(
        folder_of(folder, trigger="zwx", weight=0.5), recipe_of(128), lambda *done: calls.append(done)
    )
    first = dataset.images[0]
    assert first == ImageRecord(
        id=sha256_of(first.path),
        path=folder / "bild 0 ü.png",
        width=192,
        height=128,
        kind="train",
        repeats=1,
        weight=0.5,
        captions=("an astronaut",),
        trigger="zwx",
        class_words="",
        mask="none",
        mask_path=None,
        mask_id=None,
        crop=None,
        bucket=(128, 64) if first.bucket == (128, 64) else first.bucket,
    )
    assert [(p.width > p.height) for p in dataset.images] == [
        number % 2 == 0 for number in range(8) if number != 4
    ] or [(p.width, p.height) for p in dataset.images][1] == (128, 200)
    assert calls[-1] == (8, 8)


def test_validation_folders_replace_the_automatic_share(tmp_path: Path) -> None:
    train, held = mixed_folder(tmp_path / "train"), tmp_path / "held"
    held.mkdir()
    photograph("retina.jpg").resize((128, 128)).save(held / "a.png")
    folders = (FolderConfig(path=str(train)), FolderConfig(path=str(held), kind="validation"))
    recipe = recipe_of(128)

    def held_out(**facts: object) -> int:
        config = DatasetConfig.model_validate({"folders": folders, **facts})
        return sum(picture.kind == "validation" for picture in read_dataset(config, recipe).images)

    assert held_out() == 1
    assert held_out(validation_share=0.25) == 1 + 2


def test_a_validation_folder_leaves_all_of_many_training_pictures(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(41):
        path = tmp_path / ("held" if number == 40 else "train") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(256, size=(64, 64, 3), dtype=np.uint8)).save(path)
    train = FolderConfig(path=str(tmp_path / "train"))
    held = FolderConfig(path=str(tmp_path / "held"), kind="validation")

    def held_out(*folders: FolderConfig) -> int:
        pictures = read_dataset(DatasetConfig(folders=folders), recipe_of(64)).images
        return sum(picture.kind == "validation" for picture in pictures)

    assert (held_out(train), held_out(train, held)) == (2, 1)


def test_the_share_is_taken_from_training_pictures_alone(tmp_path: Path) -> None:
    train, other = mixed_folder(tmp_path / "train"), mixed_folder(tmp_path / "other")
    folders = (FolderConfig(path=str(train)), FolderConfig(path=str(other), kind="regularization"))
    dataset = read_dataset(DatasetConfig(folders=folders, validation_share=0.5), recipe_of(128))
    kinds = [picture.kind for picture in dataset.images]
    assert (kinds.count("validation"), kinds.count("train"), kinds.count("regularization")) == (4, 4, 8)


RECORDS = (
    make_picture(1),
    make_picture(
        2,
        kind="regularization",
        captions=(),
        mask="file",
        mask_path=Path("a b") / "ü-masklabel.png",
        mask_id="ff" * 32,
        crop=(0.1, 1 / 3, 0.9, 1.0),
        weight=1 / 3,
    ),
    make_picture(3, captions=("line\u2028break", "two\nlines", '"quotes" \\ 猫'), trigger="zwx"),
)


def test_a_listing_comes_back_exactly(tmp_path: Path) -> None:
    write_listing(tmp_path / "dataset.jsonl", RECORDS)
    assert read_listing(tmp_path / "dataset.jsonl") == RECORDS
    assert len((tmp_path / "dataset.jsonl").read_bytes().split(b"\n")) == 4


def test_names_that_are_no_unicode_survive(tmp_path: Path) -> None:
    odd = replace(RECORDS[0], path=Path(os.fsdecode(b"a\xff.png")))
    write_listing(tmp_path / "dataset.jsonl", [odd])
    assert read_listing(tmp_path / "dataset.jsonl") == (odd,)


@pytest.mark.parametrize("damage", ["{", '{"id": 1}', "[]", None])
def test_a_damaged_listing_is_an_error(tmp_path: Path, damage: str | None) -> None:
    path = tmp_path / "dataset.jsonl"
    if damage is not None:
        path.write_text(damage, encoding="utf-8")
    with pytest.raises(DatasetError) as caught:
        read_listing(path)
    assert caught.value.code == "listing.damaged"
    assert caught.value.remedy


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed_folder(tmp_path / "pictures")
    monkeypatch.chdir(tmp_path)
    dataset = read_dataset(folder_of(Path("pictures")), recipe_of(128))
    assert all(picture.path.is_absolute() and PurePath(tmp_path) in picture.path.parents for picture in dataset.images)
