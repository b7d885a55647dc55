"""lora merge against sums of whole changes in fp64, and bases with merged weights against diffusers' predictions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from tests.support.loras import EVERYTHING, Models, merge, random_weights
from tests.support.sample import of_the_day
from tests.support.tiny import (
    single_file_metadata,
    single_file_tensors,
    tiny_base,
    tiny_configs,
    tiny_models,
    write_folder,
)
from tests.train.adapter.test_export import load_in_diffusers
from tests.train.cli.lora.test_changing import change, lycoris_file, run
from trainer.adapter.attach import Adapter, module_path
from trainer.adapter.export import export_lora
from trainer.adapter.low_rank import of_matrix
from trainer.base.source import open_base
from trainer.cli import main
from trainer.config.base import BASE_VERSIONS, BaseConfig, Family
from trainer.files.header import read_header

FAMILIES: list[Family] = ["sd15", "sdxl"]


def lora(family: Family, path: Path, seed: int, **changes: Any) -> tuple[Models, Adapter, dict[str, torch.Tensor]]:
    models = Models.copies(family)
    adapter = models.attach(EVERYTHING.model_copy(update=changes))
    weights = random_weights(adapter, seed)
    export_lora(path, weights, adapter, {"ss_base_model_version": BASE_VERSIONS[family]})
    return models, adapter, weights


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two LoRAs of different layers and ranks, and a name with an equals sign."""
    lora("sdxl", tmp_path / "a=b.safetensors", 1)
    lora("sdxl", tmp_path / "c.safetensors", 2, layers="attention", rank=3, alpha=6.0)
    return tmp_path / "a=b.safetensors", tmp_path / "c.safetensors"


def sums(pair: tuple[Path, Path], strengths: tuple[float, float]) -> dict[str, np.ndarray]:
    found: dict[str, Any] = {}
    table = Models.copies("sdxl").attach().table
    for path, strength in zip(pair, strengths, strict=True):
        tensors = safetensors.torch.load_file(path)
        for slot in table:
            if slot.down in tensors:
                found[slot.kohya] = found.get(slot.kohya, 0.0) + strength * change(tensors, slot)
    return found


def test_loras_of_different_layers_and_ranks_add_up(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run("merge", f"{pair[0]}=0.8", f"{pair[1]}=-0.5", "--out", out, "--dtype", "fp32")
    tensors = safetensors.torch.load_file(out)
    expected = sums(pair, (0.8, -0.5))
    table = {slot.kohya: slot for slot in Models.copies("sdxl").attach().table}
    assert {key.removesuffix(".alpha") for key in tensors if key.endswith(".alpha")} == expected.keys()
    for name, wanted in expected.items():
        assert np.linalg.norm(change(tensors, table[name]) - wanted) < 1e-6 * np.linalg.norm(wanted)
    ranks = {len(tensors[table[name].down]) for name in expected if "attn1_to_q" in name and "unet" in name}
    assert ranks == {4 + 3}
    assert '"a=b", 0.8' in read_header(out, "lora").metadata["impasto_merged"]


def test_a_sum_of_lower_rank_is_the_nearest_one(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    run("merge", f"{pair[0]}=0.8", pair[1], "--rank", 2, "--out", out, "--dtype", "fp32")
    tensors = safetensors.torch.load_file(out)
    table = {slot.kohya: slot for slot in Models.copies("sdxl").attach().table}
    lost = whole = 0.0
    for name, wanted in sums(pair, (0.8, 1.0)).items():
        u, sizes, v = np.linalg.svd(wanted, full_matrices=False)
        assert np.linalg.norm(change(tensors, table[name]) - (u[:, :2] * sizes[:2]) @ v[:2]) < 1e-5 * sizes[0]
        lost, whole = lost + np.sum(sizes[2:] ** 2), whole + np.sum(sizes**2)
    assert f"error in total {np.sqrt(lost / whole):.2%}" in capsys.readouterr().out


def merged_prediction(path: Path, family: Family) -> torch.Tensor:
    """Load a base as training does, through diffusers' converters, and predict in fp64."""
    source = open_base(BaseConfig(model=str(path)))
    encoders = source.load_text_encoders(torch.float32, "cpu")
    models = Models(family, source.load_unet(torch.float32, "cpu"), list(encoders))
    for model in models.parts.values():
        nn.Module.to(model, torch.float64)
    return models.predict()


@pytest.mark.parametrize(("family", "form"), of_the_day(2, product(FAMILIES, ["single", "folder"])))
def test_a_base_with_a_merged_lora_predicts_what_the_lora_predicts(family: Family, form: Any, tmp_path: Path) -> None:
    _, adapter, weights = lora(family, tmp_path / "a.safetensors", 1)
    base = tiny_base(family, tmp_path / "base", form=form, prediction="v", zero_terminal_snr=True)
    expected = Models.copies(family)
    before = expected.predict()
    merge(expected, adapter, weights, strength=0.8)
    out = tmp_path / "out.safetensors"
    run("merge", f"{tmp_path / 'a.safetensors'}=0.8", "--into", base, "--out", out)
    difference = (merged_prediction(out, family) - expected.predict()).norm()
    assert difference < 1e-5 * (expected.predict() - before).norm()
    # Byte by byte the names, formats and metadata of a real single file, from either form.
    like = tiny_base(family, tmp_path / "like", form="single", prediction="v", zero_terminal_snr=True)
    ours, theirs = read_header(out), read_header(like)
    left_out = {name for name in theirs.tensors if name.endswith(("position_ids", "alphas_cumprod"))}
    assert ours.tensors.keys() | left_out == theirs.tensors.keys()
    assert {"v_pred", "ztsnr"} <= ours.tensors.keys()
    assert all(info == theirs.tensors[name] for name, info in ours.tensors.items())
    assert ours.metadata.keys() == theirs.metadata.keys() - {"format"} | {"impasto_merged"} | (
        {"format"} if form == "single" else set()
    )
    with safe_open(out, "pt") as found, safe_open(like, "pt") as wanted:
        for name in ours.tensors:
            if name.startswith("first_stage_model.") or "norm" in name or name.endswith("bias"):
                assert torch.equal(found.get_tensor(name), wanted.get_tensor(name)), name


@pytest.mark.parametrize("kind", ["dora", "loha", pytest.param("lokr", marks=pytest.mark.slow), "oft"])
def test_every_method_is_merged_into_a_base(kind: str, tmp_path: Path) -> None:
    models, _, path = lycoris_file(kind, tmp_path)
    base = tiny_base("sd15", tmp_path / "base", form="single")
    out = tmp_path / "out.safetensors"
    run("merge", path, "--into", base, "--out", out)
    expected, before = models.predict(), Models.copies("sd15").predict()
    assert (merged_prediction(out, "sd15") - expected).norm() < 1e-5 * (expected - before).norm()


def test_a_half_precision_base_keeps_its_format_unless_another_is_asked_for(tmp_path: Path) -> None:
    _, adapter, weights = lora("sd15", tmp_path / "a.safetensors", 1)
    base = tiny_base("sd15", tmp_path / "base", form="single", dtype=torch.float16)
    expected = Models.copies("sd15")
    before = expected.predict()
    merge(expected, adapter, weights)
    for words, format, bound in ([], "F16", 1e-2), (["--dtype", "bf16"], "BF16", 5e-2):
        out = tmp_path / f"{format}.safetensors"
        run("merge", tmp_path / "a.safetensors", "--into", base, "--out", out, *words)
        info = read_header(out).tensors["model.diffusion_model.input_blocks.1.1.proj_in.weight"]
        assert info.dtype == format
        found = merged_prediction(out, "sd15")
        assert (found - expected.predict()).norm() < bound * (expected.predict() - before).norm()


Words = Callable[[Path, Path], list[object]]
REFUSED: dict[str, tuple[Words, str]] = {
    "strength": (lambda a, base: [f"{a}=much"], "is not a number from"),
    "another family": (lambda a, base: [a, a.with_name("x.safetensors")], "is for SDXL"),
    "LoHa without rank": (lambda a, base: [a, a.with_name("loha.safetensors")], "contains LoHa"),
    "DoRA": (lambda a, base: [a.with_name("dora.safetensors"), "--rank", 4], "depends on the base"),
    "rank with base": (lambda a, base: [a, "--into", base, "--rank", 4], "no effect"),
    "no base": (lambda a, base: [a, "--into", base.with_name("none")], "no such file"),
    "a LoRA as base": (lambda a, base: [a, "--into", a.with_name("loha.safetensors")], "a LoRA, not a base"),
    "base of another family": (lambda a, base: [a.with_name("x.safetensors"), "--into", base], "would be lost"),
}


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("things")
    lora("sd15", folder / "a.safetensors", 1)
    lora("sdxl", folder / "x.safetensors", 1)
    for kind in ("loha", "dora"):
        lycoris_file(kind, folder)
    tiny_base("sd15", folder, form="single").rename(folder / "base.safetensors")
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_is_refused_and_leaves_nothing(
    name: str, things: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, says = REFUSED[name]
    before = sorted(things.iterdir())
    given = [str(word) for word in words(things / "a.safetensors", things / "base.safetensors")]
    assert main(["lora", "merge", *given, "--out", str(things / "out.safetensors")]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert "What to do:" in shown
    assert sorted(things.iterdir()) == before


def tuned_base(family: Family, path: Path, form: Any) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """Write a base whose weights were changed by a LoRA and noise; return each layer's change, and its prediction."""
    models = Models.copies(family, torch.float32)
    adapter = Models.copies(family).attach(EVERYTHING)
    before = Models.copies(family, torch.float32)
    merge(models, adapter, random_weights(adapter, 5), strength=0.2)
    stream = torch.Generator().manual_seed(1)
    changes = {}
    for slot in adapter.slots:
        part = models.parts[slot.part]
        weight = part.get_submodule(module_path(part, slot)).weight
        weight.data += 1e-3 * torch.randn(weight.shape, generator=stream)
        original = before.parts[slot.part].get_submodule(module_path(part, slot)).weight
        changes[slot.kohya] = (weight - original).detach().flatten(1).double().numpy()
    vae = tiny_models(family)["vae"]
    weights = {part: dict(model.state_dict()) for part, model in {**models.parts, "vae": vae}.items()}
    configs = tiny_configs(family)
    if form == "folder":
        write_folder(family, path, weights, configs)
    else:
        tensors = single_file_tensors(family, weights, configs)
        safetensors.torch.save_file(tensors, path, single_file_metadata(family, configs))
    return changes, Models(family, models.unet.double(), [each.double() for each in models.text_encoders]).predict()


@pytest.mark.parametrize(("family", "form"), [("sd15", "single"), ("sdxl", "folder")])
def test_the_difference_of_two_models_becomes_a_lora(
    family: Family, form: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_base(family, tmp_path / "base", form="single")
    tuned = tmp_path / ("tuned.safetensors" if form == "single" else "tuned")
    changes, expected = tuned_base(family, tuned, form)
    out, whole = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    run("extract", base, tuned, "--rank", 5, "--out", out, "--dtype", "fp32")
    tensors = safetensors.torch.load_file(out)
    table = {slot.kohya: slot for slot in Models.copies(family).attach().table}
    lost = total = 0.0
    for name, wanted in changes.items():
        u, sizes, v = np.linalg.svd(wanted, full_matrices=False)
        nearest = (u[:, :5] * sizes[:5]) @ v[:5]
        assert np.linalg.norm(change(tensors, table[name]) - nearest) < 2e-3 * np.linalg.norm(wanted)
        lost, total = lost + np.sum(sizes[5:] ** 2), total + np.sum(sizes**2)
    assert f"error in total {np.sqrt(lost / total):.2%}" in capsys.readouterr().out
    run("extract", base, tuned, "--rank", 1000, "--out", whole)
    plain = Models.copies(family)
    before = plain.predict()
    load_in_diffusers(plain, whole)
    assert (plain.predict() - expected).norm() < 1e-3 * (expected - before).norm()


def test_layers_and_formats_that_are_only_rounded_are_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_base("sd15", tmp_path / "base", form="single")
    tuned = tiny_base("sd15", tmp_path / "tuned", form="single", dtype=torch.bfloat16)
    words = ["lora", "extract", str(base), str(tuned), "--rank", "4", "--out", str(tmp_path / "out.safetensors")]
    assert main(words) == 2
    assert "no layer" in capsys.readouterr().err
    with safe_open(tuned, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(tuned)
    layer = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    tensors[layer] += 1.0
    tensors["model.diffusion_model.out.0.bias"] += 1.0
    safetensors.torch.save_file(tensors, tuned, metadata)
    assert main(words) == 0
    keys = safetensors.torch.load_file(tmp_path / "out.safetensors").keys()
    assert {key.partition(".")[0] for key in keys} == {
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    }
    assert "1 other tensor differs that a LoRA cannot change, such as model.diffusion_model.out.0.bias" in (
        capsys.readouterr().out
    )
    other = tiny_base("sdxl", tmp_path / "other", form="single")
    assert main([*words[:3], str(other), *words[4:], "--force"]) == 2
    assert "is SDXL" in capsys.readouterr().err


def test_the_largest_singular_values_of_a_large_matrix_are_found() -> None:
    stream = np.random.default_rng(0)
    left, right = (
        np.linalg.qr(stream.standard_normal((900, 400)))[0],
        np.linalg.qr(stream.standard_normal((700, 400)))[0],
    )
    sizes = 1.0 / np.arange(1, 401)
    matrix = torch.from_numpy((left * sizes) @ right.T).float()
    found = of_matrix(matrix, 32)
    assert len(found.sizes) < 100  # not all of them were computed
    assert np.allclose(found.sizes[:32].numpy(), sizes[:32], rtol=1e-3)
    exact = np.sqrt(np.sum(sizes[32:] ** 2) / np.sum(sizes**2))
    down, up = found.factors(32)
    off = float((up @ down - matrix).norm() / matrix.norm())
    assert found.error(32) == pytest.approx(exact, rel=1e-2)
    assert off == pytest.approx(found.error(32), rel=1e-3)
