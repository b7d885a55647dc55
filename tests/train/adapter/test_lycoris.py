"""DoRA, LoHa, LoKr and OFT against LyCORIS itself: layers, gradients, files, copies; and T-LoRA's mask."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor, nn

from tests.support.loras import EVERYTHING, Models
from trainer.adapter.applied import AppliedLoras
from trainer.adapter.attach import Adapter, RankMask, initial_weights
from trainer.adapter.continuing import continue_from
from trainer.adapter.export import export_lora
from trainer.adapter.layers import LayerSettings
from trainer.adapter.lycoris import CHANGES, LycorisLayer, base_shape, factorization, make_change
from trainer.adapter.plain_copy import MOST_RANKS, output_error, plain_copy
from trainer.adapter.reading import read_lora
from trainer.base.quantized import FrozenInt8Linear, FrozenNF4Linear, quantize_linears
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.dataset.sampling import generator
from trainer.errors import LoraFileError

logging.getLogger("LyCORIS").setLevel(logging.ERROR)  # it logs a line per large rank

KINDS = list(CHANGES)
FAMILIES: list[Any] = ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)]
# For tests of whole files: one kind is quick, --all adds the others.
SOME_KINDS = [kind if kind in ("dora", "lokr") else pytest.param(kind, marks=pytest.mark.slow) for kind in CHANGES]
LAYERS = {
    "linear": lambda: nn.Linear(24, 40),
    "without bias": lambda: nn.Linear(40, 24, bias=False),
    "1x1": lambda: nn.Conv2d(24, 40, 1),
    "3x3": lambda: nn.Conv2d(24, 40, 3, stride=2, padding=1),
}


def recipe(kind: str, **changes: Any) -> RecipeConfig:
    return RecipeConfig.model_validate({**EVERYTHING.model_dump(), "adapter": kind, **changes})


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


def change_of(twin: Any, frozen: Any) -> Tensor:
    """The change of the weight that LyCORIS trains with; its get_diff_weight scales LoHa and LoKr twice."""
    shape = frozen.weight.shape
    if getattr(twin, "wd", False):
        merged: Tensor = twin.get_merged_weight(shape=shape)[0]
        return merged - frozen.weight
    is_product = twin.name in ("hada", "loha", "kron")
    change: Tensor = twin.get_weight(shape) if is_product else twin.get_diff_weight(shape=shape)[0]
    return change.view(shape)


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dora"])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    layer = layer_of(kind, nn.Linear(6, 8).double(), rank=2)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()

    def output(x: Tensor, *weights: Tensor) -> Tensor:
        roles = [f"changes.0.{role}" for role, _ in layer.only.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(roles, weights, strict=True)), (x,))  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(
        output, (x, *(weight.detach().requires_grad_() for weight in layer.only.parameters()))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    models = Models.copies("sd15", dtype)
    before = models.predict()
    models.attach(recipe(kind))
    assert torch.equal(models.predict(), before)


@pytest.mark.parametrize("number", [1, 7, 12, 127, 128, 250, 320, 360, 512, 640, 1024, 1280, 5120, 10240])
@pytest.mark.parametrize("factor", [None, 2, 4, 8, 16])
def test_numbers_are_split_as_in_lycoris(number: int, factor: int | None) -> None:
    from lycoris.functional import factorization as theirs

    assert factorization(number, factor) == theirs(number, factor or -1)


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


def trained(kind: str, family: Family, **changes: Any) -> tuple[Models, Adapter, dict[str, Tensor]]:
    """A base with an adapter whose weights are exact in fp16, as after some training."""
    models = Models.copies(family)
    adapter = models.attach(recipe(kind, **changes))
    stream = torch.Generator().manual_seed(0)
    start = initial_weights(adapter, lambda name: generator(1, "adapter", sample=name))
    weights = {
        key: (value + 0.05 * torch.randn(value.shape, generator=stream)).half().float() for key, value in start.items()
    }
    adapter.load(weights)
    return models, adapter, weights


def saved(folder: Path, adapter: Adapter, weights: dict[str, Tensor]) -> Path:
    path = folder / "a.safetensors"
    export_lora(path, weights, adapter, {})
    return path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_files_give_lycoris_and_us_the_prediction_of_the_training(kind: str, family: Family, tmp_path: Path) -> None:
    from lycoris.modules import get_module, make_module

    models, adapter, weights = trained(kind, family)
    expected = models.predict()
    path = saved(tmp_path, adapter, weights)

    theirs, tensors = Models.copies(family), safetensors.torch.load_file(path)
    for slot in adapter.slots:
        model = theirs.parts[slot.part]
        name = slot.module if slot.part == "unet" or hasattr(model, "text_model") else slot.module[len("text_model.") :]
        layer = model.get_submodule(name)
        found, parameters = get_module(tensors, slot.kohya)
        assert found is not None
        if kind == "dora":  # make_module does not pass the axis on
            module = found(
                slot.kohya, layer, 1, len(parameters[1]), float(parameters[3]), weight_decompose=True, wd_on_out=False
            )
            for role, weight in zip(("lora_up.weight", "lora_down.weight"), parameters, strict=False):
                module.get_parameter(role).data = weight
            module.dora_scale.data = parameters[4]
        else:
            module = make_module(found, parameters, slot.kohya, layer)
        layer.weight.data += change_of(module.float() if kind == "oft" else module.double(), layer).detach()
    assert (theirs.predict() - expected).norm() < 1e-6 * expected.norm()

    ours = Models.copies(family)
    plain = ours.predict()
    applied = AppliedLoras(ours.unet, ours.text_encoders, dtype=torch.float64)
    file = read_lora(path, family, adapter.table)
    assert file.unmatched == ()
    applied.use([(file, 1.0)])
    assert (ours.predict() - expected).norm() < 1e-9 * expected.norm()
    applied.use([])
    assert torch.equal(ours.predict(), plain)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_strength_scales_the_change_and_files_add_up(kind: str, tmp_path: Path) -> None:
    _, adapter, weights = trained(kind, "sd15")
    file = read_lora(saved(tmp_path, adapter, weights), "sd15", adapter.table)
    lora = Models.copies("sd15").attach()
    other = read_lora(
        saved(tmp_path, lora, {k: torch.randn(v.shape).half().float() / 5 for k, v in lora.parameters.items()}),
        "sd15",
        lora.table,
    )
    drawn, merged = Models.copies("sd15"), Models.copies("sd15")
    AppliedLoras(drawn.unet, drawn.text_encoders, dtype=torch.float64).use([(file, 0.3), (other, 0.5)])
    for slot, layer in adapter.changes.items():
        model = merged.parts[slot.part]
        name = slot.module if slot.part == "unet" or hasattr(model, "text_model") else slot.module[len("text_model.") :]
        roles = {role: weight.detach() for role, weight in layer.only.named_parameters()}
        plain: Any = other.layers[slot]
        low_rank = (plain.up.flatten(1).double() @ plain.down.flatten(1).double()) * (0.5 * plain.alpha / plain.rank)
        weight = model.get_submodule(name).weight
        weight.data += 0.3 * layer.only.weight_change(roles, layer.frozen) + low_rank.view(weight.shape)
    expected = merged.predict()
    assert (drawn.predict() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("naming", ["LyCORIS", "PEFT"])
def test_dora_files_with_a_magnitude_per_output_are_read_as_what_they_are(naming: str, tmp_path: Path) -> None:
    """LyCORIS's default and PEFT's only form, against LyCORIS and against PEFT."""
    models = Models.copies("sd15")
    slot = next(slot for slot in models.attach().slots if slot.module.endswith("attn1.to_q"))
    base = Models.copies("sd15").unet.get_submodule(slot.module)
    stream = torch.Generator().manual_seed(0)
    down, up = (
        torch.randn(shape, generator=stream).half().float() / 5
        for shape in ((4, base.in_features), (base.out_features, 4))
    )
    magnitudes = base.weight.detach().norm(dim=1).float() * 1.25
    changed = base.weight + 0.5 * up.double() @ down.double()
    weight = changed * (magnitudes.double() / changed.norm(dim=1))[:, None]
    path = f"unet.{slot.module}"
    tensors = {
        slot.down: down,
        slot.up: up,
        f"{slot.kohya}.alpha": torch.tensor(2.0),
        f"{slot.kohya}.dora_scale": magnitudes[:, None],
    }
    metadata = {}
    if naming == "PEFT":
        tensors = {
            f"{path}.lora_A.weight": down,
            f"{path}.lora_B.weight": up,
            f"{path}.lora_magnitude_vector": magnitudes,
        }
        metadata = {"lora_adapter_metadata": '{"unet.lora_alpha": 2, "unet.use_dora": true}'}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata)
    drawn, merged = Models.copies("sd15"), Models.copies("sd15")
    adapter = Models.copies("sd15").attach()
    AppliedLoras(drawn.unet, drawn.text_encoders, dtype=torch.float64).use(
        [(read_lora(tmp_path / "a.safetensors", "sd15", adapter.table), 1.0)]
    )
    merged.unet.get_submodule(slot.module).weight.data = weight.detach()
    expected = merged.predict()
    assert (drawn.predict() - expected).norm() < 1e-7 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_from_a_file_with_its_effect(kind: str, tmp_path: Path) -> None:
    models, adapter, weights = trained(kind, "sdxl")
    path, again = saved(tmp_path, adapter, weights), Models.copies("sdxl")
    fresh = again.attach(recipe(kind, alpha=1.0, conv_alpha=1.0))
    start = initial_weights(fresh, lambda name: generator(2, "adapter", sample=name))
    fresh.load(continue_from(path, "sdxl", fresh.table, fresh, start))
    expected = models.predict()
    assert (again.predict() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "changes", "remedy"),
    [
        ("lokr", {"adapter": "loha"}, 'Set recipe.adapter = "lokr".'),
        ("dora", {"adapter": "lora"}, 'Set recipe.adapter = "dora".'),
        ("loha", {"rank": 5}, "Use the rank, conv_rank and lokr_factor with which the file was trained."),
    ],
)
def test_files_of_another_kind_or_rank_are_not_continued(
    kind: str, changes: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    _, adapter, weights = trained(kind, "sd15")
    path = saved(tmp_path, adapter, weights)
    fresh = Models.copies("sd15").attach(
        recipe(kind, **changes) if "adapter" not in changes else recipe(changes["adapter"])
    )
    with pytest.raises(LoraFileError) as caught:
        continue_from(path, "sd15", fresh.table, fresh, initial_weights(fresh, lambda _: np.random.default_rng(0)))
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"hada_w1_a": (4, 2), "hada_w1_b": (2, 4)}, "contains only a part of a layer"),
        ({"oft_blocks": (2, 3, 3), "alpha": ()}, "limits its rotations"),
        ({"lokr_w1_a": (2, 2), "lokr_w1_b": (3, 2), "lokr_w2": (2, 2)}, "shapes do not match"),
        ({"lokr_w1": (0, 2), "lokr_w2": (2, 2)}, "impossible shape: 0×2"),
        ({"lokr_w1": (4,), "lokr_w2": (2, 2)}, "impossible shape: 4 in"),
        ({"oft_blocks": (2, 3)}, "impossible shape: 2×3"),
        ({"hada_w1_a": (), "hada_w1_b": (2, 4), "hada_w2_a": (4, 2), "hada_w2_b": (2, 4)}, "impossible shape: none"),
    ],
)
def test_broken_files_are_refused(keys: dict[str, tuple[int, ...]], sentence: str, tmp_path: Path) -> None:
    adapter = Models.copies("sd15").attach()
    tensors = {f"{adapter.slots[0].kohya}.{key}": torch.ones(shape) for key, shape in keys.items()}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(LoraFileError, match=sentence):
        read_lora(tmp_path / "a.safetensors", "sd15", adapter.table)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_files_for_another_size_of_base_are_refused(kind: str, tmp_path: Path) -> None:
    _, adapter, weights = trained(kind, "sd15")
    path = saved(tmp_path, adapter, weights)
    tensors = {
        key: torch.cat([tensor, tensor]) if tensor.ndim else tensor
        for key, tensor in safetensors.torch.load_file(path).items()
    }
    safetensors.torch.save_file(tensors, path)
    drawn = Models.copies("sd15")
    before = drawn.predict()
    file = read_lora(path, "sd15", adapter.table)
    with pytest.raises(LoraFileError, match="does not fit this base"):
        AppliedLoras(drawn.unet, drawn.text_encoders, dtype=torch.float64).use([(file, 1.0)])
    assert torch.equal(drawn.predict(), before)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_plain_copy_is_as_near_as_its_error_says(kind: str, tmp_path: Path) -> None:
    """The tiny layers have fewer than 64 ranks, so that the copy of everything is exact up to what is negligible."""
    models, adapter, weights = trained(kind, "sd15")
    copy, copied = plain_copy(adapter, weights)
    assert all(rank <= MOST_RANKS for rank in copy.rank.values())
    error = output_error(adapter, weights, copied, models.predict)
    expected = models.predict()
    drawn = Models.copies("sd15")
    plain = drawn.predict()
    path = tmp_path / "copy.safetensors"
    export_lora(path, copied, copy, {}, dtype=torch.float32)
    AppliedLoras(drawn.unet, drawn.text_encoders, dtype=torch.float64).use(
        [(read_lora(path, "sd15", adapter.table), 1.0)]
    )
    assert error < 2e-3
    assert (drawn.predict() - expected).norm() < 0.02 * (expected - plain).norm()


def test_the_error_of_a_copy_is_measured_on_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank left of a LoHa of four, against the same measured layer by layer on recorded inputs."""
    monkeypatch.setattr("trainer.adapter.plain_copy.MOST_RANKS", 1)
    models, adapter, weights = trained("loha", "sd15")
    _, copied = plain_copy(adapter, weights)
    seen: dict[str, Tensor] = {}
    for slot, layer in adapter.changes.items():
        layer.register_forward_pre_hook(lambda _, inputs, name=slot.kohya: seen.__setitem__(name, inputs[0].detach()))
    error = output_error(adapter, weights, copied, models.predict)
    whole = missing = 0.0
    for slot, layer in adapter.changes.items():
        names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
        w1_a, w1_b, w2_a, w2_b = (weights[f"{slot.kohya}.{name}"].double() for name in names)
        change = (w1_a @ w1_b) * (w2_a @ w2_b) * (adapter.alpha[slot.kohya] / adapter.rank[slot.kohya])
        u, sizes, v = torch.linalg.svd(change)
        left = change - sizes[0] * torch.outer(u[:, 0], v[0])
        for place, matrix in enumerate((change, left)):
            shaped, x = matrix.view(base_shape(layer.frozen)), seen[slot.kohya]
            frozen: Any = layer.frozen
            output = (
                F.linear(x, shaped) if shaped.ndim == 2 else F.conv2d(x, shaped, None, frozen.stride, frozen.padding)
            )
            total = float(output.detach().square().sum())
            whole, missing = (whole + total, missing) if place == 0 else (whole, missing + total)
    assert error == pytest.approx((missing / whole) ** 0.5, rel=1e-3)
    assert error > 0.3


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
