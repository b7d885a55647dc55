"""What the pictures are judged for: the size they will be trained in, and how much of a caption is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from app.core.tags.splitting import Lines

if TYPE_CHECKING:  # pydantic: loaded by a worker once there are pictures
    from trainer.config.recipe import RecipeConfig

TOKEN_MARKS = (75, 150, 225)
"""Tokens that one, two and three chunks of the text encoder read."""


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
