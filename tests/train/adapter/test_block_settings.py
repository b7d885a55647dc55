"""Blocks change the rank, alpha and learning rate of the layers that they name, and of no others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.support.loras import Models, full_size, random_weights
from trainer.adapter.attach import attach
from trainer.adapter.layers import LayerSettings, trained_layers
from trainer.adapter.names import Slot, slots
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.dataset.sampling import generator
from trainer.errors import JobError


def recipe(*blocks: dict[str, Any], **changes: Any) -> RecipeConfig:
    return RecipeConfig.model_validate({"rank": 8, "alpha": 4.0, "blocks": blocks or None, **changes})


def published(family: Family) -> tuple[Slot, ...]:
    unet, encoders = full_size(family)
    return slots(family, unet.config, [encoder.config.to_dict() for encoder in encoders])


def kohya_block(family: Family, name: str) -> int:
    """Return the block index of a layer as sd-scripts' get_block_index does (networks/lora.py); -1 if it has none."""
    if family == "sdxl":
        for prefix, first in (("input_blocks_", 1), ("middle_block_", 10), ("output_blocks_", 13)):
            if found := re.match(rf"lora_unet_{prefix}(\d+)_", name):
                return first + int(found[1])
        return -1
    if found := re.search(r"(up|down)_blocks_(\d+)_(resnets|upsamplers|downsamplers|attentions)_(\d+)_", name):
        side, level, kind, number = found[1], int(found[2]), found[3], int(found[4])
        index = 3 * level + (number if kind in ("resnets", "attentions") else 2)
        return index + 1 if side == "down" else 13 + index
    return 12 if "mid_block_" in name else -1


# The table in presets/README.md: kohya's block weights and dims have these places in their lists of 25 and 23.
FIRST = {"sd15": {"input_blocks": 0, "output_blocks": 13}, "sdxl": {"input_blocks": 1, "output_blocks": 13}}


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_patterns_select_the_blocks_that_kohya_numbers(family: Family) -> None:
    table = [slot for slot in published(family) if slot.part == "unet"]
    patterns = {first + n: f"unet.{name}.{n}.*" for name, first in FIRST[family].items() for n in range(12)}
    middle = {12: "unet.middle_block.*"} if family == "sd15" else {10 + n: f"unet.middle_block.{n}.*" for n in range(3)}
    numbers = {kohya_block(family, slot.kohya) for slot in table}
    assert len(numbers) > 15
    for number in numbers:
        block = {"match": {**patterns, **middle}[number], "rank": 3}
        chosen = trained_layers(table, recipe(block, layers="all"))
        wanted = {slot for slot in table if kohya_block(family, slot.kohya) == number}
        assert {slot for slot, settings in chosen.items() if settings.rank == 3} == wanted


def test_later_entries_take_precedence_key_by_key() -> None:
    table = published("sdxl")
    blocks = (
        {"match": "unet.mid_block.*", "rank": 2, "alpha": 1.0},
        {"match": "*.attn2.*", "rank": 5, "rate_factor": 0.5},
        {"match": "*.ff.*", "rate_factor": 0.0},
    )
    chosen = trained_layers(table, recipe(*blocks))
    by_name = {slot.module: settings for slot, settings in chosen.items()}
    inside = "mid_block.attentions.0.transformer_blocks.0"
    assert by_name[f"{inside}.attn1.to_q"] == LayerSettings(2, 1.0)
    assert by_name[f"{inside}.attn2.to_q"] == LayerSettings(5, 1.0, 0.5)
    assert by_name["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"] == LayerSettings(8, 4.0)
    assert not any(".ff." in name for name in by_name)
    assert chosen.keys() == {slot for slot in table if slot.part == "unet" and slot.kind != "conv"} - {
        slot for slot in table if ".ff." in slot.module
    }


@pytest.mark.parametrize(
    ("match", "reason"),
    [
        ("unet.input_blocks.40.*", "no layer of this base"),
        ("down_blocks.1.*", "no layer of this base"),
        ("*.resnets.*", "only layers that are not trained"),
        ("text_encoder.*", "only layers that are not trained"),
    ],
)
def test_an_entry_without_effect_is_an_error(match: str, reason: str) -> None:
    with pytest.raises(JobError, match=reason) as caught:
        trained_layers(published("sdxl"), recipe({"match": match, "rank": 4}))
    assert "remove the entry" in caught.value.remedy


@pytest.mark.parametrize(
    ("match", "part", "key"),
    [("*", "UNet", "recipe.learning_rate"), ("text_encoder.*", "text encoder", "recipe.text_encoder.learning_rate")],
)
def test_a_part_without_any_layer_is_an_error(match: str, part: str, key: str) -> None:
    """A text encoder would be loaded and run in every step all the same."""
    encoder = {"learning_rate": 1e-5} if part == "text encoder" else {}
    with pytest.raises(JobError, match=f"All trained layers of the {part} have rate_factor = 0") as caught:
        trained_layers(published("sd15"), recipe({"match": match, "rate_factor": 0.0}, text_encoder=encoder))
    assert key in caught.value.remedy


def test_nothing_is_left_to_train() -> None:
    with pytest.raises(JobError, match="nothing would be trained"):
        trained_layers(published("sd15"), recipe().model_copy(update={"learning_rate": 0.0, "blocks": None}))


@pytest.mark.parametrize("lean", [True, False])
def test_layers_of_different_ranks_train_as_their_formula_says(lean: bool) -> None:
    """Queries have another rank and keys another alpha than values, so they cannot be computed together."""
    blocks = ({"match": "*.to_q", "rank": 3}, {"match": "*.to_k", "alpha": 7.0})
    settings = recipe(*blocks, rank=4, layers="all")
    models, plain = Models.copies("sdxl"), Models.copies("sdxl")
    adapter = attach(
        "sdxl", models.unet, models.text_encoders, settings, dtype=torch.float64, lean=lean,
        generator=lambda name: generator(1, "adapter", sample=name),
    )  # fmt: skip
    weights = random_weights(adapter)
    leaves = {key: tensor.double().requires_grad_() for key, tensor in weights.items()}
    for slot in adapter.slots:
        rank = 3 if slot.module.endswith("to_q") else 4
        assert adapter.parameters[slot.down].shape[0] == rank
        layer = plain.unet.get_submodule(slot.module)
        change = (leaves[slot.up].flatten(1) @ leaves[slot.down].flatten(1)).reshape(layer.weight.shape)
        scale = (7.0 if slot.module.endswith("to_k") else 4.0) / rank
        weight = layer.weight.detach() + scale * change
        del layer.weight
        layer.weight = weight
    prediction, wanted = models.predict(), plain.predict()
    torch.testing.assert_close(prediction, wanted, rtol=1e-10, atol=1e-10)
    prediction.square().sum().backward()
    wanted.square().sum().backward()
    for key, leaf in leaves.items():
        torch.testing.assert_close(adapter.parameters[key].grad, leaf.grad, rtol=1e-9, atol=1e-10)
