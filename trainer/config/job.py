"""A job: base, dataset, recipe, fit, report and output in one TOML file."""

from __future__ import annotations

from pydantic import Field

from trainer.config.base import BaseConfig
from trainer.config.dataset import DatasetConfig
from trainer.config.fit import FitConfig
from trainer.config.ladder import RungConfig
from trainer.config.model import Section
from trainer.config.output import OutputConfig
from trainer.config.recipe import RecipeConfig
from trainer.config.report import ReportConfig
from trainer.protocol.files import LONGEST_NAME

SCHEMA = 2


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
    ladder: tuple[RungConfig, ...] = Field(default=(), strict=False)
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
