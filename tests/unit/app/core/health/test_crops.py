"""Crops as the app draws them beside what the trainer cuts out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.core.health.groups import JudgingTarget
from app.core.health.judging import MIN_CROP_SIDE, crop_preview, crop_to, largest_frame, moved, scaled
from app.core.library import Folder, LibraryImage
from trainer.config.job import DatasetConfig, FolderConfig
from trainer.dataset.dataset import read_dataset
from trainer.dataset.sampling import plain_sample
from trainer.dataset.sidecar import Sidecar, write_sidecar

RECIPE = JudgingTarget(resolution=512).recipe()
SIDE, FAR = st.integers(MIN_CROP_SIDE, 4000), st.floats(-1, 1)


@pytest.mark.parametrize("size", [(512, 512), (900, 500), (500, 900), (2000, 300), (150, 150), (700, 701)])
@pytest.mark.parametrize("crop", [None, (0.1, 0.2, 0.9, 0.7), (0.0, 0.0, 1.0, 0.5)])
def test_what_is_shown_is_what_the_trainer_cuts_out(tmp_path, size, crop):
    Image.effect_noise(size, 60).convert("RGB").save(tmp_path / "a.png")
    if crop:
        write_sidecar(tmp_path, Sidecar().with_image("a.png", crop=crop))
    folders = (FolderConfig(path=str(tmp_path)),)
    (record,) = read_dataset(DatasetConfig(folders=folders, validation_share=0.0), RECIPE).images
    left, top, width, height = plain_sample(record, RECIPE).window
    shown = crop_preview(*size, crop, RECIPE)
    assert shown.bucket == record.bucket
    expected = (left / size[0], top / size[1], (left + width) / size[0], (top + height) / size[1])
    assert shown.frame == pytest.approx(expected)
    assert shown.lost == pytest.approx(1 - width * height / (size[0] * size[1]))


def test_a_picture_too_small_for_any_bucket_shows_nothing():
    assert crop_preview(20, 20, None, RECIPE) is None


@given(
    SIDE, SIDE, st.floats(-1, 1), st.floats(-1, 1), st.floats(0.05, 8), st.sampled_from([(0.5, 0.5), (0, 1), (1, 0)])
)
def test_frames_stay_inside_and_keep_their_shape(width, height, across, down, factor, anchor):
    frame = largest_frame(width, height, (768, 512))
    shape = (frame[2] - frame[0]) / (frame[3] - frame[1])
    for after in (moved(frame, across, down), scaled(moved(frame, across, down), factor, (width, height), anchor)):
        assert -1e-9 <= after[0] < after[2] <= 1 + 1e-9
        assert -1e-9 <= after[1] < after[3] <= 1 + 1e-9
        assert (after[2] - after[0]) / (after[3] - after[1]) == pytest.approx(shape)
    least = min(MIN_CROP_SIDE, (frame[2] - frame[0]) * width, (frame[3] - frame[1]) * height)
    assert min((after[2] - after[0]) * width, (after[3] - after[1]) * height) >= least - 1e-6


@given(st.integers(700, 4000), st.integers(700, 4000), st.floats(0.4, 1.0), st.floats(-1, 1), st.floats(-1, 1))
def test_a_chosen_frame_loses_next_to_nothing_more(width, height, factor, across, down):
    first = crop_preview(width, height, None, RECIPE)
    frame = moved(scaled(first.frame, factor, (width, height)), across, down)
    again = crop_preview(width, height, tuple(round(side, 6) for side in frame), RECIPE)
    kept = (again.frame[2] - again.frame[0]) * (again.frame[3] - again.frame[1])
    wanted = (frame[2] - frame[0]) * (frame[3] - frame[1])
    # Whole pixels, and for small frames another bucket, whose shape is near.
    assert kept / wanted > (0.99 if again.bucket == first.bucket else 0.8)


def test_a_corner_stays_when_the_other_is_pulled():
    frame = (0.2, 0.2, 0.6, 0.6)
    assert scaled(frame, 1.5, (1000, 1000), (0, 0))[:2] == pytest.approx((0.2, 0.2))
    assert scaled(frame, 0.5, (1000, 1000), (1, 1))[2:] == pytest.approx((0.6, 0.6))


def test_crops_are_edits_with_a_name_and_nothing_changes_twice():
    folder = Folder(Path("data"), Path("data"))
    picture = LibraryImage(1, folder, "a.png", crop=(0.1, 0.1, 0.5, 0.5))
    edit = crop_to(picture, (0.1234567, 0.1, 0.6, 1.2))
    assert edit.name == "Crop a.png"
    assert edit.changes[0].after == (0.123457, 0.1, 0.6, 1.0)
    assert crop_to(picture, None).name == "Remove the crop of a.png"
    assert not crop_to(picture, picture.crop)
