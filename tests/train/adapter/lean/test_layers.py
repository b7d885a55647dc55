"""The LoRA layers of our own beside PEFT's: the same numbers, names and dropouts, with no more rounding."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tests.support.counting import StepCounter
from tests.support.jobs import photographs
from tests.support.loras import EVERYTHING, Models, random_weights
from tests.support.steps import distance, make_batch, step_models, take_gradient
from tests.train.dataset.test_cache import prepared, quiet, showings
from trainer.adapter.attach import Adapter, attach
from trainer.adapter.lean.lora import (
    FusedInt8,
    FusedLinear,
    FusedNF4,
    LeanConv2d,
    LeanInt8,
    LeanLinear,
    LeanNF4,
    register,
)
from trainer.adapter.lean.transformer import LeanAttention, project
from trainer.base.quantized import quantize_linears, set_int8_directions
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.lr_schedule import Segment
from trainer.config.recipe import ObjectiveConfig, RecipeConfig
from trainer.dataset.sampling import generator
from trainer.training.build import build_engine
from trainer.training.callbacks.checkpoints import capture, restore
from trainer.training.checkpoint import load_latest, save_checkpoint
from trainer.training.device.gradient_checkpointing import set_checkpointing
from trainer.training.objective import NoiseSchedule
from trainer.training.optim.master_weights import MasterWeights
from trainer.training.step import training_step

FAMILIES: tuple[Family, ...] = ("sd15", "sdxl")
INPUTS, OUTPUTS = 64, 96


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(*shape: int) -> Tensor:
    return normal(*shape, INPUTS)


def maps() -> Tensor:
    return normal(2, INPUTS, 24, 17)


# What is adapted, what it is given, and which class of ours takes it, without and with dropouts.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], type[nn.Module], type[nn.Module]]] = {
    "linear": (lambda: nn.Linear(INPUTS, OUTPUTS), lambda: rows(2, 37), FusedLinear, LeanLinear),
    "no bias": (lambda: nn.Linear(INPUTS, OUTPUTS, bias=False), lambda: rows(51), FusedLinear, LeanLinear),
    "transposed": (
        lambda: nn.Linear(INPUTS, OUTPUTS),
        lambda: normal(2, INPUTS, 33).transpose(1, 2),
        FusedLinear,
        LeanLinear,
    ),
    "conv 1x1": (lambda: nn.Conv2d(INPUTS, OUTPUTS, 1), maps, LeanConv2d, LeanConv2d),
    "conv 3x3": (lambda: nn.Conv2d(INPUTS, OUTPUTS, 3, 2, 1), maps, LeanConv2d, LeanConv2d),
    "channels last": (
        lambda: nn.Conv2d(INPUTS, OUTPUTS, 3, padding=1),
        lambda: maps().contiguous(memory_format=torch.channels_last),
        LeanConv2d,
        LeanConv2d,
    ),
}


def lora_over(base: nn.Module, dtype: torch.dtype, *, lean: bool, dropouts: bool = False) -> Any:
    """A LoRA of rank 5 with scale 0.6 as PEFT injects it over a layer, with the same weights whoever computes."""
    config = LoraConfig(r=5, lora_alpha=3, target_modules=["layer"], init_lora_weights=False)
    if lean:
        register(config, hooked=dropouts)
    model = nn.ModuleDict({"layer": copy.deepcopy(base).requires_grad_(False)})
    inject_adapter_in_model(config, model)
    layer: Any = model["layer"]
    for index, factor in enumerate((layer.lora_A["default"], layer.lora_B["default"])):
        factor.weight.data = (normal(*factor.weight.shape, seed=index + 1) * 0.2).bfloat16().to(dtype)
    return layer


def plain_base(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return make().to(torch.bfloat16).to(dtype)


def results(layer: Any, x: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of x, down and up, for one gradient from above."""
    x = x.detach().requires_grad_()
    out = layer(x)
    above = normal(*out.shape, seed=9).bfloat16().to(out.dtype)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return [out.detach(), *torch.autograd.grad(out, (x, down, up), above)]


@pytest.mark.parametrize("dropouts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_gives_what_pefts_gives(kind: str, dropouts: bool) -> None:
    """To the last digits of float64, and in fp32 to rounding: sums are taken in another order."""
    make, given, *classes = KINDS[kind]
    for dtype, limit in ((torch.float64, 1e-15), (torch.float32, 3e-7)):
        base, x = plain_base(make, dtype), given().to(dtype)
        ours = lora_over(base, dtype, lean=True, dropouts=dropouts)
        assert type(ours) is classes[dropouts]
        assert isinstance(ours, LoraLayer)
        theirs = lora_over(base, dtype, lean=False)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        for mine, wanted in zip(results(ours, x), results(theirs, x), strict=True):
            assert mine.shape == wanted.shape
            assert distance(mine, wanted) < limit


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_near_to_float64_as_pefts_layers_are(kind: str) -> None:
    """Over several draws; only for the up of a convolution is it no nearer, as often rounded there as by PEFT."""
    make, given, *_ = KINDS[kind]
    exact, ours, theirs = (
        lora_over(plain_base(make, dtype), dtype, lean=lean)
        for dtype, lean in ((torch.float64, False), (torch.bfloat16, True), (torch.bfloat16, False))
    )
    errors = torch.zeros(2, 4)
    for draw in range(12):
        shaped = given().bfloat16()
        x = torch.empty_like(shaped).copy_(normal(*shaped.shape, seed=100 + draw))
        wanted = results(exact, x.double())
        for row, layer in enumerate((ours, theirs)):
            found = results(layer, x)
            assert {one.dtype for one in found} == {torch.bfloat16}
            errors[row] += torch.tensor([distance(one, other) ** 2 for one, other in zip(found, wanted, strict=True)])
    ratio = (errors[0] / errors[1]).sqrt()
    assert ratio[:3].max() < 0.97
    assert ratio[3] < (1.03 if ours.lora_A["default"].weight.ndim == 4 else 0.97)


@pytest.mark.parametrize(
    ("kind", "dropouts", "expected"),
    [
        ("int8", False, FusedInt8),
        ("int8", True, LeanInt8),
        ("int8_products", False, FusedInt8),
        ("int8_products", True, LeanInt8),
        ("nf4", False, FusedNF4),
        ("nf4", True, LeanNF4),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_quantised_bases_give_what_pefts_layers_give(
    kind: Any, dropouts: bool, expected: type[nn.Module], bias: bool
) -> None:
    """Layers of bitsandbytes are linear layers too, and must not be mistaken for full-precision ones."""
    model = nn.ModuleDict({"transformer_blocks": nn.ModuleDict({"layer": nn.Linear(INPUTS, OUTPUTS, bias=bias)})})
    place = quantize_linears(model, kind, torch.float32, torch.device("cpu"))
    set_int8_directions(model, FitConfig(quantize=kind).products)
    base: Any = model.get_submodule("transformer_blocks.layer")
    place(base, "weight", normal(OUTPUTS, INPUTS).float())
    base.bias = nn.Parameter(normal(OUTPUTS).float()) if bias else None
    ours = lora_over(base, torch.float32, lean=True, dropouts=dropouts)
    assert type(ours) is expected
    theirs = lora_over(base, torch.float32, lean=False)
    x = rows(3, 11).float()
    for mine, wanted in zip(results(ours, x), results(theirs, x), strict=True):
        assert distance(mine, wanted) < 3e-7


@pytest.mark.parametrize(("kind", "kept"), [("int8", True), ("nf4", True), ("none", False)])
def test_the_output_of_a_quantized_base_is_not_overwritten(kind: Any, kept: bool) -> None:
    """The forecast counts its bytes; an unquantized base's output takes the sum, which saves them."""
    model = nn.ModuleDict({"transformer_blocks": nn.ModuleDict({"layer": nn.Linear(INPUTS, OUTPUTS, bias=False)})})
    if kind != "none":
        place = quantize_linears(model, kind, torch.float32, torch.device("cpu"))
        place(model.get_submodule("transformer_blocks.layer"), "weight", normal(OUTPUTS, INPUTS).float())
    layer = lora_over(model.get_submodule("transformer_blocks.layer"), torch.float32, lean=True, dropouts=True)
    seen: list[tuple[Tensor, Tensor]] = []
    layer.base_layer.register_forward_hook(lambda module, given, out: seen.append((out, out.clone())))
    layer(rows(3, 11).float().requires_grad_())
    ((output, before),) = seen
    assert torch.equal(output, before) is kept


def test_what_is_used_of_pefts_private_hook() -> None:
    """A dict from base class to our class, tried in its order before PEFT's own layers."""
    assert list(inspect.signature(LoraConfig._register_custom_module).parameters) == ["self", "mapping"]
    config = LoraConfig()
    register(config, hooked=False)
    kinds = list(config._custom_modules)
    assert kinds.index(nn.Linear) > max(index for index, kind in enumerate(kinds) if kind.__module__.startswith("bits"))


def test_no_gradient_is_computed_for_inputs_that_need_none() -> None:
    layer = lora_over(plain_base(KINDS["linear"][0], torch.float32), torch.float32, lean=True)

    def products(x: Tensor) -> int:
        counter = StepCounter(torch.device("cpu"))
        with counter, counter.stage("forward"):
            torch.autograd.backward(layer(x), torch.ones(2, 37, OUTPUTS))
        layer.zero_grad()
        return counter.total("backward")

    x = rows(2, 37).float()
    assert products(x.clone().requires_grad_()) == products(x) + 2  # of the base, and of the LoRA in its place


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_was_never_written_is_never_read(kind: str, fresh_memory_is_nan: None) -> None:
    make, given, *_ = KINDS[kind]
    layer = lora_over(plain_base(make, torch.float32), torch.float32, lean=True)
    assert not any(found.isnan().any() for found in results(layer, given().float()))


@pytest.fixture
def fresh_memory_is_nan() -> None:
    """As deterministic algorithms have it, which all tests here stand on."""
    assert torch.empty(3).isnan().all()


def adapted(
    family: Family, dtype: torch.dtype, *, lean: bool, recipe: RecipeConfig = EVERYTHING
) -> tuple[Models, Adapter]:
    models = Models.copies(family, dtype)
    adapter = attach(
        family,
        models.unet,
        models.text_encoders,
        recipe,
        dtype=dtype,
        generator=lambda name: generator(0, "adapter", sample=name),
        lean=lean,
    )
    random_weights(adapter)
    return models, adapter


def learn(models: Models, adapter: Adapter, batch: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one micro-batch."""
    dtype = torch.promote_types(models.unet.dtype, torch.float32)
    schedule = NoiseSchedule.create("epsilon", False).to("cpu", dtype)
    torch.manual_seed(5)
    return training_step(step_models(models), schedule, ObjectiveConfig(), batch), take_gradient(adapter)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_gives_what_it_gives_with_pefts_layers(family: Family, fresh_memory_is_nan: None) -> None:
    """All layers of UNet and text encoders, under the same names; nothing is read that was not written."""
    batch = make_batch(family, (100, 900))
    (models, ours), (other, theirs) = (adapted(family, torch.float64, lean=lean) for lean in (True, False))
    assert list(ours.parameters) == list(theirs.parameters)
    for part, model in models.parts.items():
        assert list(model.state_dict()) == list(other.parts[part].state_dict())
    for mine, wanted in zip(learn(models, ours, batch), learn(other, theirs, batch), strict=True):
        assert distance(mine, wanted) < 1e-13


def test_dropouts_leave_out_the_same() -> None:
    recipe = RecipeConfig(layers="all", rank=4, alpha=2.0, dropout=0.3, rank_dropout=0.2, module_dropout=0.1)
    batch = make_batch("sd15", (100, 900), live_text=False)
    (models, ours), (other, theirs) = (
        adapted("sd15", torch.float64, lean=lean, recipe=recipe) for lean in (True, False)
    )
    dropped = learn(models, ours, batch)
    assert distance(dropped[1], learn(other, theirs, batch)[1]) < 1e-13
    ours.training = False
    assert distance(learn(models, ours, batch)[1], dropped[1]) > 0.1


def test_checkpointing_changes_no_bit_of_the_gradient() -> None:
    models, adapter = adapted("sdxl", torch.float32, lean=True)
    batch = make_batch("sdxl", (900,), dtype=torch.float32)
    plain = learn(models, adapter, batch)
    set_checkpointing(models.unet, models.text_encoders, "full", dropouts=False)
    assert torch.equal(learn(models, adapter, batch)[1], plain[1])


def attentions(models: Models) -> list[Attention]:
    return [module for module in models.unet.modules() if isinstance(module, Attention)]


def test_projections_lie_together_until_their_weights_are_moved() -> None:
    """Moved weights, unlike LoRAs and masks: then each module computes for itself, with the same result."""
    found = attentions(adapted("sdxl", torch.float64, lean=True)[0])
    assert all(type(attention) is LeanAttention for attention in found)
    attention = found[0]
    layers: list[Any] = [attention.to_q, attention.to_k, attention.to_v]
    x = normal(2, 5, attention.query_dim)
    together = project(layers, x)
    assert {type(part.grad_fn).__name__ for part in together} == {"_ProjectionsWithLoraBackward"}
    alone = [layer(x) for layer in layers]
    assert all(distance(one.detach(), other.detach()) < 1e-14 for one, other in zip(together, alone, strict=True))
    layers[1].lora_A["default"].weight.data = layers[1].lora_A["default"].weight.data.clone()
    moved = project(layers, x)
    assert {type(part.grad_fn).__name__ for part in moved} == {"_LinearWithLoraBackward"}
    assert all(torch.equal(one, other) for one, other in zip(moved, alone, strict=True))


@torch.no_grad()
def test_a_mask_is_left_to_diffusers() -> None:
    attention = attentions(adapted("sdxl", torch.float64, lean=True)[0])[0]
    x, mask = normal(2, 5, attention.query_dim), torch.tensor([[0.0] * 4 + [-1e4]] * 2, dtype=torch.float64)
    ours, without = attention(x, attention_mask=mask), attention(x)
    assert distance(ours, Attention.forward(attention, x, attention_mask=mask)) < 1e-14
    assert distance(ours, without) > 1e-3


@torch.no_grad()
def test_weights_that_lie_together_follow_their_masters() -> None:
    models, adapter = adapted("sdxl", torch.float64, lean=True)
    plain, with_lora = Models.copies("sdxl").predict(), models.predict()
    masters = MasterWeights(adapter.parameters)
    for key, master in masters.masters.items():
        if "lora_up" in key or "lora_B" in key:
            master.zero_()
    masters.refresh()
    assert distance(models.predict(), plain) < 1e-14
    assert distance(with_lora, plain) > 1e-3


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    photographs(tmp_path / "pictures", 3)
    job, pictures, parts = prepared(tmp_path, ("fit.dtype=bf16", "recipe.layers=attention"))
    samples = list(showings(job, pictures, 3))
    parts.cache.ensure_latents(samples, quiet)
    parts.cache.ensure_texts([sample.caption for sample in samples], quiet)
    engine = build_engine(job, parts, [Segment(0, 6)], fresh=True)
    assert engine.adapter.lean
    engine.train_step()
    save_checkpoint(tmp_path / "checkpoints", capture(engine, []))
    engine.train_step()
    saved, _ = load_latest(tmp_path / "checkpoints")
    assert saved is not None
    other = build_engine(job, parts, [Segment(0, 6)], fresh=False)
    restore(other, saved)
    other.train_step()
    for mine, wanted in zip(other.master_weights.masters.values(), engine.master_weights.masters.values(), strict=True):
        assert torch.equal(mine, wanted)
        assert not mine.isnan().any()


def test_what_a_compiler_is_given_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled here, which is slow; `python tests/benchmarks/speed.py --time` compiles without breaks."""
    models, adapter = adapted("sdxl", torch.float64, lean=True)
    model = nn.ModuleDict({"transformer_blocks": nn.ModuleDict({"layer": nn.Linear(INPUTS, OUTPUTS, bias=False)})})
    quantize_linears(model, "nf4", torch.float32, torch.device("cpu"))(
        model.get_submodule("transformer_blocks.layer"), "weight", normal(OUTPUTS, INPUTS).float()
    )
    layer, x = lora_over(model.get_submodule("transformer_blocks.layer"), torch.float32, lean=True), rows(3, 11).float()
    batch = make_batch("sdxl", (100, 900))
    expected = (*learn(models, adapter, batch), *results(layer, x))
    asked: list[bool] = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: asked.append(True) or True)
    found = (*learn(models, adapter, batch), *results(layer, x))
    assert len(asked) > 10
    for mine, wanted in zip(found, expected, strict=True):
        assert distance(mine, wanted) < (1e-13 if wanted.dtype == torch.float64 else 3e-7)
