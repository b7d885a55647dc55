"""The job: base, dataset, recipe, fit, report and output in one TOML file; folders may overlay the recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field, create_model

from trainer.config.base import BaseConfig, Part
from trainer.config.fit import FallbackStep, FitConfig
from trainer.config.methods import Sampler
from trainer.config.recipe import LENGTH_KEYS, CaptionConfig, ImagesConfig, RecipeConfig
from trainer.config.schema import LONGEST_HELP, Section
from trainer.protocol.files import LONGEST_NAME

Text = Annotated[str, Field(min_length=1)]
HeldOut = Annotated[float, Field(ge=0.0, le=0.5)]
Lines = Literal["caption", "variants"]
Masks = Literal["auto", "files", "alpha", "none"]
CaptionSource = Annotated[
    str,
    Field(pattern=r"^(\.[A-Za-z0-9_-]{1,20}|metadata|filename)$", examples=[".txt", "metadata", "filename"]),
]
Timestep = Annotated[int, Field(ge=0, le=999)]
Resolution = Annotated[int, Field(ge=64, le=4096, multiple_of=8)]
TIMESTEP_LIMITS = ("timestep_min", "timestep_max")
SCHEMA = 3
_STATED_WEIGHT = re.compile(r"\([^()]*:[+-]?\d*\.\d+\)")
_AS_IN_RECIPE = "; default: as in the recipe."
_Table = TypeVar("_Table", bound=Section)
_Kind = TypeVar("_Kind", bound=type[Section])


def _overlay_of(table: type[Section], names: Container[str]) -> Callable[[_Kind], _Kind]:
    """Return a class decorator that adds the keys ``names`` of ``table``, a table of the recipe.

    All are None by default. They are read from the schema, so that type, limits, label and help are stated once.
    """

    def extend(kind: _Kind) -> _Kind:
        added: dict[str, Any] = {}
        for name, field in table.model_fields.items():
            if name in names:
                doc = _folder_help(field.description or "")
                added[name] = field.annotation | None, Field(default=None, title=field.title, description=doc)  # type: ignore[operator]
                added[name][1].metadata = list(field.metadata)
        made = create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **added)
        return cast("_Kind", made)

    return extend


def _folder_help(doc: str) -> str:
    """Return the help of a recipe key for the same key of a folder, which has another default.

    What follows the first semicolon describes the recipe's default or a usual value of it, so it is left out. So are
    names in parentheses if the help would otherwise be longer than a tooltip's line.
    """
    summary = doc.removesuffix(".").partition(";")[0]
    if len(summary + _AS_IN_RECIPE) > LONGEST_HELP:
        summary = summary.partition(" (")[0]
    return summary + _AS_IN_RECIPE


# Forecasts take it for a setting of whole epochs; every other caption key is also one of each folder.
_OF_ALL_FOLDERS = {"dropout_every_epochs"}


@_overlay_of(CaptionConfig, CaptionConfig.model_fields.keys() - _OF_ALL_FOLDERS)
class CaptionOverlay(Section):
    """Caption settings of one folder; None for those of the recipe."""


@_overlay_of(ImagesConfig, ("crop", "flip", "rotation", "color_jitter"))
class ImagesOverlay(Section):
    """Random changes of images in one folder; None for the recipe's settings."""


class RecipeOverlay(Section):
    """The recipe settings of one folder, as they are kept with each of its images in a run's frozen listing."""

    captions: CaptionOverlay | None = None
    images: ImagesOverlay | None = None
    timestep_min: Timestep | None = None
    timestep_max: Timestep | None = None
    resolution: int | None = None
    """The resolution of this record; an image of a folder with several has one record for each."""

    def applied_to(self, recipe: RecipeConfig) -> RecipeConfig:
        """Return the recipe with this folder's settings.

        The values have been validated, but rules between keys may be broken: see `broken_rules`.
        """
        limits = {key: value for key in TIMESTEP_LIMITS if (value := getattr(self, key)) is not None}
        return recipe.model_copy(
            update={
                "captions": _overlaid(recipe.captions, self.captions),
                "images": _overlaid(recipe.images, self.images),
                "resolution": self.resolution or recipe.resolution,
                "objective": recipe.objective.model_copy(update=limits) if limits else recipe.objective,
            }
        )

    def broken_rules(self, recipe: RecipeConfig) -> Iterator[tuple[str, str]]:
        """Yield (key in the folder's table, reason) for each rule that the recipe breaks with these settings."""
        applied = self.applied_to(recipe)
        for table in ("captions", "images"):
            section: Section = getattr(applied, table)
            yield from ((f"{table}.{key}", reason) for key, reason in section.rules())
        yield from ((key, reason) for key, reason in applied.objective.rules() if key in TIMESTEP_LIMITS)

    def stated(self) -> dict[str, Any]:
        """Return the settings that differ from the recipe, as JSON data."""
        return {key: value for key, value in self.model_dump(mode="json", exclude_none=True).items() if value != {}}


def _overlaid(table: _Table, overlay: Section | None) -> _Table:
    """Return a table of the recipe with the values that an overlay sets."""
    if overlay is None:
        return table
    return table.model_copy(update={name: value for name, value in overlay if value is not None})


class FolderConfig(Section):
    """One folder of images."""

    path: Text
    """Folder, relative to the job file."""
    kind: Literal["train", "regularization", "validation"] = Field(default="train", title="Used for")
    """Used for training, regularization (keeps what the base knows about the class), or validation loss only."""
    repeats: int | None = Field(default=None, ge=1, le=10_000)
    """Repeats per epoch (kohya: num_repeats); default: from impasto.jsonl, a folder name such as 10_cat, or 1."""
    recursive: bool = Field(default=False, title="Include subfolders")
    """Include images in subfolders."""
    trigger: str | None = Field(default=None, title="Trigger word")
    """Trigger word, added to the front of captions that do not contain it; default: from impasto.jsonl."""
    class_words: str | None = None
    """Caption for images that have none (kohya: class_tokens); default: from a folder name such as 10_cat."""
    weight: float = Field(default=1.0, ge=0.0, le=100.0, title="Loss weight")
    """Loss weight of these images (OneTrainer: loss weight)."""
    lines: Lines | None = Field(default=None, title="Caption lines")
    """Lines of a caption file: caption joins them, variants uses a random one each time; default: as in the dataset."""
    caption_sources: tuple[CaptionSource, ...] | None = Field(default=None, strict=False, min_length=1, max_length=10)
    """Where captions come from, in order: extensions, metadata, filename; default: as in the dataset."""
    masks: Masks | None = None
    """Masks: auto and files read NAME-masklabel.png, alpha uses transparency; default: as in the dataset."""
    mask_folder: Text | None = None
    """Folder of masks that are named like their images (kohya: conditioning_data_dir); default: beside the images."""
    resolutions: tuple[Resolution, ...] | None = Field(default=None, strict=False, min_length=1, max_length=8)
    """Resolutions of these images; with several, an epoch has each image at each of them; default: as in the recipe."""
    timestep_min: int | None = Field(default=None, ge=0, le=999, title="Min timestep")
    """Lowest timestep for these images (kohya: min_timestep), 0 is the least noise; default: as in the recipe."""
    timestep_max: int | None = Field(default=None, ge=0, le=999, title="Max timestep")
    """Highest timestep for these images, 999 is the most noise; default: as in the recipe."""
    captions: CaptionOverlay | None = None
    """Caption settings that differ from the recipe's for this folder's images."""
    images: ImagesOverlay | None = None
    """Random changes that differ from the recipe's for this folder's images."""

    @property
    def overlays(self) -> tuple[RecipeOverlay | None, ...]:
        """Return the settings that differ from the recipe's, for each resolution; None if none differs."""
        overlays = (
            RecipeOverlay(
                captions=self.captions,
                images=self.images,
                timestep_min=self.timestep_min,
                timestep_max=self.timestep_max,
                resolution=resolution,
            )
            for resolution in self.resolutions or (None,)
        )
        return tuple(overlay if overlay.stated() else None for overlay in overlays)

    def recipe_from(self, recipe: RecipeConfig) -> RecipeConfig:
        """Return the recipe of this folder's images in a job with this recipe, at the first of its resolutions."""
        overlay = self.overlays[0]
        return overlay.applied_to(recipe) if overlay else recipe

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a resolution that is listed twice."""
        sides = self.resolutions or ()
        if len(set(sides)) < len(sides):
            yield "resolutions", "has the same resolution twice; use repeats to train on it more often"


class DatasetConfig(Section):
    """The images and captions to train on."""

    folders: tuple[FolderConfig, ...] = Field(min_length=1, strict=False)
    """The dataset's folders."""
    lines: Lines = Field(default="caption", title="Caption lines")
    """Lines of a caption file: caption joins them, variants uses a random line each time (as in OneTrainer)."""
    caption_sources: tuple[CaptionSource, ...] | None = Field(default=None, strict=False, min_length=1, max_length=10)
    """Tried in order: extensions, metadata, filename (kohya: caption_extension); default: .txt, .caption, metadata."""
    background: str = Field(default="#ffffff", pattern=r"^#[0-9a-fA-F]{6}$", examples=["#ffffff"])
    """Color behind transparent images."""
    masks: Masks = "auto"
    """Source of masks: auto and files read NAME-masklabel.png, alpha uses transparency (kohya: alpha_mask)."""
    linked_folders: tuple[Text, ...] = Field(default=(), strict=False)
    """Folders outside the dataset that its symbolic links may point to; other links are not followed."""
    max_megapixels: float = Field(default=100.0, gt=0.0, le=1000.0)
    """Larger images are refused, so that a broken or malicious file cannot fill up memory."""
    validation_share: HeldOut | Literal["auto"] = "auto"
    """Share of images held out for validation loss (kohya: validation_split); auto: 0.05, none below 40 images."""

    @property
    def has_regularization(self) -> bool:
        """Return whether any folder contains regularization images."""
        return any(folder.kind == "regularization" for folder in self.folders)

    def sides(self, recipe: RecipeConfig) -> set[int]:
        """Return all resolutions of a job with this recipe, whose resolution is resolved."""
        own = {folder.resolutions or (recipe.resolution,) for folder in self.folders}
        return {side for sides in own for side in sides if side is not None}

    def lines_of(self, folder: FolderConfig) -> Lines:
        """Return how the lines of a folder's caption files are read."""
        return folder.lines or self.lines

    def caption_sources_of(self, folder: FolderConfig) -> tuple[str, ...] | None:
        """Return where the captions of a folder's images come from; None for the usual places."""
        return folder.caption_sources or self.caption_sources

    def masks_of(self, folder: FolderConfig) -> Masks:
        """Return where the masks of a folder's images come from."""
        return folder.masks or self.masks

    def has_mask_files(self, folder: FolderConfig) -> bool:
        """Return whether masks of a folder's images are read from files."""
        return self.masks_of(folder) in ("auto", "files")

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for folders that are listed twice, and for a dataset without a training folder."""
        first: dict[str, int] = {}
        for number, folder in enumerate(self.folders):
            where = _normalized(folder.path)
            if folder.mask_folder and _normalized(folder.mask_folder) == where:
                yield f"folders.{number}.mask_folder", "is the folder of the images; masks need a folder of their own"
            if where in first:
                yield (
                    f"folders.{number}.path",
                    f"is the same folder as folders.{first[where]}; use repeats to train on it more often",
                )
            first.setdefault(where, number)
        if all(folder.kind != "train" for folder in self.folders):
            yield "folders", 'has no folder of kind "train", so there is nothing to train on'


def _normalized(path: str) -> str:
    return os.path.normcase(os.path.normpath(path))


class OutputConfig(Section):
    """Where the LoRA is saved, and in which formats."""

    runs: str = Field(default="runs", title="Runs folder")
    """Folder for run directories, relative to the job file (kohya: output_dir)."""
    dtype: Literal["fp16", "bf16", "fp32"] = Field(default="fp16", title="Save precision")
    """Precision of the LoRA file (kohya: save_precision); fp16 loads everywhere."""
    diffusers: bool = Field(default=False, title="Also save for diffusers")
    """Save a second file with diffusers key names."""
    author: str = ""
    """Author name in the LoRA's metadata."""
    license: str = Field(default="", title="License")
    """License in the LoRA's metadata."""
    description: str = ""
    """Description in the LoRA's metadata."""
    tag_frequency: bool = False
    """Store how often each tag was trained (ss_tag_frequency); reveals your captions."""


def stated_weight(text: str) -> str | None:
    """Return the first part of a text that states a weight, such as "(tag:1.3)"; None if there is none."""
    found = _STATED_WEIGHT.search(text)
    return found[0] if found else None


class PromptConfig(Section):
    """One image rendered repeatedly during the run to show progress."""

    prompt: str = Field(max_length=10_000)
    """Prompt of the preview image."""
    negative: str = Field(default="", title="Negative prompt")
    """Negative prompt: what the image should not show."""
    width: int | None = Field(default=None, ge=64, le=4096, multiple_of=8)
    """Width in pixels; default: the recipe's resolution."""
    height: int | None = Field(default=None, ge=64, le=4096, multiple_of=8)
    """Height in pixels; default: the recipe's resolution."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Seed of the preview's noise."""
    steps: int = Field(default=20, ge=1, le=1000)
    """Number of denoising steps; typically 20 to 30."""
    guidance: float = Field(default=7.0, ge=0.0, le=100.0, title="CFG scale")
    """How strongly the prompt is followed (CFG scale); typically 5 to 8."""
    sampler: Sampler = "euler"
    """Sampler; euler is a safe choice, euler_a and sde add noise, heun takes twice as long, lcm is for LCM bases."""
    weights: bool | None = Field(default=None, title="Prompt weights")
    """Read (tag:1.3), (tag) and [tag] as weights, unless after a backslash; default: as recipe.weighted_captions."""

    @property
    def evaluations(self) -> int:
        """Number of timesteps at which the UNet is evaluated: Heun takes two per step, but for the last."""
        return 2 * self.steps - 1 if self.sampler == "heun" else self.steps


class PreviewConfig(Section):
    """Preview images rendered during the run."""

    every: int | None = Field(default=None, ge=1, title="Preview every N steps")
    """Steps between previews (kohya: sample_every_n_steps); default: five times per run."""
    every_epochs: int | None = Field(default=None, ge=1, title="Preview every N epochs")
    """Epochs between previews (kohya: sample_every_n_epochs)."""
    first: bool | None = Field(default=None, title="Preview before training")
    """Also preview before the first step, to compare with (kohya: sample_at_first); default: true."""
    max_share: float | None = Field(default=None, gt=0, lt=1, title="Largest share of the time")
    """Skip previews that would take more than this share of the run's time, except the last ones; default: off."""
    prompts: tuple[PromptConfig, ...] = Field(default=(), strict=False)
    """Preview prompts; none: no previews."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error when previews are rendered both every N steps and every N epochs."""
        if self.every is not None and self.every_epochs is not None:
            yield "every", "is set, and so is every_epochs: set only one of them"


class ValidationConfig(Section):
    """Validation loss, measured with fixed noise on images that are not trained on."""

    every: int | None = Field(default=None, ge=1, title="Validate every N steps")
    """Steps between validations (kohya: validate_every_n_steps); default: ten times per run."""
    timesteps: tuple[Timestep, ...] = Field(
        default=(100, 300, 500, 700, 900), strict=False, min_length=1, max_length=50
    )
    """Timesteps at which the validation loss is measured."""
    patience: int | None = Field(default=None, ge=1, le=1000, title="Early stopping patience")
    """Stop after this many validations in a row without a lower loss; default: train all steps."""


class SavingConfig(Section):
    """LoRA files saved during the run, and checkpoints to resume from."""

    every_steps: int | None = Field(default=None, ge=1, title="Save every N steps")
    """Steps between LoRA files (kohya: save_every_n_steps); default: ten files per run."""
    every_epochs: int | None = Field(default=None, ge=1, title="Save every N epochs")
    """Epochs between LoRA files (kohya: save_every_n_epochs)."""
    keep: int | None = Field(default=None, ge=1, title="Keep last N files")
    """Number of newest LoRA files to keep during the run (kohya: save_last_n_steps); default: all."""
    checkpoint_every: int | None = Field(default=None, ge=1, title="Checkpoint every N steps")
    """Steps between checkpoints to resume from (kohya: save_state); default: as between LoRA files, but at most 500."""
    checkpoint_keep: int = Field(default=2, ge=1, le=1000, title="Keep last N checkpoints")
    """Number of newest checkpoints to keep."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error when LoRA files are saved both every N steps and every N epochs."""
        if self.every_steps is not None and self.every_epochs is not None:
            yield "every_steps", "is set, and so is every_epochs: set only one of them"


class ReportConfig(Section):
    """What a run shows and saves."""

    previews: PreviewConfig = PreviewConfig()
    """Preview images rendered during the run."""
    validation: ValidationConfig = ValidationConfig()
    """Validation loss on held-out images."""
    saving: SavingConfig = SavingConfig()
    """LoRA files and checkpoints."""
    tensorboard: bool = Field(default=False, title="TensorBoard")
    """Also write TensorBoard logs (kohya: log_with)."""
    max_skipped: int = Field(default=20, ge=1, title="Max skipped steps")
    """Consecutive optimizer steps that may be skipped for non-finite gradients before the run fails."""


ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "recipe": LENGTH_KEYS,
    "report.previews": ("every", "every_epochs"),
    "report.saving": ("every_steps", "every_epochs"),
}
"""By table, keys of which only one can be set: setting one on the command line or in the form removes the others."""


class Job(Section):
    """Everything that one training run needs."""

    schema_version: int = Field(default=SCHEMA, alias="schema", ge=1, le=SCHEMA)
    """File format version."""
    name: str = Field(
        min_length=1,
        max_length=LONGEST_NAME,
        pattern=r"^[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\s.][^\x00-\x1f\x7f]*$",
        examples=["my-style"],
    )
    """The name of the LoRA and of its run (kohya: output_name)."""
    preset: str | None = Field(default=None, pattern=r"^(sd15|sdxl)/.{1,80}$", examples=["sdxl/character"])
    """Preset that the recipe came from; for information only."""
    base: BaseConfig
    """The base model."""
    dataset: DatasetConfig
    """The images and captions."""
    recipe: RecipeConfig = RecipeConfig()
    """What the LoRA learns and how."""
    fit: FitConfig = FitConfig()
    """How the job runs on this machine."""
    fallbacks: tuple[FallbackStep, ...] = Field(default=(), strict=False)
    """Fallback steps in order, one for each time memory runs out; written by the planner into a run's frozen job."""
    report: ReportConfig = ReportConfig()
    """Previews, validation, saving and logging."""
    output: OutputConfig = OutputConfig()
    """Where the LoRA is saved."""

    @property
    def stated_fit(self) -> FitConfig:
        """Return the fit as written, with what the recipe rules out: the planner chooses the rest."""
        if self.fit.stream is None and self.recipe.needs_whole_base:
            return self.fit.replaced(stream="none")
        return self.fit

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for a streamed base that the adapter has to measure, and for folders that break a rule."""
        if self.fit.is_streamed and self.recipe.needs_whole_base:
            kind = self.recipe.adapter
            yield "fit.stream", f'cannot be used with recipe.adapter = "{kind}", which measures all base weights'
        for number, folder in enumerate(self.dataset.folders):
            overlay = folder.overlays[0]
            for key, reason in overlay.broken_rules(self.recipe) if overlay else ():
                yield f"dataset.folders.{number}.{key}", reason


def learning_rates(job: Job) -> dict[Part, float]:
    """Return the learning rate of each trained part, leaving out parts with rate 0."""
    encoders = {part: encoder.learning_rate for part, encoder in job.recipe.text_encoders.items()}
    rates: dict[Part, float] = {"unet": job.recipe.learning_rate, **encoders}
    return {part: rate for part, rate in rates.items() if rate > 0}


def trains_text_encoder(job: Job) -> bool:
    """Return whether text encoders are trained; if so, captions are encoded in each step instead of cached."""
    return any(part != "unet" for part in learning_rates(job))
