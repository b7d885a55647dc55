"""What a preset is: a recipe, a fit, or both, with who made it, for which base, and how it may look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.model import Section
from trainer.config.recipe import RecipeConfig
from trainer.config.report import PromptConfig

SCHEMA = 1
LONGEST_NAME = 80
RECIPE_KEY = "impasto_recipe"
"""The key in a LoRA's metadata under which Impasto's own files hold their whole recipe as JSON."""

# What of a fit belongs to one machine and would be wrong, or reveal something, on another.
MACHINE_KEYS = ("device", "threads", "cache_gigabytes", "int8_products")

TriggerWord = Annotated[str, Field(min_length=1, max_length=100)]


class PresetBaseConfig(Section):
    """The base that the recipe was made for."""

    family: Family
    """Which architecture it is for; a recipe for one suits no other."""
    name: str = Field(default="", max_length=200, examples=["model.safetensors"])
    """The base's file name or Hub id, without folders."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", examples=["64 digits of 0-9 and a-f"])
    """SHA-256 of the base's file, by which others can tell whether theirs is the same; of a diffusers folder that of
    what `sha256sum text_encoder*/*.safetensors unet/*.safetensors` prints in it."""


class ExampleConfig(PromptConfig):
    """A prompt that shows what the preset's LoRA does."""

    prompt: str = Field(min_length=1, max_length=2000)
    """What the picture shows, trigger words included."""
    negative: str = Field(default="", max_length=2000)
    """What the picture should not show (negative prompt)."""


class CardConfig(Section):
    """The graphics card that the fit was made for."""

    gigabytes: float = Field(gt=0.0, le=1024.0)
    """Its memory as it is sold, such as 8 or 12."""
    name: str = Field(default="", max_length=100)
    """Its name; empty: any card of that size."""
    bf16: bool | None = None
    """Whether it computes in bf16; NVIDIA's cards do since the RTX 3000 series."""


class PictureFileConfig(Section):
    """A small picture that shows the result."""

    picture: str
    """A PNG, JPEG or WebP file in base64."""


class Preset(Section):
    """A file that carries a recipe, a fit, or both from artist to artist."""

    schema_version: int = Field(alias="schema", ge=1, le=SCHEMA)
    """The version of this file's form."""
    name: str = Field(min_length=1, max_length=LONGEST_NAME, examples=["soft-gouache"])
    """What the preset is called; it also becomes its file's name."""
    author: str = Field(default="", max_length=100)
    """Who made it."""
    licence: str = Field(default="", max_length=200)
    """Under which licence it may be used."""
    notes: str = Field(default="", max_length=4000)
    """What it is good for, and what to mind."""
    trigger_words: tuple[TriggerWord, ...] = Field(default=(), strict=False, max_length=20)
    """The words that called up what was learned."""
    base: PresetBaseConfig
    """The base that the recipe was made for."""
    recipe: RecipeConfig | None = None
    """What is learned and how; keys that are absent stay as the job has them."""
    fit: FitConfig | None = None
    """How it was made to fit one card; another card is planned for anew."""
    card: CardConfig | None = None
    """The graphics card that the fit was made for."""
    examples: tuple[ExampleConfig, ...] = Field(default=(), strict=False, max_length=8)
    """Prompts that show what it does."""
    preview: PictureFileConfig | None = None
    """A small picture that shows the result."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Something to carry, nothing that belongs to one machine, and a card only beside a fit."""
        if not any(part is not None and part.model_fields_set for part in (self.recipe, self.fit)):
            yield "recipe", "is missing or empty, and so is fit: the preset carries nothing"
        for key in MACHINE_KEYS:
            if self.fit is not None and key in self.fit.model_fields_set:
                yield f"fit.{key}", "belongs to one machine and cannot travel in a preset; leave it out"
        if self.card is not None and self.fit is None:
            yield "card", "tells what a fit was made for, but there is no fit"
