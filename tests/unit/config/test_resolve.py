"""A frozen job holds every value that the run needs, chosen for its base, dataset and machine."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from trainer.config.job import Job
from trainer.config.load import parse_job
from trainer.config.resolve import Machine, resolve_job
from trainer.errors import JobError

GIB = 1024**3
CPU = Machine("cpu", None, None, True, 6)
MINIMAL = """
name = "x"
[base]
model = "owner/name"
[[dataset.folders]]
path = "pictures"
"""


def job(*overrides: str, more: str = "") -> Job:
    return parse_job(MINIMAL + more, "job.toml", Path("/jobs"), overrides)


def card(gigabytes: float, *, bf16: bool = True) -> Machine:
    """A card as sold with ``gigabytes``: drivers report a little less."""
    return Machine("cuda:0", "Test Card", int(gigabytes * GIB * 0.97), bf16, 8)


def resolved(made: Job, *, family: Any = "sd15", machine: Machine = CPU, samples: int = 20, **facts: Any) -> Job:
    known = {"prediction": "epsilon", "zero_terminal_snr": False} | facts
    return resolve_job(made, family=family, samples_per_epoch=samples, machine=machine, **known)


# What may stay absent in a frozen job: it means "off", "all", or "from the dataset's files".
MEANS_SOMETHING_ABSENT = {
    "recipe.blocks",
    "recipe.captions.secondary_separator",
    "recipe.captions.dropout_every_epochs",
    "recipe.ema_decay",
    "recipe.captions.token_warmup_step",
    "recipe.captions.token_warmup_min",
    "recipe.weighted_captions",
    "report.previews.prompts.0.weights",
    "recipe.images.rotation",
    "recipe.images.color_jitter",
    "recipe.objective.unmasked_probability",
    "recipe.objective.normalize_masked_loss",
    "recipe.objective.loss_mix",
    "recipe.lora_plus_ratio",
    "recipe.lokr_factor",
    "recipe.max_weight_norm",
    "recipe.rank_stabilized",
    "recipe.text_encoder.stop_after",
    "recipe.text_encoder_2.stop_after",
    "recipe.tlora_min_rank",
    "report.validation.patience",
    "dataset.caption_sources",
    "preset",
    "base.vae",
    "base.revision",
    "base.continue_from",
    "recipe.epochs",
    "recipe.images_seen",
    "recipe.objective.min_snr_gamma",
    *(
        f"recipe.objective.{name}"
        for name in (
            "huber_schedule",
            "huber_scale",
            "p2_gamma",
            "prior_prediction",
            "timestep_shift",
            "scale_v_pred_loss",
            "v_pred_like_loss",
            "noise_offset_random_strength",
            "adaptive_noise_scale",
            "input_perturbation_random_strength",
            "timestep_bias",
            "timestep_bias_multiplier",
            "timestep_bias_portion",
            "timestep_bias_begin",
            "timestep_bias_end",
        )
    ),
    *(f"recipe.schedule.{name}" for name in ("timescale", "decay", "decay_type", "step_rules")),
    "report.previews.every_epochs",
    "report.previews.first",
    "report.previews.max_share",
    "report.saving.every_epochs",
    "report.saving.keep",
    *(
        f"dataset.folders.0.{name}"
        for name in (
            "repeats",
            "trigger",
            "class_words",
            "lines",
            "caption_sources",
            "masks",
            "mask_folder",
            "resolutions",
            "timestep_min",
            "timestep_max",
            "captions",
            "images",
        )
    ),
}


def absent(value: Any, key: str = "") -> set[str]:
    if isinstance(value, tuple | list):
        value = {str(number): item for number, item in enumerate(value)}
    if isinstance(value, dict):
        return set().union(*(absent(inner, f"{key}.{name}" if key else name) for name, inner in value.items()))
    return {key} if value is None or value == "auto" else set()


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("machine", [CPU, card(12), card(8, bf16=False)], ids=["cpu", "12 GB", "8 GB"])
def test_nothing_is_left_open(family: Any, machine: Machine) -> None:
    prompts = "[[report.previews.prompts]]\nprompt = 'a'\n"
    frozen = resolved(job(more=prompts), family=family, machine=machine)
    # The listing settles the share held out, measurements where a run starts what attends and what multiplies in int8.
    settled_elsewhere = {"dataset.validation_share", "fit.attention", "fit.int8_products"}
    settled_elsewhere |= {"fit.loader_workers", "fit.prefetch_batches"}  # each attempt finds them again
    expected = MEANS_SOMETHING_ABSENT | settled_elsewhere | ({"recipe.clip_skip"} if family == "sdxl" else set())
    assert absent(frozen.model_dump()) == expected


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("machine", [CPU, card(6), card(24)], ids=["cpu", "6 GB", "24 GB"])
@pytest.mark.parametrize("length", ["recipe.epochs=7", "recipe.images_seen=301", "recipe.steps=3", "recipe.rank=8"])
def test_resolving_twice_changes_nothing(family: Any, machine: Machine, length: str) -> None:
    once = resolved(
        job(length, "report.saving.every_epochs=2", "report.previews.every_epochs=3"),
        family=family,
        machine=machine,
        samples=21,
    )
    assert resolved(once, family=family, machine=machine, samples=21) == once


# The keys of a job, what is known of its base and machine, and what the frozen job then has under some keys.
SETTLED: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "base facts are frozen": (
        [],
        {"family": "sdxl", "prediction": "v", "zero_terminal_snr": True},
        {"base.family": "sdxl", "base.prediction": "v", "base.zero_terminal_snr": True},
    ),
    "SD 1.5 has its resolution and buckets": (
        [],
        {"family": "sd15"},
        {"recipe.resolution": 512, "recipe.images.bucket_min": 256, "recipe.images.bucket_max": 1024},
    ),
    "SDXL has its resolution and buckets": (
        [],
        {"family": "sdxl"},
        {"recipe.resolution": 1024, "recipe.images.bucket_min": 512, "recipe.images.bucket_max": 2048},
    ),
    "bucket limits are multiples of the step": (
        ["recipe.resolution=136", "recipe.images.bucket_step=64"],
        {},
        {"recipe.images.bucket_min": 64, "recipe.images.bucket_max": 256},
    ),
    "bucket limits are never nothing": (
        ["recipe.resolution=96", "recipe.images.bucket_step=64"],
        {},
        {"recipe.images.bucket_min": 64, "recipe.images.bucket_max": 192},
    ),
    "bucket limits may be the resolution itself": (
        ["recipe.images.bucket_min=512", "recipe.images.bucket_max=512", "recipe.images.bucket_step=512"],
        {},
        {"recipe.images.bucket_min": 512, "recipe.images.bucket_max": 512},
    ),
    "ranks and alphas follow the recipe": (
        ["recipe.rank=8", "recipe.alpha=4", "recipe.text_encoder.rank=2"],
        {},
        {
            "recipe.text_encoder.rank": 2,
            "recipe.text_encoder.alpha": 4.0,
            "recipe.text_encoder_2.rank": 8,
            "recipe.conv_rank": 8,
            "recipe.conv_alpha": 4.0,
        },
    ),
    "rhythms are spread over the run": (
        ["recipe.steps=1000"],
        {},
        {
            "report.previews.every": 200,
            "report.validation.every": 100,
            "report.saving.every_steps": 100,
            "report.saving.checkpoint_every": 100,
        },
    ),
    "a long run has a checkpoint every 500 steps": (
        ["recipe.steps=20000"],
        {},
        {"report.saving.every_steps": 2000, "report.saving.checkpoint_every": 500},
    ),
    "a short run reports on every step": (
        ["recipe.steps=3"],
        {},
        {"report.previews.every": 1, "report.validation.every": 1, "report.saving.every_steps": 1},
    ),
    "saving by epochs becomes steps": (
        ["report.saving.every_epochs=3"],
        {"samples": 10},  # in batches of 4: 3 steps an epoch
        {"report.saving.every_steps": 9, "report.saving.every_epochs": None},
    ),
    "the CPU is exact": (
        ["recipe.effective_batch=6", "fit.deterministic=false"],
        {},
        {
            "fit.device": "cpu",
            "fit.dtype": "fp32",
            "fit.quantize": "none",
            "fit.gradient_checkpointing": "none",
            "fit.micro_batch": 4,
            "fit.threads": 6,
            "fit.deterministic": True,
        },
    ),
    "a small effective batch is one micro-batch on the CPU": (["recipe.effective_batch=2"], {}, {"fit.micro_batch": 2}),
    "without a plan a GPU gets what needs least and is not quantized": (
        [],
        {"family": "sdxl", "machine": card(8)},
        {
            "fit.quantize": "none",
            "fit.gradient_checkpointing": "full",
            "fit.micro_batch": 1,
            "fit.device": "cuda:0",
            "fit.dtype": "bf16",
            "fit.deterministic": False,
        },
    ),
    "GPUs without bf16 compute in fp16": ([], {"machine": card(8, bf16=False)}, {"fit.dtype": "fp16"}),
    "a stated fit is kept": (
        ["fit.quantize=nf4", "fit.micro_batch=3", "fit.dtype=fp32"],
        {"machine": card(24)},
        {"fit.quantize": "nf4", "fit.micro_batch": 3, "fit.dtype": "fp32"},
    ),
    "the device cuda is the GPU of the machine": (["fit.device=cuda"], {"machine": card(24)}, {"fit.device": "cuda:0"}),
    "a job for the CPU has its dtype beside a GPU, too": (
        ["fit.device=cpu"],
        {"machine": card(24)},
        {"fit.dtype": "fp32"},
    ),
    "a micro-batch is no larger than the effective batch": (
        ["fit.micro_batch=9"],
        {"machine": card(24)},
        {"fit.micro_batch": 4},
    ),
}


@pytest.mark.parametrize(("overrides", "facts", "expected"), SETTLED.values(), ids=SETTLED.keys())
def test_what_is_left_open_is_settled(overrides: list[str], facts: dict[str, Any], expected: dict[str, Any]) -> None:
    frozen = resolved(job(*overrides), **facts)
    assert {key: attrgetter(key)(frozen) for key in expected} == expected


def test_previews_take_the_resolution() -> None:
    prompts = "[[report.previews.prompts]]\nprompt = 'a'\nwidth = 640\n"
    (prompt,) = resolved(job(more=prompts)).report.previews.prompts
    assert (prompt.width, prompt.height) == (640, 512)


UNSUITABLE = {
    "other family": (["base.family=sd15"], {"family": "sdxl"}, 'base.family: is "sd15", but the base is SDXL'),
    "marked and epsilon": (
        [],
        {"zero_terminal_snr": True},
        "base.zero_terminal_snr: the base is marked with zero terminal SNR",
    ),
    "no second encoder": (
        ["recipe.learning_rate=0", "recipe.text_encoder_2.learning_rate=1e-5"],
        {},
        "recipe.text_encoder_2.learning_rate: SD 1.5 has no second text encoder",
    ),
    "smallest bucket": (["recipe.images.bucket_min=1024"], {}, "recipe.images.bucket_min: is 1024, more than"),
    "largest bucket": (["recipe.images.bucket_max=256"], {}, "recipe.images.bucket_max: is 256, less than"),
    "bucket step": (["recipe.images.bucket_step=128", "recipe.resolution=64"], {}, "recipe.images.bucket_step: is"),
    "no card": (["fit.device=cuda"], {}, 'fit.device: is "cuda", but PyTorch finds no NVIDIA GPU'),
    "no bf16": (["fit.dtype=bf16"], {"machine": card(8, bf16=False)}, "fit.dtype: Test Card does not support bf16"),
    "no bf16 VAE": (["fit.vae_dtype=bf16"], {"machine": card(8, bf16=False)}, "fit.vae_dtype: Test Card does not"),
}


@pytest.mark.parametrize(("overrides", "facts", "expected"), UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_what_does_not_suit_is_named(overrides: list[str], facts: dict[str, Any], expected: str) -> None:
    with pytest.raises(JobError) as caught:
        resolved(job(*overrides), **facts)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(expected)
    assert caught.value.problems[0] in caught.value.sentence
    assert caught.value.code == "job.unsuitable"
