"""Datasets of kohya: folders, settings, captions, and what is not carried over."""

import json
from pathlib import Path

import pytest

from tests.support.images import folder_config, picture_at, recipe_of
from trainer.config.job import FolderConfig
from trainer.config.recipe import RecipeConfig
from trainer.dataset.dataset import read_dataset
from trainer.errors import DatasetError
from trainer.importers.datasets import ImportedDataset
from trainer.importers.sd_scripts.dataset import import_dataset, read_kohya_metadata

KOHYA = """
[general]
shuffle_caption = true
keep_tokens = 2
caption_extension = ".txt"

[[datasets]]
resolution = [768, 512]
batch_size = 3
enable_bucket = true
bucket_no_upscale = true
max_bucket_reso = 1536

  [[datasets.subsets]]
  image_dir = "dog"
  num_repeats = 5
  class_tokens = "sks dog"
  caption_prefix = "photo of"
  secondary_separator = ";;;"
  caption_dropout_every_n_epochs = 4
  token_warmup_min = 2
  token_warmup_step = 0.25
  color_aug = true
  flip_aug = false
  face_crop_aug_range = "2.0,4.0"

  [[datasets.subsets]]
  image_dir = "reg"
  is_reg = true
  keep_tokens = 1
  alpha_mask = true
"""


def imported_from(path: Path, text: str) -> ImportedDataset:
    path.write_text(text, encoding="utf-8")
    return import_dataset(path)


def test_kohya_folders_and_settings(tmp_path: Path) -> None:
    imported = imported_from(tmp_path / "data.toml", KOHYA)
    assert imported.folders == [
        FolderConfig(path=str(tmp_path / "dog"), repeats=5, class_words="sks dog"),
        folder_config(
            tmp_path / "reg",
            kind="regularization",
            masks="alpha",
            captions={"keep_tokens": 1, "prefix": "", "secondary_separator": ""},
            images={"color_jitter": False},
        ),
    ]
    assert imported.dataset == {}
    assert imported.settings == {
        "recipe.resolution": 624,
        "recipe.objective.unmasked_weight": 0.0,
        "recipe.effective_batch": 3,
        "recipe.images.buckets": True,
        "recipe.images.max_upscale": 1.0,
        "recipe.images.bucket_max": 1536,
        "recipe.images.flip": False,
        "recipe.images.color_jitter": True,
        "recipe.captions.shuffle": True,
        "recipe.captions.keep_tokens": 2,
        "recipe.captions.prefix": "photo of",
        "recipe.captions.secondary_separator": ";;;",
        "recipe.captions.dropout_every_epochs": 4,
        "recipe.captions.token_warmup_min": 2,
        "recipe.captions.token_warmup_step": 0.25,
    }
    assert len(imported.notes) == 3
    assert "face_crop_aug_range" in imported.notes[0]
    assert {note.split()[0] for note in imported.notes[1:]} == {"token_warmup_min", "token_warmup_step"}


MULTIPLE = """
[general]
caption_extension = ".txt"
flip_aug = true

[[datasets]]
resolution = 512
  [[datasets.subsets]]
  image_dir = "dog"
  shuffle_caption = true
  [[datasets.subsets]]
  image_dir = "cat"

[[datasets]]
resolution = 768
flip_aug = false
  [[datasets.subsets]]
  image_dir = "bird"
  [[datasets.subsets]]
  image_dir = "cat"
  flip_aug = true
"""


def test_kohyas_subsets_differ_as_folders_and_a_folder_at_two_resolutions_is_one(tmp_path: Path) -> None:
    imported = imported_from(tmp_path / "data.toml", MULTIPLE)
    plain = {"shuffle": False}
    assert imported.settings == {
        "recipe.resolution": 512,
        "recipe.images.flip": True,
        "recipe.captions.shuffle": True,
    }
    assert imported.folders == [
        folder_config(tmp_path / "dog"),
        folder_config(tmp_path / "cat", captions=plain, resolutions=[512, 768]),
        folder_config(tmp_path / "bird", captions=plain, images={"flip": False}, resolutions=[768]),
    ]
    assert imported.notes == []


def test_a_subset_twice_at_one_resolution_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="same folder"):
        imported_from(tmp_path / "data.toml", MULTIPLE.replace("resolution = 768", "resolution = 512"))


def test_the_settings_are_valid_for_a_recipe(tmp_path: Path) -> None:
    tree: dict[str, dict[str, object]] = {"images": {}, "captions": {}, "objective": {}}
    plain = {}
    for key, value in imported_from(tmp_path / "data.toml", KOHYA).settings.items():
        match key.split("."):
            case ["recipe", section, name]:
                tree[section][name] = value
            case ["recipe", name]:
                plain[name] = value
    recipe = RecipeConfig.model_validate({**plain, **tree})
    assert recipe.captions.keep_tokens == 2


@pytest.mark.parametrize("form", ["absolute", "relative", "stem", "jsonl"])
def test_kohya_metadata_in_all_its_forms(tmp_path: Path, form: str) -> None:
    images = tmp_path / "images"
    first, second = picture_at(images / "a.png"), picture_at(images / "b ü.png")
    key = {"absolute": str, "relative": lambda path: path.name, "stem": lambda path: path.stem, "jsonl": str}[form]
    rows = {
        key(first): {"caption": "a dog", "tags": "1dog, solo", "train_resolution": [512, 512]},
        key(second): {"tags": "2dogs"},
        key(images / "gone.png"): {"caption": "gone"},
    }
    if form == "jsonl":
        path = tmp_path / "meta.jsonl"
        lines = [json.dumps({"image_path": name, **row}) for name, row in rows.items()]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        path = tmp_path / "meta.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
    assert read_kohya_metadata(path, images) == ({first: ("a dog, 1dog, solo",), second: ("2dogs",)}, 1)


@pytest.mark.parametrize(
    ("stated", "sources"), [(".txt", None), ("caption", None), (".wd14", (".wd14",)), ("tags", (".tags",))]
)
def test_kohyas_extension_of_captions(tmp_path: Path, stated: str, sources: tuple[str, ...] | None) -> None:
    text = f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "images"\ncaption_extension = "{stated}"\n'
    imported = imported_from(tmp_path / "data.toml", text)
    assert [folder.caption_sources for folder in imported.folders] == [sources]
    assert imported.notes == []


def test_kohyas_masks_in_a_folder(tmp_path: Path) -> None:
    text = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "images"\nconditioning_data_dir = "masks"\n'
    imported = imported_from(tmp_path / "data.toml", text)
    assert [folder.mask_folder for folder in imported.folders] == [str(tmp_path / "masks")]
    assert imported.settings == {"recipe.objective.unmasked_weight": 0.0}
    assert imported.notes == []


def test_kohya_metadata_through_the_toml_reaches_the_dataset(tmp_path: Path) -> None:
    path = picture_at(tmp_path / "images" / "a.png")
    path.with_suffix(".txt").write_text("beside", encoding="utf-8")
    (tmp_path / "meta.json").write_text(json.dumps({"a": {"caption": "a dog"}}), encoding="utf-8")
    text = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "images"\nmetadata_file = "meta.json"\n'
    imported = imported_from(tmp_path / "data.toml", text)
    dataset = read_dataset(imported.config(), recipe_of(128), imported=imported.captions)
    assert [record.captions for record in dataset.images] == [("a dog",)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "not = = toml"),
        ("a.toml", ""),
        ("a.toml", "[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 3\n"),
        ("a.toml", '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "x"\nnum_repeats = -3\n'),
        ("a.toml", '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "x"\nmetadata_file = "gone.json"\n'),
        ("a.toml", '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "x"\nresolution = "big"\n'),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(DatasetError) as caught:
        imported_from(tmp_path / name, text)
    assert caught.value.code == "import.unreadable"
    assert caught.value.remedy


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        import_dataset(tmp_path / "gone.toml")
