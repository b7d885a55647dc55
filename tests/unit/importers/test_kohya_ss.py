"""Settings that kohya_ss saved become the job that it would have started with sd-scripts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from trainer import cli
from trainer.importers.reading import read_job
from trainer.importers.sd_scripts.kohya_ss import _TYPES, PROGRAM, _options
from trainer.importers.sd_scripts.options import OPTIONS
from trainer.importers.translation import ImportedJob, Translation, named_values

SETTINGS: list[str] = json.loads((ROOT / "tests/golden/imports/kohya_ss_settings.json").read_text("utf-8"))
RECORDED: list[dict[str, Any]] = json.loads((ROOT / "tests/golden/imports/kohya_ss.json").read_text("utf-8"))
# As its versions write them: numbers as numbers or as text, and "" for what is not set.
SAVED: dict[str, Any] = {
    "LoRA_type": "Standard",
    "pretrained_model_name_or_path": "a/b",
    "sdxl": True,
    "network_dim": 32,
    "network_alpha": "16",
    "max_resolution": "1024,1024",
    "learning_rate": "0.0004",
    "unet_lr": "0.0001",
    "text_encoder_lr": "5e-05",
    "optimizer": "AdamW8bit",
    "optimizer_args": "weight_decay=0.1",
    "lr_scheduler": "cosine",
    "lr_warmup": "10",
    "epoch": "20",
    "max_train_epochs": "",
    "max_train_steps": "0",
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2.0,
    "seed": "12345",
    "clip_skip": "1",
    "max_token_length": "75",
    "noise_offset_type": "Multires",
    "noise_offset": "0.05",
    "multires_noise_iterations": 8,
    "multires_noise_discount": 0.2,
    "min_snr_gamma": 5,
    "bucket_no_upscale": True,
    "xformers": "xformers",
    "sample_prompts": "a cat --w 512 --h 512\na dog",
    "sample_every_n_epochs": 1,
    "additional_parameters": "--scale_weight_norms 1.0",
    "train_norm": False,
    "conv_dim": 8,
    "num_processes": 2,
    "ae": "",
}


def saved(folder: Path, **changes: Any) -> ImportedJob:
    path = folder / "saved.json"
    path.write_text(json.dumps({**SAVED, **changes}), encoding="utf-8")
    return read_job(path)


def test_the_job_is_what_it_would_have_trained(tmp_path: Path) -> None:
    found = saved(tmp_path).found.values
    expected = {
        "recipe.adapter": "lora",
        "recipe.layers": "linear",
        "recipe.rank": 32,
        "recipe.alpha": 16,
        "recipe.learning_rate": 1e-4,
        "recipe.text_encoder.learning_rate": 5e-5,
        "recipe.text_encoder_2.learning_rate": 5e-5,
        "recipe.optimizer": {"name": "adamw8bit", "weight_decay": 0.1},
        "recipe.schedule.warmup": 0.1,
        "recipe.epochs": 20,
        "recipe.effective_batch": 8,
        "recipe.seed": 12345,
        "recipe.resolution": 1024,
        "recipe.max_weight_norm": 1.0,
        "recipe.objective.multires_iterations": 8,
        "recipe.objective.multires_discount": 0.2,
        "recipe.images.max_upscale": 1.0,
        "dataset.caption_sources": [".txt"],
        "report.previews.every_epochs": 1,
        "report.saving.every_epochs": 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert "recipe.objective.noise_offset" not in found
    assert [each["prompt"] for each in found["report.previews.prompts"]] == ["a cat", "a dog"]


@pytest.mark.parametrize(
    ("encoder", "unet", "expected"),
    [
        (5e-5, 1e-4, (1e-4, 5e-5)),
        ("0", 1e-4, (1e-4, 0.0)),
        (5e-5, 0, (0.0, 5e-5)),
        (0, 0, (4e-4, 4e-4)),
    ],
)
def test_rates_of_zero_mean_what_they_mean_there(encoder: Any, unet: Any, expected: Any, tmp_path: Path) -> None:
    found = saved(tmp_path, text_encoder_lr=encoder, unet_lr=unet).found.values
    assert (found["recipe.learning_rate"], found["recipe.text_encoder.learning_rate"]) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_train_steps": 500}, ("steps", 500)),
        ({"max_train_steps": 500, "max_train_epochs": "7"}, ("epochs", 7)),
        ({"epoch": 3}, ("epochs", 3)),
    ],
)
def test_length_is_steps_then_epochs(changes: Any, expected: Any, tmp_path: Path) -> None:
    found = saved(tmp_path, **changes).found.values
    assert [(name, found[f"recipe.{name}"]) for name in ("steps", "epochs") if f"recipe.{name}" in found] == [expected]


@pytest.mark.parametrize(
    ("kind", "adapter", "layers"),
    [
        ("Kohya LoCon", "lora", "all"),
        ("LyCORIS/LoCon", "lora", "all"),
        ("LyCORIS/LoHa", "loha", "all"),
        ("LyCORIS/LoKr", "lokr", "all"),
        ("LyCORIS/Diag-OFT", "oft", "all"),
        ("Kohya LoHa", "loha", "all"),
    ],
)
def test_kinds_of_lora_become_adapters(kind: str, adapter: str, layers: str, tmp_path: Path) -> None:
    found = saved(tmp_path, LoRA_type=kind, additional_parameters="").found.values
    assert (found["recipe.adapter"], found["recipe.layers"]) == (adapter, layers)


def test_each_setting_has_exactly_one_outcome(tmp_path: Path) -> None:
    samples = dict.fromkeys(SETTINGS, "") | {name: SAVED[name] for name in SETTINGS if name in SAVED}
    for kind in ("Standard", "LyCORIS/LoKr"):
        found = saved(tmp_path, **{**samples, "LoRA_type": kind}).found
        assert Counter(setting.name for setting in found.settings) == Counter({*samples, *SAVED})
        assert not [setting.name for setting in found.settings if "no setting of this name" in setting.note]


def test_an_argument_without_an_equivalent_is_named(tmp_path: Path) -> None:
    found = saved(tmp_path, LoRA_type="LyCORIS/LoCon", train_norm=True, dora_wd=True).found
    assert "train_norm" in [setting.name for setting in found.of("unavailable")]
    assert found.values["recipe.adapter"] == "dora"


def test_an_unknown_setting_is_reported(tmp_path: Path) -> None:
    (setting,) = [each for each in saved(tmp_path, network_dimm=3).found.settings if each.name == "network_dimm"]
    assert (setting.outcome, setting.note) == (
        "unavailable",
        "kohya_ss has no setting of this name; did you mean network_dim?",
    )


def test_another_kind_of_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flux.json"
    path.write_text(json.dumps({**SAVED, "flux1_checkbox": True}), encoding="utf-8")
    assert cli.main(["new", str(tmp_path / "x"), "--from", str(path)]) == 2
    assert "trains Flux, not SD 1.5 or SDXL" in capsys.readouterr().err


def test_the_report_groups_settings_with_the_same_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("saved.json").write_text(json.dumps({**SAVED, "clip_l": "x", "t5xxl": "y"}), encoding="utf-8")
    assert cli.main(["new", "x", "--from", "saved.json"]) == 2
    assert "names no images" in capsys.readouterr().err
    assert cli.main(["new", "x", "--from", "saved.json", "--images", "images"]) == 0
    said = capsys.readouterr().out
    assert '  clip_l = "x", t5xxl = "y"; only for other kinds of models\n' in said
    assert '  max_resolution = "1024,1024" → recipe.resolution = 1024\n' in said


@pytest.mark.parametrize("case", RECORDED, ids=[case["name"] for case in RECORDED])
def test_options_are_those_that_it_passes_on(case: dict[str, Any]) -> None:
    gui = Translation(PROGRAM, case["saved"], _TYPES)
    ours = Translation("sd-scripts", _options(gui), OPTIONS)
    stated = {name: value for name, value in case["passed_on"].items() if name in OPTIONS}
    theirs = Translation("sd-scripts", stated, OPTIONS)
    differ = {
        name: (ours[name], theirs[name])
        for name in OPTIONS.keys() - {"network_args", "wandb_run_name"}  # which is the output's name if there is none
        if (ours[name] or None) != (theirs[name] or None)
    }
    assert not differ
    # It also passes on arguments that are off, whose absence means the same.
    mine, wanted = (named_values(found["network_args"]) for found in (ours, theirs))
    if "conv_dim" not in mine:
        mine.pop("conv_alpha", None)
    assert mine == {name: value for name, value in wanted.items() if value not in (0, None, False)}
