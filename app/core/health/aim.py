"""What the pictures are judged for: the size they will be trained in, and how much of a caption is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from app.core.tags.splitting import Lines

if TYPE_CHECKING:  # pydantic: loaded by a worker once there are pictures
    from trainer.config.recipe import RecipeConfig

TOKEN_MARKS = (75, 150, 225)
"""Tokens that one, two and three chunks of the text encoder read."""

NATIVE: Mapping[str, int] = {"sd15": 512, "sdxl": 1024}
"""Native resolutions, as trainer.config.base has them; that module brings pydantic."""


class Aim(NamedTuple):
    """A training to come, as far as pictures can suit it or not."""

    resolution: int = 1024
    """Side of the square whose area every bucket has, in pixels: 1024 for SDXL, 512 for SD 1.5."""
    tokens: int = 75
    """How many tokens of a caption are read: one of TOKEN_MARKS."""
    lines: Lines = "caption"
    """How captions of several lines are read."""

    def recipe(self) -> RecipeConfig:
        """Return a recipe with this aim and all else as the trainer has it by default; raises pydantic's ValueError."""
        from trainer.config.recipe import RecipeConfig

        return RecipeConfig.model_validate({"resolution": self.resolution, "token_chunks": self.tokens})


def aim_of(values: Mapping[str, Any], native: int) -> Aim:
    """Return what a job's values say; `native` is the resolution that its base has, wrong values count as absent."""
    recipe, dataset = _table(values, "recipe"), _table(values, "dataset")
    resolution, tokens = recipe.get("resolution"), recipe.get("token_chunks")
    if not isinstance(resolution, int) or not 64 <= resolution <= 4096 or resolution % 8:
        resolution = native
    return Aim(
        resolution,
        tokens if tokens in TOKEN_MARKS else Aim().tokens,
        "variants" if dataset.get("lines") == "variants" else "caption",
    )


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name)
    return table if isinstance(table, Mapping) else {}
