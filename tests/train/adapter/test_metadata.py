"""What LoRA files say of themselves, key by key, and what they must not say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.support.loras import EVERYTHING, Models, random_weights
from trainer.adapter.attach import Adapter
from trainer.adapter.export import TIME_KEYS, ExportFacts, count_tags, export_lora, lora_metadata, write_side_files
from trainer.config.base import Family
from trainer.config.presets.kohya import LoraParts, recipe_of_metadata
from trainer.config.recipe import RecipeConfig

SHA = "ab" * 32


def facts(family: Family = "sdxl", **changes: Any) -> ExportFacts:
    recipe = {"steps": 1000, "resolution": 512 if family == "sd15" else 1024, "rank": 4, "alpha": 2.0}
    values: dict[str, Any] = {
        "title": "Gouache",
        "family": family,
        "prediction": "epsilon",
        "zero_terminal_snr": False,
        "base_name": "model.safetensors",
        "base_sha256": SHA,
        "recipe": RecipeConfig.model_validate(recipe),
        "dtype": "bf16",
        "step": 500,
        "epoch": 5,
        "epochs": 10,
        "images": 40,
        "regularization_images": 0,
        "started_at": 1_700_000_000.25,
    }
    return ExportFacts(**values | changes)


@cache
def adapter(family: Family, recipe: RecipeConfig) -> Adapter:
    return Models.copies(family, torch.float32).attach(recipe)


def metadata(given: ExportFacts, recipe: RecipeConfig | None = None) -> dict[str, str]:
    return lora_metadata(given, adapter(given.family, recipe or given.recipe), "Gouache-step000500")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "sd15",
            {
                "ss_base_model_version": "sd_v1",
                "ss_resolution": "(512, 512)",
                "ss_text_encoder_lr": "0.0",
                "modelspec.architecture": "stable-diffusion-v1/lora",
                "modelspec.implementation": "diffusers",
                "modelspec.resolution": "512x512",
                "modelspec.encoder_layer": "1",
            },
        ),
        (
            "sdxl",
            {
                "ss_base_model_version": "sdxl_base_v1-0",
                "ss_resolution": "(1024, 1024)",
                "ss_text_encoder_lr": "[0.0, 0.0]",
                "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
                "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
                "modelspec.resolution": "1024x1024",
            },
        ),
    ],
)
def test_each_family_says_what_its_readers_look_for(family: Family, expected: dict[str, str]) -> None:
    found = metadata(facts(family))
    both = {
        "ss_v2": "False",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "2.0",
        "ss_network_args": "{}",
        "ss_output_name": "Gouache-step000500",
        "ss_sd_model_name": "model.safetensors",
        "ss_new_sd_model_hash": SHA,
        "ss_num_train_images": "40",
        "ss_num_epochs": "10",
        "ss_epoch": "5",
        "ss_steps": "500",
        "ss_max_train_steps": "1000",
        "ss_learning_rate": "0.0001",
        "ss_unet_lr": "0.0001",
        "ss_optimizer": "adamw",
        "ss_lr_scheduler": "constant",
        "ss_mixed_precision": "bf16",
        "ss_clip_skip": "None",
        "ss_seed": "42",
        "ss_noise_offset": "None",
        "ss_min_snr_gamma": "None",
        "ss_zero_terminal_snr": "False",
        "ss_training_started_at": "1700000000.25",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.title": "Gouache",
        "modelspec.date": "2023-11-14T22:13:20+00:00",
        "modelspec.prediction_type": "epsilon",
        "modelspec.timestep_range": "0,1000",
    }
    assert (both | expected).items() <= found.items()
    assert all(isinstance(value, str) for value in found.values())
    assert ("modelspec.encoder_layer" in found) == (family == "sd15")


def test_ranks_that_differ_are_dynamic_and_convolutions_have_arguments() -> None:
    found = metadata(facts(recipe=EVERYTHING))
    assert found["ss_network_dim"] == found["ss_network_alpha"] == "Dynamic"
    assert json.loads(found["ss_network_args"]) == {"conv_dim": "3", "conv_alpha": "5.0"}


def test_kohyas_keys_of_loss_and_noise_give_the_same_objective() -> None:
    objective = {
        "loss": "smooth_l1", "huber_c": 0.2, "huber_schedule": "exponential", "huber_scale": 1.5,
        "noise_offset": 0.05, "noise_offset_random_strength": True, "adaptive_noise_scale": 0.01,
        "input_perturbation": 0.1, "input_perturbation_random_strength": True,
    }  # fmt: skip
    recipe = RecipeConfig.model_validate({"steps": 1000, "resolution": 1024, "objective": objective})
    found = metadata(facts(recipe=recipe))
    assert (found["ss_loss_type"], found["ss_huber_schedule"]) == ("smooth_l1", "exponential")
    parts = LoraParts("sdxl", unet=True, text_encoder=False, text_encoder_2=False, ranks=(16,))
    read = recipe_of_metadata(found, parts).recipe["objective"]
    assert objective.items() <= read.items()


def test_epochs_without_captions_are_named_if_there_are_any() -> None:
    assert not any("caption_dropout" in key for key in metadata(facts()))
    recipe = RecipeConfig.model_validate({"steps": 9, "resolution": 1024, "captions": {"dropout_every_epochs": 3}})
    found = metadata(facts(recipe=recipe))
    assert found["ss_caption_dropout_every_n_epochs"] == "3"
    parts = LoraParts("sdxl", unet=True, text_encoder=False, text_encoder_2=False, ranks=(16,))
    assert recipe_of_metadata(found, parts).recipe["captions"] == {"dropout_every_epochs": 3}


def test_weighted_captions_are_named_if_they_were_used() -> None:
    assert "ss_weighted_captions" not in metadata(facts())
    found = metadata(
        facts(recipe=RecipeConfig.model_validate({"steps": 9, "resolution": 64, "weighted_captions": True}))
    )
    assert found["ss_weighted_captions"] == "True"
    parts = LoraParts("sdxl", unet=True, text_encoder=False, text_encoder_2=False, ranks=(16,))
    assert recipe_of_metadata(found, parts).recipe["weighted_captions"] is True


def test_v_prediction_is_said() -> None:
    found = metadata(facts(prediction="v", zero_terminal_snr=True))
    assert found["modelspec.prediction_type"] == "v"
    assert found["ss_zero_terminal_snr"] == "True"


def test_captions_stay_private_unless_asked_for() -> None:
    assert not any("tag" in key or "dataset" in key for key in metadata(facts()))
    tags = count_tags([("gouache, a cat, a cat", ","), ("gouache; été ;", ";"), ("", ",")])
    assert tags == {"gouache": 2, "a cat": 1, "été": 1}
    found = metadata(facts(tags=tags))
    assert json.loads(found["ss_tag_frequency"]) == {"Gouache": tags}


def test_many_tags_leave_the_header_readable_for_comfyui() -> None:
    found = metadata(facts(tags={f"tag number {number:05d} " + "x" * 200: number for number in range(5000)}))
    kept = json.loads(found["ss_tag_frequency"])["Gouache"]
    assert min(kept.values()) == 4000
    assert sum(len(value.encode()) for value in found.values()) < 1 << 19


def test_buckets_are_nested_as_a1111_reads_them() -> None:
    found = metadata(facts(buckets={(832, 1216): 30, (1024, 1024): 10}))
    assert json.loads(found["ss_bucket_info"])["buckets"] == {
        "0": {"resolution": [832, 1216], "count": 30},
        "1": {"resolution": [1024, 1024], "count": 10},
    }


def test_only_the_named_keys_know_the_time() -> None:
    first, second = metadata(facts()), metadata(facts(started_at=1_800_000_000.5))
    assert {key for key in first if first[key] != second[key]} == set(TIME_KEYS)


def test_credits_are_left_out_or_said() -> None:
    assert not {"modelspec.author", "modelspec.license", "modelspec.trigger_phrase"} & metadata(facts()).keys()
    found = metadata(facts(author="Zoë", license="CC-BY-4.0", description="Flat colors", trigger_words=("gch", "cat")))
    assert found["modelspec.author"] == "Zoë"
    assert found["modelspec.license"] == "CC-BY-4.0"
    assert found["modelspec.description"] == "Flat colors"
    assert found["modelspec.trigger_phrase"] == "gch, cat"


def test_the_file_carries_it_all_with_its_hashes(tmp_path: Path) -> None:
    given = facts(author="Zoë 画家")
    trained = adapter(given.family, given.recipe)
    expected = metadata(given)
    export_lora(tmp_path / "a.safetensors", random_weights(trained), trained, expected)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        found = file.metadata()
    assert expected.items() <= found.items()
    assert found.keys() - expected.keys() == {"sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256"}


@pytest.mark.parametrize(("family", "version"), [("sd15", "SD1"), ("sdxl", "SDXL")])
def test_side_files_lie_beside_the_lora(family: Family, version: str, tmp_path: Path) -> None:
    lora = tmp_path / "my style v1.2.safetensors"
    preview = tmp_path / "picture of step.png"
    preview.write_bytes(b"\x89PNG picture")
    given = facts(family, trigger_words=("gch",), description="Flat colors")
    write_side_files(lora, given, preview)
    said = json.loads((tmp_path / "my style v1.2.json").read_text(encoding="utf-8"))
    assert said.pop("notes").startswith("500 steps on model.safetensors")
    assert said == {
        "description": "Flat colors",
        "sd version": version,
        "activation text": "gch",
        "preferred weight": 1.0,
        "negative text": "",
    }
    assert (tmp_path / "my style v1.2.png").read_bytes() == b"\x89PNG picture"


def test_without_a_preview_only_the_text_is_written(tmp_path: Path) -> None:
    write_side_files(tmp_path / "a.safetensors", facts(), None)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
