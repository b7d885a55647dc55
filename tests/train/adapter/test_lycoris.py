"""Layers of DoRA, LoHa, LoKr and OFT and their gradients against LyCORIS itself; and T-LoRA's mask."""

from __future__ import annotations

import json
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor, nn

from tests.support.loras import Models
from tests.support.lycoris import change_of, recipe
from tests.support.tiny import models_on_meta
from trainer.adapter.attach import RankMask, models_by_part, module_path
from trainer.adapter.layers import LayerSettings
from trainer.adapter.lycoris import CHANGES, Dora, LycorisLayer, make_change
from trainer.adapter.names import slots
from trainer.base.quantized import FrozenInt8Linear, FrozenNF4Linear, quantize_linears
from trainer.config.base import Family
from trainer.config.checks import LAYER_SIZES
from trainer.config.methods import factorization
from trainer.files.assets import asset_path

KINDS = list(CHANGES)
LAYERS = {
    "linear": lambda: nn.Linear(24, 40),
    "without bias": lambda: nn.Linear(40, 24, bias=False),
    "1x1": lambda: nn.Conv2d(24, 40, 1),
    "3x3": lambda: nn.Conv2d(24, 40, 3, stride=2, padding=1),
}


def layer_of(kind: str, frozen: Any, rank: int = 2, **changes: Any) -> LycorisLayer:
    """A wrapped layer with scale 1/2, in float64, whose weights are all random."""
    change = make_change(recipe(kind, **changes), frozen, LayerSettings(rank, rank / 2), torch.float64)
    start = change.initial(np.random.default_rng(0))
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for role, weight in change.named_parameters():
            weight.copy_(start[role].double() + 0.1 * torch.randn(weight.shape, generator=stream, dtype=torch.float64))
    return LycorisLayer(frozen.requires_grad_(False), [change])


def lycoris_twin(layer: LycorisLayer, kind: str, rank: int = 2, **arguments: Any) -> Any:
    """LyCORIS's own module over the same frozen layer and with the same weights."""
    from lycoris.modules.diag_oft import DiagOFTModule
    from lycoris.modules.locon import LoConModule
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule

    classes = {"dora": LoConModule, "loha": LohaModule, "lokr": LokrModule, "oft": DiagOFTModule}
    if kind == "dora":
        arguments = {"weight_decompose": True, "wd_on_out": False, **arguments}
    twin = classes[kind]("twin", layer.frozen, lora_dim=rank, alpha=rank / 2, **arguments).double()
    with torch.no_grad():
        for role, weight in layer.only.named_parameters():
            name = f"{role}.weight" if role.startswith("lora_") else role
            twin.get_parameter(name).data = weight.detach().clone()
    return twin


def apply_like(frozen: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    return F.conv2d(x, weight, bias, frozen.stride, frozen.padding)


def inputs_of(frozen: nn.Module) -> Tensor:
    stream = torch.Generator().manual_seed(2)
    shape = (2, frozen.in_channels, 6, 6) if isinstance(frozen, nn.Conv2d) else (2, 5, frozen.in_features)
    return torch.randn(shape, generator=stream, dtype=torch.float64).requires_grad_()  # type: ignore[arg-type]


def gradients(output: Tensor, *leaves: Tensor) -> list[Tensor]:
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    return list(torch.autograd.grad((output * probe).sum(), leaves))


# LyCORIS computes rotations in fp32 even for float64 weights.
LIMITS = {"oft": {"rtol": 5e-6, "atol": 5e-6}}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_lycoris(kind: str, shape: str) -> None:
    layer = layer_of(kind, LAYERS[shape]().double())
    frozen, x = layer.frozen, inputs_of(layer.frozen)
    twin = lycoris_twin(layer, kind)
    if kind == "oft":
        twin, frozen.weight.data = twin.float(), frozen.weight.data.float()
    change = change_of(twin, frozen).double()
    frozen.weight.data = frozen.weight.data.double()
    limits = LIMITS.get(kind, EXACT)
    expected = apply_like(frozen, x, frozen.weight + change, frozen.bias)
    torch.testing.assert_close(layer(x), expected, **limits)
    found = layer.only.weight_change({role: weight.detach() for role, weight in layer.only.named_parameters()}, frozen)
    torch.testing.assert_close(found, change.detach(), **limits)
    if kind == "dora":  # LyCORIS differentiates the norm, which the paper and PEFT do not
        return
    theirs = [twin.get_parameter(role) for role, _ in layer.only.named_parameters()]
    wanted = gradients(expected, x, *theirs)
    for ours, other in zip(gradients(layer(x), x, *layer.only.parameters()), wanted, strict=True):
        torch.testing.assert_close(ours, other.double(), **limits)


@pytest.mark.parametrize("shape", LAYERS)
def test_rotations_are_cayleys_in_float64(shape: str) -> None:
    layer = layer_of("oft", LAYERS[shape]().double())
    (blocks,) = layer.only.parameters()
    q = blocks - blocks.mT
    eye = torch.eye(len(q[0]), dtype=q.dtype)
    rotations = torch.linalg.solve(eye - q, eye + q)  # the two factors commute
    weight = torch.block_diag(*rotations.mT) @ layer.frozen.weight.flatten(1)
    x = inputs_of(layer.frozen)
    expected = apply_like(layer.frozen, x, weight.view(layer.frozen.weight.shape), layer.frozen.bias)
    torch.testing.assert_close(layer(x), expected, **EXACT)
    for ours, other in zip(gradients(layer(x), x, blocks), gradients(expected, x, blocks), strict=True):
        torch.testing.assert_close(ours, other, **EXACT)


@pytest.mark.parametrize("shape", LAYERS)
def test_gradients_of_dora_are_those_of_its_formula_with_a_constant_norm(shape: str) -> None:
    """Equation 5 and section 4.3 of the paper; LyCORIS differentiates the norm too."""
    layer = layer_of("dora", LAYERS[shape]().double())
    x, (down, up, magnitudes) = inputs_of(layer.frozen), layer.only.parameters()
    base = layer.frozen.weight
    changed = base + 0.5 * (up.flatten(1) @ down.flatten(1)).view(base.shape)
    norms = changed.detach().transpose(0, 1).flatten(1).norm(dim=1).view(magnitudes.shape)
    weight = changed * (magnitudes / norms)
    expected = apply_like(layer.frozen, x, weight)
    for found, wanted in zip(
        gradients(layer(x), x, down, up, magnitudes), gradients(expected, x, down, up, magnitudes), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(kind, nn.Linear(6, 8).double(), rank=2)
    if isinstance(layer.only, Dora):  # its norm is a constant in the gradient, so it must be one in the differences
        norms = layer.only._norms(layer.frozen)
        monkeypatch.setattr(layer.only, "_norms", lambda _: norms)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()

    def output(x: Tensor, *weights: Tensor) -> Tensor:
        roles = [f"changes.0.{role}" for role, _ in layer.only.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(roles, weights, strict=True)), (x,))  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(
        output, (x, *(weight.detach().requires_grad_() for weight in layer.only.parameters()))
    )


@pytest.mark.parametrize("shape", LAYERS)
def test_a_dora_of_an_input_that_the_base_ignores_is_finite(shape: str) -> None:
    """Its norm is 0, as in bases that were pruned or merged to that effect."""
    frozen = LAYERS[shape]().float().requires_grad_(False)
    frozen.weight.data[:, 3] = 0.0
    change = make_change(recipe("dora"), frozen, LayerSettings(2, 1.0), torch.float32)
    start = change.initial(np.random.default_rng(0))
    with torch.no_grad():
        for role, weight in change.named_parameters():
            weight.copy_(start[role])
    layer, x = LycorisLayer(frozen, [change]), inputs_of(frozen).float()
    assert torch.equal(layer(x), frozen(x))
    assert all(gradient.isfinite().all() for gradient in gradients(layer(x), x, *change.parameters()))
    assert not change.weight_change(start, frozen).any()


@pytest.mark.parametrize("name", ["attn1.to_q", "resnets.0.conv2"])
@pytest.mark.parametrize("share", ["dropout", "rank_dropout", "module_dropout"])
def test_dropouts_of_a_dora_act_between_its_matrices_in_training_alone(share: str, name: str) -> None:
    models = Models.copies("sd15")
    adapter = models.attach(recipe("dora", **{share: 0.4}))
    slot = next(slot for slot in adapter.slots if slot.module.endswith(name))
    layer, x = adapter.changes[slot], inputs_of(adapter.changes[slot].frozen).detach()
    down, up, magnitudes = (weight.detach() for weight in layer.only.parameters())
    up.copy_(torch.randn(up.shape, generator=torch.Generator().manual_seed(4)))
    base, scale = layer.frozen.weight.detach(), layer.only.scale
    norms = (base + scale * (up.flatten(1) @ down.flatten(1)).view(base.shape)).transpose(0, 1).flatten(1).norm(dim=1)
    scaled = x * (magnitudes / norms.view(magnitudes.shape)).flatten().view(-1, *(1 for _ in base.shape[2:]))
    hidden = apply_like(layer.frozen, scaled, down)
    torch.manual_seed(7)
    if share == "dropout":
        kept = F.dropout(hidden, 0.4)
    elif share == "module_dropout":
        kept = hidden * (torch.rand(()) >= 0.4)
    else:
        shape = (2, hidden.shape[1], 1, 1) if hidden.ndim == 4 else (2, 1, hidden.shape[2])
        kept = hidden * (torch.rand(shape) >= 0.4) / 0.6
    whole = apply_like(layer.frozen, scaled, base, layer.frozen.bias)
    for hidden_now, adapter.training in ((kept, True), (hidden, False)):
        raised = F.conv2d(hidden_now, up) if hidden.ndim == 4 else F.linear(hidden_now, up)
        torch.manual_seed(7)
        torch.testing.assert_close(layer(x), whole + scale * raised, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    models = Models.copies("sd15", dtype)
    before = models.predict()
    models.attach(recipe(kind))
    assert torch.equal(models.predict(), before)


@pytest.mark.parametrize("number", [1, 7, 12, 127, 128, 250, 320, 360, 512, 640, 1024, 1280, 5120, 10240])
@pytest.mark.parametrize("factor", [None, 2, 4, 8, 16, 90, 1000])
def test_numbers_are_split_as_in_lycoris(number: int, factor: int | None) -> None:
    from lycoris.functional import factorization as theirs

    assert factorization(number, factor) == theirs(number, factor or -1)


def test_checks_know_the_sizes_of_all_layers() -> None:
    found: set[int] = set()
    for family in get_args(Family):
        files = asset_path("models", family).glob("*/config.json")
        configs = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
        models = models_on_meta(configs)
        encoders = [name for name in models if name.startswith("text_encoder")]
        parts = models_by_part(models["unet"], [models[name] for name in encoders])
        for slot in slots(family, configs["unet"], [configs[name] for name in encoders]):
            model = parts[slot.part]
            found.update(model.get_submodule(module_path(model, slot)).weight.shape[:2])
    assert sorted(found) == list(LAYER_SIZES)


@pytest.mark.parametrize(
    ("factor", "rank", "shapes"),
    [
        (None, 2, {"lokr_w1": (5, 4), "lokr_w2_a": (8, 2), "lokr_w2_b": (2, 6 * 9)}),
        (2, 2, {"lokr_w1": (2, 2), "lokr_w2_a": (20, 2), "lokr_w2_b": (2, 12 * 9)}),
        (None, 4, {"lokr_w1": (5, 4), "lokr_w2": (8, 6, 3, 3)}),
    ],
)
def test_lokr_has_the_shapes_of_lycoris(factor: int | None, rank: int, shapes: dict[str, tuple[int, ...]]) -> None:
    layer = layer_of("lokr", LAYERS["3x3"](), rank=rank, lokr_factor=factor)
    assert {role: tuple(weight.shape) for role, weight in layer.only.named_parameters()} == shapes
    twin = lycoris_twin(layer, "lokr", rank=rank, factor=factor or -1)
    assert {name: tuple(weight.shape) for name, weight in twin.named_parameters() if "lokr" in name} == shapes
    assert twin.scale == layer.only.scale
    x = inputs_of(layer.frozen.double())
    weight = layer.frozen.weight + change_of(twin, layer.frozen)
    torch.testing.assert_close(layer(x), apply_like(layer.frozen, x, weight, layer.frozen.bias), **EXACT)


@pytest.mark.parametrize("base", [(40, 24), (40, 24, 3, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_fit_a_layer_only_with_all_dimensions(kind: str, base: tuple[int, ...]) -> None:
    shapes = CHANGES[kind].shapes_of(base, LayerSettings(3, 3.0), None)
    assert CHANGES[kind].fits(shapes, base)
    for role, shape in shapes.items():
        for axis, size in enumerate(shape):
            doubled = [*shape[:axis], 2 * size, *shape[axis + 1 :]]
            assert not CHANGES[kind].fits({**shapes, role: doubled}, base), (role, axis)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("adapter", KINDS)
def test_quantized_layers_have_the_same_change(adapter: str, kind: Any) -> None:
    """The change that the dequantized weight would have; bitsandbytes computes its own products less exactly."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.transformer_blocks = nn.ModuleList([nn.Linear(64, 128)])

    model = Blocks()
    place = quantize_linears(model, kind, torch.float32, torch.device("cpu"))
    frozen: Any = model.transformer_blocks[0]
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(4)) / 8
    place(frozen, "weight", weight)
    frozen.bias = nn.Parameter(torch.randn(128, generator=torch.Generator().manual_seed(5)), requires_grad=False)
    assert isinstance(frozen, FrozenInt8Linear | FrozenNF4Linear)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(6))
    frozen(x)
    dense = (
        frozen.state.CB.float() * frozen.state.SCB[:, None] / 127
        if kind == "int8"
        else dequantize_4bit(frozen.weight, frozen.weight.quant_state).float()
    )
    plain = nn.Linear(64, 128)
    plain.weight.data, plain.bias.data = dense, frozen.bias.data.clone()
    quantized, full = layer_of(adapter, frozen), layer_of(adapter, plain)
    quantized.only.load_state_dict(full.only.state_dict())
    with torch.no_grad():
        found, wanted = quantized.float()(x) - frozen(x), full.float()(x) - plain(x)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * wanted.abs().max().item())


def test_tlora_masks_ranks_by_timestep() -> None:
    """The ranks that learn are those of LyCORIS's formula; without training, all are active."""
    from lycoris.modules.tlora import compute_timestep_mask

    def active(models: Models) -> dict[str, Tensor]:
        """Whether each rank of each layer of the UNet is in use, for each of the two images."""
        found: dict[str, Tensor] = {}

        def note(name: str, output: Tensor) -> None:
            maps = output if output.ndim == 4 else output.flatten(1, -2).mT if output.ndim == 3 else output[..., None]
            found[name] = maps.detach().flatten(2).abs().sum(2) > 0

        for name, module in models.unet.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        models.predict()
        return found

    models = Models.copies("sd15")
    adapter = models.attach(recipe("tlora", rank=8, conv_rank=6, tlora_min_rank=2))
    stream = torch.Generator().manual_seed(0)
    adapter.load({key: torch.randn(weight.shape, generator=stream) for key, weight in adapter.parameters.items()})
    masked = active(models)
    assert len(masked) == sum(slot.part == "unet" for slot in adapter.slots)
    for ranks in masked.values():
        expected = [compute_timestep_mask(timestep, 1000, ranks.shape[1], 2)[0] > 0 for timestep in (17, 801)]
        assert torch.equal(ranks, torch.stack(expected))
    adapter.training = False
    assert all(ranks.all() for ranks in active(models).values())


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_half_of_tloras_ranks_learn_from_the_noisiest_timesteps(rank: int) -> None:
    mask = RankMask(None)
    mask.use(torch.tensor([999, 0]))
    assert mask.of(rank).sum(1).tolist() == [(rank + 1) // 2, rank]
