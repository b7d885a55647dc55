"""Continue training from the weights of a LoRA file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainer.adapter.attach import Adapter
from trainer.adapter.layers import rank_key, trained_layers
from trainer.adapter.lycoris import scale_of
from trainer.adapter.names import Slot, file_key
from trainer.adapter.products import base_shape
from trainer.adapter.reading import LoraLayer, LoraWeights, LycorisWeights, read_lora, reshape_to_layer
from trainer.config.base import Family
from trainer.config.methods import ADAPTERS
from trainer.config.recipe import BlockConfig, RecipeConfig
from trainer.errors import LoraFileError

_SETTINGS = {"unet": "recipe", "text_encoder": "recipe.text_encoder", "text_encoder_2": "recipe.text_encoder_2"}


def continue_from(
    path: Path,
    recipe: RecipeConfig,
    family: Family,
    table: Sequence[Slot],
    adapter: Adapter,
    initial: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the fp32 weights by file key to continue training from a LoRA file.

    `table` lists all layers of the base, including text encoders that are not trained; `adapter` is that of `recipe`
    and may be on the meta device. Layers missing from the file keep their weights in `initial` (from
    `initial_weights`), which have no effect yet. If the file's alpha differs from
    the recipe's, the ratio is multiplied into `up`, so that training starts with the file's effect. Raises
    LoraFileError if a part of the file would be lost, or if its ranks or shapes do not match the recipe and base.
    """
    lora = read_lora(path, family, table)
    _refuse_losses(path, lora, adapter)
    _refuse_other_kinds(path, lora, adapter)
    _refuse_other_ranks(path, lora, recipe, adapter)
    weights = dict(initial)
    for slot in adapter.slots:
        layer = lora.layers.get(slot)
        if isinstance(layer, LycorisWeights):
            weights |= _fitted(path, slot, layer, adapter)
        elif layer is not None:
            weights[slot.down] = reshape_to_layer(slot, layer.down, adapter.parameters[slot.down].shape)
            up = reshape_to_layer(slot, layer.up, adapter.parameters[slot.up].shape)
            weights[slot.up] = up * (layer.alpha / adapter.alpha[slot.kohya])
    return weights


def layers_of_file(path: Path, recipe: RecipeConfig, family: Family, table: Sequence[Slot]) -> tuple[BlockConfig, ...]:
    """Return entries of `recipe.blocks` with the ranks of a plain LoRA file whose layers have different ranks.

    They keep the recipe's alpha / rank, so that all layers learn alike; with rsLoRA, the scale follows the rank. Empty
    if the recipe's ranks match, if one setting for each part would make them match, which the error of `continue_from`
    names, or if an entry of the recipe sets another rank. Raises LoraFileError if the file cannot be read.
    """
    lora = read_lora(path, family, table)
    ranks: dict[str, set[int]] = {}
    entries, wrong = [], set()
    for slot, size in trained_layers(table, recipe).items():
        layer = lora.layers.get(slot)
        if not isinstance(layer, LoraLayer):
            continue
        key = rank_key(slot, recipe)
        ranks.setdefault(key, set()).add(layer.rank)
        if layer.rank != size.rank:
            wrong.add(key)
            alpha = None if recipe.rank_stabilized else min(size.alpha * layer.rank / size.rank, 4096.0)
            name = f"{slot.part}.{slot.module}"
            entries.append(BlockConfig.model_validate({"match": name, "rank": layer.rank, "alpha": alpha}))
    uneven = any(len(ranks[key]) > 1 for key in wrong)
    stated = any(key.startswith("recipe.blocks.") for key in wrong)
    return tuple(entries) if uneven and recipe.is_plain_lora and not stated else ()


def _refuse_other_kinds(path: Path, lora: LoraWeights, adapter: Adapter) -> None:
    """Raise LoraFileError unless the file's layers that are trained are of the kind that the recipe trains."""
    for slot, layer in lora.layers.items():
        if slot.kohya not in adapter.rank:
            continue  # changes nothing, or _refuse_losses would have raised an error
        wanted = adapter.changes.get(slot)
        kind = layer.kind if isinstance(layer, LycorisWeights) else "lora"
        trained = wanted.only.kind if wanted else "lora"
        if kind != trained:
            raise LoraFileError(
                "lora.kind",
                f"Could not continue from {path.name}: it contains {ADAPTERS[kind].title} at {slot.kohya}, "
                f"but the recipe trains {ADAPTERS[trained].title}.",
                f'Set recipe.adapter = "{kind}".',
            )


def _fitted(path: Path, slot: Slot, layer: LycorisWeights, adapter: Adapter) -> dict[str, Tensor]:
    """Return one layer's weights by file key, with the ratio of the alphas in the weights that start at zero."""
    trained = adapter.changes[slot]
    roles = layer.for_layer(len(base_shape(trained.frozen)))
    shapes = {role: parameter.shape for role, parameter in trained.only.named_parameters(recurse=False)}
    found = {role: tensor.shape for role, tensor in roles.items()}
    wrong = [role for role in shapes.keys() | found.keys() if found.get(role) != shapes.get(role)]
    if wrong == ["dora_scale"] and found["dora_scale"][1] == 1:
        raise LoraFileError(
            "lora.magnitudes",
            f"Could not continue from {path.name}: its DoRA has magnitudes of outputs, but runs train those of inputs.",
            "Use a file that LyCORIS trained with wd_on_output=False, or one of Impasto; `render` reads both.",
        )
    if wrong:
        sizes = "rank, conv_rank and lokr_factor" if layer.kind == "lokr" else "rank and conv_rank"
        raise LoraFileError(
            "lora.rank",
            f"Could not continue from {path.name}: the matrices of {slot.kohya} have other shapes than the recipe's.",
            f"Use the {sizes} with which the file was trained.",
        )
    ratio = scale_of(found, layer.alpha) / trained.only.scale
    return {
        file_key(slot, role): tensor * ratio if role in trained.only.zero else tensor for role, tensor in roles.items()
    }


def _changes_something(layer: LoraLayer | LycorisWeights) -> bool:
    """Return whether a layer may have an effect; exporters add zeros for untrained projections of a text layer."""
    return isinstance(layer, LycorisWeights) or bool(layer.up.any())


def _refuse_losses(path: Path, lora: LoraWeights, adapter: Adapter) -> None:
    if lora.unmatched:
        keys = "1 key matches" if len(lora.unmatched) == 1 else f"{len(lora.unmatched)} keys match"
        raise LoraFileError(
            "lora.unmatched",
            f"Could not continue from {path.name}: {keys} no layer of the base, such as {lora.unmatched[0]}.",
            "Choose a LoRA for the same family as the base.",
        )
    lost = [slot for slot, layer in lora.layers.items() if slot.kohya not in adapter.rank and _changes_something(layer)]
    if lost:
        layers = "1 layer" if len(lost) == 1 else f"{len(lost)} layers"
        raise LoraFileError(
            "lora.untrained",
            f"Could not continue from {path.name}: the changes to {layers} that the recipe does not train "
            f"would be lost, for example {lost[0].kohya}.",
            _remedy(lost, adapter),
        )


def _remedy(lost: list[Slot], adapter: Adapter) -> str:
    """Return a sentence that says which setting to change so that no layer of the file is lost."""
    untrained = {slot.part for slot in lost} - {slot.part for slot in adapter.slots}
    if untrained:
        return " ".join(f"Set {_SETTINGS[part]}.learning_rate above 0." for part in sorted(untrained))
    if {slot.kind for slot in lost} <= {slot.kind for slot in adapter.slots if slot.part == "unet"}:
        return "Remove the entries of recipe.blocks that exclude these layers with rate_factor = 0."
    layers = "all" if any(slot.kind == "conv" for slot in lost) else "linear"
    return f'Set recipe.layers = "{layers}".'


def _refuse_other_ranks(path: Path, lora: LoraWeights, recipe: RecipeConfig, adapter: Adapter) -> None:
    """Raise LoraFileError, naming each key to change, if layers of the file have other ranks than the recipe's."""
    ranks: dict[str, set[int]] = {}
    for slot, layer in lora.layers.items():
        if layer.rank is not None and layer.rank != _trained_rank(slot, adapter, layer.rank):
            ranks.setdefault(rank_key(slot, recipe), set()).add(layer.rank)
    if not ranks:
        return
    listed = {key: " and ".join(map(str, sorted(found))) for key, found in ranks.items()}
    differences = ", ".join(f"{key}: {found} in the file" for key, found in listed.items())
    uneven = any(len(found) > 1 for found in ranks.values())
    raise LoraFileError(
        "lora.rank",
        f"Could not continue from {path.name}: its ranks do not match the recipe ({differences}).",
        "The file's layers have different ranks: set them in recipe.blocks, or use a LoRA that was not resized."
        if uneven
        else "Set " + " and ".join(f"{key} = {found.pop()}" for key, found in ranks.items()) + ".",
    )


def _trained_rank(slot: Slot, adapter: Adapter, default: int) -> int:
    """Return the rank with which a layer is trained; `default` if it is not trained or LoKr trains a whole matrix."""
    trained = adapter.changes.get(slot)
    is_whole = trained is not None and hasattr(trained.only, "lokr_w2")
    return default if is_whole else adapter.rank.get(slot.kohya, default)
