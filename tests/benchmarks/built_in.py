"""What shipped traces and fit presets answer: built-in recipes on typical cards, the same on every machine."""

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
GIGABYTES = (6, 8, 10, 12, 16, 24, 32)
# Of other generations than the typical cards of their sizes: with other number formats or workspaces of libraries.
OTHER_GENERATIONS = ("RTX 2080", "RTX 2080 Ti", "RTX 5060", "RTX 5070", "RTX 5080")
SYSTEMS = ("Windows", "Linux")


def built_in(family: Family, recipe: str, card: str, system: str) -> PlanRequest:
    """A recipe on a card as `--gpu` names it, without what runs on this machine have taught."""
    question = request_without_job(family, preset_recipe(recipe, family), card, recipe)
    situation = state_of_listed_gpu(find_gpu(card), system=system)
    return replace(question, device_state=replace(situation, correction=Correction()))


def all_built_in() -> Iterator[PlanRequest]:
    """Every family, recipe, card and system, those with most to trace in common one after the other."""
    cards = (*(f"{size}GB" for size in GIGABYTES), *OTHER_GENERATIONS)
    for family in FAMILIES:
        for recipe in RECIPES:
            for card in cards:
                for system in SYSTEMS:
                    yield built_in(family, recipe, card, system)
