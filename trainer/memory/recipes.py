"""Changes of a recipe that let it need less, the smallest first: offered where nothing fits, never made unasked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.recipe import RecipeConfig
from trainer.memory.subject import BucketUse, Subject

LOWEST_RANK = 4
SMALLEST_SIDE = 256
# Resolutions are offered in these shares of the one asked for.
SHARES = (0.875, 0.75, 0.625, 0.5)


@dataclass(frozen=True)
class Change:
    """Keys of a recipe with other values."""

    keys: Mapping[str, Any]
    """By their names below ``recipe``, such as "text_encoder.learning_rate"."""

    def applied_to(self, subject: Subject) -> Subject:
        """The subject with the change; its shapes follow the resolution."""
        recipe = changed(subject.recipe, self.keys)
        share = (recipe.resolution or 1) / (subject.recipe.resolution or 1)
        buckets = subject.buckets if share == 1.0 else _scaled(subject, share)
        return replace(subject, recipe=recipe, buckets=buckets)


def lighter(subject: Subject) -> Iterator[Change]:
    """Changes in the order of what they cost the result: one alone first, then all of them with less resolution."""
    recipe = subject.recipe
    kept: dict[str, Any] = {}
    for single in _singles(recipe):
        yield Change(single)
        kept |= single
    for side in _sides(recipe):
        yield Change({"resolution": side})
    for side in _sides(recipe):
        yield Change({**kept, "resolution": side})


def changed(recipe: RecipeConfig, keys: Mapping[str, Any]) -> RecipeConfig:
    """The recipe with some keys replaced; those of inner tables by their dotted names."""
    values = recipe.model_dump(exclude_unset=True)
    for key, value in keys.items():
        *tables, name = key.split(".")
        inner = values
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return RecipeConfig.model_validate(values)


def _singles(recipe: RecipeConfig) -> Iterator[dict[str, Any]]:
    if recipe.optimizer.name == "adamw":
        yield {"optimizer.name": "adamw8bit"}
    trained = [name for name in ("text_encoder", "text_encoder_2") if getattr(recipe, name).learning_rate]
    if trained and recipe.learning_rate:
        yield {f"{name}.learning_rate": 0.0 for name in trained}
    rank = recipe.rank // 2
    while rank >= LOWEST_RANK:
        # The strength alpha/rank stays as it was.
        yield {"rank": rank, "alpha": recipe.alpha * rank / recipe.rank}
        rank //= 2


def _sides(recipe: RecipeConfig) -> Iterator[int]:
    """Lower resolutions in whole steps of the buckets."""
    step, side = recipe.pictures.bucket_step, recipe.resolution or 0
    for share in SHARES:
        lower = int(side * share) // step * step
        if lower >= SMALLEST_SIDE:
            yield lower


def _scaled(subject: Subject, share: float) -> tuple[BucketUse, ...]:
    """Shapes about as the pictures would fall into them: their own, smaller, in whole steps."""
    step = subject.recipe.pictures.bucket_step
    uses: dict[tuple[int, int], int] = {}
    for bucket in subject.buckets:
        width, height = (max(step, int(side * share) // step * step) for side in bucket.size)
        uses[width, height] = uses.get((width, height), 0) + bucket.pictures
    largest_first = sorted(uses, key=lambda size: (-size[0] * size[1], size))
    return tuple(BucketUse(*size, uses[size]) for size in largest_first)
