"""A job like the one that a LoRA was trained with: sd-scripts' metadata as its options, and Impasto's own recipe."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.unit.config.presets.test_lora import DATASETS, FOLDER, SD15, SDXL, UNET_ONLY, lora
from trainer import cli
from trainer.config.load import load_job
from trainer.config.presets.creating import preset_of_lora
from trainer.config.presets.preset import RECIPE_KEY
from trainer.config.resolve import flatten
from trainer.importers.reading import read_job

KEYS: list[str] = json.loads((ROOT / "tests/golden/imports/sd_scripts_metadata.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("layers", "metadata"), [(SD15, FOLDER), (SDXL, DATASETS), (UNET_ONLY, FOLDER)], ids=["folder", "datasets", "unet"]
)
def test_a_job_has_the_recipe_of_the_preset_made_of_the_same_file(
    layers: dict[str, int], metadata: dict[str, str], tmp_path: Path
) -> None:
    file = lora(tmp_path, layers, metadata, rank=32)
    recipe = preset_of_lora(file).preset.recipe
    assert recipe is not None
    theirs = dict(flatten(recipe.model_dump(mode="json", exclude_unset=True), "recipe"))
    found = read_job(file)
    found.found.values |= {"base.model": "own/er", "dataset.folders": [{"path": "images"}]}
    ours = dict(flatten(found.job("x").recipe.model_dump(mode="json"), "recipe"))
    if metadata.get("ss_bucket_no_upscale") == "True":  # sd-scripts ignores both then
        del theirs["recipe.images.bucket_min"], theirs["recipe.images.bucket_max"]
    if "recipe.objective.noise_offset" not in theirs:  # which it is added to
        theirs.pop("recipe.objective.adaptive_noise_scale", None)
    assert {key: ours.get(key) for key in theirs} == theirs


def test_each_key_has_exactly_one_outcome(tmp_path: Path) -> None:
    stated = {**dict.fromkeys(KEYS, "None"), **FOLDER}
    found = read_job(lora(tmp_path, SD15, stated)).found
    assert Counter(setting.name for setting in found.settings) == Counter(stated.keys())
    assert not [setting.name for setting in found.settings if "no setting of this name" in setting.note]


@pytest.mark.parametrize(
    ("module", "arguments", "adapter"),
    [
        ("networks.lora", {}, "lora"),
        ("networks.loha", {}, "loha"),
        ("networks.lokr", {"factor": "8"}, "lokr"),
        ("networks.oft", {}, "oft"),
        ("lycoris.kohya", {"algo": "lokr"}, "lokr"),
        ("lycoris.kohya", {"algo": "diag-oft"}, "oft"),
    ],
)
def test_the_network_of_a_file_becomes_its_adapter(
    module: str, arguments: dict[str, str], adapter: str, tmp_path: Path
) -> None:
    metadata = {**FOLDER, "ss_network_module": module, "ss_network_args": json.dumps(arguments)}
    file = lora(tmp_path, SD15, metadata)
    assert read_job(file).found.values["recipe.adapter"] == adapter
    recipe = preset_of_lora(file).preset.recipe
    assert recipe is not None
    assert recipe.adapter == adapter


def test_a_recipe_of_impasto_is_taken_as_it_is(tmp_path: Path) -> None:
    recipe = {"rank": 12, "alpha": 3.0, "objective": {"min_snr_gamma": 4.0}}
    found = read_job(lora(tmp_path, SD15, {**FOLDER, RECIPE_KEY: json.dumps(recipe)})).found
    assert found.values == {"recipe.rank": 12, "recipe.alpha": 3.0, "recipe.objective.min_snr_gamma": 4.0}


def test_bad_values_are_left_out_and_the_others_stay(tmp_path: Path) -> None:
    bad: dict[str, Any] = {
        "ss_seed": "abc",
        "ss_network_alpha": "nan",
        "ss_datasets": "[[" * 2000,
        "ss_network_args": "{",
        "ss_lr_warmup_steps": "1e999",
        "ss_resolution": "x" * 5000,
    }
    found = read_job(lora(tmp_path, SD15, {**FOLDER, **bad})).found
    assert "recipe.seed" not in found.values
    assert {setting.name for setting in found.settings if setting.note == "is no valid value"} == {
        "ss_seed",
        "ss_network_alpha",
        "ss_lr_warmup_steps",
    }
    assert found.values["recipe.learning_rate"] == 1e-4


def test_new_takes_the_settings_of_a_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lora(tmp_path, SD15, FOLDER, name="mika")
    assert cli.main(["new", "x", "--from", "mika.safetensors"]) == 2
    assert "names no base model" in capsys.readouterr().err
    assert cli.main(["new", "x", "--from", "mika.safetensors", "--base", "own/er", "--images", "images"]) == 0
    job = load_job(Path("x/job.toml"))
    assert (job.name, job.recipe.rank, job.recipe.schedule.kind, job.recipe.steps) == ("mika_v2", 32, "restarts", 1500)


def test_a_lora_without_metadata_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lora(tmp_path, SD15, {})
    assert cli.main(["new", str(tmp_path / "x"), "--from", str(file)]) == 2
    assert "has no training metadata" in capsys.readouterr().err
