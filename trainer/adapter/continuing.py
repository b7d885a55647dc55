"""Starts a training from an existing LoRA file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainer.adapter.attach import Adapter
from trainer.adapter.names import Slot
from trainer.adapter.reading import LoraWeights, fitted, read_lora
from trainer.config.base import Family
from trainer.errors import LoraFileError

_SETTINGS = {"unet": "recipe", "text_encoder": "recipe.text_encoder", "text_encoder_2": "recipe.text_encoder_2"}


def continue_from(
    path: Path, family: Family, table: Sequence[Slot], adapter: Adapter, initial: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights (fp32, by file key) with which training goes on from a LoRA file.

    `table` holds all layers of the base, text encoders included whether trained or not. `initial` are the weights of a
    fresh start (`initial_weights`); layers that the file lacks keep them, and do nothing yet. Another alpha than the
    recipe's is folded into `up`, so the first step sees what the file does. Raises LoraFileError when part of the file
    would be lost, or its ranks or shapes are not those of recipe and base.
    """
    lora = read_lora(path, family, table)
    _refuse_losses(path, lora, adapter)
    _refuse_other_ranks(path, lora, adapter)
    weights = dict(initial)
    for slot in adapter.slots:
        if slot in lora.layers:
            layer = lora.layers[slot]
            weights[slot.down] = fitted(slot, layer.down, adapter.parameters[slot.down].shape)
            up = fitted(slot, layer.up, adapter.parameters[slot.up].shape)
            weights[slot.up] = up * (layer.alpha / adapter.alpha[slot.kohya])
    return weights


def _refuse_losses(path: Path, lora: LoraWeights, adapter: Adapter) -> None:
    if lora.unmatched:
        raise LoraFileError(
            "lora.unmatched",
            f"{path.name} holds {len(lora.unmatched)} keys that fit no layer of the base, first {lora.unmatched[0]}.",
            "Choose a plain LoRA that was made for the family of the base.",
        )
    # Exporters complete a text layer's projections with zeros: those carry nothing.
    lost = [slot for slot, layer in lora.layers.items() if slot.kohya not in adapter.rank and layer.up.any()]
    if lost:
        raise LoraFileError(
            "lora.untrained",
            f"{path.name} also changes {len(lost)} layers that this recipe does not train, first {lost[0].kohya}; "
            "they would be lost.",
            _remedy(lost, adapter),
        )


def _remedy(lost: list[Slot], adapter: Adapter) -> str:
    """Say which setting makes the recipe train the lost layers."""
    untrained = {slot.part for slot in lost} - {slot.part for slot in adapter.slots}
    if untrained:
        return " ".join(f"Set {_SETTINGS[part]}.learning_rate above 0." for part in sorted(untrained))
    layers = "all" if any(slot.kind == "conv" for slot in lost) else "linear"
    return f'Set recipe.layers = "{layers}".'


def _refuse_other_ranks(path: Path, lora: LoraWeights, adapter: Adapter) -> None:
    ranks: dict[str, set[int]] = {}
    for slot, layer in lora.layers.items():
        if layer.rank != adapter.rank.get(slot.kohya, layer.rank):
            key = "recipe.conv_rank" if slot.kernel == 3 else f"{_SETTINGS[slot.part]}.rank"
            ranks.setdefault(key, set()).add(layer.rank)
    if not ranks:
        return
    stated = ", ".join(f"{key} is not {' and '.join(map(str, sorted(found)))}" for key, found in ranks.items())
    uneven = any(len(found) > 1 for found in ranks.values())
    raise LoraFileError(
        "lora.rank",
        f"{path.name} has another rank than the recipe: {stated}.",
        "Its layers differ in rank, which a recipe cannot: continue from a LoRA that was not resized."
        if uneven
        else "Set " + " and ".join(f"{key} = {found.pop()}" for key, found in ranks.items()) + ".",
    )
