"""Painted masks beside plain formulas, and their files as the trainer reads them."""

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage.segmentation import flood

from app.core.edits import safe_files
from app.core.edits.backups import Backups
from app.core.edits.masks import (
    Mask,
    MaskChanged,
    connected_area,
    mask_path,
    read_mask,
    remove_mask,
    state_of,
    write_mask,
)
from tests.support.images import photograph
from trainer.config.job import DatasetConfig, FolderConfig
from trainer.config.recipe import RecipeConfig
from trainer.dataset.dataset import read_dataset
from trainer.dataset.pixels import crop_pixels
from trainer.dataset.sampling import plain_sample
from trainer.errors import DatasetError


@pytest.fixture
def picture(tmp_path):
    """A picture that lies on its side and is turned upright by its EXIF: 256 wide, 320 high."""
    folder = tmp_path / "mes images é"
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph().resize((320, 256)).save(folder / "one.jpg", exif=exif)
    return folder / "one.jpg"


@pytest.fixture
def backups(tmp_path):
    return Backups(tmp_path / "backups")


def all_trained(height=320, width=256):
    return Mask(np.full((height, width), 255, np.uint8))


def test_a_hard_stroke_covers_what_lies_within_its_radius():
    mask = all_trained(80, 100)
    mask.begin()
    mask.stroke((20, 30), (70, 50), 8.0, 1.0, 0)
    mask.end()
    for y, x in np.ndindex(80, 100):
        point, a, b = np.array([x + 0.5, y + 0.5]), np.array([20, 30]), np.array([70, 50])
        along = np.clip(np.dot(point - a, b - a) / np.dot(b - a, b - a), 0, 1)
        reach = np.linalg.norm(point - a - along * (b - a))
        if reach < 7.4:
            assert mask.pixels[y, x] == 0
        if reach > 8.1:
            assert mask.pixels[y, x] == 255


def test_a_soft_brush_fades_to_its_rim_and_never_covers_twice_in_one_stroke():
    mask = all_trained(60, 60)
    mask.begin()
    for _ in range(5):
        mask.stroke((30, 30), (30, 30), 20.0, 0.0, 0)
    mask.end()
    row = mask.pixels[30, 30:52].astype(int)
    expected = 255 * np.clip(np.hypot(np.arange(22) + 0.5, 0.5) / 20, 0, 1)
    assert np.abs(row - expected).max() <= 1
    assert (np.diff(row) >= 0).all()


def test_strokes_beyond_the_picture_do_no_harm():
    mask = all_trained(20, 20)
    mask.begin()
    mask.stroke((-50, -50), (-40, -40), 5, 1, 0)
    mask.stroke((15, 15), (500, 15), 3, 1, 0)
    mask.end()
    assert mask.pixels[15, 19] == 0
    assert mask.pixels[0, 0] == 255


def test_every_step_can_be_taken_back_and_done_again():
    chance = random.Random(5)
    mask = all_trained(64, 48)
    states = [mask.pixels.copy()]
    for _ in range(25):
        before = mask.pixels.copy()
        match chance.randrange(4):
            case 0:
                mask.fill(chance.choice([0, 255]))
            case 1:
                mask.invert()
            case 2:
                mask.flood(chance.randrange(48), chance.randrange(64), chance.choice([0, 255]))
            case 3:
                mask.begin()
                ends = [(chance.uniform(-5, 55), chance.uniform(-5, 70)) for _ in range(3)]
                mask.stroke(ends[0], ends[1], chance.uniform(1, 20), chance.random(), 0)
                mask.stroke(ends[1], ends[2], chance.uniform(1, 20), chance.random(), 0)
                mask.end()
        if not np.array_equal(before, mask.pixels):
            states.append(mask.pixels.copy())
    for state in reversed(states[:-1]):
        mask.undo()
        assert np.array_equal(mask.pixels, state)
    assert not mask.can_undo
    for state in states[1:]:
        mask.redo()
        assert np.array_equal(mask.pixels, state)
    assert not mask.can_redo


@pytest.mark.parametrize("seed", range(6))
def test_a_flood_fills_what_scikit_image_fills(seed):
    draw = np.random.default_rng(seed)
    alike = draw.random((40, 50)) < [0.5, 0.6, 0.7, 0.8, 0.95, 0.62][seed]
    y, x = (int(place) for place in draw.integers((40, 50)))
    alike[y, x] = True
    expected = flood(alike.astype(np.uint8), (y, x), connectivity=1)
    assert np.array_equal(connected_area(alike, x, y), expected)


def test_a_flood_reaches_round_a_spiral():
    alike = np.ones((21, 21), bool)
    alike[1::4, :-1] = alike[3::4, 1:] = False
    assert np.array_equal(connected_area(alike, 0, 0), alike)


def trained(picture):
    """What the trainer does with the folder of a picture: its mask as a sample is shown."""
    config = DatasetConfig(folders=(FolderConfig(path=str(picture.parent)),), masks="files", validation_share=0.0)
    recipe = RecipeConfig(resolution=256)
    (record,) = read_dataset(config, recipe).images
    return record, crop_pixels(plain_sample(record, recipe), "#ffffff", 100)[1]


def test_the_trainer_reads_what_was_painted(picture, backups):
    opened = read_mask(picture, 256, 320)
    assert opened.state is None
    assert (opened.pixels == 255).all()
    mask = Mask(opened.pixels)
    mask.begin()
    mask.stroke((64, 80), (64, 80), 40.0, 1.0, 0)
    mask.end()
    state = state_of(write_mask(picture, picture.parent, mask.pixels, None, backups).after)
    with Image.open(mask_path(picture)) as image:
        assert (image.mode, image.size, image.format) == ("L", (256, 320), "PNG")
    again = read_mask(picture, 256, 320)
    assert again.state == state
    assert np.array_equal(again.pixels, mask.pixels)
    record, seen = trained(picture)
    assert record.mask == "file"
    assert record.mask_path == mask_path(picture)
    height, width = seen.shape
    left, top = 0, (320 - round(256 * height / width)) // 2
    at = np.array([64 - left, 80 - top]) * width / 256
    assert seen[int(at[1]), int(at[0])] == 0.0
    assert seen[-1, -1] == 1.0
    assert abs(seen.mean() - (mask.pixels[top : 320 - top] / 255).mean()) < 0.01


def test_what_was_there_is_kept_before_it_is_written_and_removed(picture, backups):
    first = state_of(write_mask(picture, picture.parent, np.zeros((320, 256), np.uint8), None, backups).after)
    data = mask_path(picture).read_bytes()
    second = write_mask(picture, picture.parent, np.full((320, 256), 128, np.uint8), first, backups)
    other = mask_path(picture).read_bytes()
    assert second == (mask_path(picture), data, other)
    assert remove_mask(picture, picture.parent, state_of(other), backups) == (mask_path(picture), other, None)
    assert not mask_path(picture).exists()
    kept = backups.versions(str(picture.parent), "one-masklabel.png")
    assert [version.data for version in kept] == [None, data, other]
    assert trained(picture)[1] is None


def test_a_mask_that_changed_meanwhile_is_not_overwritten_unless_asked(picture, backups):
    mine = np.zeros((320, 256), np.uint8)
    Image.new("L", (256, 320), 77).save(mask_path(picture))
    theirs = mask_path(picture).read_bytes()
    for state in (None, "0" * 64):
        with pytest.raises(MaskChanged) as caught:
            write_mask(picture, picture.parent, mine, state, backups)
        assert caught.value.code == "mask.changed"
        with pytest.raises(MaskChanged):
            remove_mask(picture, picture.parent, state, backups)
    assert mask_path(picture).read_bytes() == theirs
    write_mask(picture, picture.parent, mine, None, backups, over=True)
    assert backups.versions(str(picture.parent), "one-masklabel.png")[0].data == theirs


def test_a_mask_of_another_size_is_stretched_and_said(picture):
    Image.new("L", (64, 80), 90).save(mask_path(picture))
    opened = read_mask(picture, 256, 320)
    assert opened.stretched
    assert opened.pixels.shape == (320, 256)
    assert (opened.pixels == 90).all()


def test_a_file_that_is_no_mask_is_told_and_left(picture):
    mask_path(picture).write_bytes(b"no picture")
    with pytest.raises(DatasetError):
        read_mask(picture, 256, 320)
    assert mask_path(picture).read_bytes() == b"no picture"


@pytest.mark.parametrize("remove", [False, True])
def test_a_mask_written_by_another_program_at_the_last_moment_stays(picture, backups, monkeypatch, remove):
    """Between the check and the renaming it was overwritten, and no backup had it."""
    write_mask(picture, picture.parent, np.zeros((320, 256), np.uint8), None, backups)
    path, renamed = mask_path(picture), safe_files._rename if remove else safe_files._swap

    def interrupted(source: str, target: str) -> None:
        monkeypatch.undo()
        path.write_bytes(b"theirs")
        renamed(source, target)

    state = state_of(path.read_bytes())
    monkeypatch.setattr(safe_files, "_rename" if remove else "_swap", interrupted)
    with pytest.raises(MaskChanged):
        if remove:
            remove_mask(picture, picture.parent, state, backups)
        else:
            write_mask(picture, picture.parent, np.ones((320, 256), np.uint8), state, backups)
    assert path.read_bytes() == b"theirs"
    write_mask(picture, picture.parent, np.ones((320, 256), np.uint8), state, backups, over=True)
    kept = [version.data for version in backups.versions(str(picture.parent), path.name)]
    assert b"theirs" in kept


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_mask_that_is_a_link_to_elsewhere_or_no_file_is_neither_shown_nor_backed_up(picture, backups, kind):
    other = picture.parent.parent / "private.png"
    photograph().save(other)
    if kind == "folder":
        mask_path(picture).mkdir()
    else:
        try:
            mask_path(picture).symlink_to(other)
        except OSError:
            pytest.skip("this user may not make symbolic links")
    with pytest.raises(DatasetError) as caught:
        read_mask(picture, 256, 320)
    assert caught.value.code == "mask.unreadable"
    with pytest.raises(DatasetError):
        remove_mask(picture, picture.parent, None, backups, over=True)
    assert backups.originals(str(picture.parent)) == []


def test_a_disk_that_refuses_is_told_and_the_old_mask_stays(picture, backups, monkeypatch):
    write_mask(picture, picture.parent, np.zeros((320, 256), np.uint8), None, backups)
    data = mask_path(picture).read_bytes()
    state = state_of(data)

    def full(handle: int, data: bytes) -> int:  # some of it is there
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(DatasetError, match="No space left"):
        patch.setattr(safe_files.os, "write", full)
        write_mask(picture, picture.parent, np.ones((320, 256), np.uint8), state, backups)
    assert mask_path(picture).read_bytes() == data
    assert [path.name for path in Path(picture.parent).iterdir() if path.name.startswith(".")] == []
