"""Settings without effect are found and told, the others are left alone."""

from pathlib import Path
from typing import Any

import pytest

from trainer.config.checks import settings_without_effect
from trainer.config.job import Job
from trainer.config.load import parse_job

MINIMAL = """
name = "x"
[base]
model = "owner/name"
[[dataset.folders]]
path = "pictures"
"""


def job(*overrides: str) -> Job:
    return parse_job(MINIMAL, "job.toml", Path("/jobs"), overrides)


WITHOUT_EFFECT = {
    "clip skip on SDXL": ("sdxl", ["recipe.clip_skip=2"], "recipe.clip_skip"),
    "second encoder on SD 1.5": (
        "sd15",
        ["recipe.text_encoder_2.learning_rate=1e-5"],
        "recipe.text_encoder_2.learning_rate",
    ),
    "rank of an untrained encoder": ("sdxl", ["recipe.text_encoder.rank=4"], "recipe.text_encoder.rank"),
    "stop of an untrained encoder": (
        "sdxl",
        ["recipe.text_encoder.stop_after=0.5"],
        "recipe.text_encoder.stop_after",
    ),
    "stop after the end": (
        "sdxl",
        ["recipe.steps=9", "recipe.text_encoder.learning_rate=1e-4", "recipe.text_encoder.stop_after=9"],
        "recipe.text_encoder.stop_after",
    ),
    "convolutions": ("sdxl", ["recipe.conv_rank=4"], "recipe.conv_rank"),
    "factor of another adapter": ("sdxl", ["recipe.lokr_factor=4"], "recipe.lokr_factor"),
    "least rank of a LoRA": ("sd15", ["recipe.tlora_min_rank=4"], "recipe.tlora_min_rank"),
    "mask of no rank": (
        "sd15",
        ["recipe.adapter=tlora", "recipe.rank=4", "recipe.tlora_min_rank=4"],
        "recipe.tlora_min_rank",
    ),
    "alpha of rotations": ("sd15", ["recipe.adapter=oft", "recipe.alpha=4"], "recipe.alpha"),
    "prior of no folder": ("sd15", ["recipe.objective.prior_prediction=true"], "recipe.objective.prior_prediction"),
    "huber": ("sd15", ["recipe.objective.huber_c=0.2"], "recipe.objective.huber_c"),
    "huber's schedule": (
        "sd15",
        ["recipe.objective.loss=l1", "recipe.objective.huber_schedule=exponential"],
        "recipe.objective.huber_schedule",
    ),
    "huber's scale by SNR": (
        "sd15",
        ["recipe.objective.loss=huber", "recipe.objective.huber_schedule=snr", "recipe.objective.huber_scale=2"],
        "recipe.objective.huber_scale",
    ),
    "v loss of noise": (
        "sdxl",
        ["base.prediction=epsilon", "recipe.objective.scale_v_pred_loss=true"],
        "recipe.objective.scale_v_pred_loss",
    ),
    "v-like loss of v": (
        "sdxl",
        ["base.prediction=v", "recipe.objective.v_pred_like_loss=0.5"],
        "recipe.objective.v_pred_like_loss",
    ),
    "adaptive offset of none": (
        "sd15",
        ["recipe.objective.adaptive_noise_scale=0.1"],
        "recipe.objective.adaptive_noise_scale",
    ),
    "bias of another distribution": (
        "sd15",
        ["recipe.objective.timestep_bias=later", "recipe.objective.timesteps=logit_normal"],
        "recipe.objective.timestep_bias",
    ),
    "range of later": (
        "sd15",
        [
            "recipe.objective.timestep_bias=later",
            "recipe.objective.timestep_bias_begin=100",
        ],
        "recipe.objective.timestep_bias_begin",
    ),
    "bias outside the timesteps in use": (
        "sd15",
        [
            "recipe.objective.timestep_bias=range",
            "recipe.objective.timestep_bias_begin=500",
            "recipe.objective.timestep_bias_end=600",
            "recipe.objective.timestep_max=499",
        ],
        "recipe.objective.timestep_bias",
    ),
    "bias of all timesteps in use": (
        "sd15",
        [
            "recipe.objective.timestep_bias=range",
            "recipe.objective.timestep_bias_begin=100",
            "recipe.objective.timestep_bias_end=400",
            "dataset.folders.0.timestep_min=100",
            "dataset.folders.0.timestep_max=399",
        ],
        "recipe.objective.timestep_bias",
    ),
    "bias of less than a timestep": (
        "sd15",
        ["recipe.objective.timestep_bias=later", "recipe.objective.timestep_bias_portion=0.0009"],
        "recipe.objective.timestep_bias",
    ),
    "bias by one": (
        "sd15",
        ["recipe.objective.timestep_bias=later", "recipe.objective.timestep_bias_multiplier=1.0"],
        "recipe.objective.timestep_bias",
    ),
    "prediction of weightless images": (
        "sd15",
        [
            "dataset.folders=[{path='a'}, {path='b', kind='regularization'}]",
            "recipe.objective.prior_prediction=true",
            "recipe.objective.prior_weight=0.0",
        ],
        "recipe.objective.prior_prediction",
    ),
    "multires": ("sd15", ["recipe.objective.multires_iterations=3"], "recipe.objective.multires_iterations"),
    "masks": ("sd15", ["recipe.objective.unmasked_weight=0.5"], "recipe.objective.unmasked_weight"),
    "keep tokens of a folder": (
        "sd15",
        ["dataset.folders.0.captions={keep_tokens=2}"],
        "dataset.folders.0.captions.keep_tokens",
    ),
    "separator of a folder": (
        "sd15",
        ["dataset.folders.0.captions={separator=';', secondary_separator=';'}"],
        "dataset.folders.0.captions.secondary_separator",
    ),
    "flips of no folder": (
        "sd15",
        ["recipe.images.flip=true", "dataset.folders.0.images.flip=false"],
        "recipe.images.flip",
    ),
    "lines of no folder": (
        "sd15",
        ["dataset.lines=variants", "dataset.folders.0.lines=caption"],
        "dataset.lines",
    ),
    "timesteps of no folder": (
        "sd15",
        ["recipe.objective.timestep_min=10", "dataset.folders.0.timestep_min=20"],
        "recipe.objective.timestep_min",
    ),
    "masks of no folder": (
        "sd15",
        ["recipe.objective.unmasked_weight=0.5", "dataset.masks=auto", "dataset.folders.0.masks=none"],
        "recipe.objective.unmasked_weight",
    ),
    "keep tokens": ("sd15", ["recipe.captions.keep_tokens=1"], "recipe.captions.keep_tokens"),
    "secondary separator": ("sd15", ["recipe.captions.secondary_separator=','"], "recipe.captions.secondary_separator"),
    "epochs without captions": (
        "sd15",
        ["recipe.captions.dropout_every_epochs=5", "recipe.epochs=4"],
        "recipe.captions.dropout_every_epochs",
    ),
    "least tokens of no warm-up": (
        "sd15",
        ["recipe.captions.token_warmup_min=2"],
        "recipe.captions.token_warmup_min",
    ),
    "masks at times": (
        "sd15",
        ["dataset.masks=none", "recipe.objective.unmasked_probability=0.1"],
        "recipe.objective.unmasked_probability",
    ),
    "mean of ignored masks": (
        "sd15",
        ["dataset.masks=auto", "recipe.objective.unmasked_weight=1", "recipe.objective.normalize_masked_loss=true"],
        "recipe.objective.normalize_masked_loss",
    ),
    "masks that are not read": (
        "sd15",
        ["dataset.masks=alpha", "dataset.folders.0.mask_folder=masks"],
        "dataset.folders.0.mask_folder",
    ),
    "never a caption": (
        "sd15",
        ["recipe.captions.dropout_every_epochs=5", "recipe.captions.dropout=1"],
        "recipe.captions.dropout_every_epochs",
    ),
    "end of constant": ("sd15", ["recipe.schedule.end=0.1"], "recipe.schedule.end"),
    "cycles of a cosine": (
        "sd15",
        ["recipe.schedule.kind=cosine", "recipe.schedule.cycles=3"],
        "recipe.schedule.cycles",
    ),
    "power of a line": ("sd15", ["recipe.schedule.kind=linear", "recipe.schedule.power=2"], "recipe.schedule.power"),
    "limits of no buckets": (
        "sd15",
        ["recipe.images.buckets=false", "recipe.images.bucket_min=256"],
        "recipe.images.bucket_min",
    ),
    "no previews at the start": ("sd15", ["report.previews.first=false"], "report.previews.first"),
    "previews of nothing": ("sd15", ["report.previews.every=10"], "report.previews.every"),
    "revision of a file": ("sd15", ["base.model=./a.safetensors", "base.revision=fp16"], "base.revision"),
    "CPU not deterministic": ("sd15", ["fit.device=cpu", "fit.deterministic=false"], "fit.deterministic"),
    "fp16 sums in bf16": ("sdxl", ["fit.dtype=bf16", "fit.fp16_accumulation=true"], "fit.fp16_accumulation"),
    "blocks compiled beside graphs": ("sdxl", ["fit.cuda_graphs=true", "fit.compile=true"], "fit.compile"),
    "blocks compiled with dropouts": ("sd15", ["recipe.dropout=0.1", "fit.compile=true"], "fit.compile"),
    "layout of convolutions that learn": ("sd15", ["recipe.layers=all", "fit.channels_last=true"], "fit.channels_last"),
    "graphs on the CPU": ("sdxl", ["fit.device=cpu", "fit.cuda_graphs=true"], "fit.cuda_graphs"),
    "AdamW's rate under Prodigy": ("sd15", ["recipe.optimizer.name=prodigy"], "recipe.learning_rate"),
    "adafactor's own rate": (
        "sd15",
        ["recipe.optimizer.name=adafactor", "recipe.optimizer.relative_step=true", "recipe.learning_rate=1e-3"],
        "recipe.learning_rate",
    ),
}


@pytest.mark.parametrize(("family", "overrides", "key"), WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT.keys())
def test_settings_without_effect_are_found(family: Any, overrides: list[str], key: str) -> None:
    ((found, reason),) = settings_without_effect(job(*overrides), family)
    assert found == key
    assert len(reason.split()) >= 3


def test_settings_with_effect_are_not_named() -> None:
    used = job(
        "recipe.clip_skip=2",
        "recipe.layers=all",
        "recipe.conv_rank=4",
        "recipe.objective.loss=huber",
        "recipe.objective.huber_c=0.2",
        "recipe.captions.shuffle=true",
        "recipe.captions.keep_tokens=1",
        "recipe.schedule.kind=restarts",
        "recipe.schedule.cycles=3",
        "recipe.text_encoder.rank=4",
        "base.revision=main",
        "recipe.optimizer.name=prodigy",
        "recipe.learning_rate=1",
        "recipe.text_encoder.learning_rate=1",
    )
    assert settings_without_effect(used, "sd15") == []
    by_folders = job(
        "recipe.captions.keep_tokens=1",
        "recipe.images.flip=true",
        'dataset.folders=[{path="a", captions={shuffle=true}}, {path="b", images={flip=false}}]',
    )
    assert settings_without_effect(by_folders, "sd15") == []
    biased = job(
        "recipe.objective.timestep_bias=range",
        "recipe.objective.timestep_bias_end=500",
        'dataset.folders=[{path="a", timestep_min=500}, {path="b"}]',
    )
    assert settings_without_effect(biased, "sd15") == []
    masked = ["recipe.adapter=tlora", "recipe.rank=4", "recipe.tlora_min_rank=4"]
    for more in ('recipe.blocks=[{match="unet.*", rank=8}]', "recipe.rank=5"):
        assert settings_without_effect(job(*masked, more), "sd15") == []


def test_validation_draws_nothing_whatever_its_folder_says() -> None:
    tables = 'captions={shuffle=true, dropout=0.1, suffix="x"}, images={flip=true}'
    text = f'{{path="b", kind="validation", timestep_max=9, {tables}}}'
    found = settings_without_effect(job(f'dataset.folders=[{{path="a"}}, {text}]'), "sd15")
    at = "dataset.folders.1."
    assert {key for key, _ in found} == {
        f"{at}captions.shuffle",
        f"{at}captions.dropout",
        f"{at}images.flip",
        f"{at}timestep_max",
    }


def test_a_job_without_settings_has_none_without_effect() -> None:
    assert settings_without_effect(job(), "sdxl") == []
