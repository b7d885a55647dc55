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
from trainer.dataset.dataset import Dataset, read_dataset, read_listing, write_listing
from trainer.dataset.sampling import EpochBatches, Sample, caption_lengths, plain_sample
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
    """Return all samples of some epochs by image, epoch and repeat."""
    batches = (batch for epoch in range(epochs) for batch in EpochBatches(dataset.images, recipe, epoch))
    return {(sample.image.id, sample.epoch, sample.repeat): sample for batch in batches for sample in batch}


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
    assert folder.overlay is None
    assert folder_of(tmp_path).folders[0].overlay is None
