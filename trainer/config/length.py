"""How long a run is: steps from epochs, pictures seen, or a sensible default, and all three in one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.recipe import RecipeConfig

# Without a length: each sample about a hundred times, but no run too short to learn or longer than an evening.
SHOWINGS = 100
FEWEST_PICTURES = 1_600
MOST_PICTURES = 8_000


@dataclass(frozen=True, slots=True)
class Length:
    """One length in its three measures; ``epochs`` may end within an epoch."""

    steps: int
    epochs: float
    pictures: int

    def __str__(self) -> str:
        """The three in one sentence: "1,200 steps = 30 epochs = about 4,800 pictures seen"."""
        epochs = f"{self.epochs:,.0f}" if self.epochs.is_integer() else f"{self.epochs:,.1f}"
        return (
            f"{self.steps:,} {_plural('step', self.steps)} = {epochs} {_plural('epoch', self.epochs)}"
            f" = about {self.pictures:,} {_plural('picture', self.pictures)} seen"
        )


def steps_per_epoch(samples: int, effective_batch: int) -> int:
    """Optimizer steps in one pass over ``samples`` showings; the last batch of an epoch may be smaller."""
    return math.ceil(samples / effective_batch)


def resolve_length(recipe: RecipeConfig, samples_per_epoch: int) -> Length:
    """The length that ``recipe`` states, or the default one; an epoch has ``samples_per_epoch`` showings (1 up)."""
    per_epoch = steps_per_epoch(samples_per_epoch, recipe.effective_batch)
    steps = recipe.steps or _steps(recipe, samples_per_epoch, per_epoch)
    return length_of(steps, samples_per_epoch, recipe.effective_batch)


def length_of(steps: int, samples_per_epoch: int, effective_batch: int) -> Length:
    """A number of steps in all three measures."""
    per_epoch = steps_per_epoch(samples_per_epoch, effective_batch)
    whole, rest = divmod(steps, per_epoch)
    return Length(steps, steps / per_epoch, whole * samples_per_epoch + min(rest * effective_batch, samples_per_epoch))


def default_pictures(samples: int) -> int:
    """How many pictures are shown when a job states no length; never less than one epoch of ``samples``."""
    return max(samples, min(max(samples * SHOWINGS, FEWEST_PICTURES), MOST_PICTURES))


def _steps(recipe: RecipeConfig, samples: int, per_epoch: int) -> int:
    if recipe.epochs is not None:
        return recipe.epochs * per_epoch
    if recipe.pictures_seen is not None:
        return _steps_to_see(recipe.pictures_seen, samples, per_epoch, recipe.effective_batch)
    return _steps_to_see(default_pictures(samples), samples, per_epoch, recipe.effective_batch)


def _steps_to_see(pictures: int, samples: int, per_epoch: int, effective_batch: int) -> int:
    """The fewest steps that show ``pictures``; the short batch at an epoch's end is counted as it is."""
    whole, rest = divmod(pictures, samples)
    return max(1, whole * per_epoch + math.ceil(rest / effective_batch))


def _plural(word: str, number: float) -> str:
    return word if number == 1 else word + "s"
