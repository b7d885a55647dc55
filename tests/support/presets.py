"""Presets for tests, and the values they set."""

from typing import Any

from trainer.config.presets.preset import Preset
from trainer.config.resolve import flatten

JOB = """schema = 3
name = "mine"
[base]
model = "owner/name"
[[dataset.folders]]
path = "pictures"
"""


def preset(**values: Any) -> Preset:
    data = {"schema": 2, "name": "gouache", "base": {"family": "sdxl"}, "recipe": {"rank": 8}} | values
    return Preset.model_validate(data)


def stated(section: Any) -> dict[str, Any]:
    """Return the values that a table sets, by dotted key; a table without values sets nothing."""
    data = section.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return {key: value for key, value in flatten(data, "") if value != []}
