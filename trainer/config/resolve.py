"""Resolve jobs: replace each missing or "auto" value with the one for this base, dataset and machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.config.base import NATIVE_RESOLUTION, BaseConfig, Family, Prediction
from trainer.config.fit import DEFAULT_TEXT_BATCH, FitConfig
from trainer.config.job import Job, ReportConfig, SavingConfig
from trainer.config.recipe import LENGTH_KEYS, ImagesConfig, RecipeConfig
from trainer.config.toml_file import toml_value
from trainer.errors import JobError
from trainer.files.architecture import NAMES

# Default length: about 100 repeats of each sample, within limits: long enough to learn, no longer than an evening.
SAMPLES = 100
FEWEST_IMAGES = 1_600
MOST_IMAGES = 8_000
CACHE_GIGABYTES = 40.0
CHECKPOINT_AT_LEAST_EVERY = 500
# Other fit keys change results only by rounding: a run may resume with a smaller micro-batch or more checkpointing.
FIT_NUMERICS = ("dtype", "quantize", "int8_products", "vae_dtype", "vae_encode_tiling")


@dataclass(frozen=True, slots=True)
class Length:
    """Length of a run in steps, epochs (possibly a fraction) and images seen."""

    steps: int
    epochs: float
    images: int

    def __str__(self) -> str:
        """Return all three as text: "1,200 steps = 30 epochs = about 4,800 images seen"."""
        epochs = f"{self.epochs:,.0f}" if self.epochs.is_integer() else f"{self.epochs:,.1f}"
        return (
            f"{self.steps:,} {_plural('step', self.steps)} = {epochs} {_plural('epoch', self.epochs)}"
            f" = about {self.images:,} {_plural('image', self.images)} seen"
        )


def steps_per_epoch(samples: int, effective_batch: int) -> int:
    """Return the optimizer steps per epoch of ``samples`` (with repeats); an epoch's last batch may be smaller."""
    return math.ceil(samples / effective_batch)


def resolve_length(recipe: RecipeConfig, samples_per_epoch: int) -> Length:
    """Return the length set in ``recipe``, or the default; ``samples_per_epoch`` (at least 1) includes repeats."""
    per_epoch = steps_per_epoch(samples_per_epoch, recipe.effective_batch)
    steps = recipe.steps or _steps(recipe, samples_per_epoch, per_epoch)
    return length_of(steps, samples_per_epoch, recipe.effective_batch)


def length_of(steps: int, samples_per_epoch: int, effective_batch: int) -> Length:
    """Return the length of a run with ``steps`` optimizer steps, converted to epochs and images seen."""
    per_epoch = steps_per_epoch(samples_per_epoch, effective_batch)
    whole, rest = divmod(steps, per_epoch)
    return Length(steps, steps / per_epoch, whole * samples_per_epoch + min(rest * effective_batch, samples_per_epoch))


def default_images_seen(samples: int) -> int:
    """Return the default length in images seen, which is at least one epoch of ``samples``."""
    return max(samples, min(max(samples * SAMPLES, FEWEST_IMAGES), MOST_IMAGES))


def _steps(recipe: RecipeConfig, samples: int, per_epoch: int) -> int:
    if recipe.epochs is not None:
        return recipe.epochs * per_epoch
    if recipe.images_seen is not None:
        return _steps_to_see(recipe.images_seen, samples, per_epoch, recipe.effective_batch)
    return _steps_to_see(default_images_seen(samples), samples, per_epoch, recipe.effective_batch)


def _steps_to_see(images: int, samples: int, per_epoch: int, effective_batch: int) -> int:
    """Return the fewest steps in which ``images`` are seen; an epoch's last batch may be smaller."""
    whole, rest = divmod(images, samples)
    return max(1, whole * per_epoch + math.ceil(rest / effective_batch))


def _plural(word: str, number: float) -> str:
    return word if number == 1 else word + "s"


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine that a fit is chosen for."""

    device: str
    """"cpu" or "cuda:0"."""
    gpu: str | None
    """Name of the GPU; None without one."""
    total_bytes: int | None
    """Total GPU memory in bytes; None without a GPU."""
    bf16: bool
    """Whether the GPU supports bf16."""
    cores: int
    """Number of CPU cores."""


def resolve_job(
    job: Job,
    *,
    family: Family,
    prediction: Prediction,
    zero_terminal_snr: bool,
    samples_per_epoch: int,
    machine: Machine,
) -> Job:
    """Return the job with all values resolved, ready to be frozen; resolving it again changes nothing.

    ``family``, ``prediction`` and ``zero_terminal_snr`` are the detected (or configured) properties of the base;
    ``samples_per_epoch`` includes repeats. Values set in the job are kept. A value that stays None means "off" or
    "all", or comes from the dataset's files and is recorded in the frozen listing.

    Raises JobError that names every key that does not work with this base or machine.
    """
    faults = tuple(_faults(job, family, prediction, zero_terminal_snr, machine))
    if faults:
        sentence = f"Could not prepare {job.name}: " + "; ".join(faults)
        raise JobError("job.unsuitable", sentence, "Change these settings, or remove them to use the defaults.", faults)
    recipe = _resolve_recipe(_without_unused_prior(job), family, samples_per_epoch)
    return job.replaced(
        base=job.base.replaced(family=family, prediction=prediction, zero_terminal_snr=zero_terminal_snr),
        recipe=recipe,
        fit=choose_fit(job.fit, recipe, machine),
        report=_resolve_report(job.report, recipe, samples_per_epoch),
    )


def _faults(
    job: Job, family: Family, prediction: Prediction, zero_terminal_snr: bool, machine: Machine
) -> Iterator[str]:
    yield from _base_faults(job.base, family, prediction, zero_terminal_snr)
    recipe = job.recipe
    if family == "sd15" and not (recipe.learning_rate or recipe.text_encoder.learning_rate):
        yield "recipe.text_encoder_2.learning_rate: SD 1.5 has no second text encoder, so nothing would be trained"
    side = recipe.resolution or NATIVE_RESOLUTION[family]
    for each in sorted({side, *job.dataset.sides(recipe)}):
        yield from _bucket_faults(recipe.images, each)
    if prediction == "flow":
        yield from _flow_faults(job)
    yield from _machine_faults(job.fit, machine)


def _bucket_faults(images: ImagesConfig, side: int) -> Iterator[str]:
    """Yield the settings that leave no bucket at the resolution ``side``."""
    shortest, longest = images.bucket_min, images.bucket_max
    if images.buckets and shortest is not None and shortest > side:
        yield f"recipe.images.bucket_min: is {shortest}, more than the resolution of {side}; no bucket is left"
    if images.buckets and longest is not None and longest < side:
        yield f"recipe.images.bucket_max: is {longest}, less than the resolution of {side}; no bucket is left"
    if images.bucket_step > side:
        yield f"recipe.images.bucket_step: is {images.bucket_step}, more than the resolution of {side}"


def _flow_faults(job: Job) -> Iterator[str]:
    """Yield settings that need the noise schedule of a diffusion model, which rectified flow does not have."""
    for key in job.recipe.objective.snr_weights:
        yield f"recipe.objective.{key}: cannot be used with a base that predicts a flow, which has no such weights"
    for number, prompt in enumerate(job.report.previews.prompts):
        if prompt.sampler != "euler":
            yield f'report.previews.prompts.{number}.sampler: must be "euler" for a base that predicts a flow'


def _base_faults(base: BaseConfig, family: Family, prediction: Prediction, zero_terminal_snr: bool) -> Iterator[str]:
    if base.family not in ("auto", family):
        yield f'base.family: is "{base.family}", but the base is {NAMES[family]}'
    if zero_terminal_snr and prediction == "epsilon":
        yield (
            "base.zero_terminal_snr: the base is marked with zero terminal SNR but predicts epsilon, which cannot be "
            'trained at pure noise; set base.prediction = "v" or base.zero_terminal_snr = false'
        )


def _machine_faults(fit: FitConfig, machine: Machine) -> Iterator[str]:
    on_gpu = _device(fit, machine) != "cpu"
    if on_gpu and machine.device == "cpu":
        yield f'fit.device: is "{fit.device}", but PyTorch finds no NVIDIA GPU'
        return
    if fit.dtype == "bf16" and on_gpu and not machine.bf16:
        yield f'fit.dtype: {machine.gpu or "this GPU"} does not support bf16; use "fp16"'
    if fit.vae_dtype == "bf16" and on_gpu and not machine.bf16:
        yield f'fit.vae_dtype: {machine.gpu or "this GPU"} does not support bf16; use "fp32"'


def _without_unused_prior(job: Job) -> RecipeConfig:
    """Return the recipe without prior prediction if nothing uses it, because it costs time in every step."""
    objective = job.recipe.objective
    if objective.prior_prediction and not job.dataset.has_regularization:
        return job.recipe.replaced(objective=objective.replaced(prior_prediction=None))
    return job.recipe


def _resolve_recipe(recipe: RecipeConfig, family: Family, samples_per_epoch: int) -> RecipeConfig:
    resolution = recipe.resolution or NATIVE_RESOLUTION[family]
    steps = resolve_length(recipe, samples_per_epoch).steps
    # A share is of the length that the run starts with: a run that is extended does not train an encoder again.
    stops = recipe.replaced(steps=steps, epochs=None, images_seen=None).stops
    encoders = {
        name: encoder.replaced(
            rank=encoder.rank or recipe.rank,
            alpha=encoder.alpha or recipe.alpha,
            stop_after=stops.get(name, encoder.stop_after),
        )
        for name, encoder in recipe.text_encoders.items()
    }
    if family == "sd15":
        encoders["text_encoder_2"] = encoders["text_encoder_2"].replaced(learning_rate=0.0)
    return recipe.replaced(
        **encoders,
        conv_rank=recipe.conv_rank or recipe.rank,
        conv_alpha=recipe.conv_alpha or recipe.alpha,
        steps=steps,
        epochs=None,
        images_seen=None,
        clip_skip=recipe.clip_skip or (1 if family == "sd15" else None),
        # A frozen job without this key pads to the limit: it is from a version that did nothing else.
        caption_padding=recipe.caption_padding or "caption",
        resolution=resolution,
        images=_resolve_buckets(recipe.images, resolution),
    )


def _resolve_buckets(images: ImagesConfig, resolution: int) -> ImagesConfig:
    """Set missing limits to half and twice the resolution: at 1024 this allows 832x1216 but not 256x4096."""
    step = images.bucket_step
    return images.replaced(
        bucket_min=images.bucket_min or max(step, resolution // 2 // step * step),
        bucket_max=images.bucket_max or max(step, resolution * 2 // step * step),
    )


def choose_fit(fit: FitConfig, recipe: RecipeConfig, machine: Machine) -> FitConfig:
    """Return the complete fit for ``recipe`` on ``machine``; missing values are those that use the least GPU memory.

    The planner (trainer/memory/planner) starts from this fit, and runs without a plan use it.
    """
    on_cpu = _device(fit, machine) == "cpu"
    chosen = _cpu_fit(recipe, machine) if on_cpu else _gpu_fit(machine)
    stated = {name: value for name, value in fit if value is not None}
    fit = chosen.replaced(**stated)
    return fit.replaced(
        device=_device(fit, machine),
        micro_batch=min(fit.micro_batch or 1, recipe.effective_batch),
        deterministic=on_cpu or fit.deterministic,
        text_encoder_batch_size=fit.text_encoder_batch_size
        or (1 if on_cpu or fit.deterministic else DEFAULT_TEXT_BATCH),
    )


def _device(fit: FitConfig, machine: Machine) -> str:
    """Return the configured device, with "cuda" replaced by the machine's GPU."""
    if fit.device is None or (fit.device == "cuda" and machine.device != "cpu"):
        return machine.device
    return fit.device


def _cpu_fit(recipe: RecipeConfig, machine: Machine) -> FitConfig:
    return FitConfig(
        dtype="fp32",
        quantize="none",
        vae_dtype="fp32",
        vae_encode_tiling=False,
        micro_batch=min(recipe.effective_batch, 4),
        gradient_checkpointing="none",
        stream="none",
        attention="auto",
        vae_tiling=False,
        preview_offload=False,
        threads=machine.cores,
        deterministic=True,
        cache_gigabytes=CACHE_GIGABYTES,
    )


def _gpu_fit(machine: Machine) -> FitConfig:
    """Return the fit that uses the least memory without quantizing the base."""
    return FitConfig(
        dtype="bf16" if machine.bf16 else "fp16",
        quantize="none",
        vae_dtype="fp32",
        vae_encode_tiling=False,
        micro_batch=1,
        gradient_checkpointing="full",
        stream="none",
        attention="auto",
        vae_tiling=True,
        preview_offload=False,
        threads=machine.cores,
        deterministic=False,
        cache_gigabytes=CACHE_GIGABYTES,
    )


def _resolve_report(report: ReportConfig, recipe: RecipeConfig, samples_per_epoch: int) -> ReportConfig:
    steps = recipe.steps or 1
    side = recipe.resolution
    prompts = tuple(
        prompt.replaced(width=prompt.width or side, height=prompt.height or side) for prompt in report.previews.prompts
    )
    per_epoch = steps_per_epoch(samples_per_epoch, recipe.effective_batch)
    every = (report.previews.every_epochs or 0) * per_epoch or report.previews.every or max(1, steps // 5)
    previews = report.previews.replaced(every=every, every_epochs=None, prompts=prompts)
    validation = report.validation.replaced(every=report.validation.every or max(1, steps // 10))
    saving = _resolve_saving(report.saving, steps, per_epoch)
    return report.replaced(previews=previews, validation=validation, saving=saving)


def _resolve_saving(saving: SavingConfig, steps: int, per_epoch: int) -> SavingConfig:
    every = saving.every_steps or max(1, steps // 10)
    if saving.every_epochs is not None:
        every = saving.every_epochs * per_epoch
    checkpoint = saving.checkpoint_every or min(every, CHECKPOINT_AT_LEAST_EVERY)
    return saving.replaced(every_steps=every, every_epochs=None, checkpoint_every=checkpoint)


def identity(job: Job) -> dict[str, object]:
    """Return the parts of a resolved job that must not change on resume, as JSON values by dotted key.

    These are the base, the dataset, the recipe except its length, and the fit keys that affect results.
    """
    data = job.model_dump(mode="json", by_alias=True)
    recipe = {key: value for key, value in data["recipe"].items() if key not in LENGTH_KEYS}
    fit = {key: data["fit"][key] for key in FIT_NUMERICS}
    kept = {"base": data["base"], "dataset": data["dataset"], "recipe": recipe, "fit": fit}
    return dict(flatten(kept, ""))


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return a line for each key that differs, such as "recipe.rank was 16 and is now 32"."""
    return [f"{key} was {before} and is now {after}" for key, before, after in changes(old, new)]


def changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return (key, old value, new value) for each key that differs, with the values as text."""
    return [
        (key, _shown(old.get(key)), _shown(new.get(key)))
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]


def flatten(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested JSON tables as (dotted key, value), with ``key`` as prefix."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): item for number, item in enumerate(value)}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _shown(value: object) -> str:
    if value is None or value == "":
        return "not set"
    return toml_value(value)
