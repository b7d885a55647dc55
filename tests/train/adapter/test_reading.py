"""LoRA files of every naming read alike, continued from, drawn with, and refused with a sentence and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.support.loras import EVERYTHING, Models, merge, random_weights
from trainer.adapter.applied import AppliedLoras
from trainer.adapter.attach import Adapter, initial_weights
from trainer.adapter.continuing import continue_from, layers_of_file
from trainer.adapter.export import export_lora
from trainer.adapter.layers import trained_layers
from trainer.adapter.names import Slot
from trainer.adapter.reading import LoraWeights, read_lora
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.dataset.sampling import generator
from trainer.errors import LoraFileError

FAMILIES: list[Family] = ["sd15", "sdxl"]
ATTENTION = RecipeConfig(layers="attention", rank=3, alpha=7.0)
Rename = Callable[[Slot], tuple[str, str, str | None]]


def flat(prefix: str, path: str) -> str:
    return f"lora_{prefix}_{path.replace('.', '_')}"


def kohya(slot: Slot) -> tuple[str, str, str | None]:
    return slot.down, slot.up, f"{slot.kohya}.alpha"


def other_blocks(slot: Slot) -> tuple[str, str, str | None]:
    """The block naming that sd-scripts does not write for the family, text encoders as transformers 5.6 has them."""
    prefix = {"unet": "unet", "text_encoder": "te1", "text_encoder_2": "te2"}[slot.part]
    path = slot.ldm if slot.kohya.endswith(slot.module.replace(".", "_")) else slot.module
    name = flat(prefix, path.removeprefix("text_model."))
    return f"{name}.lora_down.weight", f"{name}.lora_up.weight", f"{name}.alpha"


def peft(slot: Slot) -> tuple[str, str, str | None]:
    return f"{slot.part}.{slot.module}.lora_A.weight", f"{slot.part}.{slot.module}.lora_B.default.weight", None


def diffusers(slot: Slot) -> tuple[str, str, str | None]:
    path = f"{slot.part}.{slot.module.removeprefix('text_model.')}"
    return f"{path}.lora.down.weight", f"{path}.lora.up.weight", None


def first_diffusers(slot: Slot) -> tuple[str, str, str | None]:
    """As diffusers wrote attention before PEFT: a processor between, and the layer's name run into the suffix."""
    path = f"{slot.part}.{slot.module}".removesuffix(".0").replace(".to_", ".processor.to_")
    joint = "_lora" if ".processor." in path else ".lora_linear_layer"
    return f"{path}{joint}.down.weight", f"{path}{joint}.up.weight", None


@cache
def attached(family: Family, recipe: RecipeConfig = EVERYTHING) -> tuple[Models, Adapter, dict[str, Tensor]]:
    """Return models with an adapter of random weights; shared between tests, so treat all three as read-only."""
    models = Models.copies(family)
    adapter = models.attach(recipe)
    return models, adapter, random_weights(adapter)


def write(path: Path, adapter: Adapter, weights: dict[str, Tensor], rename: Rename, **metadata: str) -> Path:
    tensors = {}
    for slot in adapter.slots:
        down, up, alpha = rename(slot)
        tensors[down], tensors[up] = weights[slot.down], weights[slot.up]
        if alpha:
            tensors[alpha] = torch.tensor(adapter.alpha[slot.kohya])
    safetensors.torch.save_file(tensors, path, metadata)
    return path


@pytest.mark.parametrize("rename", [kohya, other_blocks, peft, diffusers, first_diffusers])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_naming_is_read_alike(family: Family, rename: Rename, tmp_path: Path) -> None:
    _, adapter, weights = attached(family)
    lora = read_lora(write(tmp_path / "a.safetensors", adapter, weights, rename), family, adapter.table)
    assert lora.unmatched == ()
    assert tuple(lora.layers) == adapter.slots
    stated = rename(adapter.slots[0])[2] is not None
    for slot, layer in lora.layers.items():
        assert torch.equal(layer.down, weights[slot.down])
        assert torch.equal(layer.up, weights[slot.up])
        assert layer.alpha == (adapter.alpha[slot.kohya] if stated else layer.rank)


def test_alpha_is_found_in_diffusers_metadata(tmp_path: Path) -> None:
    _, adapter, weights = attached("sdxl")
    stated = {
        "unet.lora_alpha": 8,
        "unet.alpha_pattern": {"down_blocks.0.resnets.0.conv1": 2.5},
        "text_encoder.lora_alpha": 3,
        "text_encoder.use_rslora": True,
        "text_encoder.alpha_pattern": None,
    }
    metadata = {"lora_adapter_metadata": json.dumps(stated)}
    path = write(tmp_path / "a.safetensors", adapter, weights, peft, **metadata)
    for slot, layer in read_lora(path, "sdxl", adapter.table).layers.items():
        expected = {"unet": 8.0, "text_encoder": 3.0 * layer.rank**0.5, "text_encoder_2": layer.rank}[slot.part]
        assert layer.alpha == (2.5 if slot.module == "down_blocks.0.resnets.0.conv1" else expected)


def test_keys_that_fit_nothing_are_named(tmp_path: Path) -> None:
    _, adapter, weights = attached("sdxl")
    path = write(tmp_path / "a.safetensors", adapter, weights, kohya)
    strange = {
        "lora_te2_text_projection.lora_down.weight": torch.ones(2, 2),
        "bundle_emb.x.clip_l": torch.ones(1, 2),
    }
    safetensors.torch.save_file(safetensors.torch.load_file(path) | strange, path)
    assert set(read_lora(path, "sdxl", adapter.table).unmatched) == set(strange)
    with pytest.raises(LoraFileError, match="2 keys match no layer"):
        continued(path, "sdxl", adapter)


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("lora_unet_mid_block_resnets_0_conv1.lora_mid.weight", "Tucker"),
        ("lora_unet_mid_block_resnets_0_conv1.hada_t1", "Tucker"),
        ("lora_unet_mid_block_attentions_0_proj_in.oft_diag", "rotations of other forms"),
        ("lora_unet_mid_block_attentions_0_proj_in.diff", "full weight differences"),
    ],
)
def test_other_kinds_are_refused_by_name(key: str, word: str, tmp_path: Path) -> None:
    _, adapter, weights = attached("sd15")
    path = write(tmp_path / "a.safetensors", adapter, weights, kohya)
    safetensors.torch.save_file(safetensors.torch.load_file(path) | {key: torch.ones(2)}, path)
    with pytest.raises(LoraFileError, match=word) as caught:
        read_lora(path, "sd15", adapter.table)
    assert caught.value.code == "lora.kind"


@pytest.mark.parametrize(("width", "made_for"), [(2048, "SDXL"), (1024, "SD 2")])
@pytest.mark.parametrize("naming", ["kohya", "peft"])
def test_another_family_is_told_by_its_text_width(width: int, made_for: str, naming: str, tmp_path: Path) -> None:
    _, adapter, _ = attached("sd15")
    name = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
    keys = {"down": f"{name}.lora_down.weight", "up": f"{name}.lora_up.weight"}
    if naming == "peft":
        path = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
        keys = {"down": f"{path}.lora_A.weight", "up": f"{path}.lora_B.weight"}
    tensors = {keys["down"]: torch.ones(4, width), keys["up"]: torch.ones(640, 4)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(LoraFileError, match=f"made for {made_for}, but the base is SD 1.5"):
        read_lora(tmp_path / "a.safetensors", "sd15", adapter.table)


def drop_up(tensors: dict[str, Tensor], slot: Slot) -> None:
    del tensors[slot.up]


def put_nan(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors[slot.down][0, 0] = float("nan")


def other_rank(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors[slot.down] = torch.ones(9, *tensors[slot.down].shape[1:])


def empty_rank(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors[slot.down], tensors[slot.up] = tensors[slot.down][:0], tensors[slot.up][:, :0]


def vector(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors[slot.down] = torch.ones(4)


def long_alpha(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors[f"{slot.kohya}.alpha"] = torch.ones(2)


def zero_alpha(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors[f"{slot.kohya}.alpha"] = torch.tensor(float("inf"))


def integers(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors[slot.down] = tensors[slot.down].to(torch.int8)


def twice(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors[f"{slot.part}.{slot.module}.lora_A.weight"] = tensors[slot.down].clone()


def nothing_known(tensors: dict[str, Tensor], slot: Slot) -> None:
    tensors.clear()
    tensors["lora_unet_double_blocks_0_img_attn_proj.lora_down.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (drop_up, "half of a layer"),
        (put_nan, "NaN or infinity"),
        (other_rank, "shapes do not match"),
        (empty_rank, "shapes do not match"),
        (vector, "shapes do not match"),
        (long_alpha, "not a single number"),
        (zero_alpha, "NaN or infinity"),
        (integers, "number format"),
        (twice, "twice"),
        (nothing_known, "no LoRA layer for SD 1.5"),
    ],
)
def test_broken_files_are_refused(
    spoil: Callable[[dict[str, Tensor], Slot], None], sentence: str, tmp_path: Path
) -> None:
    _, adapter, weights = attached("sd15")
    path = write(tmp_path / "a.safetensors", adapter, weights, kohya)
    tensors = safetensors.torch.load_file(path)
    spoil(tensors, adapter.slots[3])
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(LoraFileError, match=sentence) as caught:
        read_lora(path, "sd15", adapter.table)
    assert caught.value.remedy


@pytest.mark.parametrize("data", [b"", b"<html>log in</html>", b"PK\x03\x04 pickle", None])
def test_what_is_no_safetensors_file_is_refused(data: bytes | None, tmp_path: Path) -> None:
    _, adapter, weights = attached("sd15")
    path = write(tmp_path / "a.safetensors", adapter, weights, kohya)
    path.write_bytes(path.read_bytes()[:-100] if data is None else data)
    with pytest.raises(LoraFileError):
        read_lora(path, "sd15", adapter.table)
    with pytest.raises(LoraFileError):
        read_lora(tmp_path / "missing.safetensors", "sd15", adapter.table)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[" * 100_000,
        "[1]",
        '{"unet.lora_alpha": "eight"}',
        '{"unet.lora_alpha": NaN}',
        '{"unet.lora_alpha": 1' + "0" * 400 + "}",
        '{"unet.use_dora": true}',
        '{"unet.alpha_pattern": [1]}',
    ],
)
def test_metadata_that_makes_no_sense_is_refused(text: str, tmp_path: Path) -> None:
    _, adapter, weights = attached("sd15")
    path = write(tmp_path / "a.safetensors", adapter, weights, peft, lora_adapter_metadata=text)
    with pytest.raises(LoraFileError):
        read_lora(path, "sd15", adapter.table)


def continued(path: Path, family: Family, adapter: Adapter, recipe: RecipeConfig = EVERYTHING) -> dict[str, Tensor]:
    initial = initial_weights(adapter, lambda name: generator(42, "adapter", sample=name))
    return continue_from(path, recipe, family, adapter.table, adapter, initial)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_on_from_what_the_file_does(family: Family, tmp_path: Path) -> None:
    models, adapter, weights = attached(family)
    path = tmp_path / "a.safetensors"
    export_lora(path, weights, adapter, {})
    other_alphas = {"alpha": 7.0, "conv_alpha": 1.0, "text_encoder": {"learning_rate": 1e-4, "rank": 2, "alpha": 9.0}}
    again = Models.copies(family)
    recipe = RecipeConfig.model_validate(EVERYTHING.model_dump() | other_alphas)
    continuing = again.attach(recipe)
    continuing.load(continued(path, family, continuing, recipe))
    expected, found = models.predict(), again.predict()
    assert (found - expected).norm() < 1e-6 * expected.norm()


def test_layers_that_the_file_lacks_start_afresh(tmp_path: Path) -> None:
    models, small, weights = attached("sdxl", ATTENTION)
    path = tmp_path / "a.safetensors"
    export_lora(path, weights, small, {})
    again = Models.copies("sdxl")
    recipe = RecipeConfig(layers="all", rank=3, alpha=7.0)
    large = again.attach(recipe)
    start = continued(path, "sdxl", large, recipe)
    large.load(start)
    expected, found = models.predict(), again.predict()
    assert (found - expected).norm() < 1e-12 * expected.norm()
    fresh = [slot for slot in large.slots if slot.kohya not in small.rank]
    assert fresh
    assert all(start[slot.down].any() and not start[slot.up].any() for slot in fresh)


UNEVEN = {"blocks": [{"match": "unet.mid_block.*", "rank": 2}, {"match": "*.attn2.to_k", "rank": 7}]}


@pytest.mark.parametrize(
    ("trained", "recipe", "found"),
    [
        (UNEVEN, {}, {2, 7}),
        (UNEVEN, {"conv_rank": 9}, {2, 3, 7}),
        (UNEVEN, UNEVEN, set()),
        ({}, {"rank": 8}, set()),  # recipe.rank = 4 is enough
        (UNEVEN, {"blocks": [{"match": "unet.*", "rank": 9}]}, set()),  # stated by the user
        (UNEVEN, {"blocks": [{"match": "unet.*", "rate_factor": 0.5}]}, {2, 7}),
    ],
)
def test_a_file_with_different_ranks_gives_those_that_the_recipe_lacks(
    trained: dict[str, Any], recipe: dict[str, Any], found: set[int], tmp_path: Path
) -> None:
    first, second = (RecipeConfig.model_validate(EVERYTHING.model_dump() | changes) for changes in (trained, recipe))
    adapter = Models.copies("sdxl").attach(first)
    weights = {key: weight.detach().float() for key, weight in adapter.parameters.items()}
    export_lora(tmp_path / "a.safetensors", weights, adapter, {})
    entries = layers_of_file(tmp_path / "a.safetensors", second, "sdxl", adapter.table)
    assert {entry.rank for entry in entries} == found
    if entries:
        blocks = (*(second.blocks or ()), *entries)
        settings = trained_layers(adapter.table, second.replaced(blocks=blocks))
        assert {slot.kohya: size.rank for slot, size in settings.items()} == adapter.rank
        before = trained_layers(adapter.table, second)
        assert all(size.alpha / size.rank == before[slot].alpha / before[slot].rank for slot, size in settings.items())


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"rank": 8}, "Set recipe.rank = 4."),
        ({"conv_rank": 8}, "Set recipe.conv_rank = 3."),
        ({"text_encoder": {"learning_rate": 1.0, "rank": 8}}, "Set recipe.text_encoder.rank = 2."),
        (
            {"conv_rank": 8, "text_encoder_2": {"learning_rate": 1.0, "rank": 8}},
            "Set recipe.conv_rank = 3 and recipe.text_encoder_2.rank = 5.",
        ),
        (
            {"blocks": [{"match": "unet.mid_block.*", "alpha": 1.0}, {"match": "*.attn2.to_k", "rank": 7}]},
            "Set recipe.blocks.1.rank = 4.",
        ),
        (
            {
                "blocks": [{"match": "unet.*", "rank": 9}, {"match": "unet.*.conv1", "rank": 7}],
                "text_encoder_2": {"learning_rate": 1.0, "rank": 8},
            },
            "The file's layers have different ranks: set them in recipe.blocks, or use a LoRA that was not resized.",
        ),
        ({"text_encoder": {}}, "Set recipe.text_encoder.learning_rate above 0."),
        ({"layers": "linear"}, 'Set recipe.layers = "all".'),
        ({"layers": "attention"}, 'Set recipe.layers = "all".'),
    ],
)
def test_recipes_that_would_lose_something_are_refused_with_the_setting(
    changes: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    _, adapter, weights = attached("sdxl")
    path = tmp_path / "a.safetensors"
    export_lora(path, weights, adapter, {})
    recipe = RecipeConfig.model_validate(EVERYTHING.model_dump() | changes)
    with pytest.raises(LoraFileError) as caught:
        continued(path, "sdxl", Models.copies("sdxl").attach(recipe), recipe)
    assert caught.value.remedy == remedy


def test_layers_that_do_nothing_may_be_lost(tmp_path: Path) -> None:
    """As those with which exporters complete the projections of a text layer."""
    _, adapter, weights = attached("sdxl")
    silent = {slot.up: torch.zeros_like(weights[slot.up]) for slot in adapter.slots if slot.part == "text_encoder_2"}
    path = tmp_path / "a.safetensors"
    export_lora(path, weights | silent, adapter, {})
    recipe = RecipeConfig.model_validate(EVERYTHING.model_dump() | {"text_encoder_2": {}})
    fewer = Models.copies("sdxl").attach(recipe)
    start = continued(path, "sdxl", fewer, recipe)
    assert start.keys() == fewer.parameters.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in start.items())


def test_resized_files_and_other_sizes_of_base_are_refused(tmp_path: Path) -> None:
    _, adapter, weights = attached("sd15")
    path = tmp_path / "a.safetensors"
    export_lora(path, weights, adapter, {})
    tensors = safetensors.torch.load_file(path)
    linear = [slot for slot in adapter.slots if slot.kernel == 1 and slot.part == "unet"]
    for slot, rank in zip(linear, (1, 2), strict=False):
        tensors[slot.down], tensors[slot.up] = tensors[slot.down][:rank], tensors[slot.up][:, :rank].contiguous()
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(LoraFileError, match=r"recipe\.rank: 1 and 2 in the file") as caught:
        continued(path, "sd15", adapter)
    assert "not resized" in caught.value.remedy

    tensors = {key: tensor for key, tensor in tensors.items() if linear[3].kohya in key}
    tensors[linear[3].down] = torch.ones(4, 640)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(LoraFileError, match=f"does not fit this base: {linear[3].kohya} has shape"):
        continued(path, "sd15", adapter)


@pytest.mark.parametrize("family", FAMILIES)
def test_drawing_with_loras_adds_them_by_strength(family: Family, tmp_path: Path) -> None:
    drawn, merged = Models.copies(family), Models.copies(family)
    loras: list[tuple[LoraWeights, float]] = []
    for recipe, strength in ((EVERYTHING, 0.8), (ATTENTION, -0.5), (EVERYTHING, 0.0)):
        _, adapter, weights = attached(family, recipe)
        path = tmp_path / "a.safetensors"
        export_lora(path, weights, adapter, {})
        loras.append((read_lora(path, family, adapter.table), strength))
        merge(merged, adapter, weights, strength)
    AppliedLoras(drawn.unet, drawn.text_encoders, dtype=torch.float64).use(loras)
    expected, found = merged.predict(), drawn.predict()
    assert (found - expected).norm() < 1e-6 * expected.norm()
    assert not any(parameter.requires_grad for model in drawn.parts.values() for parameter in model.parameters())


@pytest.mark.parametrize("family", [pytest.param("sd15", marks=pytest.mark.slow), "sdxl"])
def test_other_loras_take_their_place_and_the_base_comes_back_bit_for_bit(family: Family, tmp_path: Path) -> None:
    """Strengths, weights of the same ranks, other ranks, none: each is as if it had been the first."""
    drawn = Models.copies(family)
    before = {
        name: {key: value.clone() for key, value in model.state_dict().items()} for name, model in drawn.parts.items()
    }
    plain = drawn.predict()
    files = []
    for number, recipe in enumerate((EVERYTHING, EVERYTHING.model_copy(update={"rank": 3}), ATTENTION)):
        _, adapter, weights = attached(family, recipe)
        if number == 1:
            weights = {key: tensor * 2 for key, tensor in weights.items()}
        export_lora(tmp_path / f"{number}.safetensors", weights, adapter, {})
        files.append(read_lora(tmp_path / f"{number}.safetensors", family, adapter.table))
    applied = AppliedLoras(drawn.unet, drawn.text_encoders, dtype=torch.float64)
    courses = [
        [(files[0], 1.0)],
        [(files[0], 0.4)],
        [(files[1], 0.4)],
        [(files[2], 1.0), (files[0], 1.0)],
        [(files[2], 1.0)],
    ]
    for loras in courses:
        applied.use(loras)
        fresh = Models.copies(family)
        AppliedLoras(fresh.unet, fresh.text_encoders, dtype=torch.float64).use(loras)
        found = drawn.predict()
        assert torch.equal(found, fresh.predict())
        assert not torch.equal(found, plain)
    applied.use([])
    assert torch.equal(drawn.predict(), plain)
    for name, model in drawn.parts.items():
        after = model.state_dict()
        assert after.keys() == before[name].keys()
        assert all(torch.equal(after[key], value) for key, value in before[name].items())


def test_matrices_written_for_the_other_kind_of_layer_are_understood(tmp_path: Path) -> None:
    """SD 1.5's proj_in is a 1x1 convolution; some programs write it as a matrix."""
    models, adapter, weights = attached("sd15")
    flattened = {
        key: tensor.flatten(1) if tensor.shape[2:] == (1, 1) and "proj_" in key else tensor
        for key, tensor in weights.items()
    }
    assert flattened["lora_unet_mid_block_attentions_0_proj_in.lora_up.weight"].ndim == 2
    path = write(tmp_path / "a.safetensors", adapter, flattened, kohya)
    drawn = Models.copies("sd15")
    AppliedLoras(drawn.unet, drawn.text_encoders, dtype=torch.float64).use(
        [(read_lora(path, "sd15", adapter.table), 1.0)]
    )
    expected, found = models.predict(), drawn.predict()
    assert (found - expected).norm() < 1e-6 * expected.norm()
