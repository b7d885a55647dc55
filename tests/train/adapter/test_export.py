"""Exported files: loaded by diffusers, merged by hand, compared with the golden lists, and broken on purpose."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from transformers import CLIPTokenizer

from app.core.after.export import LoraSummary
from app.core.after.export import export as send_out
from tests.support.loras import EVERYTHING, Models, full_size, golden_rows, merge, random_weights
from tests.support.tiny import tiny_configs
from trainer.adapter import export
from trainer.adapter.attach import Adapter, attach
from trainer.adapter.export import Naming, export_lora
from trainer.config.base import Family
from trainer.errors import LoraFileError
from trainer.files.header import read_header
from trainer.files.tokens import vocabulary

FAMILIES: list[Family] = ["sd15", "sdxl"]
METADATA = {"ss_v2": "False", "ss_output_name": "Zürich", "modelspec.title": "t"}


def load_in_diffusers(models: Models, path: Path) -> None:
    words, merges = vocabulary()
    tokenizer = CLIPTokenizer(vocab=words, merges=cast(Any, merges))
    scheduler = DDIMScheduler.from_config(tiny_configs(models.family)["scheduler"])
    parts: dict[str, Any] = {**models.parts, "vae": None, "tokenizer": tokenizer, "scheduler": scheduler}
    pipeline: Any
    if models.family == "sd15":
        pipeline = StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    else:
        pipeline = StableDiffusionXLPipeline(**parts, tokenizer_2=tokenizer, add_watermarker=False)
    pipeline.load_lora_weights(path)
    for model in models.parts.values():
        nn.Module.to(model, models.unet.dtype)  # the LoRA's weights come in the file's dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_that_was_sent_out_loads_in_diffusers_as_the_file_it_was_made_of(family: Family, tmp_path: Path) -> None:
    trained, plain = Models.copies(family), Models.copies(family)
    adapter = trained.attach()
    export_lora(tmp_path / "a.safetensors", random_weights(adapter), adapter, METADATA)
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    copy = send_out(
        tmp_path / "a.safetensors", tmp_path / "loras", "b", LoraSummary("b", image=tmp_path / "red.png")
    ).file
    load_in_diffusers(plain, copy)  # refuses files with keys that it cannot match
    assert torch.allclose(trained.predict(), plain.predict(), rtol=0, atol=1e-12)
    before, after = safetensors.torch.load_file(tmp_path / "a.safetensors"), safetensors.torch.load_file(copy)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    hashes = [read_header(path, "lora").metadata["sshs_model_hash"] for path in (tmp_path / "a.safetensors", copy)]
    assert hashes[0] == hashes[1]


def no_numbers(name: str) -> np.random.Generator:
    raise AssertionError(f"a layer on the meta device, {name}, has no numbers")


@cache
def attention_adapter(rank: int) -> Adapter:
    recipe = EVERYTHING.model_copy(update={"layers": "attention", "rank": rank})
    return Models.copies("sd15", torch.float32).attach(recipe)


def small_adapter(rank: int = 2) -> tuple[Adapter, dict[str, Tensor]]:
    adapter = attention_adapter(rank)
    return adapter, random_weights(adapter)


@pytest.mark.parametrize("naming", ["kohya", "diffusers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_predicts_what_training_predicts(family: Family, naming: Naming, tmp_path: Path) -> None:
    trained, plain = Models.copies(family), Models.copies(family)
    before = plain.predict()
    adapter = trained.attach()
    weights = random_weights(adapter)
    dtype = torch.float16 if naming == "kohya" else torch.float32
    export_lora(tmp_path / "a.safetensors", weights, adapter, METADATA, dtype=dtype, naming=naming)
    load_in_diffusers(plain, tmp_path / "a.safetensors")
    expected, found = trained.predict(), plain.predict()
    assert (expected - before).norm() > 0.05 * before.norm()
    # Folding alpha into lora_B rounds once in fp32; the universal file is exact.
    bound = 1e-12 if naming == "kohya" else 1e-6
    assert (found - expected).norm() < bound * (expected - before).norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_merging_into_the_weights_gives_the_same(family: Family) -> None:
    trained, merged = Models.copies(family), Models.copies(family)
    adapter = trained.attach()
    merge(merged, adapter, random_weights(adapter))
    expected, found = trained.predict(), merged.predict()
    assert (found - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_full_size_files_hold_exactly_the_golden_names_and_shapes(family: Family, tmp_path: Path) -> None:
    unet, encoders = full_size(family)
    recipe = EVERYTHING.model_copy(update={"conv_rank": 2, "rank": 1})
    adapter = attach(family, unet, encoders, recipe, dtype=torch.bfloat16, generator=no_numbers)
    assert all(parameter.is_meta for parameter in adapter.parameters.values())
    weights = {key: torch.zeros(parameter.shape) for key, parameter in adapter.parameters.items()}
    export_lora(tmp_path / "full.safetensors", weights, adapter, METADATA)
    with safe_open(tmp_path / "full.safetensors", framework="pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    expected = {}
    for name, _, down, up in golden_rows(family):
        rank = adapter.rank[name]
        expected[f"{name}.alpha"] = ()
        expected[f"{name}.lora_down.weight"] = tuple(rank if size == "r" else int(size) for size in down.split("x"))
        expected[f"{name}.lora_up.weight"] = tuple(rank if size == "r" else int(size) for size in up.split("x"))
    assert shapes == expected


def test_universal_file_has_fp16_matrices_and_scalar_alpha(tmp_path: Path) -> None:
    adapter, weights = small_adapter()
    export_lora(tmp_path / "a.safetensors", weights, adapter, METADATA)
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    for slot in adapter.slots:
        alpha = tensors[f"{slot.kohya}.alpha"]
        assert (alpha.shape, alpha.dtype, float(alpha)) == ((), torch.float32, adapter.alpha[slot.kohya])
        for key in (slot.down, slot.up):
            assert torch.equal(tensors[key], weights[key].half())
    assert len(tensors) == 3 * len(adapter.slots)


def test_partly_trained_text_layers_are_completed_with_zeros(tmp_path: Path) -> None:
    models, plain = Models.copies("sdxl"), Models.copies("sdxl")
    full = models.attach()
    weights = random_weights(full)
    endings = ("layers.1.self_attn.q_proj", "layers.2.mlp.fc1", "mid_block.attentions.0.proj_in")
    kept = tuple(slot for slot in full.slots if slot.module.endswith(endings))
    full.load({key: tensor * any(key.startswith(f"{slot.kohya}.") for slot in kept) for key, tensor in weights.items()})
    partial = Adapter(full.table, kept, {slot.kohya: full.rank[slot.kohya] for slot in kept}, full.alpha)
    export_lora(tmp_path / "a.safetensors", weights, partial, METADATA)

    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    added = {key.split(".")[0] for key in tensors} - {slot.kohya for slot in kept}
    assert added == {
        f"lora_{encoder}_text_model_encoder_layers_1_self_attn_{projection}"
        for encoder in ("te1", "te2")
        for projection in ("k_proj", "v_proj", "out_proj")
    }
    for name in added:
        assert not tensors[f"{name}.lora_up.weight"].any()
        assert float(tensors[f"{name}.alpha"]) == full.alpha[name]
    # diffusers refuses or drops text layers that are not complete.
    load_in_diffusers(plain, tmp_path / "a.safetensors")
    expected, found = models.predict(), plain.predict()
    assert (found - expected).norm() < 1e-12 * expected.norm()


def test_equal_input_gives_equal_bytes_with_sorted_metadata(tmp_path: Path) -> None:
    adapter, weights = small_adapter()
    many = {f"ss_{number}": "x" for number in range(20)}
    digests = []
    for name in ("a", "b"):
        digests.append(export_lora(tmp_path / f"{name}.safetensors", weights, adapter, many))
        many = dict(reversed(many.items()))
    first, second = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second
    assert digests == [hashlib.sha256(first).hexdigest()] * 2
    assert first[8:10] == b'{"'
    assert int.from_bytes(first[:8], "little") % 8 == 0


def test_hashes_are_those_of_sd_scripts(tmp_path: Path) -> None:
    adapter, weights = small_adapter(rank=400)  # past the megabyte at which the legacy hash begins
    export_lora(tmp_path / "a.safetensors", weights, adapter, METADATA)
    data = (tmp_path / "a.safetensors").read_bytes()
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        metadata = file.metadata()
    payload = data[8 + int.from_bytes(data[:8], "little") :]
    assert len(payload) > 0x110000
    # As sd-scripts computes it: the whole file, serialized by safetensors itself with nothing but the ss_ keys.
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    virtual = safetensors.torch.save(tensors, {key: text for key, text in METADATA.items() if key.startswith("ss_")})
    assert metadata["sshs_legacy_hash"] == hashlib.sha256(virtual[0x100000:0x110000]).hexdigest()[:8]
    assert metadata["sshs_model_hash"] == hashlib.sha256(payload).hexdigest()
    assert metadata["modelspec.hash_sha256"] == "0x" + hashlib.sha256(payload).hexdigest()
    assert METADATA.items() <= metadata.items()


@pytest.mark.parametrize(
    ("value", "dtype", "remedy"),
    [
        (7e4, torch.float16, 'output.dtype = "bf16"'),
        (float("nan"), torch.float16, "lower learning rate"),
        (float("inf"), torch.bfloat16, "lower learning rate"),
    ],
)
def test_values_that_are_not_finite_are_refused_and_the_old_file_stays(
    value: float, dtype: torch.dtype, remedy: str, tmp_path: Path
) -> None:
    adapter, weights = small_adapter()
    path = tmp_path / "a.safetensors"
    export_lora(path, weights, adapter, METADATA)
    before = path.read_bytes()
    slot = adapter.slots[5]
    weights[slot.up][0, 0] = value
    with pytest.raises(LoraFileError, match=slot.kohya) as caught:
        export_lora(path, weights, adapter, METADATA, dtype=dtype)
    assert caught.value.code == "lora.not_finite"
    assert remedy in caught.value.remedy
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_large_values_fit_bf16(tmp_path: Path) -> None:
    adapter, weights = small_adapter()
    weights[adapter.slots[5].up][0, 0] = 7e4
    export_lora(tmp_path / "a.safetensors", weights, adapter, METADATA, dtype=torch.bfloat16)
    stored = safetensors.torch.load_file(tmp_path / "a.safetensors")[adapter.slots[5].up]
    assert (stored.dtype, float(stored[0, 0])) == (torch.bfloat16, float(torch.tensor(7e4).bfloat16()))


@pytest.mark.parametrize("fault", ["unknown", "halved", "infinite"])
def test_a_file_with_a_fault_never_takes_its_place(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, weights = small_adapter()
    first = adapter.slots[0]
    tensors = export._tensors(weights, adapter, torch.float16, "kohya")
    if fault == "unknown":
        tensors["lora_te_encoder_layers_0_mlp_fc1.lora_up.weight"] = tensors[first.up].clone()
    elif fault == "halved":
        del tensors[first.up]
    else:
        tensors[first.up][0, 0] = float("inf")
    monkeypatch.setattr(export, "_tensors", lambda *_: tensors)
    with pytest.raises(LoraFileError, match="encoder_layers_0_mlp_fc1.lora_up" if fault == "unknown" else first.kohya):
        export_lora(tmp_path / "a.safetensors", weights, adapter, METADATA)
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_is_found_on_reopening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, weights = small_adapter()
    check = export._check_written

    def flip_then_check(written: Path, *rest: Any) -> None:
        data = bytearray(written.read_bytes())
        data[-2] ^= 1
        written.write_bytes(data)
        check(written, *rest)

    monkeypatch.setattr(export, "_check_written", flip_then_check)
    with pytest.raises(LoraFileError, match="its bytes"):
        export_lora(tmp_path / "a.safetensors", weights, adapter, METADATA)
    assert list(tmp_path.iterdir()) == []
