"""Every option of sd-scripts has one outcome, and its values are those that sd-scripts' own parsers read."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from trainer.importers.reading import read_job
from trainer.importers.sd_scripts.files import read_options
from trainer.importers.sd_scripts.options import OPTIONS, PATHS
from trainer.importers.translation import ImportedJob

GOLDEN = ROOT / "tests" / "golden" / "imports"
PINNED: dict[str, tuple[str, Any]] = json.loads((GOLDEN / "sd_scripts_options.json").read_text("utf-8"))
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "sd_scripts_parsed.json").read_text("utf-8"))
SAMPLES = {"whole": 3, "number": 0.5, "text": "x", "switch": True, "list": ["a=1"], "numbers": [1e-5]}
VALID = {
    "resolution": "512,768",
    "loss_type": "huber",
    "conditioning_data_dir": "masks",
    "train_data_dir": "images",
    "dataset_config": None,  # a file, which has tests of its own
    "in_json": None,
    "config_file": "c.toml",
}
FAMILIES = {"train_network": "sd15", "sdxl_train_network": "sdxl"}


def test_options_and_defaults_are_those_of_its_parsers() -> None:
    ours = {name: [option.kind, option.default or None] for name, option in OPTIONS.items()}
    assert ours == {name: [kind, default or None] for name, (kind, default) in PINNED.items()}


@pytest.mark.parametrize("family", ["sd15", "sdxl", None])
@pytest.mark.parametrize("together", [True, False])
def test_each_option_has_exactly_one_outcome(family: Any, together: bool, tmp_path: Path) -> None:
    stated = {name: VALID.get(name, SAMPLES[kind]) for name, (kind, _) in PINNED.items()}
    for options in [stated] if together else [{name: value} for name, value in stated.items()]:
        found = read_options(options, tmp_path, family, ()).found
        assert Counter(setting.name for setting in found.settings) == Counter(options.keys())
        assert not [setting for setting in found.settings if "no setting of this name" in setting.note]
        assert all(setting.note for setting in found.settings if setting.outcome != "carried")


def test_an_unknown_option_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    (setting,) = read_options({"network_dimm": 3}, tmp_path, None, ()).found.of("unavailable")
    assert setting.note == "sd-scripts has no setting of this name; did you mean network_dim?"


def imported(case: dict[str, Any], folder: Path) -> ImportedJob:
    """Read a recorded configuration from a file, as a user gives it."""
    path = folder / ("config.toml" if "toml" in case else "start.txt")
    path.write_text("\n".join(case["toml"]) if "toml" in case else case["command"], "utf-8")
    return read_job(path, FAMILIES[case["script"]] if "toml" in case else None)


def test_there_are_thirty_configurations_and_most_options_occur_in_them() -> None:
    assert len(CASES) == 30
    assert len({name for case in CASES for name in case["parsed"]}) > 90


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_values_are_those_that_sd_scripts_parses(case: dict[str, Any], tmp_path: Path) -> None:
    job = imported(case, tmp_path)
    theirs = {name: default for name, (_, default) in PINNED.items()} | case["parsed"]
    ours = {name: job.found[name] for name in OPTIONS}
    here = {name: os.path.normpath(tmp_path / theirs[name].replace("\\", "/")) for name in PATHS if theirs[name]}
    differ = {
        name: (value, theirs[name])
        for name, value in ours.items()
        if (value or None) not in (theirs[name] or None, here.get(name)) and name not in ADJUSTED
    }
    assert not differ


# What sd-scripts adjusts after parsing, and which has no effect on a job.
ADJUSTED = {"cache_latents", "sample_every_n_epochs", "sample_every_n_steps"}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_jobs_mean_what_sd_scripts_does(case: dict[str, Any], tmp_path: Path) -> None:
    job = imported(case, tmp_path)
    job.found.values.setdefault("base.model", "own/er")
    job.found.values.setdefault("dataset.folders", [{"path": "images"}])
    made = job.job("x").model_dump(mode="json", exclude_none=True)
    theirs = {name: default for name, (_, default) in PINNED.items()} | case["parsed"]
    differ = {}
    for key, expected in meaning(theirs, case["script"].startswith("sdxl")).items():
        value: Any = made
        for part in key.split("."):
            value = value.get(part) if value else None
        if value != expected:
            differ[key] = (value, expected)
    assert not differ


def meaning(args: dict[str, Any], is_sdxl: bool) -> dict[str, Any]:
    """Return what sd-scripts does with parsed options, from its code: train_network.py and library/train_util.py."""
    rank = args["network_dim"] or 4  # networks/lora.py, create_network
    rates = args["text_encoder_lr"] or [args["learning_rate"]]
    encoders = [0.0] if args["network_train_unet_only"] else rates
    unet = args["learning_rate"] if args["unet_lr"] is None else args["unet_lr"]
    by_epochs = args["max_train_epochs"] is not None
    previews = args["sample_every_n_epochs"]
    buckets = args["enable_bucket"]
    sizes = buckets and not args["bucket_no_upscale"]
    return {
        "recipe.rank": rank,
        "recipe.alpha": args["network_alpha"] or rank,
        "recipe.dropout": args["network_dropout"] or 0.0,
        "recipe.max_weight_norm": args["scale_weight_norms"],
        "recipe.learning_rate": 0.0 if args["network_train_text_encoder_only"] else unet,
        "recipe.text_encoder.learning_rate": encoders[0],
        **({"recipe.text_encoder_2.learning_rate": encoders[-1]} if is_sdxl else {}),
        "recipe.steps": None if by_epochs else args["max_train_steps"],
        "recipe.epochs": args["max_train_epochs"],
        "recipe.effective_batch": args["train_batch_size"] * args["gradient_accumulation_steps"],
        **({"recipe.seed": args["seed"]} if args["seed"] is not None else {}),
        "recipe.max_grad_norm": args["max_grad_norm"],
        "recipe.schedule.warmup": 0 if args["lr_scheduler"] == "constant" else args["lr_warmup_steps"],
        "recipe.clip_skip": None if is_sdxl else args["clip_skip"],
        "recipe.token_chunks": args["max_token_length"] or 75,
        "recipe.objective.min_snr_gamma": args["min_snr_gamma"],
        "recipe.objective.noise_offset": args["noise_offset"] or 0.0,
        "recipe.objective.input_perturbation": args["ip_noise_gamma"] or 0.0,
        "recipe.objective.multires_discount": args["multires_noise_discount"]
        if args["multires_noise_iterations"]
        else 0.0,
        "recipe.objective.debiased_estimation": args["debiased_estimation_loss"],
        "recipe.objective.prior_weight": args["prior_loss_weight"],
        "recipe.objective.timestep_min": args["min_timestep"] or 0,
        "recipe.objective.timestep_max": (args["max_timestep"] or 1000) - 1,
        "recipe.images.buckets": buckets,
        **({"recipe.images.bucket_step": args["bucket_reso_steps"]} if buckets else {}),
        **({"recipe.images.bucket_min": args["min_bucket_reso"]} if sizes else {}),
        **({"recipe.images.bucket_max": args["max_bucket_reso"]} if sizes else {}),
        "recipe.images.flip": args["flip_aug"],
        "recipe.images.color_jitter": args["color_aug"] or None,
        "recipe.captions.shuffle": args["shuffle_caption"],
        "recipe.captions.keep_tokens": args["keep_tokens"],
        "recipe.captions.separator": args["caption_separator"],
        "recipe.captions.prefix": args["caption_prefix"] or "",
        "recipe.captions.suffix": args["caption_suffix"] or "",
        "recipe.captions.dropout": args["caption_dropout_rate"],
        "recipe.captions.tag_dropout": args["caption_tag_dropout_rate"],
        "report.previews.every_epochs": previews,
        "report.previews.every": None if previews else args["sample_every_n_steps"],
        "report.saving.every_epochs": None if args["save_every_n_steps"] else args["save_every_n_epochs"],
        "report.saving.every_steps": args["save_every_n_steps"],
        "dataset.validation_share": args["validation_split"],
        "base.zero_terminal_snr": args["zero_terminal_snr"] or "auto",
    }
