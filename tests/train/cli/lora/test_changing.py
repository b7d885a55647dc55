"""lora resize and lora convert against numpy's SVD of whole changes, kohya's criteria, LyCORIS and diffusers."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.support.loras import EVERYTHING, Models, random_weights
from tests.support.lycoris import change_of, recipe
from tests.support.sample import of_the_day
from tests.train.adapter.test_export import load_in_diffusers
from trainer.adapter.attach import Adapter, initial_weights, module_path
from trainer.adapter.export import export_lora
from trainer.adapter.names import Slot
from trainer.cli import main
from trainer.config.base import BASE_VERSIONS, Family
from trainer.dataset.sampling import generator
from trainer.files.header import read_header

FAMILIES: list[Family] = ["sd15", "sdxl"]


@cache
def trained(family: Family) -> tuple[Models, Adapter, dict[str, Tensor]]:
    """A LoRA of all layers whose singular values differ much, as after training; treat it as read-only."""
    models = Models.copies(family)
    adapter = models.attach(EVERYTHING.model_copy(update={"rank": 8, "conv_rank": 6}))
    weights = random_weights(adapter)
    for slot in adapter.slots:
        down = weights[slot.down]
        weights[slot.down] = (down * scales(len(down), down.ndim)).half().float()
    adapter.load(weights)
    return models, adapter, weights


def scales(rank: int, dimensions: int) -> Tensor:
    return (0.6 ** torch.arange(rank)).view(-1, *(1,) * (dimensions - 1))


def written(family: Family, folder: Path, **metadata: str) -> Path:
    _, adapter, weights = trained(family)
    path = folder / "a ü.safetensors"
    export_lora(path, weights, adapter, {"ss_base_model_version": BASE_VERSIONS[family], **metadata})
    return path


def run(*words: object) -> None:
    assert main(["lora", *(str(word) for word in words)]) == 0


def change(tensors: dict[str, Tensor], slot: Slot) -> np.ndarray:
    """The change that every program applies: alpha / rank · up · down, as a matrix in fp64."""
    up, down = (tensors[key].double().flatten(1).numpy() for key in (slot.up, slot.down))
    alpha = float(tensors[f"{slot.kohya}.alpha"])
    return np.asarray(alpha / len(down) * (up @ down))


# As in networks/resize_lora.py of sd-scripts, on all singular values in fp64; a full rank may stay.
def sv_fro(sizes: np.ndarray, target: float) -> int:
    return int(np.searchsorted(np.cumsum(sizes**2) / np.sum(sizes**2), target**2)) + 1


def sv_ratio(sizes: np.ndarray, target: float) -> int:
    return int(np.sum(sizes > sizes[0] / target))


def sv_cumulative(sizes: np.ndarray, target: float) -> int:
    return int(np.searchsorted(np.cumsum(sizes) / np.sum(sizes), target)) + 1


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--rank", "3"], lambda sizes: 3),
        (["--share", "0.95"], lambda sizes: sv_fro(sizes, 0.95)),
        (["--ratio", "3"], lambda sizes: sv_ratio(sizes, 3.0)),
        (["--sum", "0.8"], lambda sizes: sv_cumulative(sizes, 0.8)),
        (["--share", "0.99", "--rank", "4"], lambda sizes: min(4, sv_fro(sizes, 0.99))),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param("sdxl", marks=pytest.mark.slow)])
def test_each_layer_is_the_nearest_of_the_rank_that_kohya_keeps(
    words: list[str], count: Any, family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, adapter, _ = trained(family)
    out, path = tmp_path / "b.safetensors", written(family, tmp_path)
    run("resize", path, "--out", out, *words)
    before, after = safetensors.torch.load_file(path), safetensors.torch.load_file(out)
    assert before.keys() == after.keys()
    lost = whole = 0.0
    for slot in adapter.slots:
        full = change(before, slot)
        u, sizes, v = np.linalg.svd(full, full_matrices=False)
        rank = min(count(sizes), len(before[slot.down]))
        assert len(after[slot.down]) == rank
        assert float(after[f"{slot.kohya}.alpha"]) == 2.0  # that of most layers before
        nearest = (u[:, :rank] * sizes[:rank]) @ v[:rank]
        assert np.linalg.norm(change(after, slot) - nearest) < 1e-3 * np.linalg.norm(full)
        lost, whole = lost + np.sum(sizes[rank:] ** 2), whole + np.sum(sizes**2)
        assert after[slot.down].ndim == before[slot.down].ndim
    assert f"error in total {np.sqrt(lost / whole):.2%}" in capsys.readouterr().out
    assert read_header(out, "lora").metadata["ss_network_module"] == "networks.lora"


@pytest.mark.parametrize("family", of_the_day(1, FAMILIES))
def test_files_with_many_ranks_predict_in_diffusers_what_their_layers_say(family: Family, tmp_path: Path) -> None:
    _, adapter, _ = trained(family)
    out = tmp_path / "b.safetensors"
    run("resize", written(family, tmp_path), "--out", out, "--ratio", 2.5)
    tensors = safetensors.torch.load_file(out)
    assert len({len(tensors[slot.down]) for slot in adapter.slots if slot.kind == "attention"}) > 1
    plain, merged = Models.copies(family), Models.copies(family)
    before = plain.predict()
    load_in_diffusers(plain, out)
    for slot in adapter.slots:
        model = merged.parts[slot.part]
        weight = model.get_submodule(module_path(model, slot)).weight
        weight.data += torch.from_numpy(change(tensors, slot)).view(weight.shape)
    expected = merged.predict()
    assert (plain.predict() - expected).norm() < 1e-3 * (expected - before).norm()


@pytest.mark.parametrize(
    ("family", "names"), of_the_day(3, product(FAMILIES, ["kohya", "lycoris", "diffusers", "peft"]))
)
def test_converted_files_predict_the_same_in_diffusers(family: Family, names: str, tmp_path: Path) -> None:
    models, adapter, _ = trained(family)
    path, out = written(family, tmp_path, note="mine"), tmp_path / "b.safetensors"
    run("convert", path, "--to", names, "--out", out)
    plain = Models.copies(family)
    before = plain.predict()
    load_in_diffusers(plain, out)
    expected = models.predict()
    assert (plain.predict() - expected).norm() < 1e-3 * (expected - before).norm()
    assert read_header(out, "lora").metadata["note"] == "mine"
    back = tmp_path / "c.safetensors"
    words = ("convert", out, "--to", "kohya", "--out", back, "--family", family, "--metadata", "minimal")
    run(*words)
    first, last = safetensors.torch.load_file(path), safetensors.torch.load_file(back)
    assert first.keys() == last.keys()
    assert "note" not in read_header(back, "lora").metadata
    for slot in adapter.slots:
        assert np.allclose(
            change(first, slot), change(last, slot), rtol=0, atol=2e-3 * np.abs(change(first, slot)).max()
        )


def lycoris_file(kind: str, folder: Path) -> tuple[Models, Adapter, Path]:
    models = Models.copies("sd15")
    adapter = models.attach(recipe(kind))
    stream = torch.Generator().manual_seed(0)
    start = initial_weights(adapter, lambda name: generator(1, "adapter", sample=name))
    weights = {
        key: (value + 0.05 * torch.randn(value.shape, generator=stream)).half().float() for key, value in start.items()
    }
    adapter.load(weights)
    path = folder / f"{kind}.safetensors"
    export_lora(path, weights, adapter, {"ss_base_model_version": "sd_v1"})
    return models, adapter, path


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_lycoris_own_change_becomes_a_plain_lora(kind: str, tmp_path: Path) -> None:
    from lycoris.modules import get_module, make_module

    models, adapter, path = lycoris_file(kind, tmp_path)
    out, whole = tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    run("resize", path, "--rank", "6", "--out", out, "--dtype", "fp32")
    run("resize", path, "--rank", "1000", "--out", whole, "--dtype", "fp32")
    tensors = safetensors.torch.load_file(path)
    six, all_ranks = safetensors.torch.load_file(out), safetensors.torch.load_file(whole)
    for slot in adapter.slots:
        frozen = models.parts[slot.part].get_submodule(module_path(models.parts[slot.part], slot))
        base = getattr(frozen, "frozen", frozen)
        found, parameters = get_module(tensors, slot.kohya)
        theirs = change_of(make_module(found, parameters, slot.kohya, base).double(), base).detach().flatten(1).numpy()
        u, sizes, v = np.linalg.svd(theirs, full_matrices=False)
        nearest = (u[:, :6] * sizes[:6]) @ v[:6]
        assert np.linalg.norm(change(six, slot) - nearest) < 1e-3 * np.linalg.norm(theirs)
        assert np.linalg.norm(change(all_ranks, slot) - theirs) < 1e-4 * np.linalg.norm(theirs)


def test_lycoris_files_keep_their_tensors_under_lycoris_names(tmp_path: Path) -> None:
    _, _, path = lycoris_file("dora", tmp_path)
    out = tmp_path / "b.safetensors"
    run("convert", path, "--to", "lycoris", "--out", out)
    before, after = safetensors.torch.load_file(path), safetensors.torch.load_file(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads(read_header(out, "lora").metadata["ss_network_args"])["wd_on_output"] == "False"


EMBEDDING = {"bundle_emb.x.clip_l": torch.ones(1, 2)}
REFUSED: dict[str, tuple[list[str], Any, str]] = {
    "no rule": (["resize"], None, "no option says which ranks"),
    "share above 1": (["resize", "--share", "1.5"], None, "--share is 1.5"),
    "ratio of nan": (["resize", "--ratio", "nan"], None, "--ratio is nan"),
    "bundled embedding": (
        ["resize", "--rank", "2"],
        lambda t: t | EMBEDDING,
        "would be lost",
    ),
    "Tucker": (["convert", "--to", "kohya"], lambda t: t | {"lora_unet_x.lora_mid.weight": torch.ones(1, 2)}, "Tucker"),
    "half a layer": (
        ["convert", "--to", "kohya"],
        lambda t: {
            key: value for key, value in t.items() if not key.endswith("mid_block_attentions_0_proj_in.lora_up.weight")
        },
        "half of a layer",
    ),
    "not finite": (["resize", "--rank", "2"], lambda t: {key: value * float("nan") for key, value in t.items()}, "NaN"),
    "too large for fp16": (
        ["convert", "--to", "kohya", "--dtype", "fp16"],
        lambda t: {key: value.float() * 1e6 for key, value in t.items()},
        "too large for float16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, alter, says = REFUSED[name]
    path = written("sd15", tmp_path)
    if alter:
        safetensors.torch.save_file(alter(safetensors.torch.load_file(path)), path, {"ss_base_model_version": "sd_v1"})
    assert main(["lora", words[0], str(path), *words[1:], "--out", str(tmp_path / "b.safetensors")]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert "What to do:" in shown
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_huge_change_and_methods_that_depend_on_the_base_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, path = tmp_path / "b.safetensors", tmp_path / "a.safetensors"
    layer = "lora_unet_mid_block_attentions_0_proj_in"
    wide = {"hada_w1_a": (10**6, 1), "hada_w1_b": (1, 10**6), "hada_w2_a": (10**6, 1), "hada_w2_b": (1, 10**6)}
    safetensors.torch.save_file({f"{layer}.{role}": torch.ones(shape) for role, shape in wide.items()}, path)
    words = ["--rank", "4", "--out", str(out), "--family", "sd15"]
    assert main(["lora", "resize", str(path), *words]) == 2
    assert "would change 1,000,000,000,000 weights" in capsys.readouterr().err
    _, _, dora = lycoris_file("dora", tmp_path)
    assert main(["lora", "resize", str(dora), *words]) == 2
    assert "depends on the base" in capsys.readouterr().err
    assert main(["lora", "convert", str(dora), "--to", "kohya", "--out", str(out)]) == 2
    assert "contains DoRA" in capsys.readouterr().err
    assert not out.exists()


def test_a_chart_shows_the_singular_values(tmp_path: Path) -> None:
    from PIL import Image

    chart = tmp_path / "chart.png"
    run("resize", written("sd15", tmp_path), "--rank", "2", "--out", tmp_path / "b.safetensors", "--chart", chart)
    with Image.open(chart) as image:
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 20) or ()}
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)} <= colors
    before = chart.read_bytes()
    words = ["lora", "resize", str(tmp_path / "b.safetensors"), "--rank", "1", "--out", str(tmp_path / "c.safetensors")]
    assert main([*words, "--chart", str(chart)]) == 2
    assert chart.read_bytes() == before
    assert not (tmp_path / "c.safetensors").exists()
