"""Files of DoRA, LoHa, LoKr and OFT against LyCORIS itself: predictions, training that continues, plain copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.loras import Models, merge
from tests.support.lycoris import change_of, recipe
from trainer.adapter.applied import AppliedLoras
from trainer.adapter.attach import Adapter, initial_weights, module_path
from trainer.adapter.continuing import continue_from
from trainer.adapter.export import export_lora
from trainer.adapter.lycoris import CHANGES
from trainer.adapter.plain_copy import MOST_RANKS, plain_copy
from trainer.adapter.products import base_shape
from trainer.adapter.reading import read_lora
from trainer.config.base import Family
from trainer.dataset.sampling import generator
from trainer.errors import LoraFileError

KINDS = list(CHANGES)
FAMILIES: list[Any] = ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)]
# One kind is quick, --all adds the others.
SOME_KINDS = [kind if kind in ("dora", "lokr") else pytest.param(kind, marks=pytest.mark.slow) for kind in CHANGES]


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
        layer = model.get_submodule(module_path(model, slot))
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
    merge(merged, adapter, {}, strength=0.3)
    for slot in adapter.changes:
        model = merged.parts[slot.part]
        plain: Any = other.layers[slot]
        low_rank = (plain.up.flatten(1).double() @ plain.down.flatten(1).double()) * (0.5 * plain.alpha / plain.rank)
        weight = model.get_submodule(module_path(model, slot)).weight
        weight.data += low_rank.view(weight.shape)
    expected = merged.predict()
    assert (drawn.predict() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("layer", ["attn1.to_q", "resnets.0.conv2"])
@pytest.mark.parametrize("naming", ["LyCORIS", "PEFT"])
def test_dora_files_with_a_magnitude_per_output_are_read_as_what_they_are(
    naming: str, layer: str, tmp_path: Path
) -> None:
    """LyCORIS's default and PEFT's only form, against their formula, in layers with as many inputs as outputs."""
    models = Models.copies("sd15")
    slot = next(slot for slot in models.attach().slots if slot.module.endswith(layer))
    base = Models.copies("sd15").unet.get_submodule(slot.module)
    outputs, inputs, *kernel = base.weight.shape
    ones = [1 for _ in kernel]
    stream = torch.Generator().manual_seed(0)
    down, up = (
        torch.randn(shape, generator=stream).half().float() / 5 for shape in ((4, inputs, *kernel), (outputs, 4, *ones))
    )
    magnitudes = base.weight.detach().flatten(1).norm(dim=1).float() * 1.25
    product = (up.double().flatten(1) @ down.double().flatten(1)).view(base.weight.shape)
    changed = base.weight + 0.5 * product
    weight = changed * (magnitudes.double() / changed.flatten(1).norm(dim=1)).view(-1, 1, *ones)
    path = f"unet.{slot.module}"
    tensors = {
        slot.down: down,
        slot.up: up,
        f"{slot.kohya}.alpha": torch.tensor(2.0),
        f"{slot.kohya}.dora_scale": magnitudes.view(-1, 1, *ones),
    }
    metadata = {}
    if naming == "PEFT":
        tensors = {
            f"{path}.lora_A.weight": down,
            f"{path}.lora_B.weight": up,
            f"{path}.lora_magnitude_vector": magnitudes.view(1, -1, *ones) if kernel else magnitudes,
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
    other_alphas = recipe(kind, alpha=1.0, conv_alpha=1.0)
    fresh = again.attach(other_alphas)
    start = initial_weights(fresh, lambda name: generator(2, "adapter", sample=name))
    fresh.load(continue_from(path, other_alphas, "sdxl", fresh.table, fresh, start))
    expected = models.predict()
    assert (again.predict() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "changes", "remedy"),
    [
        ("lokr", {"adapter": "loha"}, 'Set recipe.adapter = "lokr".'),
        ("dora", {"adapter": "lora"}, 'Set recipe.adapter = "dora".'),
        ("loha", {"rank": 5}, "Set recipe.rank = 4."),
        ("dora", {"conv_rank": 5}, "Set recipe.conv_rank = 3."),
        ("lokr", {"rank": 1}, "Set recipe.rank = 4."),
        ("lokr", {"rank": 64}, "Use the rank, conv_rank and lokr_factor with which the file was trained."),
        ("lokr", {"lokr_factor": 2}, "Use the rank, conv_rank and lokr_factor with which the file was trained."),
        ("oft", {"rank": 2}, "Use the rank and conv_rank with which the file was trained."),
    ],
)
def test_files_of_another_kind_or_rank_are_not_continued(
    kind: str, changes: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    _, adapter, weights = trained(kind, "sd15")
    path = saved(tmp_path, adapter, weights)
    wanted = recipe(**{"kind": kind} | {{"adapter": "kind"}.get(key, key): value for key, value in changes.items()})
    fresh = Models.copies("sd15").attach(wanted)
    with pytest.raises(LoraFileError) as caught:
        continue_from(path, wanted, "sd15", fresh.table, fresh, {})
    assert caught.value.remedy == remedy


def test_a_dora_with_a_magnitude_per_output_is_not_continued_as_one_per_input(tmp_path: Path) -> None:
    """In square layers, both have the same number of magnitudes."""
    _, adapter, weights = trained("dora", "sd15")
    path = saved(tmp_path, adapter, weights)
    tensors = {key: tensor for key, tensor in safetensors.torch.load_file(path).items() if "attn1_to_q" in key}
    transposed = {key: tensor.mT.contiguous() for key, tensor in tensors.items() if key.endswith("dora_scale")}
    safetensors.torch.save_file(tensors | transposed, path)
    with pytest.raises(LoraFileError, match="magnitudes of outputs"):
        continue_from(path, recipe("dora"), "sd15", adapter.table, adapter, {})


def test_kronecker_factors_of_other_shapes_but_equal_sizes_are_not_continued(tmp_path: Path) -> None:
    """As LyCORIS writes them with unbalanced_factorization."""
    _, adapter, weights = trained("lokr", "sd15")
    path, slot = saved(tmp_path, adapter, weights), adapter.slots[1]
    tensors = safetensors.torch.load_file(path)
    w1 = tensors[f"{slot.kohya}.lokr_w1"]
    tensors[f"{slot.kohya}.lokr_w1"] = w1.reshape(2 * w1.shape[0], w1.shape[1] // 2)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(LoraFileError, match=f"the matrices of {slot.kohya} have other shapes"):
        continue_from(path, recipe("lokr"), "sd15", adapter.table, adapter, {})


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
        ({"oft_blocks": (2, 3, 4, 4), "alpha": ()}, r"butterfly rotations \(BOFT\)"),
        ({"lokr_w1": (2, 2), "lokr_w2": (2, 2), "dora_scale": (4, 1)}, "LoHa or LoKr with the magnitudes of DoRA"),
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
    copy, copied, error = plain_copy(adapter, weights, models.predict)
    assert all(rank <= MOST_RANKS for rank in copy.rank.values())
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


def test_layers_that_do_not_run_are_copied_too() -> None:
    models, adapter, weights = trained("lokr", "sd15")
    run, idle = plain_copy(adapter, weights, models.predict), plain_copy(adapter, weights, lambda: None)
    assert idle.error == 0.0 < run.error
    assert idle.weights.keys() == run.weights.keys()
    assert all(torch.equal(tensor, run.weights[key]) for key, tensor in idle.weights.items())


def test_the_error_of_a_copy_is_measured_on_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank left of a LoHa of four, against the same measured layer by layer on recorded inputs."""
    monkeypatch.setattr("trainer.adapter.plain_copy.MOST_RANKS", 1)
    models, adapter, weights = trained("loha", "sd15")
    seen: dict[str, Tensor] = {}
    for slot, layer in adapter.changes.items():
        layer.register_forward_pre_hook(lambda _, inputs, name=slot.kohya: seen.__setitem__(name, inputs[0].detach()))
    error = plain_copy(adapter, weights, models.predict).error
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
