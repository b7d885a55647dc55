"""Which layers of a base a recipe trains, and with which rank, alpha and learning rate. Does not require torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from trainer.adapter.names import Slot
from trainer.config.recipe import BlockConfig, RecipeConfig
from trainer.errors import JobError

_PARTS = {"unet": "UNet", "text_encoder": "text encoder", "text_encoder_2": "second text encoder"}
_KINDS = {"attention": ("attention",), "linear": ("attention", "linear"), "all": ("attention", "linear", "conv")}


class LayerSettings(NamedTuple):
    """How one layer is trained. Its LoRA's output is scaled by alpha / rank."""

    rank: int
    alpha: float
    """Alpha as in the LoRA's file, which includes the square root of the rank in rank-stabilized LoRAs."""
    rate_factor: float = 1.0
    """Factor for the learning rate of the layer's part."""


def trained_layers(table: Sequence[Slot], recipe: RecipeConfig) -> dict[Slot, LayerSettings]:
    """Return the settings of each layer of `table` that the recipe trains, in the order of `table`.

    Later entries of `recipe.blocks` take precedence, key by key. Raises JobError for an entry that matches no trained
    layer, because it would have no effect, and if nothing is trained.
    """
    candidates = [slot for slot in table if _is_trained(slot, recipe)]
    blocks = recipe.blocks or ()
    matches = [_matching(number, block, candidates, table) for number, block in enumerate(blocks)]
    chosen = {}
    for slot in candidates:
        own = [block for block, slots in zip(blocks, matches, strict=True) if slot in slots]
        settings = _with_blocks(_settings(slot, recipe), own)
        if recipe.rank_stabilized:
            settings = _stabilized(settings)
        if settings.rate_factor > 0:
            chosen[slot] = settings
    _refuse_untrained_parts(candidates, chosen)
    return chosen


def rank_key(slot: Slot, recipe: RecipeConfig) -> str:
    """Return the key that sets the rank of a layer, for messages."""
    entries = [n for n, block in enumerate(recipe.blocks or ()) if block.rank and _matches(slot, block.match)]
    if entries:
        return f"recipe.blocks.{entries[-1]}.rank"
    if slot.part == "unet":
        return "recipe.conv_rank" if slot.kernel == 3 else "recipe.rank"
    return f"recipe.{slot.part}.rank"


def _refuse_untrained_parts(candidates: Sequence[Slot], chosen: Iterable[Slot]) -> None:
    """Raise JobError if nothing is trained, or if blocks exclude all layers of a text encoder with a learning rate."""
    if not candidates:
        raise JobError(
            "recipe.nothing_trained",
            "Every learning rate is zero, so nothing would be trained.",
            "Set recipe.learning_rate (typically 1e-4) or the learning rate of a text encoder above zero.",
        )
    trained = {slot.part for slot in chosen}
    excluded = sorted({slot.part for slot in candidates} - trained - ({"unet"} if trained else set()))
    if excluded:
        part = excluded[0]
        key = "recipe.learning_rate" if part == "unet" else f"recipe.{part}.learning_rate"
        raise JobError(
            "recipe.blocks",
            f"All trained layers of the {_PARTS[part]} have rate_factor = 0 in recipe.blocks.",
            f"Remove one of these entries, or set {key} = 0 so that the {_PARTS[part]} is not trained.",
        )


def _is_trained(slot: Slot, recipe: RecipeConfig) -> bool:
    if slot.part == "unet":
        return recipe.learning_rate > 0 and slot.kind in _KINDS[recipe.layers]
    # recipe.layers selects only among the UNet's layers.
    encoder = recipe.text_encoder if slot.part == "text_encoder" else recipe.text_encoder_2
    return encoder.learning_rate > 0


def _settings(slot: Slot, recipe: RecipeConfig) -> LayerSettings:
    """Return a layer's settings without blocks; as in sd-scripts, conv_rank applies only to 3x3 kernels, not to 1x1."""
    if slot.part == "unet":
        rank, alpha = (recipe.conv_rank, recipe.conv_alpha) if slot.kernel == 3 else (None, None)
    else:
        encoder = recipe.text_encoder if slot.part == "text_encoder" else recipe.text_encoder_2
        rank, alpha = encoder.rank, encoder.alpha
    return LayerSettings(rank or recipe.rank, alpha or recipe.alpha)


def _matching(number: int, block: BlockConfig, candidates: Sequence[Slot], table: Sequence[Slot]) -> set[Slot]:
    """Return the trained layers that an entry of `recipe.blocks` matches; raise JobError if there are none."""
    found = {slot for slot in candidates if _matches(slot, block.match)}
    if found:
        return found
    untrained = any(_matches(slot, block.match) for slot in table)
    what = "only layers that are not trained" if untrained else "no layer of this base"
    raise JobError(
        "recipe.blocks",
        f'Could not use recipe.blocks.{number}: "{block.match}" matches {what}, so it would have no effect.',
        "Set recipe.layers or the learning rate of that part so that they are trained, or remove the entry."
        if untrained
        else 'Write names with * for any text, such as "unet.mid_block.*", or remove the entry.',
    )


def _matches(slot: Slot, pattern: str) -> bool:
    """Return whether a pattern matches a layer's name as in diffusers or as in single-file checkpoints."""
    names = (f"{slot.part}.{slot.module}", f"{slot.part}.{slot.ldm}")
    # A run may have an entry for each of its layers, and then a million pairs are compared.
    return any(fnmatchcase(name, pattern) for name in names) if "*" in pattern else pattern in names


def _with_blocks(settings: LayerSettings, blocks: Iterable[BlockConfig]) -> LayerSettings:
    for block in blocks:
        settings = LayerSettings(
            rank=block.rank or settings.rank,
            alpha=block.alpha or settings.alpha,
            rate_factor=settings.rate_factor if block.rate_factor is None else block.rate_factor,
        )
    return settings


def _stabilized(settings: LayerSettings) -> LayerSettings:
    """Return settings whose scale, alpha / rank, is the given alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732).

    Alpha is rounded to fp32, the format it has in files, so that they have exactly the scale of the training.
    """
    return settings._replace(alpha=float(np.float32(settings.alpha * math.sqrt(settings.rank))))
