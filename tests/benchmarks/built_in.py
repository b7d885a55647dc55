"""The plans that shipped traces and fit presets cover: built-in recipes on typical GPUs, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from trainer.cli.jobs import preset_recipe
from trainer.config.base import Family
from trainer.memory.device.calibration import Correction
from trainer.memory.device.device_state import state_of_listed_gpu
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.planner.request import PlanRequest, request_without_job

FAMILIES: tuple[Family, ...] = get_args(Family)
RECIPES = ("character", "concept", "likeness", "style")
GIGABYTES = (4, 6, 8, 10, 12, 16, 24, 32)
# From other generations than the typical GPUs of their sizes: with other dtypes or library workspaces.
OTHER_GENERATIONS = ("RTX 2080", "RTX 2080 Ti", "RTX 5060", "RTX 5070", "RTX 5080")
SYSTEMS = ("Windows", "Linux")
# Changes to SDXL's recipe of this name that are common and change every trace of a step.
CHANGED_RECIPE = "style"
COMMON_CHANGES: dict[str, tuple[str, ...]] = {
    "all-layers": ('recipe.layers="all"',),
    "text-encoder": ("recipe.text_encoder.learning_rate=5e-5",),
}


def built_in(family: Family, recipe: str, card: str, system: str, change: str | None = None) -> PlanRequest:
    """Return the request for a recipe on a GPU as `--gpu` names it, without corrections from runs on this machine.

    ``change`` names one of `COMMON_CHANGES`.
    """
    overrides = COMMON_CHANGES[change] if change else ()
    question = request_without_job(family, preset_recipe(recipe, family), card, recipe, overrides=overrides)
    device_state = state_of_listed_gpu(find_gpu(card), system=system)
    return replace(question, device_state=replace(device_state, correction=Correction()))


def all_built_in() -> Iterator[PlanRequest]:
    """Yield every family, recipe, GPU and system, those with most traces in common one after the other."""
    cards = (*(f"{size}GB" for size in GIGABYTES), *OTHER_GENERATIONS)
    for family in FAMILIES:
        for recipe in RECIPES:
            for card in cards:
                for system in SYSTEMS:
                    yield built_in(family, recipe, card, system)


def changed_built_in(change: str) -> Iterator[PlanRequest]:
    """Yield SDXL's changed recipe on GPUs with bf16."""
    for card in (f"{size}GB" for size in GIGABYTES):
        if find_gpu(card).bf16:
            for system in SYSTEMS:
                yield built_in("sdxl", CHANGED_RECIPE, card, system, change)
