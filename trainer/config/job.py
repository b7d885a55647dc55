"""A job: base, dataset, recipe, fit, report and output in one TOML file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.base import BaseConfig
from trainer.config.fit import FallbackStep, FitConfig
from trainer.config.recipe import RecipeConfig
from trainer.config.schema import Section
from trainer.protocol.files import LONGEST_NAME

Text = Annotated[str, Field(min_length=1)]
HeldOut = Annotated[float, Field(ge=0.0, le=0.5)]
SCHEMA = 2


class FolderConfig(Section):
    """One folder of pictures."""

    path: Text
    """The folder, relative to the job file."""
    kind: Literal["train", "regularisation", "validation"] = "train"
    """What the pictures are for: learning, keeping the base's idea of the class (regularisation), or measuring only."""
    repeats: int | None = Field(default=None, ge=1, le=10_000)
    """How often each picture is shown per epoch; absent: from impasto.jsonl, a folder name such as 10_cat, or 1."""
    recursive: bool = False
    """Whether pictures in subfolders belong to it too."""
    trigger: str | None = None
    """The word that calls up what is learned, put first unless the caption holds it; absent: from impasto.jsonl."""
    class_words: str | None = None
    """The text used where a picture has no caption; absent: from a folder name such as 10_cat."""
    weight: float = Field(default=1.0, ge=0.0, le=100.0)
    """How much each of these pictures counts in the loss."""


class DatasetConfig(Section):
    """The pictures and captions to learn from."""

    folders: tuple[FolderConfig, ...] = Field(min_length=1, strict=False)
    """The folders that make up the dataset."""
    lines: Literal["caption", "variants"] = "caption"
    """Whether the lines of a caption file make one caption, or each line is an alternative."""
    background: str = Field(default="#ffffff", pattern=r"^#[0-9a-fA-F]{6}$", examples=["#ffffff"])
    """The colour put behind transparent pictures."""
    masks: Literal["auto", "files", "alpha", "none"] = "auto"
    """Where masks come from: auto and files read NAME-masklabel.png, alpha the transparency of images, none nothing."""
    linked_folders: tuple[Text, ...] = Field(default=(), strict=False)
    """Other folders that symbolic links in the dataset may lead to; links to anywhere else are not followed."""
    max_megapixels: float = Field(default=100.0, gt=0.0, le=1000.0)
    """Larger pictures are refused, so that a hostile or broken file cannot fill the memory."""
    validation_share: HeldOut | Literal["auto"] = "auto"
    """Share of pictures (0 to 0.5) held out to measure progress; auto: none below 40 pictures, else 0.05."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Each folder once, and at least one to learn from."""
        first: dict[str, int] = {}
        for number, folder in enumerate(self.folders):
            where = os.path.normcase(os.path.normpath(folder.path))
            if where in first:
                yield (
                    f"folders.{number}.path",
                    f"is the same folder as folders.{first[where]}; use repeats to show it more often",
                )
            first.setdefault(where, number)
        if all(folder.kind != "train" for folder in self.folders):
            yield "folders", 'holds no folder of kind "train", so there is nothing to learn from'


class OutputConfig(Section):
    """Where the LoRA goes and in which forms."""

    runs: str = "runs"
    """The folder that holds the run directories, relative to the job file."""
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    """The number format of the LoRA file; fp16 loads everywhere."""
    diffusers: bool = False
    """Whether a second file in diffusers naming is written as well."""
    author: str = ""
    """Your name, for the file's metadata."""
    licence: str = ""
    """The licence of the LoRA, for the file's metadata."""
    description: str = ""
    """What the LoRA does, for the file's metadata."""
    tag_frequency: bool = Field(default=False)
    """Whether the file tells how often each tag was trained; it reveals your captions."""


Timestep = Annotated[int, Field(ge=0, le=999)]


class PromptConfig(Section):
    """One picture that is drawn again and again to show progress."""

    prompt: str = Field(max_length=10_000)
    """What the picture shows, as you would prompt it."""
    negative: str = ""
    """What the picture should not show (negative prompt)."""
    width: int | None = Field(default=None, ge=64, le=4096, multiple_of=8)
    """Width in pixels; absent: the recipe's resolution."""
    height: int | None = Field(default=None, ge=64, le=4096, multiple_of=8)
    """Height in pixels; absent: the recipe's resolution."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """The number its noise comes from."""
    steps: int = Field(default=20, ge=1, le=1000)
    """How many denoising steps."""
    guidance: float = Field(default=7.0, ge=0.0, le=100.0)
    """How strictly the prompt is followed (CFG scale)."""
    sampler: Literal["euler", "euler_a", "ddim", "dpmpp_2m", "unipc"] = "euler"
    """The rule by which noise becomes a picture; euler is dependable, euler_a adds noise of its own."""


class PreviewConfig(Section):
    """Pictures drawn during the run, the first at step 0 as the baseline."""

    every: int | None = Field(default=None, ge=1)
    """Draw every so many steps; absent: five times over the run."""
    prompts: tuple[PromptConfig, ...] = Field(default=(), strict=False)
    """What to draw; empty: no previews."""


class ValidationConfig(Section):
    """Loss on pictures that are not trained on, at fixed noise."""

    every: int | None = Field(default=None, ge=1)
    """Measure every so many steps; absent: ten times over the run."""
    timesteps: tuple[Timestep, ...] = Field(
        default=(100, 300, 500, 700, 900), strict=False, min_length=1, max_length=50
    )
    """The noise strengths at which it is measured."""


class SavingConfig(Section):
    """LoRA files written during the run, and resumable checkpoints."""

    every_steps: int | None = Field(default=None, ge=1)
    """Write a LoRA file every so many steps; absent: ten spread over the run."""
    every_epochs: int | None = Field(default=None, ge=1)
    """Write a LoRA file every so many epochs."""
    keep: int | None = Field(default=None, ge=1)
    """How many of the LoRA files written during the run to keep, the newest; absent: all."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Write a resumable checkpoint every so many steps; absent: as LoRA files, but at least every 500."""
    checkpoint_keep: int = Field(default=2, ge=1, le=1000)
    """How many resumable checkpoints to keep."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """One rhythm for LoRA files."""
        if self.every_steps is not None and self.every_epochs is not None:
            yield "every_steps", "says how often LoRA files are written, and so does every_epochs; keep one of them"


class ReportConfig(Section):
    """What a run shows and keeps."""

    previews: PreviewConfig = PreviewConfig()
    """Pictures drawn during the run."""
    validation: ValidationConfig = ValidationConfig()
    """Loss on held-out pictures."""
    saving: SavingConfig = SavingConfig()
    """LoRA files and checkpoints."""
    tensorboard: bool = False
    """Whether curves are also written for TensorBoard."""
    max_skipped: int = Field(default=20, ge=1)
    """How many optimizer steps in a row may be skipped for non-finite gradients before the run ends."""


class Job(Section):
    """Everything one training needs."""

    schema_version: int = Field(default=SCHEMA, alias="schema", ge=1, le=SCHEMA)
    """File format version."""
    name: str = Field(
        min_length=1,
        max_length=LONGEST_NAME,
        pattern=r"^[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\s.][^\x00-\x1f\x7f]*$",
        examples=["my-style"],
    )
    """The name of the LoRA and of its run."""
    preset: str | None = Field(default=None, pattern=r"^(sd15|sdxl)/.{1,80}$", examples=["sdxl/character"])
    """The preset that the recipe was taken from; a note, which changes nothing."""
    base: BaseConfig
    """The model that is adapted."""
    dataset: DatasetConfig
    """The pictures and captions."""
    recipe: RecipeConfig = RecipeConfig()
    """What is learned and how."""
    fit: FitConfig = FitConfig()
    """How it is made to fit this machine."""
    ladder: tuple[FallbackStep, ...] = Field(default=(), strict=False)
    """Written by the planner into a run's frozen job: what changes, in order, each time memory runs out."""
    report: ReportConfig = ReportConfig()
    """What is shown and kept."""
    output: OutputConfig = OutputConfig()
    """Where the result goes."""


def learning_rates(job: Job) -> dict[str, float]:
    """The learning rate of every part that is trained; parts with rate 0 are left out."""
    recipe = job.recipe
    rates = {
        "unet": recipe.learning_rate,
        "text_encoder": recipe.text_encoder.learning_rate,
        "text_encoder_2": recipe.text_encoder_2.learning_rate,
    }
    return {part: rate for part, rate in rates.items() if rate > 0}


def live_text(job: Job) -> bool:
    """Whether text encoders are trained, so that captions are encoded in the step and not cached."""
    return any(part != "unet" for part in learning_rates(job))
