"""What a preset changes: in a job that takes its recipe, and against another preset or the defaults, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.fit import FitConfig
from trainer.config.identity import changes, differences, flat
from trainer.config.presets.picture import decode_picture
from trainer.config.presets.preset import Preset
from trainer.config.recipe import RecipeConfig
from trainer.config.write import toml_value

_PICTURE = "preview.picture"


def recipe_overrides(recipe: RecipeConfig) -> list[str]:
    """What the recipe states, as ``key=value`` texts for ``load_job``; put the user's own after them.

    The optimizer is one value, so that no argument of the job's own optimizer is left over.
    """
    stated = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    optimizer = stated.pop("optimizer", None)
    texts = [f"{key}={toml_value(value)}" for key, value in flat(stated, "recipe") if value is not None]
    if optimizer is not None:
        arguments = (f"{key} = {toml_value(value)}" for key, value in optimizer.items() if value is not None)
        texts.append(f"recipe.optimizer={{{', '.join(arguments)}}}")
    return texts


def compared(former: Preset, new: Preset) -> list[str]:
    """How ``new`` differs from ``former``, one sentence a key; empty when they say the same."""
    return differences(_flat_preset(former), _flat_preset(new))


def changed_keys(former: Preset | None, new: Preset) -> list[tuple[str, str, str]]:
    """Return each key in which ``new`` differs from ``former`` with both values in words.

    Without a ``former`` one, its recipe is set against a job that states nothing.
    """
    if former is not None:
        return changes(_flat_preset(former), _flat_preset(new))
    if new.recipe is None:
        return []
    return changes(*_beside_defaults(new.recipe, ""))


def compared_with_defaults(recipe: RecipeConfig) -> list[str]:
    """What the recipe states otherwise than a job that states nothing: "recipe.rank = 32 instead of 16"."""
    defaults, stated = _beside_defaults(recipe, "recipe")
    return [
        f"{key} = {toml_value(value)}" + (f" instead of {toml_value(defaults[key])}" if defaults[key] else "")
        for key, value in stated.items()
        if value != defaults[key]
    ]


def stated_fit(fit: FitConfig) -> list[str]:
    """What a fit states: "fit.micro_batch = 2"."""
    stated = fit.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return [f"{key} = {toml_value(value)}" for key, value in flat(stated, "fit")]


def _beside_defaults(recipe: RecipeConfig, path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What a job that states nothing has for the keys that a recipe states, and what that states."""
    stated = dict(flat(recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True), path))
    defaults = dict(flat(RecipeConfig().model_dump(mode="json", by_alias=True), path))
    return {key: defaults.get(key) for key in stated}, stated


def _flat_preset(preset: Preset) -> Mapping[str, Any]:
    """What the preset states; an empty text, such as that of no negative prompt, states nothing."""
    stated = flat(preset.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True), "")
    values = {key: value for key, value in stated if value != ""}
    if preset.preview is not None:
        values[_PICTURE] = f"a picture of {len(decode_picture(preset.preview.picture)):,} bytes"
    return values
