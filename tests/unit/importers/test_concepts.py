"""OneTrainer's concepts: folders, settings, captions, and what is not carried over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.images import folder_config, picture_at
from trainer.config.job import FolderConfig
from trainer.errors import DatasetError
from trainer.importers.datasets import ImportedDataset
from trainer.importers.onetrainer.concepts import import_concepts, resolutions_in

PINNED = json.loads((Path(__file__).parents[2] / "golden" / "imports" / "onetrainer.json").read_text("utf-8"))

CONCEPTS = [
    {
        "__version": 2,
        "name": "cats",
        "path": "cats",
        "include_subdirectories": True,
        "balancing": 2.0,
        "loss_weight": 0.5,
        "image": {"enable_crop_jitter": False, "enable_random_flip": False, "enable_random_hue": True},
        "text": {
            "prompt_source": "sample",
            "enable_tag_shuffling": True,
            "tag_delimiter": ";",
            "keep_tags_count": 3,
        },
    },
    {"path": "held", "type": "VALIDATION", "balancing": 1.5, "text": {"prompt_source": "filename"}},
    {"path": "prior", "type": "PRIOR_PREDICTION", "balancing": 9, "balancing_strategy": "SAMPLES"},
    {"path": "off", "name": "off", "enabled": False},
]


def imported_from(path: Path, text: str) -> ImportedDataset:
    path.write_text(text, encoding="utf-8")
    return import_concepts(path)


def test_onetrainer_concepts(tmp_path: Path) -> None:
    picture_at(tmp_path / "held" / "a red fox.png")
    imported = imported_from(tmp_path / "concepts.json", json.dumps(CONCEPTS))
    defaults = {
        "captions": {"shuffle": False, "separator": ",", "keep_tokens": 0},
        "images": {"crop": "random"},
    }
    assert imported.folders == [
        FolderConfig(path=str(tmp_path / "cats"), repeats=2, recursive=True, weight=0.5),
        folder_config(tmp_path / "held", kind="validation", repeats=2, caption_sources=["filename"], **defaults),
        folder_config(tmp_path / "prior", kind="regularization", repeats=1, **defaults),
    ]
    assert imported.dataset == {"lines": "variants"}
    assert imported.captions == {}
    assert imported.settings == {
        "recipe.objective.prior_prediction": True,
        "recipe.images.flip": False,
        "recipe.images.crop": "center",
        "recipe.captions.shuffle": True,
        "recipe.captions.separator": ";",
        "recipe.captions.keep_tokens": 3,
    }
    notes = " ".join(imported.notes)
    for word in (
        "enable_random_hue",
        "1.5 repeats",
        "9 samples",
        "off is disabled",
    ):
        assert word in notes


def test_onetrainers_whole_config_with_one_file_of_prompts(tmp_path: Path) -> None:
    first = picture_at(tmp_path / "cats" / "inner" / "a.png")
    (tmp_path / "prompts.txt").write_text("a cat\nthe cat\n", encoding="utf-8")
    concept = {
        "path": "cats",
        "include_subdirectories": True,
        "text": {"prompt_source": "concept", "prompt_path": "prompts.txt"},
    }
    imported = imported_from(tmp_path / "config.json", json.dumps({"model_type": "SDXL", "concepts": [concept]}))
    assert imported.captions == {first: ("a cat", "the cat")}


def test_onetrainers_random_rotation_is_that_of_its_concept(tmp_path: Path) -> None:
    still = {"enable_random_flip": False, "enable_crop_jitter": False}
    turned = {**still, "enable_random_rotate": True, "random_rotate_max_angle": 7.6}
    concepts = [{"path": "cats", "image": turned}, {"path": "dogs", "image": still}]
    imported = imported_from(tmp_path / "concepts.json", json.dumps(concepts))
    assert imported.settings["recipe.images.rotation"] == 8 and imported.notes == []
    assert imported.folders[1].images is not None and imported.folders[1].images.rotation == 0
    assert imported.folders[0].images is None


@pytest.mark.parametrize("masked", [True, False])
def test_onetrainers_masked_training(tmp_path: Path, masked: bool) -> None:
    config = {"masked_training": masked, "normalize_masked_area_loss": True, "unmasked_weight": 0.0}
    config["concepts"] = [{"path": "cats", "image": {"enable_random_flip": False, "enable_crop_jitter": False}}]
    settings = imported_from(tmp_path / "config.json", json.dumps(config)).settings
    expected = {
        "recipe.objective.unmasked_probability": 0.1,
        "recipe.objective.unmasked_weight": 0.0,
        "recipe.objective.normalize_masked_loss": True,
    }
    assert {key: value for key, value in settings.items() if "mask" in key} == (expected if masked else {})


def concept_with(**keys: object) -> ImportedDataset:
    """Import one concept in the working folder, with these keys in its tables, as `text__prompt_source`."""
    concept: dict[str, Any] = {"path": "cats", "text": {}, "image": {"enable_crop_jitter": False}}
    for key, value in keys.items():
        table, _, name = key.rpartition("__")
        (concept[table] if table else concept)[name] = value
    return imported_from(Path("concepts.json"), json.dumps([concept]))


@pytest.mark.parametrize(
    ("mode", "key", "value", "words"),
    [
        ("FULL", "dropout", 0.2, "keeps the first tags"),
        ("RANDOM", "tag_dropout", 0.2, ""),
        ("RANDOM WEIGHTED", "tag_dropout", 0.1, "later tags more often"),
    ],
)
def test_modes_of_tag_dropout(
    mode: str, key: str, value: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    imported = concept_with(
        text__tag_dropout_enable=True, text__tag_dropout_mode=mode, text__tag_dropout_probability=0.2
    )
    assert imported.settings[f"recipe.captions.{key}"] == value
    assert [words in note for note in imported.notes] == ([True] if words else [])
    assert imported.settings.get("recipe.captions.keep_tokens") == (None if mode == "FULL" else 1)


def test_samples_per_epoch_become_repeats_of_the_images_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        picture_at(tmp_path / "cats" / f"{name}.png")
    imported = concept_with(balancing=10, balancing_strategy="SAMPLES")
    assert [each.repeats for each in imported.folders] == [2]  # 10 of 4 images: 2.5 times each
    assert "10 samples per epoch in OneTrainer; here each image is used 2 times" in imported.notes[0]


def test_a_concept_has_resolutions_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    imported = concept_with(image__enable_resolution_override=True, image__resolution_override="512, 768")
    assert [each.resolutions for each in imported.folders] == [(512, 768)]
    assert imported.notes == []


@pytest.mark.parametrize(("text", "sides"), [("512", [512]), ("512,768", [512, 768]), ("512x768", [624]), (640, [640])])
def test_resolutions(text: object, sides: list[int]) -> None:
    assert resolutions_in(text) == sides  # 624² is nearest to 512 x 768


def test_paths_of_another_pc(tmp_path: Path) -> None:
    path = tmp_path / "concepts.json"
    path.write_text(json.dumps([{"path": "D:\\data\\Cats\\best"}, {"path": "E:\\dogs"}]), encoding="utf-8")
    imported = import_concepts(path, [("d:/DATA", str(tmp_path / "here"))])
    assert [each.path for each in imported.folders] == [str(tmp_path / "here" / "Cats" / "best"), "E:\\dogs"]


HARMLESS = {"seed", "image_variations", "text_variations", "concept_stats", "name"}
"""How OneTrainer caches and shows a concept."""
# With these, a setting that is idle by itself has an effect.
SWITCHES: dict[str, dict[str, object]] = {
    "image.random_rotate_max_angle": {"image.enable_random_rotate": True},
    "image.resolution_override": {"image.enable_resolution_override": True},
    "text.prompt_path": {"text.prompt_source": "concept", "text.prompt_path": "gone.txt"},
    "balancing_strategy": {"balancing": 3.0},
    "text.tag_delimiter": {"text.enable_tag_shuffling": True},
    "text.keep_tags_count": {"text.enable_tag_shuffling": True},
}
VALUES = {
    "path": "dogs", "type": "PRIOR_PREDICTION", "balancing_strategy": "SAMPLES", "enabled": False,
    "image.enable_crop_jitter": False, "image.resolution_override": "640", "text.prompt_source": "filename",
    "text.prompt_path": "prompts.txt", "text.tag_delimiter": ";", "image.random_rotate_max_angle": 7.0,
}  # fmt: skip


def outcome(flat: dict[str, object]) -> object:
    concept: dict[str, Any] = {"path": "cats", "image": {}, "text": {}}
    for key, value in flat.items():
        table, _, name = key.rpartition(".")
        (concept[table] if table else concept)[name] = value
    made = imported_from(Path("concepts.json"), json.dumps([concept, {"path": "other"}]))
    return [made.folders, made.dataset, made.settings, made.notes]


@pytest.mark.parametrize("key", sorted(PINNED["concept"].keys() - HARMLESS))
def test_each_setting_of_a_concept_has_an_effect_or_a_note(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a cat", encoding="utf-8")
    default = PINNED["concept"][key]
    other = VALUES.get(key, not default if isinstance(default, bool) else 0.5 if isinstance(default, float) else 3)
    switches = SWITCHES.get(key, {})
    if key.startswith("text.tag_dropout"):
        switches = {"text.tag_dropout_enable": True, "text.tag_dropout_probability": 0.25}
        switches["text.tag_dropout_special_tags_mode"] = "BLACKLIST"
        other = "RANDOM" if key.endswith("dropout_mode") else "NONE" if key.endswith("special_tags_mode") else other
    elif key.startswith("text.caps_randomize"):
        key, other = "text.caps_randomize_enable", True
    elif "max_strength" in key:
        key, other = key.replace("image.", "image.enable_").removesuffix("_max_strength"), True
    if key.startswith("text.tag_dropout_special_tags"):  # the note on the mode stands for them
        key, other = "text.tag_dropout_special_tags_mode", "NONE"
    if key == "text.tag_dropout_enable":
        other = False
    assert outcome({**switches, key: other}) != outcome(switches)


@pytest.mark.parametrize(
    "text",
    [
        "{", "17", "[1]", "[]", '[{"name": "no path"}]', '[{"path": "x", "balancing": "much"}]',
        '[{"path": ".", "text": {"prompt_source": "concept", "prompt_path": "gone.txt"}}]',
        '[{"path": "x", "image": {"enable_resolution_override": true, "resolution_override": "big"}}]',
    ],
)  # fmt: skip
def test_files_that_make_no_sense(tmp_path: Path, text: str) -> None:
    with pytest.raises(DatasetError) as caught:
        imported_from(tmp_path / "a.json", text)
    assert caught.value.code == "import.unreadable"
    assert caught.value.remedy
