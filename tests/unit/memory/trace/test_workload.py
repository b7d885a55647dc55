"""What memory depends on, and the keys under which traces of it are kept."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from subprocess import run
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config.fit import FitConfig
from trainer.config.job import Job
from trainer.config.recipe import RecipeConfig
from trainer.config.write import dump_job
from trainer.dataset.image import ImageRecord
from trainer.files.assets import bundled_configs
from trainer.memory.planner.request import request_of_job
from trainer.memory.planner.suggestions import reduced_recipes
from trainer.memory.trace.workload import BucketUse, TracePart, Workload, workload_of_job, workload_without_base


def subject(recipe: dict[str, Any] | None = None, **fit: Any) -> Workload:
    return workload_without_base(
        "sdxl", RecipeConfig.model_validate({"resolution": 1024, **(recipe or {})}), FitConfig(**fit)
    )


def picture(name: str, bucket: tuple[int, int], **facts: Any) -> ImageRecord:
    plain: dict[str, Any] = {
        "id": name,
        "path": Path(name),
        "width": bucket[0],
        "height": bucket[1],
        "kind": "train",
        "repeats": 1,
        "weight": 1.0,
        "captions": (),
        "trigger": "",
        "class_words": "",
        "mask": "none",
        "mask_path": None,
        "mask_id": None,
        "crop": None,
        "bucket": bucket,
    }
    return ImageRecord(**{**plain, **facts})


def job(**recipe: Any) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "base": {"model": "base"},
            "dataset": {"folders": [{"path": "pictures"}]},
            "recipe": {"resolution": 512, **recipe},
            "report": {
                "previews": {"prompts": [{"prompt": "a cat", "width": 640}]},
                "validation": {"timesteps": [1, 2]},
            },
        }
    )


SOURCE: Any = SimpleNamespace(
    family="sd15", prediction="v", zero_terminal_snr=True, unet_config={"a": 1}, vae_config={}, text_configs=({},)
)


def test_ahead_of_any_base_it_is_the_published_one_with_a_square_bucket() -> None:
    ahead = workload_without_base("sd15", RecipeConfig(resolution=520))
    assert ahead.unet_config == bundled_configs("sd15")["unet"]
    assert [(bucket.width, bucket.height) for bucket in ahead.buckets] == [(512, 512)]
    assert (ahead.fit.dtype, ahead.fit.micro_batch, ahead.fit.gradient_checkpointing) == ("bf16", 1, "none")


def test_a_recipe_without_its_resolution_is_refused() -> None:
    with pytest.raises(ValueError, match="resolution"):
        workload_without_base("sd15", RecipeConfig())


def test_buckets_of_a_job_by_pixels_with_what_is_shown_in_the_first_epoch() -> None:
    pictures = [
        picture("a", (512, 512), repeats=3),
        picture("b", (448, 576)),
        picture("c", (384, 640), kind="regularization"),
        picture("d", (320, 320), kind="regularization", repeats=9),
        picture("e", (640, 384), kind="validation", mask="file"),
    ]
    found = workload_of_job(job(), SOURCE, pictures)
    shown = {bucket.size: bucket.images for bucket in found.buckets}
    assert shown[512, 512] == 3
    assert shown[448, 576] == 1
    assert shown[384, 640] + shown[320, 320] == 4  # as many as are trained on
    pixels = [bucket.width * bucket.height for bucket in found.buckets]
    assert pixels == sorted(pixels, reverse=True)
    assert found.validation_buckets == (BucketUse(640, 384, 1),)
    assert (found.validation, found.validation_timesteps, found.masks) == (True, 2, False)
    assert [(prompt.width, prompt.height) for prompt in found.previews] == [(640, 512)]
    assert (found.family, found.prediction, found.zero_terminal_snr) == ("sd15", "v", True)


def test_resolutions_of_folders_decide_the_buckets_and_no_lower_resolution_is_suggested(tmp_path: Path) -> None:
    base = {"model": str(tmp_path / "missing"), "family": "sd15"}
    folders = [{"path": str(tmp_path / "none"), "resolutions": [256, 768]}, {"path": str(tmp_path)}]
    path = tmp_path / "job.toml"
    path.write_text(dump_job(job().replaced(base=base, dataset={"folders": folders}), comments=False), encoding="utf-8")
    workload = request_of_job(path, [], "8GB").workload  # the images are assumed, one of each resolution
    assert [bucket.size for bucket in workload.buckets] == [(768, 768), (512, 512), (256, 256)]
    keys = {key for group in reduced_recipes(workload) for change in group for key in change.keys}
    assert "rank" in keys
    assert "resolution" not in keys
    one = request_of_job(path, ["dataset.folders.0.resolutions=[256]", "dataset.folders.1.resolutions=[64]"], "8GB")
    assert [bucket.size for bucket in one.workload.buckets] == [(256, 256), (64, 64)]


@pytest.mark.parametrize(
    "other",
    [
        subject({"rank": 32}),
        subject({"layers": "all"}),
        subject({"text_encoder": {"learning_rate": 1e-4}}),
        subject({"objective": {"input_perturbation": 0.1}}),
        subject({"objective": {"min_snr_gamma": 5.0}}),
        subject({"objective": {"loss": "l1"}}),
        subject({"objective": {"p2_gamma": 0.5}}),
        subject({"dropout": 0.1}),
        subject({"blocks": [{"match": "*.attn2.*", "rank": 4}]}),
        subject({"blocks": [{"match": "*.to_q", "alpha": 4.0}]}),  # lets projections not be computed together
        subject({"token_chunks": 150}),
        subject(dtype="fp16"),
        subject(quantize="nf4"),
        subject(gradient_checkpointing="full"),
        subject(gradient_checkpointing=["mid_block"]),
        subject(attention="efficient"),
        dataclasses.replace(subject(), masks=True),
        dataclasses.replace(subject(), after_stops=True),
        dataclasses.replace(subject(), prediction="v"),
        dataclasses.replace(subject(), unet_config={**subject().unet_config, "layers_per_block": 1}),
    ],
)
def test_what_a_micro_batch_depends_on_gives_another_key(other: Workload) -> None:
    assert other.key("micro") != subject().key("micro")


@pytest.mark.parametrize(
    "same",
    [
        subject({"learning_rate": 5e-4, "alpha": 4.0, "seed": 7, "steps": 99, "effective_batch": 9}),
        subject({"ema_decay": None, "text_encoder": {"stop_after": 5}}),
        subject({"weighted_captions": True}),
        subject({"objective": {"noise_offset": 0.05, "timestep_max": 500}, "schedule": {"warmup": 0.1}}),
        subject({"optimizer": {"name": "adamw", "weight_decay": 0.1, "beta2": 0.99, "eps": 1e-6}}),
        subject({"optimizer": {"name": "adamw8bit"}, "max_grad_norm": 0.0}),
        subject(attention="flash"),
        subject(micro_batch=8, vae_tiling=False, preview_offload=True, vae_dtype="bf16", threads=3),
        dataclasses.replace(subject(), buckets=(BucketUse(512, 512, 3),), validation_timesteps=9),
        dataclasses.replace(subject(), unet_config={**subject().unet_config, "_name_or_path": "elsewhere"}),
    ],
)
def test_what_a_micro_batch_does_not_depend_on_gives_the_same_key(same: Workload) -> None:
    assert same.key("micro") == subject().key("micro")


@pytest.mark.parametrize(
    "other",
    [
        subject({"rank": 32}),
        subject({"optimizer": {"name": "adamw8bit"}}),
        subject({"optimizer": {"name": "adamw", "weight_decay": 0.0}}),
        subject({"max_grad_norm": 0.0}),
        subject({"clip_skip": 2}),
        subject({"lora_plus_ratio": 4.0}),
        subject({"max_weight_norm": 1.0}),
        subject({"ema_decay": 0.999}),
        subject({"blocks": [{"match": "*.attn2.*", "rank": 4}]}),
        subject(dtype="fp16"),
    ],
)
def test_what_an_optimizer_depends_on_gives_another_key(other: Workload) -> None:
    assert other.key("optimizer") != subject().key("optimizer")


def test_what_an_optimizer_does_not_depend_on_gives_the_same_key() -> None:
    """Neither micro-batches nor the base's bits: its steps follow on any."""
    other = subject({"objective": {"min_snr_gamma": 5.0}}, quantize="nf4", gradient_checkpointing="full", micro_batch=8)
    same = dataclasses.replace(other, buckets=(BucketUse(512, 512, 3),), masks=True)
    assert same.key("optimizer") == subject().key("optimizer")


@pytest.mark.parametrize("part", ["validate", "preview", "save"])
def test_of_optimizers_other_phases_depend_on_averages_alone(part: TracePart) -> None:
    keys = [subject({"optimizer": {"name": name}}).key(part) for name in ("adamw", "lion8bit", "schedulefree")]
    assert keys[0] == keys[1] != keys[2]


def test_one_rank_for_all_of_a_lora() -> None:
    many = {"rank": 8, "conv_rank": 4, "text_encoder": {"rank": 2}, "text_encoder_2": {"rank": 2}}
    assert not subject(many).scales_with_rank
    assert not subject({"max_weight_norm": 1.0}).at_rank(8).scales_with_rank
    assert not subject({"blocks": [{"match": "*.attn2.*", "rank": 4}]}).at_rank(8).scales_with_rank
    assert subject({"blocks": [{"match": "*.attn2.*", "rate_factor": 0.0}]}).at_rank(8).scales_with_rank
    assert subject(many).at_rank(32).scales_with_rank
    keys = {subject(recipe).at_rank(32).key("micro") for recipe in (many, {"rank": 32})}
    assert len(keys) == 1
    assert keys != {subject(many).at_rank(16).key("micro")}


def test_how_many_texts_are_encoded_at_once_matters_to_their_trace_alone() -> None:
    plain, exact = subject(), subject(deterministic=True)
    assert exact.key("cache_texts") != plain.key("cache_texts")
    assert exact.key("cache_pictures") == plain.key("cache_pictures")
    assert exact.key("micro") == plain.key("micro")


def test_parts_and_what_was_asked_for_besides_have_keys_of_their_own() -> None:
    keys = {subject().key("micro"), subject().key("load"), subject().key("micro", (1024, 1024), 2)}
    assert len(keys) == 3


def test_keys_are_the_same_in_another_process() -> None:
    program = (
        "from trainer.memory.trace.workload import *; from trainer.config.recipe import RecipeConfig\n"
        "import sys; workload = workload_without_base('sdxl', RecipeConfig(resolution=1024))\n"
        "print(workload.key('micro'), 'torch' in sys.modules)"
    )
    printed = run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert printed == [subject().key("micro"), "False"]
