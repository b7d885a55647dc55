"""Describe everything that a job's memory depends on, and hash it into the keys of its traces."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, Literal, Protocol

from trainer import __version__
from trainer.config.base import Family, Prediction
from trainer.config.fit import FitConfig, Int8LayerConfig
from trainer.config.job import Job, PromptConfig
from trainer.config.recipe import ObjectiveConfig, RecipeConfig
from trainer.dataset.cache_keys import text_batch_size
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import (
    Shape,
    caption_lengths,
    epoch_samples,
    measured_samples,
    most_per_epoch,
    padded_tokens,
    prompt_texts,
)
from trainer.files.architecture import Config
from trainer.files.assets import PARTS, bundled_configs
from trainer.files.tokens import CHUNK, has_weights

TracePart = Literal[
    "micro", "optimizer", "load", "quantise", "cache_pictures", "cache_texts", "validate", "preview", "checkpoint",
    "save",
]  # fmt: skip

# Raised when the same version of the program starts to trace differently; traces on disk are then recorded again.
FORM = 8
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "prodigyopt", "schedulefree")

# Values to trace with if a fit leaves a setting unset.
OPEN_FIT = FitConfig(
    dtype="bf16",
    quantize="none",
    vae_dtype="fp32",
    micro_batch=1,
    gradient_checkpointing="none",
    stream="none",
    attention="auto",
    vae_tiling=True,
    preview_offload=False,
)

_STEP_FACTS = ("unet", "live_texts", "text_form", "adapter", "precision", "checkpointing", "masks", "objective")
_FACTS: dict[TracePart, tuple[str, ...]] = {
    "micro": _STEP_FACTS,
    # Of the base only what it computes: its bits and the size of a micro-batch do not affect the optimizer.
    "optimizer": ("unet", "live_texts", "text_form", "adapter", "dtype", "clipped", "optimizer"),
    "load": ("unet", "live_texts", "adapter", "precision"),
    "quantise": ("unet", "live_texts", "adapter", "precision"),
    "cache_pictures": ("vae", "vae_dtype", "buckets", "validation"),
    "cache_texts": ("texts", "live_texts", "text_form", "precision", "texts_at_once"),
    "validate": (*_STEP_FACTS, "averaged", "buckets", "micro_batch", "validation"),
    "preview": (
        "unet",
        "vae",
        "texts",
        "text_form",
        "adapter",
        "averaged",
        "precision",
        "vae_dtype",
        "decoding",
        "previews",
    ),
    "checkpoint": (),
    "save": ("unet", "live_texts", "adapter", "precision", "averaged"),
}


@dataclass(frozen=True)
class BucketUse:
    """Shape of images (width, height) and captions to train in, with the number of images that have it."""

    width: int
    height: int
    images: int
    """Number of images in this shape in the first epoch, repeats included; 0 if it occurs only in later epochs."""
    tokens: int | None = None
    """Tokens that captions are padded to, if a job's captions differ in that."""
    most: int | None = None
    """Most images that an epoch can have in this shape; None if there is no dataset to count."""

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height in pixels."""
        return self.width, self.height


@dataclass(frozen=True)
class TextLengths:
    """Tokens of the longest texts outside of training, if a job's captions are padded to different lengths."""

    encoded: int
    """Longest of all texts."""
    validated: int
    """Longest caption in validation."""
    previewed: int
    """Longest preview prompt."""


@dataclass(frozen=True)
class Workload:
    """Everything that a job's memory depends on; recipe and fit are resolved."""

    family: Family
    unet_config: Config
    vae_config: Config
    text_configs: tuple[Config, ...]
    recipe: RecipeConfig
    fit: FitConfig
    buckets: tuple[BucketUse, ...]
    """Shapes to train on, the one with the most pixels first."""
    prediction: Prediction = "epsilon"
    zero_terminal_snr: bool = False
    masks: bool = False
    previews: tuple[PromptConfig, ...] = ()
    """Preview prompts with their sizes."""
    validation: bool = True
    """Whether validation uses images held out from training; otherwise it uses some training images."""
    validation_buckets: tuple[BucketUse, ...] = ()
    """Shapes to validate in; if empty, ``buckets`` are used."""
    validation_timesteps: int = 5
    """Number of timesteps at which the loss of each image is measured."""
    lengths: TextLengths | None = None
    """Lengths of texts outside of training; None: all are padded to the recipe's limit."""
    after_stops: bool = False
    """Whether the text encoders that are not trained to the end have stopped."""
    folder_resolutions: bool = False
    """Whether folders have resolutions of their own, which do not follow the recipe's."""

    @property
    def trained_texts(self) -> bool:
        """Return whether any text encoder is trained; if so, all of them stay on the GPU."""
        return learns_texts(self.recipe)

    @property
    def has_published_unet(self) -> bool:
        """Return whether the UNet has the published config of its family, regardless of its weights."""
        return _plain(self.unet_config) == _plain(bundled_configs(self.family)["unet"])

    @property
    def scales_with_rank(self) -> bool:
        """Return whether all parts of the LoRA have the same rank, and every tensor of a step is linear in it.

        The limit of weight norms multiplies matrices of rank × rank; other adapters than LoRAs may depend on the rank
        in other ways.
        """
        recipe = self.recipe
        one_rank = {recipe.conv_rank, recipe.text_encoder.rank, recipe.text_encoder_2.rank} == {recipe.rank}
        blocks = any(block.rank for block in recipe.blocks or ())
        return recipe.adapter == "lora" and one_rank and recipe.max_weight_norm is None and not blocks

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes to train in (width, height, tokens), the largest first."""
        return tuple((*bucket.size, bucket.tokens or self.recipe.token_chunks) for bucket in self.buckets)

    def images_at_once(self, shape: Shape) -> int:
        """Return the number of images in the largest micro-batch of a shape; rare shapes never fill one."""
        size, most = self.fit.micro_batch or 1, self._most.get(shape)
        return size if most is None else max(min(size, most), 1)

    @property
    def images_per_step(self) -> int:
        """Return the most images in an optimizer step: the effective batch, or a whole dataset that is smaller."""
        batch, counts = self.recipe.effective_batch, [count for count in self._most.values() if count is not None]
        return min(batch, max(sum(counts), 1)) if len(counts) == len(self.buckets) else batch

    @cached_property
    def _most(self) -> dict[Shape, int | None]:
        return {shape: bucket.most for shape, bucket in zip(self.shapes, self.buckets, strict=True)}

    def padded(self) -> Workload:
        """Return the workload with all captions padded to the recipe's limit."""
        return replace(self, buckets=merged(replace(bucket, tokens=None) for bucket in self.buckets), lengths=None)

    def at_tokens(self, tokens: int) -> Workload:
        """Return the workload with all texts padded to ``tokens``."""
        if tokens == self.recipe.token_chunks:
            return self
        return replace(self, recipe=self.recipe.replaced(token_chunks=tokens))

    def of_part(self, part: TracePart) -> Workload:
        """Return the workload with the texts that a part uses; the optimizer's memory depends on none."""
        if part == "optimizer":
            return self.at_tokens(CHUNK)
        if self.lengths is None:
            return self
        of_part: dict[TracePart, int] = {
            "cache_texts": self.lengths.encoded,
            "validate": self.lengths.validated,
            "preview": self.lengths.previewed,
        }
        return self.at_tokens(of_part[part]) if part in of_part else self

    @property
    def reads_weights(self) -> bool:
        """Return whether captions or preview prompts are encoded with weights."""
        return bool(self.recipe.weighted_captions) or any(map(_reads_weights, self.previews))

    def at_rank(self, rank: int) -> Workload:
        """Return the workload with all parts of the LoRA at ``rank``."""
        recipe = self.recipe
        encoders = {name: encoder.replaced(rank=rank) for name, encoder in recipe.text_encoders.items()}
        return replace(self, recipe=recipe.replaced(rank=rank, conv_rank=rank, **encoders))

    def key(self, part: TracePart, *more: object) -> str:
        """Return the key of a part's traces: SHA-256 (hex) over everything that they depend on.

        ``more`` contains further arguments of the request, such as a bucket and a number of images.
        """
        known = self._facts()
        # The library versions are included because their code is what gets traced; another version may allocate more.
        content = [FORM, __version__, library_versions(), part, more, [(name, known[name]) for name in _FACTS[part]]]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode("utf-8")).hexdigest()

    def _facts(self) -> dict[str, object]:
        recipe, fit = self.recipe, self.fit
        objective = recipe.objective
        texts = [_plain(config) for config in self.text_configs]
        # Of the texts only whether there is a negative one, and in "text_form" the length of the longest.
        weighted = bool(recipe.weighted_captions)
        prompts = [
            (
                p.width,
                p.height,
                p.sampler,
                p.steps,
                p.guidance,
                bool(p.negative),
                *(("weighted",) if _reads_weights(p) else ()),
            )
            for p in self.previews
        ]
        return {
            "unet": (self.family, _plain(self.unet_config)),
            "vae": _plain(self.vae_config),
            "texts": texts,
            "live_texts": texts if self.trained_texts else None,
            # Weights are only listed when they are on, as tiling below, and in the step only if it encodes captions.
            "texts_at_once": (text_batch_size(fit), "weighted") if self.reads_weights else text_batch_size(fit),
            "text_form": (
                *(recipe.token_chunks, recipe.clip_skip),
                *(("weighted",) if weighted and self.trained_texts else ()),
            ),
            "adapter": self._adapter_facts(),
            # "auto" uses flash attention; see trainer.memory.trace.cuda_kernels.attention_kernel.
            # Streaming is only listed when it is on, as tiling below.
            "precision": (
                *(fit.dtype, fit.quantize, "auto" if fit.attention == "flash" else fit.attention),
                *map(_product_facts, fit.products),
                *((("streaming", fit.stream),) if fit.is_streamed else ()),
            ),
            "checkpointing": fit.gradient_checkpointing,
            "masks": self.masks,
            "objective": (
                _objective_facts(objective),
                objective.input_perturbation > 0,
                self.prediction,
            ),
            "dtype": fit.dtype,
            "clipped": recipe.max_grad_norm > 0,
            # All but the first are only listed when they are on, as tiling below.
            "optimizer": _present(recipe.optimizer.model_dump(mode="json"))
            | _further_library(recipe.optimizer.library)
            | ({"lora_plus": True} if recipe.lora_plus_ratio else {})
            | ({"weight_norms": True} if recipe.max_weight_norm else {}),
            "averaged": recipe.optimizer.method.averages,
            # Tiling is only listed when it is on, so that the keys of shipped traces do not change.
            "vae_dtype": (fit.vae_dtype, "tiled") if fit.vae_encode_tiling else fit.vae_dtype,
            "decoding": (fit.vae_tiling, fit.preview_offload),
            "previews": (prompts, self.zero_terminal_snr, self.prediction),
            "buckets": sorted({bucket.size for bucket in self.buckets}),
            "micro_batch": fit.micro_batch,
            "validation": (sorted({bucket.size for bucket in self.validation_buckets}), self.validation_timesteps),
        }

    def _adapter_facts(self) -> object:
        recipe = self.recipe
        encoders = (recipe.text_encoder, recipe.text_encoder_2)
        return (
            (recipe.adapter, recipe.layers, recipe.rank, recipe.conv_rank, recipe.learning_rate > 0),
            [(encoder.rank, encoder.learning_rate > 0) for encoder in encoders],
            [share > 0 for share in (recipe.dropout, recipe.rank_dropout, recipe.module_dropout)],
            # Only listed if there are any, as tiling above.
            *((("lokr_factor", recipe.lokr_factor),) if recipe.lokr_factor else ()),
            *((("tlora_min_rank", recipe.tlora_min_rank),) if recipe.tlora_min_rank else ()),
            *((("ema", True),) if recipe.ema_decay else ()),
            *((("stopped", *recipe.stops),) if self.after_stops else ()),
            *(tuple(block.model_dump().values()) for block in recipe.blocks or ()),
        )


def lengths_of(workload: Workload) -> dict[int, int]:
    """Return the number of samples in the first epoch by the tokens that their captions are padded to."""
    counts: Counter[int] = Counter()
    for (_, _, tokens), bucket in zip(workload.shapes, workload.buckets, strict=True):
        counts[tokens] += bucket.images
    return {tokens: count for tokens, count in sorted(counts.items()) if count}


def learns_texts(recipe: RecipeConfig) -> bool:
    """Return whether a recipe trains a text encoder; if so, no texts are cached."""
    return recipe.text_encoder.learning_rate > 0 or recipe.text_encoder_2.learning_rate > 0


class SourceFacts(Protocol):
    """Properties of a base that a workload depends on, as provided by trainer.base.source.BaseSource.

    The planner implements it for bases that are not on this PC.
    """

    @property
    def unet_config(self) -> Config: ...  # noqa: D102 (as in BaseSource)
    @property
    def vae_config(self) -> Config: ...  # noqa: D102
    @property
    def text_configs(self) -> tuple[Config, ...]: ...  # noqa: D102

    family: Family
    prediction: Prediction
    zero_terminal_snr: bool


def workload_of_job(job: Job, source: SourceFacts, images: Sequence[ImageRecord]) -> Workload:
    """Return the workload of a job with a resolved recipe, from its base and images."""
    shown, lengths = _shown_shapes(job, images)
    held_out = Counter(image.bucket for image in images if image.kind == "validation")
    side = job.recipe.resolution
    prompts = job.report.previews.prompts
    return Workload(
        family=source.family,
        unet_config=source.unet_config,
        vae_config=source.vae_config,
        text_configs=source.text_configs,
        recipe=job.recipe,
        fit=complete_fit(job.fit),
        buckets=shown,
        prediction=source.prediction,
        zero_terminal_snr=source.zero_terminal_snr,
        masks=any(image.mask != "none" and image.kind != "validation" for image in images),
        previews=tuple(p.replaced(width=p.width or side, height=p.height or side) for p in prompts),
        validation=bool(held_out),
        validation_buckets=_uses(held_out),
        validation_timesteps=len(job.report.validation.timesteps),
        lengths=lengths,
        folder_resolutions=any(folder.resolutions for folder in job.dataset.folders),
    )


def _reads_weights(prompt: PromptConfig) -> bool:
    return bool(prompt.weights) and has_weights(prompt.prompt + prompt.negative)


def _shown_shapes(job: Job, images: Sequence[ImageRecord]) -> tuple[tuple[BucketUse, ...], TextLengths | None]:
    """Return the shapes to train in, and the lengths of other texts if captions differ in length.

    Shapes that occur only in later epochs count as well: one of them may need the most memory.
    """
    recipe = job.recipe
    trained = [image for image in images if image.kind != "validation"]
    if not recipe.has_caption_lengths:
        shown = Counter(image.bucket for image, _ in epoch_samples(images, 0))
        shown.update({image.bucket: 0 for image in trained})
        sizes = most_per_epoch(trained, lambda image: (image.bucket,))
        return tuple(replace(bucket, most=sizes[bucket.size]) for bucket in _uses(shown)), None
    of_image = {id(image): caption_lengths(image, recipe) for image in trained}
    shapes = Counter((*image.bucket, of_image[id(image)].usual) for image, _ in epoch_samples(images, 0))

    def possible(image: ImageRecord) -> set[Shape]:
        found = of_image[id(image)]
        return {(*image.bucket, tokens) for tokens in (found.shortest, found.usual, found.longest)}

    most = most_per_epoch(trained, possible)
    shapes.update(dict.fromkeys(most, 0))
    largest_first = sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape[:2], -shape[2]))
    validated = max((sample.tokens for sample in measured_samples(images, recipe)), default=CHUNK)
    prompts = [text for prompt in job.report.previews.prompts for text in prompt_texts(prompt, recipe)]
    previewed = max((padded_tokens(text, recipe) for text in prompts), default=CHUNK)
    encoded = max(validated, previewed, *(found.longest for found in of_image.values()), CHUNK)
    uses = tuple(BucketUse(*shape[:2], shapes[shape], shape[2], most[shape]) for shape in largest_first)
    return uses, TextLengths(encoded, validated, previewed)


def workload_without_base(
    family: Family, recipe: RecipeConfig, fit: FitConfig | None = None, buckets: Iterable[BucketUse] = ()
) -> Workload:
    """Return the workload of a recipe without base or images: published configs, one square bucket."""
    configs = bundled_configs(family)
    step = recipe.images.bucket_step
    side = (recipe.resolution or 0) // step * step
    if not side:
        raise ValueError("resolve the recipe's resolution before estimating its memory")
    return Workload(
        family=family,
        unet_config=configs["unet"],
        vae_config=configs["vae"],
        text_configs=tuple(configs[part] for part in PARTS[family] if part.startswith("text_encoder")),
        recipe=recipe,
        fit=complete_fit(fit or FitConfig()),
        buckets=tuple(buckets) or (BucketUse(side, side, 1),),
        validation=False,
    )


def complete_fit(fit: FitConfig) -> FitConfig:
    """Return the fit with unset keys that affect memory filled in from `OPEN_FIT`."""
    return fit.replaced(**{name: value for name, value in OPEN_FIT if getattr(fit, name) is None})


def merged(uses: Iterable[BucketUse]) -> tuple[BucketUse, ...]:
    """Return the uses with those of equal shapes added up, the largest shape first."""
    found: dict[tuple[int, int, int | None], BucketUse] = {}
    for use in uses:
        shape = *use.size, use.tokens
        before = found.get(shape, replace(use, images=0, most=0))
        most = None if use.most is None or before.most is None else before.most + use.most
        found[shape] = replace(use, images=before.images + use.images, most=most)
    return tuple(sorted(found.values(), key=lambda use: (-use.width * use.height, use.size, -(use.tokens or 0))))


def _uses(shown: Counter[tuple[int, int]]) -> tuple[BucketUse, ...]:
    largest_first = sorted(shown, key=lambda size: (-size[0] * size[1], size))
    return tuple(BucketUse(*size, shown[size]) for size in largest_first)


def _objective_facts(objective: ObjectiveConfig) -> dict[str, object]:
    """Return what the loss allocates depends on; later settings are only listed when they are used, for old keys."""
    facts: dict[str, object] = {
        "loss": objective.loss,
        "min_snr_gamma": objective.min_snr_gamma,
        "debiased": objective.debiased_estimation,
    }
    if objective.has_threshold and objective.huber_schedule in ("exponential", "snr"):
        facts["huber_schedule"] = objective.huber_schedule
    if objective.loss_mix is not None:
        facts["loss"] = [name for name, _ in objective.losses]
    weights = ("p2_gamma", "scale_v_pred_loss", "v_pred_like_loss", "prior_prediction")
    return _present(facts) | {name: True for name in weights if getattr(objective, name)}


def _plain(config: Config) -> dict[str, object]:
    """Return a config without entries that start with an underscore (its file, the version that wrote it)."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _product_facts(product: Int8LayerConfig) -> dict[str, int | None]:
    """Return the settings of int8 products under fixed keys, so that renaming an attribute does not change hashes."""
    return {
        "inputs": product.inputs,
        "outputs": product.outputs,
        "forward": product.forward,
        "backward": product.backward,
    }


def _present(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings with each float replaced by whether it is nonzero, because its value does not affect memory."""
    return {name: bool(value) if isinstance(value, float) else value for name, value in settings.items()}


@cache
def library_versions(libraries: Iterable[str] = LIBRARIES) -> tuple[str, ...]:
    """Return the versions of libraries without build suffixes such as +cpu, which do not affect meta tensors."""
    return tuple(version(library).partition("+")[0] for library in libraries)


def _further_library(name: str) -> dict[str, str]:
    """Return the version of an optimizer's library that the keys of all traces leave out.

    Its release makes only the traces of its own optimizers out of date.
    """
    return {} if name in LIBRARIES else {name: library_versions((name,))[0]}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request for the traces of one part of a workload; ``more`` is as in ``Workload.key``.

    A micro-batch may be requested by shape (width, height, tokens): it is then that of a workload whose captions are
    all padded to these tokens, so that jobs with other lengths and limits share its traces.
    """

    workload: Workload
    part: TracePart
    more: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        """Leave out what the part does not depend on."""
        workload, more = self.workload.of_part(self.part), self.more
        if self.part == "micro" and len(more[0]) > 2:
            (*size, tokens), images = more
            workload, more = workload.at_tokens(tokens), (tuple(size), images)
        object.__setattr__(self, "workload", workload)
        object.__setattr__(self, "more", more)

    @property
    def key(self) -> str:
        """Return the key of the traces."""
        return self.workload.key(self.part, *self.more)


def sizes_of_parts(count: int, most: int) -> list[int]:
    """Return the sizes of the parts when ``count`` items are processed ``most`` at a time."""
    return [min(most, count - done) for done in range(0, count, most)]
