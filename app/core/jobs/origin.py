"""What a job is compared with: the preset that its recipe came from, and the defaults for all that it leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.core.jobs.settings import settings
from app.core.jobs.values import Values, value_at
from trainer.config.presets.preset import Preset


class Origin:
    """A preset's recipe over the defaults."""

    def __init__(self, preset: Preset | None) -> None:
        self.preset = preset
        self.values: Values = {}
        """What the preset states, as it would stand in a job."""
        if preset is not None and preset.recipe is not None:
            self.values = {"recipe": stated(preset)}

    def stated(self, key: str) -> Any:
        """Return what the preset says of a key; None where it says nothing."""
        return value_at(self.values, key)

    def differences(self, values: Values) -> Mapping[str, Any]:
        """Return the keys whose value in a job is another, with what it would be (None: absent)."""
        found: dict[str, Any] = {}
        kinds = {value_at(place, "recipe.optimizer.name") or "adamw" for place in (values, self.values)}
        for each in settings():
            if "*" in each.key or each.key in ("name", "base.model") or (each.kind and {each.kind} != kinds):
                continue
            expected = _first(self.stated(each.key), each.default)
            if _first(value_at(values, each.key), each.default) != expected:
                found[each.key] = expected
        return found


def stated(preset: Preset) -> Values:
    """Return what a preset's recipe states, as plain values; raises ValueError for a preset without one."""
    if preset.recipe is None:
        raise ValueError(f"{preset.name} holds no recipe")
    return preset.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
