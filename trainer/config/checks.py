"""Check valid jobs for settings that have no effect because of other settings, and for doubtful settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from trainer.config.base import Family, Prediction
from trainer.config.job import TIMESTEP_LIMITS, CaptionOverlay, FolderConfig, ImagesOverlay, Job, stated_weight
from trainer.config.methods import factorization
from trainer.config.optimizers.kinds import AdafactorConfig
from trainer.config.recipe import RecipeConfig
from trainer.config.schema import Section

# Prodigy multiplies the rate it finds by learning_rate, which should therefore be about 1.
SMALL_FOR_PRODIGY = 0.01

DEFAULT_VALIDATIONS = 10
"""Validations per run, unless report.validation.every is set."""

LAYER_SIZES = (320, 640, 768, 960, 1280, 1920, 2048, 2560, 3072, 5120, 10240)
"""Inputs and outputs of the layers of SD 1.5 and SDXL that can carry a LoRA."""

ONLY_SDXL_TEXT = "InvokeAI 6.14 refuses SDXL LoRAs without layers of the UNet; other programs load them"
"""Why an SDXL LoRA of text encoders alone is doubtful."""

SCHEDULE_KEYS = {
    "cycles": "restarts",
    "power": "polynomial",
    "timescale": "inverse_sqrt",
    "decay": "warmup_stable_decay",
    "decay_type": "warmup_stable_decay",
    "step_rules": "piecewise",
}
"""The kind of learning rate schedule that each of these keys is for."""

_DRAWN_CAPTION_KEYS = ("shuffle", "keep_tokens", "dropout", "tag_dropout", "token_warmup_step", "token_warmup_min")
"""Caption keys that validation does not use, since it measures every image with its whole caption."""

_FIXED_TAGS = "tags are neither shuffled nor dropped"
_AT_ONCE = "captions have all tags from the start (token_warmup_step)"
_SAME_SEPARATOR = "it is the tag separator (captions.separator)"
_Candidate = tuple[str, Section, bool, str]


def settings_without_effect(job: Job, family: Family) -> list[tuple[str, str]]:
    """Return settings without effect in this job, and learning rates too low for Prodigy, as (key, reason).

    Call this with the job as written, because only values that differ from the default count, and resolving a job fills
    in many values.
    """
    found = [(key, reason) for key, section, off, reason in _candidates(job, family) if off and _is_set(section, key)]
    return [*found, *prodigy_at_a_small_rate(job.recipe)]


def without_effect(job: Job, family: Family) -> list[tuple[str, str]]:
    """Return all keys that have no effect in this job, whether set or not, as (key, reason); for forms."""
    return [(key, reason) for key, _, off, reason in _candidates(job, family) if off]


def _candidates(job: Job, family: Family) -> Iterator[_Candidate]:
    yield from _recipe_without_effect(job, family)
    yield from _text_encoders_without_effect(job, family)
    yield from _replaced_by_folders(job)
    for number, folder in enumerate(job.dataset.folders):
        at = f"dataset.folders.{number}."
        unread = not job.dataset.has_mask_files(folder)
        yield f"{at}mask_folder", folder, unread, "masks are off or come from transparency (masks)"
        yield from _folder_without_effect(folder, at, job.recipe)
    yield from _rest(job)


def _is_set(section: Section, key: str) -> bool:
    name = key.rpartition(".")[2]
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _recipe_without_effect(job: Job, family: Family) -> Iterator[_Candidate]:
    recipe = job.recipe
    objective, captions, schedule, images = recipe.objective, recipe.captions, recipe.schedule, recipe.images
    at = "recipe."
    yield at + "clip_skip", recipe, family == "sdxl", "SDXL always uses the penultimate layer"
    yield at + "caption_padding", recipe, recipe.token_chunks == 75, "the max token length is 75 (token_chunks)"
    for key in ("dropout", "rank_dropout", "module_dropout", "lora_plus_ratio"):
        yield at + key, recipe, not recipe.has_low_rank, f'adapter = "{recipe.adapter}" has no low-rank product'
    yield at + "max_weight_norm", recipe, not recipe.is_plain_lora, "it limits the norm of plain LoRAs"
    yield at + "rank_stabilized", recipe, recipe.adapter == "oft", 'adapter = "oft" has no scale'
    yield at + "lokr_factor", recipe, recipe.adapter != "lokr", 'it is used only with adapter = "lokr"'
    yield at + "tlora_min_rank", recipe, recipe.adapter != "tlora", 'it is used only with adapter = "tlora"'
    unmasked_ranks = recipe.adapter == "tlora" and (recipe.tlora_min_rank or 0) >= _highest_unet_rank(recipe)
    yield at + "tlora_min_rank", recipe, unmasked_ranks, "no layer of the UNet has a higher rank, so none is masked"
    for key in ("alpha", "conv_alpha"):
        yield at + key, recipe, recipe.adapter == "oft", 'adapter = "oft" has no scale'
    for key in ("conv_rank", "conv_alpha"):
        yield at + key, recipe, recipe.layers != "all", '3x3 convolutions are trained only with layers = "all"'
    yield (
        at + "learning_rate",
        recipe,
        recipe.optimizer.ignores_rates and recipe.learning_rate > 0,
        f"{recipe.optimizer.method.title} chooses the learning rate itself (relative_step)",
    )
    yield at + "objective.loss", objective, objective.loss_mix is not None, "loss_mix is used in its place"
    for key in ("huber_c", "huber_schedule", "huber_scale"):
        unused = not objective.has_threshold
        yield f"{at}objective.{key}", objective, unused, 'it is used only with the losses "huber" and "smooth_l1"'
    if objective.has_threshold:
        by_snr = objective.huber_schedule == "snr"
        yield at + "objective.huber_scale", objective, by_snr, 'huber_schedule = "snr" does not use it'
    for key in ("noise_offset_random_strength", "adaptive_noise_scale"):
        yield f"{at}objective.{key}", objective, not objective.noise_offset, "the noise offset is 0 (noise_offset)"
    exact = not objective.input_perturbation
    yield at + "objective.input_perturbation_random_strength", objective, exact, "the input perturbation is 0"
    yield from _timestep_bias_without_effect(job)
    predicted = job.base.prediction
    yield at + "objective.scale_v_pred_loss", objective, predicted == "epsilon", 'base.prediction is "epsilon"'
    yield at + "objective.v_pred_like_loss", objective, predicted == "v", 'base.prediction is "v"'
    without_prior = not job.dataset.has_regularization
    for key in ("prior_weight", "prior_prediction"):
        yield f"{at}objective.{key}", objective, without_prior, 'no folder of the dataset is of kind "regularization"'
    weightless = not without_prior and objective.prior_weight == 0
    yield (
        at + "objective.prior_prediction",
        objective,
        weightless,
        "regularization images have no weight (prior_weight)",
    )
    yield at + "objective.multires_iterations", objective, not objective.multires_discount, "multires_discount is 0"
    unmasked = all(job.dataset.masks_of(folder) == "none" for folder in job.dataset.folders)
    for key in ("unmasked_weight", "unmasked_probability", "normalize_masked_loss"):
        yield f"{at}objective.{key}", objective, unmasked, "masks are off (dataset.masks)"
    for key in ("unmasked_probability", "normalize_masked_loss"):
        ignored = objective.unmasked_weight == 1
        yield f"{at}objective.{key}", objective, ignored, "masks are ignored (unmasked_weight = 1)"
    fixed_tags = all(_has_fixed_tags(folder.recipe_from(recipe)) for folder in job.dataset.folders)
    yield at + "captions.keep_tokens", captions, fixed_tags, _FIXED_TAGS
    at_once = all(folder.recipe_from(recipe).captions.token_warmup_step is None for folder in job.dataset.folders)
    yield at + "captions.token_warmup_min", captions, at_once, _AT_ONCE
    every, last = captions.dropout_every_epochs, recipe.epochs
    too_late = every is not None and last is not None and every > last
    yield at + "captions.dropout_every_epochs", captions, too_late, f"the run ends after {last} epochs"
    never = all(folder.recipe_from(recipe).captions.dropout == 1 for folder in job.dataset.folders)
    yield at + "captions.dropout_every_epochs", captions, never, "all captions are dropped (captions.dropout)"
    same = captions.secondary_separator == captions.separator
    yield at + "captions.secondary_separator", captions, same, _SAME_SEPARATOR
    yield (
        at + "schedule.end",
        schedule,
        not schedule.has_end,
        f'kind = "{schedule.kind}" does not use it',
    )
    for key, kind in SCHEDULE_KEYS.items():
        yield f"{at}schedule.{key}", schedule, schedule.kind != kind, f'it is used only with kind = "{kind}"'
    for key in ("bucket_min", "bucket_max"):
        yield at + f"images.{key}", images, not images.buckets, "buckets are off"


def _highest_unet_rank(recipe: RecipeConfig) -> int:
    convolutions = (recipe.conv_rank or 0) if recipe.layers == "all" else 0
    return max(recipe.rank, convolutions, *(block.rank or 0 for block in recipe.blocks or ()))


def _timestep_bias_without_effect(job: Job) -> Iterator[_Candidate]:
    objective = job.recipe.objective
    at, bias = "recipe.objective.timestep_bias", objective.timestep_bias
    drawn = objective.timesteps != "uniform"
    yield at, objective, drawn, 'it is used only with timesteps = "uniform"'
    drawing = (folder for folder in job.dataset.folders if folder.kind != "validation")
    reasons = [folder.recipe_from(job.recipe).objective.idle_bias for folder in drawing]
    yield at, objective, not drawn and all(reasons), reasons[0]
    biased = bias is not None and not drawn
    yield "recipe.objective.timestep_shift", objective, biased, "timesteps are drawn with a bias (timestep_bias)"
    off = drawn or bias is None
    yield f"{at}_multiplier", objective, off, "there is no timestep bias (timestep_bias)"
    on_share = bias in ("earlier", "later")
    yield f"{at}_portion", objective, off or not on_share, 'it is used only with timestep_bias = "earlier" or "later"'
    for key in ("_begin", "_end"):
        yield at + key, objective, off or bias != "range", 'it is used only with timestep_bias = "range"'


def _has_fixed_tags(recipe: RecipeConfig) -> bool:
    captions = recipe.captions
    return not (captions.shuffle or captions.tag_dropout or captions.token_warmup_step)


def _replaced_by_folders(job: Job) -> Iterator[_Candidate]:
    """Yield the settings of the whole job that every folder replaces with its own."""
    dataset, recipe = job.dataset, job.recipe
    places: tuple[tuple[str, Section, list[Section | None]], ...] = (
        ("dataset.", dataset, list(dataset.folders)),
        ("recipe.captions.", recipe.captions, [folder.captions for folder in dataset.folders]),
        ("recipe.images.", recipe.images, [folder.images for folder in dataset.folders]),
        ("recipe.objective.", recipe.objective, list(dataset.folders)),
    )
    for at, section, tables in places:
        for key in type(section).model_fields:
            replaced = all(getattr(table, key, None) is not None for table in tables)
            yield at + key, section, replaced, "every folder has its own value"


def _folder_without_effect(folder: FolderConfig, at: str, recipe: RecipeConfig) -> Iterator[_Candidate]:
    captions, images = folder.captions or CaptionOverlay(), folder.images or ImagesOverlay()
    applied = folder.recipe_from(recipe)
    yield f"{at}captions.keep_tokens", captions, _has_fixed_tags(applied), _FIXED_TAGS
    at_once = applied.captions.token_warmup_step is None
    yield f"{at}captions.token_warmup_min", captions, at_once, _AT_ONCE
    same = applied.captions.secondary_separator == applied.captions.separator
    yield f"{at}captions.secondary_separator", captions, same, _SAME_SEPARATOR
    measured, why = folder.kind == "validation", "validation uses whole captions and centered crops"
    for key in _DRAWN_CAPTION_KEYS:
        yield f"{at}captions.{key}", captions, measured, why
    for key in ImagesOverlay.model_fields:
        yield f"{at}images.{key}", images, measured, why
    for key in TIMESTEP_LIMITS:
        yield at + key, folder, measured, "validation has its own timesteps (report.validation.timesteps)"


def _text_encoders_without_effect(job: Job, family: Family) -> Iterator[_Candidate]:
    for name, encoder in job.recipe.text_encoders.items():
        missing = family == "sd15" and name == "text_encoder_2"
        why = "SD 1.5 has no second text encoder" if missing else "its learning rate is 0, so it is not trained"
        yield f"recipe.{name}.learning_rate", encoder, missing, why
        for key in ("rank", "alpha", "stop_after"):
            yield f"recipe.{name}.{key}", encoder, missing or not encoder.learning_rate, why
        steps, last = job.recipe.steps, encoder.stop_after
        if steps is not None and last is not None and last >= steps:
            yield f"recipe.{name}.stop_after", encoder, True, f"the run has only {steps} steps"


def _rest(job: Job) -> Iterator[_Candidate]:
    previews = job.report.previews
    for key in ("every", "every_epochs", "first", "max_share"):
        yield f"report.previews.{key}", previews, not previews.prompts, "there are no preview prompts"
    yield "fit.vae_tiling", job.fit, not previews.prompts, "there are no preview prompts to decode"
    on_cpu = job.fit.device == "cpu" and job.fit.deterministic is False
    yield "fit.deterministic", job.fit, on_cpu, "the CPU is always deterministic"
    other_base = job.fit.quantize != "int8_products"
    yield "fit.int8_products", job.fit, other_base, 'it is used only with fit.quantize = "int8_products"'
    yield "fit.cuda_graphs", job.fit, job.fit.device == "cpu", "CUDA graphs need an NVIDIA GPU"
    for key in ("cuda_graphs", "compile", "channels_last"):
        yield f"fit.{key}", job.fit, job.fit.is_streamed, "it is not used while the base is streamed (fit.stream)"
    yield (
        "fit.compile",
        job.fit,
        job.fit.cuda_graphs,
        "CUDA graphs record steps that are not compiled (fit.cuda_graphs)",
    )
    dropouts = job.recipe.has_dropouts
    yield "fit.compile", job.fit, dropouts and not job.fit.cuda_graphs, "blocks with dropout are not compiled"
    on_convolutions = job.recipe.layers == "all"
    yield (
        "fit.channels_last",
        job.fit,
        on_convolutions,
        "with a LoRA on 3x3 convolutions, the default memory format is used",
    )
    elsewhere = job.fit.device == "cpu" or job.fit.dtype not in (None, "fp16")
    yield "fit.fp16_accumulation", job.fit, elsewhere, "it is used only for fp16 on an NVIDIA GPU"
    local = "://" in job.base.model or Path(job.base.model).is_absolute()
    yield "base.revision", job.base, local, "only Hugging Face bases have revisions"


def prodigy_at_a_small_rate(recipe: RecipeConfig) -> Iterator[tuple[str, str]]:
    """Yield the rates that are far too low for an optimizer that finds its own, such as AdamW's, as (key, reason)."""
    if not recipe.optimizer.method.finds_rate:
        return
    rates = {
        "recipe.learning_rate": recipe.learning_rate,
        "recipe.text_encoder.learning_rate": recipe.text_encoder.learning_rate,
        "recipe.text_encoder_2.learning_rate": recipe.text_encoder_2.learning_rate,
    }
    for key, rate in rates.items():
        if 0 < rate < SMALL_FOR_PRODIGY:
            who = recipe.optimizer.who
            yield key, f"{who} multiplies the rate it finds by this, so {rate:g} would train almost nothing; use 1.0"


def not_forecast(job: Job) -> Iterator[tuple[str, str]]:
    """Yield experimental settings that forecasts ignore, as (key, reason).

    Runs that use one of these settings are not used to calibrate forecasts.
    """
    others = "so memory and time may differ from the forecast"
    if job.fit.compile:
        yield "fit.compile", f"forecasts assume blocks that are not compiled, {others}"
    if job.fit.channels_last:
        yield "fit.channels_last", f"forecasts assume the default memory format, {others}"


def doubtful(
    job: Job, *, zero_terminal_snr: bool, prediction: Prediction | None = None, family: Family | None = None
) -> Iterator[tuple[str, str]]:
    """Yield doubtful settings as (key, reason).

    ``zero_terminal_snr``, ``prediction`` and ``family`` are the detected or configured values; None if unknown.
    """
    yield from not_forecast(job)
    if family == "sdxl" and not job.recipe.learning_rate:
        yield "recipe.learning_rate", f"is 0, so only text encoders are trained: {ONLY_SDXL_TEXT}"
    yield from _doubtful_weights(job, prediction)
    yield from _doubtful_patience(job)
    yield from _doubtful_prompts(job)
    yield from _doubtful_sizes(job.recipe)
    yield from _doubtful_adafactor(job.recipe)
    objective = job.recipe.objective
    last = max(folder.recipe_from(job.recipe).objective.timestep_max for folder in job.dataset.folders)
    if objective.debiased_estimation and zero_terminal_snr and last == 999:
        yield (
            "recipe.objective.debiased_estimation",
            "this base has zero terminal SNR: pure noise would be weighted a thousand times as much as the cleanest "
            "images, although it contains no trace of an image; min_snr_gamma gives it no weight",
        )


def _doubtful_prompts(job: Job) -> Iterator[tuple[str, str]]:
    """Yield preview prompts with weights that are read as plain text."""
    if job.recipe.weighted_captions:
        return
    for number, prompt in enumerate(job.report.previews.prompts):
        found = stated_weight(f"{prompt.prompt} {prompt.negative}") if prompt.weights is None else None
        if found:
            reason = f"{found} is read as plain text, like captions; set weights = true for this prompt to read weights"
            yield f"report.previews.prompts.{number}.prompt", reason


def _doubtful_sizes(recipe: RecipeConfig) -> Iterator[tuple[str, str]]:
    """Yield a T-LoRA that masks no rank, a LoKr factor that splits no layer, and a rank too high for rotations.

    As in LyCORIS, a rotated block is the smaller of the two factors that the rank splits a layer's outputs into.
    """
    if recipe.adapter == "tlora" and _highest_unet_rank(recipe) == 1:
        yield (
            "recipe.adapter",
            'T-LoRA masks no rank of layers with rank 1, so this trains a plain LoRA; use a higher rank or "lora"',
        )
    factor = recipe.lokr_factor if recipe.adapter == "lokr" else None
    if factor and all(factorization(size, factor) == factorization(size) for size in LAYER_SIZES):
        yield (
            "recipe.lokr_factor",
            f"{factor} splits all layers as without a factor; use a divisor of their sizes, such as 8 or 16",
        )
    fewest = LAYER_SIZES[0]
    most = math.isqrt(fewest)
    if recipe.adapter == "oft" and recipe.rank > most:
        yield (
            "recipe.rank",
            f"in OFT, the rank is the size of the rotated blocks; above {most}, those of layers with {fewest} "
            "outputs do not become larger, and with a divisor such as 32 or 64 they become smaller",
        )


def _doubtful_adafactor(recipe: RecipeConfig) -> Iterator[tuple[str, str]]:
    optimizer = recipe.optimizer
    if isinstance(optimizer, AdafactorConfig) and optimizer.scale_parameter and not optimizer.relative_step:
        yield (
            "recipe.optimizer.scale_parameter",
            "half of an adapter's weights start at zero, for which it multiplies the learning rate by 0.001; turn it "
            "off, or set relative_step = true too",
        )


def _doubtful_patience(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the patience if the run cannot end early: its first validation always counts as the best so far."""
    steps, validation = job.recipe.steps, job.report.validation
    if validation.patience is None or (steps is None and validation.every is not None):
        return  # the number of validations depends on the dataset
    every = validation.every or max(1, (steps or DEFAULT_VALIDATIONS) // DEFAULT_VALIDATIONS)
    count = (steps or DEFAULT_VALIDATIONS) // every
    if validation.patience + 1 >= count:
        yield (
            "report.validation.patience",
            f"{validation.patience} validations without a lower loss cannot end this run early: it has only {count}",
        )


def _doubtful_weights(job: Job, prediction: Prediction | None) -> Iterator[tuple[str, str]]:
    objective = job.recipe.objective
    if prediction == "v" and objective.scale_v_pred_loss and objective.min_snr_gamma is not None:
        yield (
            "recipe.objective.min_snr_gamma",
            "for a v-prediction base, it already lowers the weight of noisy timesteps, and scale_v_pred_loss lowers it "
            "again; use only one of them",
        )
    if job.base.prediction != "auto":
        return  # reported as without effect
    if prediction == "epsilon" and objective.scale_v_pred_loss:
        yield "recipe.objective.scale_v_pred_loss", "this base predicts noise, so this has no effect"
    if prediction == "v" and objective.v_pred_like_loss:
        yield "recipe.objective.v_pred_like_loss", "this base predicts v, so this has no effect"
