"""Settings of a folder: its images are sampled exactly as in a job of that folder alone with these settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.images import folder_of, make_picture, photograph, recipe_of
from trainer.config.job import CaptionOverlay, DatasetConfig, FolderConfig, RecipeOverlay
from trainer.config.load import parse_job
from trainer.config.recipe import CaptionConfig, RecipeConfig
from trainer.config.resolve import Machine, resolve_job
from trainer.dataset.dataset import Dataset, describe, read_dataset, read_listing, write_listing
from trainer.dataset.sampling import (
    EpochBatches,
    Sample,
    caption_lengths,
    measured_samples,
    plain_sample,
    samples_per_epoch,
    steps_per_epoch,
)
from trainer.errors import JobError

TAGGED = {"shuffle": True, "keep_tokens": 1, "tag_dropout": 0.3, "suffix": "drawing"}
WRITTEN = {"dropout": 0.4, "prefix": "photo of", "separator": ";", "wildcards": True}
MIRRORED, CROPPED = {"flip": True}, {"crop": "random"}
PLAIN = {"validation_share": 0.0}


def two_folders(root: Path) -> tuple[Path, Path]:
    """Make a folder of tagged photographs and one of described ones."""
    captions = {"tags": "cat, sofa, red, window", "words": "a {cat|dog} on a sofa; red"}
    for name, caption in captions.items():
        (root / name).mkdir()
        for number, source in enumerate(("astronaut.png", "chelsea.png", "coffee.png")):
            # Different sizes, so that the folders have no image in common.
            photograph(source).resize((160 + 8 * number + len(name), 96)).save(root / name / f"{number}.png")
            (root / name / f"{number}.txt").write_text(f"{number}, {caption}", encoding="utf-8")
    return root / "tags", root / "words"


def read(folders: list[dict[str, Any]], recipe: RecipeConfig) -> Dataset:
    return read_dataset(DatasetConfig.model_validate({"folders": folders, **PLAIN}), recipe)


def drawn(dataset: Dataset, recipe: RecipeConfig, epochs: int = 4) -> dict[tuple[object, ...], Sample]:
    """Return all samples of some epochs by image, resolution, epoch and repeat."""
    batches = (batch for epoch in range(epochs) for batch in EpochBatches(dataset.images, recipe, epoch))
    return {(sample.image.stream, sample.epoch, sample.repeat): sample for batch in batches for sample in batch}


def shown(sample: Sample) -> tuple[object, ...]:
    return sample.caption, sample.window, sample.flip, sample.tokens, sample.image.bucket


def test_two_folders_are_sampled_as_two_jobs_of_one_folder(tmp_path: Path) -> None:
    tags, words = two_folders(tmp_path)
    repeated = {"repeats": 3}
    both = read(
        [
            {"path": str(tags), "captions": TAGGED, "images": MIRRORED, **repeated},
            {"path": str(words), "captions": WRITTEN, "images": CROPPED, **repeated},
        ],
        recipe_of(64),
    )
    found = drawn(both, recipe_of(64))
    expected: dict[tuple[object, ...], Sample] = {}
    for path, captions, images in ((tags, TAGGED, MIRRORED), (words, WRITTEN, CROPPED)):
        alone = recipe_of(64, captions=captions, images=images)
        expected |= drawn(read([{"path": str(path), **repeated}], alone), alone)
    assert {key: shown(one) for key, one in found.items()} == {key: shown(one) for key, one in expected.items()}
    assert len({one.caption for one in found.values()}) > 12
    assert any(one.flip for one in found.values())


def test_a_folder_without_settings_follows_the_recipe(tmp_path: Path) -> None:
    tags, words = two_folders(tmp_path)
    recipe = recipe_of(64, captions=TAGGED, images=MIRRORED)
    folders = [{"path": str(tags)}, {"path": str(words), "captions": {"shuffle": False}}]
    found, plain = read(folders, recipe), read([{"path": str(tags)}, {"path": str(words)}], recipe)
    one, other = drawn(found, recipe), drawn(plain, recipe)
    for key, sample in one.items():
        same = shown(sample) == shown(other[key])
        assert same or sample.image.path.parent == words
    assert {sample.image.overlay for sample in one.values() if sample.image.path.parent == tags} == {None}


def test_subfolders_have_the_settings_of_their_folder(tmp_path: Path) -> None:
    two_folders(tmp_path)
    found = read([{"path": str(tmp_path), "recursive": True, "captions": {"suffix": "drawing"}}], recipe_of(64))
    assert len(found.images) == 6
    assert all(plain_sample(image, recipe_of(64)).caption.endswith("drawing") for image in found.images)


def test_the_listing_keeps_the_settings_of_folders(tmp_path: Path) -> None:
    tags, words = two_folders(tmp_path)
    recipe = recipe_of(64)
    dataset = read([{"path": str(tags), "captions": TAGGED, "images": MIRRORED}, {"path": str(words)}], recipe)
    write_listing(tmp_path / "dataset.jsonl", dataset.images)
    listed = read_listing(tmp_path / "dataset.jsonl")
    assert listed == dataset.images
    assert len({id(image.overlay) for image in listed if image.overlay}) == 1  # not one object for each image
    lines = [json.loads(line) for line in (tmp_path / "dataset.jsonl").read_text("ascii").splitlines()]
    assert lines[0]["overlay"] == {"captions": TAGGED, "images": MIRRORED}
    assert "overlay" not in lines[-1]


def test_lines_and_masks_can_differ_between_folders(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        Image.new("RGBA", (64, 64), (9, 99, len(name), 128)).save(tmp_path / name / "1.png")
        Image.new("L", (64, 64), 255).save(tmp_path / name / "1-masklabel.png")
        (tmp_path / name / "1.txt").write_text("one\ntwo\n", encoding="utf-8")
    folders = [
        {"path": str(tmp_path / "a")},
        {"path": str(tmp_path / "b"), "lines": "variants", "masks": "alpha"},
        {"path": str(tmp_path / "c"), "masks": "none"},
    ]
    dataset = read(folders, recipe_of(64))
    assert [image.captions for image in dataset.images] == [("one two",), ("one", "two"), ("one two",)]
    assert [image.mask for image in dataset.images] == ["file", "alpha", "none"]
    assert "mask.missing" not in {finding.code for finding in dataset.findings}


def test_the_lengths_of_captions_follow_the_folder(tmp_path: Path) -> None:
    recipe = recipe_of(64, token_chunks=225, caption_padding="caption")
    long = "red, " * 40
    overlay = RecipeOverlay.model_validate({"captions": {"suffix": long, "dropout": 0.5}})
    plain, longer = make_picture(0), make_picture(1, overlay=overlay)
    assert caption_lengths(plain, recipe).longest == 75
    lengths = caption_lengths(longer, recipe)
    assert (lengths.shortest, lengths.usual, lengths.longest) == (75, 150, 150)


def test_every_caption_setting_can_be_one_of_a_folder() -> None:
    of_epochs = {"dropout_every_epochs"}
    assert CaptionOverlay.model_fields.keys() == CaptionConfig.model_fields.keys() - of_epochs
    assert CaptionOverlay() == CaptionOverlay.model_validate(dict.fromkeys(CaptionOverlay.model_fields))
    for wrong in ({"dropout": 1.5}, {"keep_tokens": "two"}, {"separator": ""}, {"shuffled": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CaptionOverlay.model_validate(wrong)


@pytest.mark.parametrize("crop", ["center", "random"])
def test_several_resolutions_are_sampled_as_jobs_of_one(tmp_path: Path, crop: str) -> None:
    """An epoch has every image at every resolution, as with several datasets of kohya, and none shares a stream."""
    tags, _ = two_folders(tmp_path)
    recipe = recipe_of(64, captions=TAGGED, images={"crop": crop, "flip": True, "bucket_step": 32}, effective_batch=4)
    both = read([{"path": str(tags), "resolutions": [96, 64], "repeats": 2}], recipe)
    found = drawn(both, recipe)
    expected: dict[tuple[object, ...], Sample] = {}
    for side in (64, 96):
        alone = read([{"path": str(tags), "resolutions": [side], "repeats": 2}], recipe)
        expected |= drawn(alone, recipe)
        # Its buckets are those of a job whose recipe has this resolution.
        plain = read([{"path": str(tags)}], recipe.replaced(resolution=side))
        assert [image.bucket for image in alone.images] == [image.bucket for image in plain.images]
    assert len(found) == 4 * 3 * 2 * 2
    assert {key: shown(one) for key, one in found.items()} == {key: shown(one) for key, one in expected.items()}
    assert samples_per_epoch(both.images) == 12
    assert steps_per_epoch(both.images, recipe) == 3
    for batch in EpochBatches(both.images, recipe, 0):
        assert len(batch) == 4


def test_an_image_is_held_out_at_all_of_its_resolutions(tmp_path: Path) -> None:
    tags, words = two_folders(tmp_path)
    folders = [{"path": str(tags), "resolutions": [64, 96]}, {"path": str(words)}]
    config = DatasetConfig.model_validate({"folders": folders, "validation_share": 0.34})
    dataset = read_dataset(config, recipe_of(64))
    held_out = {image.path for image in dataset.images if image.kind == "validation"}
    assert len(held_out) == 2
    assert held_out.isdisjoint(image.path for image in dataset.images if image.kind == "train")
    measured = measured_samples(dataset.images, recipe_of(64))
    assert len(measured) == sum(image.kind == "validation" for image in dataset.images)
    assert [sample.image.stream for sample in measured] == sorted(sample.image.stream for sample in measured)


def test_an_image_at_two_resolutions_is_one_image_in_the_report(tmp_path: Path) -> None:
    tags, _ = two_folders(tmp_path)
    Image.new("L", (168, 96), 255).save(tags / "0-masklabel.png")
    dataset = read([{"path": str(tags), "resolutions": [64, 256]}], recipe_of(128))
    found = {finding.code: finding for finding in dataset.findings}
    assert "image.twice" not in found
    assert len(found["image.small"].paths) == 3
    lines = describe(dataset, recipe_of(128))
    assert lines[:3] == [
        "3 images for training, 6 samples per epoch",
        "1 of 3 images with a mask",
        "Resolutions: 64 × 64, 256 × 256, or other aspect ratios of the same areas",
    ]
    assert {image.mask_path for image in dataset.images if image.path.stem == "0"} == {tags / "0-masklabel.png"}


def test_an_image_too_small_for_a_resolution_is_not_enlarged(tmp_path: Path) -> None:
    photograph().resize((64, 64)).save(tmp_path / "1.png")
    recipe = recipe_of(64, images={"max_upscale": 1.0})
    dataset = read([{"path": str(tmp_path), "resolutions": [64, 128]}], recipe)
    assert [image.bucket for image in dataset.images] == [(64, 64), (64, 64)]
    assert len({image.stream for image in dataset.images}) == 2
    (batch,) = EpochBatches(dataset.images, recipe, 0)
    assert len(batch) == 2


def test_the_listing_keeps_resolutions(tmp_path: Path) -> None:
    tags, _ = two_folders(tmp_path)
    dataset = read([{"path": str(tags), "resolutions": [64, 96]}], recipe_of(64))
    write_listing(tmp_path / "dataset.jsonl", dataset.images)
    listed = read_listing(tmp_path / "dataset.jsonl")
    assert listed == dataset.images
    assert sorted({image.stream.partition("@")[2] for image in listed}) == ["64", "96"]


def test_limits_of_buckets_hold_at_every_resolution() -> None:
    text = 'name = "x"\n[base]\nmodel = "owner/name"\n[[dataset.folders]]\npath = "a"\nresolutions = [256, 768]\n'
    facts: dict[str, Any] = {"family": "sd15", "prediction": "epsilon", "zero_terminal_snr": False}
    facts |= {"samples_per_epoch": 4, "machine": Machine("cpu", None, None, True, 2)}
    for limit, side in (("bucket_min=320", 256), ("bucket_max=640", 768)):
        job = parse_job(text, "job.toml", Path("/jobs"), [f"recipe.images.{limit}"])
        with pytest.raises(JobError, match=f"the resolution of {side}; no bucket is left"):
            resolve_job(job, **facts)
    assert resolve_job(parse_job(text, "job.toml", Path("/jobs")), **facts).dataset.sides(RecipeConfig()) == {256, 768}
    with pytest.raises(JobError, match="has the same resolution twice"):
        parse_job(text, "job.toml", Path("/jobs"), ["dataset.folders.0.resolutions=[512, 512]"])


def test_a_range_of_timesteps_is_checked_together_with_the_recipe() -> None:
    text = (
        'name = "x"\n[base]\nmodel = "owner/name"\n[[dataset.folders]]\npath = "a"\n[[dataset.folders]]\npath = "b"\n'
    )
    sets = ["recipe.objective.timestep_max=499", "dataset.folders.1.timestep_min=500"]
    with pytest.raises(JobError, match=r"dataset\.folders\.1\.timestep_min.* above timestep_max = 499"):
        parse_job(text, "job.toml", Path("/jobs"), sets)
    job = parse_job(text, "job.toml", Path("/jobs"), [*sets, "dataset.folders.1.timestep_max=600"])
    objective = job.dataset.folders[1].recipe_from(job.recipe).objective
    assert (objective.timestep_min, objective.timestep_max) == (500, 600)
    assert job.dataset.folders[0].recipe_from(job.recipe) == job.recipe


def test_an_empty_table_changes_nothing(tmp_path: Path) -> None:
    folder = FolderConfig.model_validate({"path": str(tmp_path), "captions": {}, "images": {}})
    assert folder.overlays == (None,)
    assert folder_of(tmp_path).folders[0].overlays == (None,)
