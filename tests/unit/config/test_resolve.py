"""A frozen job holds every value that the run needs, chosen for its base, dataset and machine."""

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
    "preset",
    "base.vae",
    "base.revision",
    "base.continue_from",
    "recipe.epochs",
    "recipe.images_seen",
    "recipe.objective.min_snr_gamma",
    "report.saving.every_epochs",
    "report.saving.keep",
    "dataset.folders.0.repeats",
    "dataset.folders.0.trigger",
    "dataset.folders.0.class_words",
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
    expected = MEANS_SOMETHING_ABSENT | settled_elsewhere | ({"recipe.clip_skip"} if family == "sdxl" else set())
    assert absent(frozen.model_dump()) == expected


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("machine", [CPU, card(6), card(24)], ids=["cpu", "6 GB", "24 GB"])
@pytest.mark.parametrize("length", ["recipe.epochs=7", "recipe.images_seen=301", "recipe.steps=3", "recipe.rank=8"])
def test_resolving_twice_changes_nothing(family: Any, machine: Machine, length: str) -> None:
    once = resolved(job(length, "report.saving.every_epochs=2"), family=family, machine=machine, samples=21)
    assert resolved(once, family=family, machine=machine, samples=21) == once


def test_base_facts_are_frozen() -> None:
    base = resolved(job(), family="sdxl", prediction="v", zero_terminal_snr=True).base
    assert (base.family, base.prediction, base.zero_terminal_snr) == ("sdxl", "v", True)


@pytest.mark.parametrize(("family", "side", "limits"), [("sd15", 512, (256, 1024)), ("sdxl", 1024, (512, 2048))])
def test_resolution_and_buckets_follow_the_family(family: Any, side: int, limits: tuple[int, int]) -> None:
    recipe = resolved(job(), family=family).recipe
    assert recipe.resolution == side
    assert (recipe.images.bucket_min, recipe.images.bucket_max) == limits


def test_bucket_limits_are_multiples_of_the_step_and_never_nothing() -> None:
    pictures = resolved(job("recipe.resolution=136", "recipe.images.bucket_step=64")).recipe.images
    assert (pictures.bucket_min, pictures.bucket_max) == (64, 256)
    pictures = resolved(job("recipe.resolution=96", "recipe.images.bucket_step=64")).recipe.images
    assert (pictures.bucket_min, pictures.bucket_max) == (64, 192)


def test_bucket_limits_may_be_the_resolution_itself() -> None:
    limits = ("recipe.images.bucket_min=512", "recipe.images.bucket_max=512", "recipe.images.bucket_step=512")
    pictures = resolved(job(*limits)).recipe.images
    assert (pictures.bucket_min, pictures.bucket_max) == (512, 512)


def test_ranks_and_alphas_follow_the_recipe() -> None:
    recipe = resolved(job("recipe.rank=8", "recipe.alpha=4", "recipe.text_encoder.rank=2")).recipe
    assert (recipe.text_encoder.rank, recipe.text_encoder.alpha) == (2, 4.0)
    assert (recipe.text_encoder_2.rank, recipe.conv_rank, recipe.conv_alpha) == (8, 8, 4.0)


def test_rhythms_are_spread_over_the_run() -> None:
    report = resolved(job("recipe.steps=1000")).report
    assert (report.previews.every, report.validation.every) == (200, 100)
    assert (report.saving.every_steps, report.saving.checkpoint_every) == (100, 100)
    long = resolved(job("recipe.steps=20000")).report.saving
    assert (long.every_steps, long.checkpoint_every) == (2000, 500)
    short = resolved(job("recipe.steps=3")).report
    assert (short.previews.every, short.validation.every, short.saving.every_steps) == (1, 1, 1)


def test_saving_by_epochs_becomes_steps() -> None:
    saving = resolved(job("report.saving.every_epochs=3"), samples=10).report.saving
    assert (saving.every_steps, saving.every_epochs) == (9, None)  # 10 pictures in batches of 4: 3 steps an epoch


def test_previews_take_the_resolution() -> None:
    prompts = "[[report.previews.prompts]]\nprompt = 'a'\nwidth = 640\n"
    (prompt,) = resolved(job(more=prompts)).report.previews.prompts
    assert (prompt.width, prompt.height) == (640, 512)


def test_cpu_is_exact() -> None:
    fit = resolved(job("recipe.effective_batch=6", "fit.deterministic=false")).fit
    assert (fit.device, fit.dtype, fit.quantize, fit.gradient_checkpointing) == ("cpu", "fp32", "none", "none")
    assert (fit.micro_batch, fit.threads, fit.deterministic) == (4, 6, True)
    assert resolved(job("recipe.effective_batch=2")).fit.micro_batch == 2


def test_without_a_plan_a_card_gets_what_needs_least_unrounded() -> None:
    fit = resolved(job(), family="sdxl", machine=card(8)).fit
    assert (fit.quantize, fit.gradient_checkpointing, fit.micro_batch) == ("none", "full", 1)
    assert (fit.device, fit.dtype, fit.deterministic) == ("cuda:0", "bf16", False)


def test_cards_without_bf16_compute_in_fp16() -> None:
    assert resolved(job(), machine=card(8, bf16=False)).fit.dtype == "fp16"


def test_stated_fit_is_kept() -> None:
    fit = resolved(job("fit.quantize=nf4", "fit.micro_batch=3", "fit.dtype=fp32"), machine=card(24)).fit
    assert (fit.quantize, fit.micro_batch, fit.dtype) == ("nf4", 3, "fp32")
    assert resolved(job("fit.device=cuda"), machine=card(24)).fit.device == "cuda:0"
    assert resolved(job("fit.device=cpu"), machine=card(24)).fit.dtype == "fp32"


def test_a_micro_batch_is_no_larger_than_the_effective_batch() -> None:
    assert resolved(job("fit.micro_batch=9"), machine=card(24)).fit.micro_batch == 4


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
