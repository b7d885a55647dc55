"""Where LoRA layers go, what they start from, what trains, and the dropouts, each against its own reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.ldm import unet_to_ldm
from tests.support.loras import EVERYTHING, Models, full_size, golden_rows, random_weights
from trainer.adapter.attach import Adapter, attach, initial_weights
from trainer.adapter.names import slots
from trainer.base.quantized import FrozenInt8Linear, FrozenNF4Linear, quantize_linears
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.dataset.sampling import generator
from trainer.errors import JobError, LoraFileError
from trainer.training.device.gradient_checkpointing import set_checkpointing

FAMILIES: list[Family] = ["sd15", "sdxl"]


def recipe(**changes: Any) -> RecipeConfig:
    return RecipeConfig.model_validate(changes)


def sd_scripts_targets(unet: nn.Module) -> dict[str, str]:
    """Find layers as sd-scripts does: by the class around them (networks/lora.py); path to "plain" or "conv"."""
    found = {}
    for name, module in unet.named_modules():
        inside = type(module).__name__
        if inside not in ("Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"):
            continue
        for child, layer in module.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                found[f"{name}.{child}"] = "plain" if inside == "Transformer2DModel" else "conv"
    return found


@pytest.mark.parametrize(("levels", "resnets", "depths"), [(1, 1, 2), (2, 2, [1, 2]), (3, 1, [3, 1, 2]), (4, 3, 1)])
def test_table_finds_the_layers_that_sd_scripts_finds(levels: int, resnets: int, depths: Any) -> None:
    down = ["CrossAttnDownBlock2D" if level % 2 else "DownBlock2D" for level in range(levels)]
    config = {
        "block_out_channels": [32 * 2 ** (level // 2) for level in range(levels)],
        "layers_per_block": resnets,
        "down_block_types": down,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(down)],
        "transformer_layers_per_block": depths,
        "cross_attention_dim": 32,
    }
    with torch.device("meta"):
        unet = UNet2DConditionModel(**config)
    table = slots("sdxl", config, [])
    assert {slot.module: "conv" if slot.kind == "conv" else "plain" for slot in table} == sd_scripts_targets(unet)
    for slot in table:
        layer = unet.get_submodule(slot.module)
        assert slot.kernel == (layer.kernel_size[0] if isinstance(layer, nn.Conv2d) else 1)  # type: ignore[comparison-overlap]
    # The same names as the checkpoints that the tests write by a mapping of their own.
    weights = unet_to_ldm({f"{slot.module}.weight": torch.tensor(place) for place, slot in enumerate(table)}, config)
    assert [f"{slot.ldm}.weight" for slot in table] == [name for name, _ in sorted(weights.items(), key=lambda i: i[1])]


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_on_the_full_models_are_the_golden_ones(family: Family) -> None:
    unet, encoders = full_size(family)
    everything = EVERYTHING.model_copy(update={"rank": 7})
    adapter = attach(family, unet, encoders, everything, dtype=torch.bfloat16, generator=np.random.default_rng)  # type: ignore[arg-type]
    found = {}
    for slot in adapter.slots:
        down, up = adapter.parameters[slot.down], adapter.parameters[slot.up]
        assert down.shape[0] == up.shape[1] == adapter.rank[slot.kohya] == expected_rank(slot.kohya, slot.kernel)
        sizes = [[str(size) for size in parameter.shape] for parameter in (down, up)]
        sizes[0][0] = sizes[1][1] = "r"
        found[slot.kohya] = ["x".join(size) for size in sizes]
    assert found == {name: [down, up] for name, _, down, up in golden_rows(family)}


def expected_rank(name: str, kernel: int) -> int:
    if name.startswith(("lora_te_", "lora_te1_")):
        return 2
    if name.startswith("lora_te2_"):
        return 5
    return 3 if kernel == 3 else 7


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_fresh_adapter_changes_nothing_and_alone_requires_gradients(family: Family, dtype: torch.dtype) -> None:
    models = Models.copies(family, dtype)
    for model in models.parts.values():
        model.requires_grad_(True)
    before = models.predict()
    state = torch.get_rng_state()
    adapter = models.attach()
    assert torch.equal(torch.get_rng_state(), state)
    # In bf16 the base's product is rounded once with its bias, where diffusers' layers may round before and after.
    assert torch.allclose(models.predict(), before, rtol=0, atol=0.02 if dtype == torch.bfloat16 else 1e-12)
    trained = {id(p) for model in models.parts.values() for p in model.parameters() if p.requires_grad}
    assert trained == {id(parameter) for parameter in adapter.parameters.values()}
    assert {parameter.dtype for parameter in adapter.parameters.values()} == {dtype}
    assert list(adapter.part_of) == list(adapter.parameters)


def test_start_values_are_kaiming_and_depend_on_seed_and_layer_alone() -> None:
    first = Models.copies("sdxl", torch.float32).attach()
    alone = Models.copies("sdxl", torch.float64).attach(recipe(layers="attention", rank=4))
    assert len(alone.slots) < len(first.slots)
    for slot in first.slots:
        down, up = first.parameters[slot.down].detach(), first.parameters[slot.up].detach()
        fan_in = math.prod(down.shape[1:])
        reference = torch.empty_like(down)
        nn.init.kaiming_uniform_(reference, a=math.sqrt(5), generator=torch.Generator().manual_seed(1))
        assert down.abs().max() <= 1 / math.sqrt(fan_in)
        if down.numel() >= 1000:
            assert abs(float(down.std() / reference.std()) - 1) < 0.1
            assert abs(float(down.mean())) < 0.1 / math.sqrt(fan_in)
        assert not up.any()
        if slot.down in alone.parameters:
            assert torch.equal(alone.parameters[slot.down].float(), down)
    other = Models.copies("sdxl", torch.float32).attach(EVERYTHING.model_copy(update={"seed": 43}))
    assert not torch.equal(other.parameters[first.slots[0].down], first.parameters[first.slots[0].down])
    weights = initial_weights(first, lambda name: generator(42, "adapter", sample=name))
    assert all(torch.equal(weights[key], parameter) for key, parameter in first.parameters.items())


@pytest.mark.parametrize(
    ("changes", "parts", "kinds"),
    [
        ({"layers": "attention"}, {"unet"}, {"attention"}),
        ({"layers": "linear"}, {"unet"}, {"attention", "linear"}),
        ({"layers": "all"}, {"unet"}, {"attention", "linear", "conv"}),
        ({"learning_rate": 0, "text_encoder_2": {"learning_rate": 1e-5}}, {"text_encoder_2"}, {"attention", "linear"}),
        (
            {"layers": "attention", "text_encoder": {"learning_rate": 1e-5}},
            {"unet", "text_encoder"},
            {"attention", "linear"},
        ),
    ],
)
def test_the_recipe_says_what_is_trained(changes: dict[str, Any], parts: set[str], kinds: set[str]) -> None:
    models = Models.copies("sdxl", torch.float32)
    for model in models.parts.values():
        model.requires_grad_(True)
    adapter = models.attach(recipe(**changes))
    trained = {id(p) for model in models.parts.values() for p in model.parameters() if p.requires_grad}
    assert trained == {id(parameter) for parameter in adapter.parameters.values()}
    assert {slot.part for slot in adapter.slots} == set(adapter.part_of.values()) == parts
    assert {slot.kind for slot in adapter.slots} == kinds
    expected = [slot for slot in adapter.table if slot in adapter.slots]
    assert list(adapter.slots) == expected
    assert list(adapter.parameters) == [key for slot in expected for key in (slot.down, slot.up)]


def test_nothing_to_train_is_an_error() -> None:
    nothing = EVERYTHING.model_copy(update={"learning_rate": 0.0, "text_encoder": RecipeConfig().text_encoder})
    with pytest.raises(JobError, match="nothing would be trained") as caught:
        Models.copies("sd15", torch.float32).attach(nothing)
    assert "learning_rate" in caught.value.remedy


def test_gradients_are_those_of_the_merged_formula() -> None:
    """The gradients d loss / d up and d down via PEFT equal those via W + alpha / rank · up @ down in float64."""
    models, plain = Models.copies("sd15"), Models.copies("sd15")
    adapter = models.attach()
    weights = random_weights(adapter)
    models.predict().square().sum().backward()

    leaves = {key: tensor.double().requires_grad_() for key, tensor in weights.items()}
    for slot in adapter.slots:
        model = plain.parts[slot.part]
        path = slot.module if slot.part == "unet" else slot.module.removeprefix("text_model.")
        layer = model.get_submodule(path)
        delta = (leaves[slot.up].flatten(1) @ leaves[slot.down].flatten(1)).reshape(layer.weight.shape)
        weight = layer.weight.detach() + delta * (adapter.alpha[slot.kohya] / adapter.rank[slot.kohya])
        del layer.weight
        layer.weight = weight
    plain.predict().square().sum().backward()
    found = torch.cat(
        [parameter.grad.flatten() for parameter in adapter.parameters.values() if parameter.grad is not None]
    )
    expected = torch.cat([leaf.grad.flatten() for leaf in leaves.values() if leaf.grad is not None])
    assert (found - expected).norm() < 1e-10 * expected.norm()


def gradient(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the gradients of all parameters as one vector, zeros where a layer took no part."""
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters.values()]
    )


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_bases_carry_adapters_in_the_stated_dtype(kind: Any) -> None:
    models = Models.copies("sdxl", torch.bfloat16)
    exact = models.predict()
    weights = dict(models.unet.named_parameters())
    place = quantize_linears(models.unet, kind, torch.bfloat16, torch.device("cpu"))
    for path, weight in weights.items():
        parent, _, leaf = path.rpartition(".")
        if place(module := models.unet.get_submodule(parent), leaf, weight.detach()):
            assert type(module) in (FrozenInt8Linear, FrozenNF4Linear)
        else:
            setattr(module, leaf, weight)
    quantised_only = models.predict()
    adapter = models.attach()
    assert {parameter.dtype for parameter in adapter.parameters.values()} == {torch.bfloat16}
    assert torch.allclose(models.predict(), quantised_only, rtol=0, atol=0.02)
    assert (quantised_only - exact).norm() < 0.2 * exact.norm()
    random_weights(adapter)
    models.predict().float().square().sum().backward()
    for key, parameter in adapter.parameters.items():
        if adapter.part_of[key] == "unet":
            assert parameter.grad is not None
            assert parameter.grad.any()
            assert parameter.grad.isfinite().all()
    layer = type(models.unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q"))
    assert layer.__bases__[-1].__module__ == "peft.tuners.lora.bnb"


def test_weights_that_do_not_fit_are_refused_before_any_is_copied() -> None:
    adapter = Models.copies("sd15", torch.float32).attach()
    before = {key: parameter.detach().clone() for key, parameter in adapter.parameters.items()}
    weights = {key: tensor + 1 for key, tensor in before.items()}
    last = list(weights)[-1]
    with pytest.raises(LoraFileError, match=last):
        adapter.load(weights | {last: torch.zeros(7, 7)})
    with pytest.raises(LoraFileError, match="extra"):
        adapter.load(weights | {"extra": torch.zeros(1)})
    assert all(torch.equal(parameter, before[key]) for key, parameter in adapter.parameters.items())


def dropping(**shares: float) -> tuple[Models, Adapter]:
    models = Models.copies("sd15")
    adapter = models.attach(EVERYTHING.model_copy(update=shares))
    random_weights(adapter)
    return models, adapter


@pytest.mark.parametrize("shares", [{"dropout": 0.3}, {"rank_dropout": 0.3}, {"module_dropout": 0.3}])
def test_dropouts_act_in_training_alone_and_follow_torchs_stream(shares: dict[str, float]) -> None:
    models, adapter = dropping(**shares)
    plain = dropping()[0].predict()
    predictions = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        predictions.append(models.predict())
    assert torch.equal(predictions[0], predictions[1])
    assert not torch.equal(predictions[0], predictions[2])
    assert not torch.equal(predictions[0], plain)
    adapter.training = False
    assert torch.allclose(models.predict(), plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(24, 32), (24, 9, 32), (24, 32, 5, 5)])
def test_dropouts_equal_sd_scripts_formulas(shape: tuple[int, ...]) -> None:
    """What comes out of `down`, element by element: dropped as a whole where it should be, and scaled as there."""
    convolution = len(shape) == 4
    models, adapter = dropping(dropout=0.25)
    layer = down_layer(models, convolution)
    inputs = torch.rand(shape, dtype=torch.float64) + 0.1
    rank_axis = 1 if convolution else len(shape) - 1
    adapter.training = False
    whole = layer(inputs)

    adapter.training = True
    torch.manual_seed(0)
    found = layer(inputs)
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(whole, 0.25))

    models, adapter = dropping(rank_dropout=0.25)
    layer = down_layer(models, convolution)
    ratio = layer(inputs) / whole
    rows = ratio.movedim(rank_axis, 1).flatten(2) if len(shape) > 2 else ratio[..., None]
    kept = rows.detach()[..., 0] > 0
    # A rank is kept for all of a picture's places or for none; each picture has its own.
    assert torch.allclose(rows, kept[..., None].expand_as(rows).double() / 0.75, atol=1e-12)
    assert abs(float(kept.double().mean()) - 0.75) < 0.15
    assert len({tuple(row.tolist()) for row in kept}) > 2

    models, adapter = dropping(module_dropout=0.25)
    layer = down_layer(models, convolution)
    outcomes = [layer(inputs[:1]).detach() for _ in range(300)]
    assert all(torch.allclose(outcome, whole[:1]) or not outcome.any() for outcome in outcomes)
    assert abs(sum(bool(outcome.any()) for outcome in outcomes) / 300 - 0.75) < 0.1


def down_layer(models: Models, convolution: bool) -> Any:
    path = (
        "down_blocks.0.resnets.0.conv1" if convolution else "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    )
    return models.unet.get_submodule(path).lora_A["default"]


def test_checkpointing_recomputes_the_same_dropouts() -> None:
    gradients = []
    for checkpointing in (True, False):
        models, adapter = dropping(dropout=0.2, rank_dropout=0.2, module_dropout=0.2)
        if checkpointing:
            set_checkpointing(models.unet, models.text_encoders, "full", dropouts=True)
        torch.manual_seed(5)
        models.predict().square().sum().backward()
        gradients.append(gradient(adapter.parameters))
    assert torch.equal(*gradients)
