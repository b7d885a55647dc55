"""A file of LoRA_Easy_Training_Scripts becomes the job that its backend would have started with sd-scripts."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from trainer import cli
from trainer.config.toml_file import table_lines
from trainer.importers.reading import read_job
from trainer.importers.sd_scripts.easy_training import _options
from trainer.importers.translation import ImportedJob

GOLDEN = ROOT / "tests" / "golden" / "imports"
SETTINGS: list[str] = json.loads((GOLDEN / "easy_training_settings.json").read_text("utf-8"))
RECORDED: dict[str, Any] = json.loads((GOLDEN / "easy_training.json").read_text("utf-8"))
SAVED: dict[str, Any] = RECORDED["saved"]


def saved(folder: Path, data: dict[str, Any] = SAVED) -> ImportedJob:
    path = folder / "saved.toml"
    path.write_text("\n".join(table_lines(data, "")), encoding="utf-8")
    return read_job(path)


def test_options_are_those_that_its_backend_passes_on() -> None:
    stated = {
        name: value
        for kind in ("dataset_args", "args")
        for section in SAVED.values()
        if isinstance(section, dict)
        for name, value in section.get(kind, {}).items()
    }
    ours = _options(stated)
    theirs = {**RECORDED["args"], **RECORDED["general"]}
    # Both are done later there, and the last ones only concern the GUI itself.
    theirs |= {"lr_warmup_steps": theirs.pop("warmup_ratio"), "train_batch_size": theirs.pop("batch_size")}
    for name in ("easy_name", "sdxl", "save_toml", "save_toml_location", "tag_occurrence"):
        del theirs[name]
    assert (
        theirs.pop("lr_scheduler_type").rpartition(".")[2],
        theirs.pop("lr_scheduler"),
        ours.pop("lr_scheduler"),
    ) == (
        "RexAnnealingWarmRestarts",
        "cosine",
        "rex",
    )
    assert (theirs.pop("output_dir"), ours.pop("output_dir")) == ("/out/${replace}", "/out/cat")
    assert (theirs.pop("output_name"), ours.pop("output_name")) == ("${replace}", "cat")
    assert (theirs.pop("resolution"), ours.pop("resolution")) == ([1024, 1024], "1024,1024")
    assert ours == theirs


def test_the_job_is_what_it_would_have_trained(tmp_path: Path) -> None:
    job = saved(tmp_path).job("x")
    recipe = job.recipe
    assert (job.name, job.base.model) == ("cat", "/models/sdxl.safetensors")
    assert (recipe.adapter, recipe.rank, recipe.alpha, recipe.conv_rank, recipe.conv_alpha) == ("dora", 32, 16, 8, 4)
    assert (recipe.learning_rate, recipe.text_encoder.learning_rate) == (2e-4, 1e-5)
    assert (recipe.schedule.kind, recipe.schedule.warmup, recipe.epochs) == ("rex", 0.05, 10)
    assert (recipe.resolution, recipe.effective_batch, recipe.images.bucket_max) == (1024, 4, 2048)
    assert (recipe.objective.min_snr_gamma, recipe.objective.noise_offset) == (8, 0.0357)
    assert [(Path(each.path).name, each.kind, each.repeats) for each in job.dataset.folders] == [
        ("images", "train", 5),
        ("reg", "regularization", 1),
    ]
    assert (recipe.captions.shuffle, recipe.captions.keep_tokens) == (True, 1)


def test_each_setting_has_exactly_one_outcome(tmp_path: Path) -> None:
    data = copy.deepcopy(SAVED)
    known = {name for each in data.values() if isinstance(each, dict) for part in each.values() for name in part}
    flux = {"guidance_scale"}
    data["extra_args"] = {"args": dict.fromkeys((name for name in SETTINGS if name not in known | flux), False)}
    found = saved(tmp_path, data).found
    stated = {
        *(name for each in data.values() if isinstance(each, dict) for kind in ("args", "dataset_args")
          for name in each.get(kind, {})),
        "subsets", "train_mode",
    }  # fmt: skip
    assert Counter(setting.name for setting in found.settings) == Counter(stated)
    assert not [setting.name for setting in found.settings if "no setting of this name" in setting.note]


def test_a_lora_fa_is_reported(tmp_path: Path) -> None:
    data = copy.deepcopy(SAVED)
    data["network_args"]["args"] = {"network_dim": 8, "fa": True}
    found = saved(tmp_path, data).found
    (setting,) = [each for each in found.settings if each.name == "fa"]
    assert (setting.outcome, found.values["recipe.adapter"]) == ("changed", "lora")


@pytest.mark.parametrize(
    ("section", "table", "said"),
    [
        ("train_mode", {"train_mode": "textual_inversion"}, "it trains a textual inversion"),
        ("flux_args", {"args": {"guidance_scale": 3.5}}, "it trains Flux"),
        ("general_args", {"args": {"seed": "x"}}, "seed must be a whole number"),
        ("subsets", [{"image_dir": 7}], "as a dataset"),
        ("subsets", ["x"], "as a dataset"),
        (
            "optimizer_args",
            {"args": {"optimizer_args": [[1]], "learning_rate": {"a": 1}}},
            "learning_rate must be a number",
        ),
    ],
)
def test_what_cannot_be_read_is_explained(
    section: str, table: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved.toml"
    path.write_text("\n".join(table_lines({**SAVED, section: table}, "")), encoding="utf-8")
    assert cli.main(["new", str(tmp_path / "x"), "--from", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "What to do: " in error
