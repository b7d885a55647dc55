"""Finds settings that a job states and that change nothing in their combination, so that nobody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config.base import Family
from trainer.config.job import Job
from trainer.config.optimizer import AdafactorConfig, ProdigyConfig
from trainer.config.recipe import RecipeConfig, TextEncoderConfig
from trainer.config.schema import Section

# Prodigy multiplies the rate that it finds by the stated one, which is therefore about 1.
SMALL_FOR_PRODIGY = 0.01

_Candidate = tuple[str, Section, bool, str]


def effectless(job: Job, family: Family) -> list[tuple[str, str]]:
    """Settings that change nothing in this job's combination, as (key, reason).

    Ask it of the job as written: only values that differ from the default count, and resolving fills in many.
    """
    found = [(key, reason) for key, section, off, reason in _candidates(job, family) if off and _is_set(section, key)]
    return [*found, *prodigy_at_a_small_rate(job.recipe)]


def without_effect(job: Job, family: Family) -> list[tuple[str, str]]:
    """Every key that changes nothing in this job's combination, stated or not, as (key, reason); for forms."""
    return [(key, reason) for key, _, off, reason in _candidates(job, family) if off]


def _candidates(job: Job, family: Family) -> Iterator[_Candidate]:
    yield from _recipe_without_effect(job, family)
    yield from _text_encoders_without_effect(job, family)
    yield from _rest(job)


def _is_set(section: Section, key: str) -> bool:
    name = key.rpartition(".")[2]
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _recipe_without_effect(job: Job, family: Family) -> Iterator[_Candidate]:
    recipe = job.recipe
    objective, captions, schedule, pictures = recipe.objective, recipe.captions, recipe.schedule, recipe.pictures
    at = "recipe."
    yield at + "clip_skip", recipe, family == "sdxl", "SDXL always reads the penultimate layer"
    for key in ("conv_rank", "conv_alpha"):
        yield at + key, recipe, recipe.layers != "all", 'no 3x3 convolution learns unless layers = "all"'
    own_rate = isinstance(recipe.optimizer, AdafactorConfig) and recipe.optimizer.relative_step
    yield at + "learning_rate", recipe, own_rate and recipe.learning_rate > 0, "Adafactor chooses it (relative_step)"
    yield at + "objective.huber_c", objective, objective.loss != "huber", 'it belongs to loss = "huber"'
    yield at + "objective.multires_levels", objective, not objective.multires_discount, "multires_discount is 0"
    yield at + "objective.unmasked_weight", objective, job.dataset.masks == "none", "dataset.masks is none"
    fixed_tags = not (captions.shuffle or captions.tag_dropout)
    yield at + "captions.keep_tokens", captions, fixed_tags, "tags are neither shuffled nor dropped"
    yield (
        at + "schedule.end",
        schedule,
        schedule.kind in ("constant", "rex"),
        f'kind = "{schedule.kind}" has none',
    )
    yield at + "schedule.cycles", schedule, schedule.kind != "restarts", 'it belongs to kind = "restarts"'
    yield at + "schedule.power", schedule, schedule.kind != "polynomial", 'it belongs to kind = "polynomial"'
    for key in ("bucket_min", "bucket_max"):
        yield at + f"pictures.{key}", pictures, not pictures.buckets, "buckets are off"


def _text_encoders_without_effect(job: Job, family: Family) -> Iterator[_Candidate]:
    for name in ("text_encoder", "text_encoder_2"):
        encoder: TextEncoderConfig = getattr(job.recipe, name)
        missing = family == "sd15" and name == "text_encoder_2"
        why = "SD 1.5 has no second text encoder" if missing else "its learning rate is 0, so it is not trained"
        yield f"recipe.{name}.learning_rate", encoder, missing, why
        for key in ("rank", "alpha"):
            yield f"recipe.{name}.{key}", encoder, missing or not encoder.learning_rate, why


def _rest(job: Job) -> Iterator[_Candidate]:
    previews = job.report.previews
    yield "report.previews.every", previews, not previews.prompts, "there are no preview prompts"
    yield "fit.vae_tiling", job.fit, not previews.prompts, "there are no preview prompts to decode"
    on_cpu = job.fit.device == "cpu" and job.fit.deterministic is False
    yield "fit.deterministic", job.fit, on_cpu, "the CPU is always deterministic"
    other_base = job.fit.quantise != "int8_products"
    yield "fit.int8_products", job.fit, other_base, 'it belongs to fit.quantise = "int8_products"'
    yield "fit.graphs", job.fit, job.fit.device == "cpu", "graphs are recorded on CUDA cards only"
    yield "fit.compile", job.fit, job.fit.graphs, "steps are recorded as they are written (fit.graphs)"
    dropouts = job.recipe.has_dropouts
    yield "fit.compile", job.fit, dropouts and not job.fit.graphs, "blocks with dropouts are not compiled"
    on_convolutions = job.recipe.layers == "all"
    yield "fit.channels_last", job.fit, on_convolutions, "a LoRA on convolutions lays their maps as usual"
    elsewhere = job.fit.device == "cpu" or job.fit.dtype not in (None, "fp16")
    yield "fit.fp16_accumulation", job.fit, elsewhere, "it concerns products in fp16 on CUDA cards only"
    local = "://" in job.base.model or Path(job.base.model).is_absolute()
    yield "base.revision", job.base, local, "only bases from Hugging Face have revisions"


def prodigy_at_a_small_rate(recipe: RecipeConfig) -> Iterator[tuple[str, str]]:
    """The one default that another choice makes useless: AdamW's learning rate under Prodigy."""
    if not isinstance(recipe.optimizer, ProdigyConfig):
        return
    rates = {
        "recipe.learning_rate": recipe.learning_rate,
        "recipe.text_encoder.learning_rate": recipe.text_encoder.learning_rate,
        "recipe.text_encoder_2.learning_rate": recipe.text_encoder_2.learning_rate,
    }
    for key, rate in rates.items():
        if 0 < rate < SMALL_FOR_PRODIGY:
            yield key, f"Prodigy multiplies the rate it finds by it, so {rate:g} learns next to nothing; use 1.0"


def unforeseen(job: Job) -> Iterator[tuple[str, str]]:
    """Experiments that forecasts know nothing of, as (key, what they count instead); runs with them teach nothing."""
    others = "so memory and time may be others with this experiment"
    if job.fit.compile:
        yield "fit.compile", f"forecasts count blocks that are not compiled, {others}"
    if job.fit.channels_last:
        yield "fit.channels_last", f"forecasts count maps that lie as usual, {others}"


def doubtful(job: Job, *, zero_terminal_snr: bool) -> Iterator[tuple[str, str]]:
    """Settings to think over, as (key, reason); ``zero_terminal_snr`` is what the base was found or stated to be."""
    yield from unforeseen(job)
    if job.recipe.objective.debiased and zero_terminal_snr and job.recipe.objective.timestep_max == 999:
        yield (
            "recipe.objective.debiased",
            "this base is trained down to pure noise (zero terminal SNR), which then counts a thousand times as much "
            "as the cleanest pictures, though nothing of a picture is left in it; min_snr_gamma gives it no weight",
        )
