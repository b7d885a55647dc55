"""Rank-stabilized LoRAs have PEFT's scale alpha / sqrt(rank), in training and in files that know only alpha / rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from tests.support.loras import EVERYTHING, Models, random_weights
from tests.train.adapter.test_export import load_in_diffusers
from trainer.adapter.attach import Adapter, attach, module_path
from trainer.adapter.continuing import continue_from
from trainer.adapter.export import export_lora
from trainer.adapter.names import Slot
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.dataset.sampling import generator

METADATA = {"ss_v2": "False"}


def attached(models: Models, recipe: RecipeConfig, *, lean: bool = False) -> Adapter:
    return attach(
        models.family, models.unet, models.text_encoders, recipe, dtype=torch.float64, lean=lean,
        generator=lambda name: generator(1, "adapter", sample=name),
    )  # fmt: skip


def stabilized_by_peft(models: Models, rank: dict[Slot, int], alpha: float) -> dict[Slot, nn.Module]:
    """Inject PEFT's LoRA layers with use_rslora; return them by slot."""
    for part, model in models.parts.items():
        ranks = {module_path(model, slot): size for slot, size in rank.items() if slot.part == part}
        if not ranks:
            continue
        config: Any = LoraConfig(
            r=1, lora_alpha=alpha, use_rslora=True, target_modules=list(ranks), rank_pattern=ranks,  # type: ignore[arg-type]
            init_lora_weights=False,
        )  # fmt: skip
        inject_adapter_in_model(config, model)
    return {slot: models.parts[slot.part].get_submodule(module_path(models.parts[slot.part], slot)) for slot in rank}


@pytest.mark.parametrize("lean", [True, False])
def test_prediction_and_gradients_are_those_of_peft(lean: bool) -> None:
    """Ranks that are squares have roots without rounding, so the two agree to the precision of float64."""
    recipe = RecipeConfig.model_validate({
        "rank": 16, "alpha": 3.0, "rank_stabilized": True, "layers": "all", "conv_rank": 4,
        "text_encoder": {"learning_rate": 1e-4, "rank": 9}, "blocks": [{"match": "*.to_k", "rank": 25}],
    })  # fmt: skip
    models, others = Models.copies("sdxl"), Models.copies("sdxl")
    adapter = attached(models, recipe, lean=lean)
    weights = random_weights(adapter)
    layers = stabilized_by_peft(others, {slot: adapter.rank[slot.kohya] for slot in adapter.slots}, 3.0)
    factors: dict[str, nn.Parameter] = {}
    for slot, layer in layers.items():
        assert isinstance(layer, LoraLayer)
        for key, factor in ((slot.down, layer.lora_A["default"]), (slot.up, layer.lora_B["default"])):
            factors[key] = factor.weight = nn.Parameter(weights[key].double())  # type: ignore[assignment]
    prediction, wanted = models.predict(), others.predict()
    torch.testing.assert_close(prediction, wanted, rtol=1e-10, atol=1e-10)
    prediction.square().sum().backward()
    wanted.square().sum().backward()
    assert len({adapter.rank[slot.kohya] for slot in adapter.slots}) == 4
    for key, factor in factors.items():
        torch.testing.assert_close(adapter.parameters[key].grad, factor.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_the_file_is_a_plain_lora_with_the_same_effect(family: Family, tmp_path: Path) -> None:
    """Ranks 2, 3 and 5 have irrational roots."""
    recipe = EVERYTHING.replaced(rank_stabilized=True)
    trained, plain = Models.copies(family), Models.copies(family)
    before = plain.predict()
    adapter = attached(trained, recipe)
    weights = random_weights(adapter)
    path = tmp_path / "a.safetensors"
    export_lora(path, weights, adapter, METADATA, dtype=torch.float32)
    load_in_diffusers(plain, path)
    expected, found = trained.predict(), plain.predict()
    assert (expected - before).norm() > 0.05 * before.norm()
    assert (found - expected).norm() < 1e-12 * (expected - before).norm()
    continued = continue_from(path, recipe, family, adapter.table, adapter, dict.fromkeys(weights, torch.empty(0)))
    assert all(torch.equal(continued[key], weights[key]) for key in weights)


def test_scale_is_alpha_over_the_root_of_the_rank() -> None:
    adapter = attached(Models.copies("sd15"), EVERYTHING.replaced(rank_stabilized=True))
    by_rank = {4: 2.0 / 2.0, 3: 5.0 / 3.0**0.5, 2: 3.0 / 2.0**0.5}
    for name, rank in adapter.rank.items():
        assert adapter.alpha[name] / rank == pytest.approx(by_rank[rank], rel=2**-24)
    assert set(adapter.rank.values()) == set(by_rank)
