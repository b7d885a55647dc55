"""What is told of LoRA files: names apart, strengths against products in full with torch, hostile files in words."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from app.core.loras import strength
from app.core.loras.file import LONGEST_TEXT, MOST_ROWS, read_lora
from app.core.loras.strength import block_of, block_order, layers_of
from tests.support.loras import EVERYTHING, Models, golden_rows, random_weights
from tests.support.raw import header_of, write_raw, write_shapes
from tests.unit.config.presets.test_hostile import TINY, png_of_size
from tests.unit.config.presets.test_lora import DATASETS, FOLDER, SD15, SDXL, lora
from trainer.errors import LoraFileError
from trainer.files.header import read_header

LAYER = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape))).to(dtype)


def strengths(path: Path) -> dict[str, float | None]:
    return {block.name: block.strength for block in read_lora(path).blocks()}


# Names.


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        (LAYER, "IN04"),
        ("lora_unet_middle_block_1_proj_in", "MID"),
        ("lora_unet_output_blocks_11_1_proj_in", "OUT11"),
        ("lora_unet_down_blocks_0_attentions_1_proj_in", "IN02"),
        ("lora_unet_down_blocks_2_downsamplers_0_conv", "IN09"),
        ("lora_unet_mid_block_attentions_0_proj_in", "MID"),
        ("unet.up_blocks.3.attentions.2.proj_in", "OUT11"),
        ("lora_unet_up_blocks_0_upsamplers_0_conv", "OUT02"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", "TE1"),
        ("lora_te2_text_model_encoder_layers_31_mlp_fc1", "TE2"),
        ("text_encoder.text_model.encoder.layers.0.mlp.fc1", "TE1"),
        ("text_encoder_2.text_model.encoder.layers.0.mlp.fc1", "TE2"),
        ("lora_unet_time_embed_0", "?"),
        ("x" * 5000, "?"),
    ],
)
def test_a_layer_lies_in_its_block(layer, block):
    assert block_of(layer) == block


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_every_layer_that_is_trained_has_a_block(family):
    """sd-scripts names SD 1.5 by diffusers' paths and SDXL by the original's; the original has these blocks."""
    found = {block_of(row[0]) for row in golden_rows(family)}
    ends = {"sd15": (11, 11, {"TE1"}), "sdxl": (8, 8, {"TE1", "TE2"})}[family]
    last_in, last_out, encoders = ends
    wanted = {f"IN{n:02}" for n in range(1, last_in + 1)} | {f"OUT{n:02}" for n in range(last_out + 1)}
    assert found == wanted | {"MID"} | encoders
    assert sorted(found, key=block_order)[: len(encoders)] == sorted(encoders)
    assert sorted(found, key=block_order)[-1] == f"OUT{last_out:02}"


# Strengths.


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_strengths_equal_full_products_in_float64(family, dtype, tmp_path):
    """Of a real adapter on every kind of layer: attention, convolutions, text encoders, ranks apart from alphas."""
    models = Models.copies(family)
    adapter = models.attach(EVERYTHING)
    weights = random_weights(adapter)
    file, expected = {}, {}
    for slot in adapter.slots:
        down, up, alpha = weights[slot.down].to(dtype), weights[slot.up].to(dtype), adapter.alpha[slot.kohya]
        file |= {f"{slot.kohya}.lora_down.weight": down, f"{slot.kohya}.lora_up.weight": up}
        file[f"{slot.kohya}.alpha"] = torch.tensor(alpha)
        delta = up.double().flatten(1) @ down.double().flatten(1) * alpha / len(down)
        expected.setdefault(block_of(slot.kohya), []).append(delta.flatten())
    save_file({name: tensor.contiguous() for name, tensor in file.items()}, tmp_path / "a ü.safetensors")
    found = strengths(tmp_path / "a ü.safetensors")
    assert found == pytest.approx(
        {block: float(torch.cat(deltas).norm()) for block, deltas in expected.items()}, rel=1e-12
    )
    assert len(found) > 5


def test_a_tucker_core_is_counted(tmp_path):
    down, mid, up = random(3, 8, 1, 1), random(5, 3, 3, 3), random(6, 5, 1, 1)
    name = "lora_unet_input_blocks_1_0_in_layers_2"
    tensors = {f"{name}.lora_down.weight": down, f"{name}.lora_mid.weight": mid, f"{name}.lora_up.weight": up}
    save_file(tensors | {f"{name}.alpha": torch.tensor(6.0)}, tmp_path / "a.safetensors")
    whole = torch.einsum("or,rskl,si->oikl", up.double()[..., 0, 0], mid.double(), down.double()[..., 0, 0]) * 2
    assert strengths(tmp_path / "a.safetensors") == pytest.approx({"IN01": float(whole.norm())}, rel=1e-6)
    assert read_lora(tmp_path / "a.safetensors").kind == "LoCon with Tucker decomposition"


def test_loha_and_lokr_are_counted(tmp_path):
    a, b, c, d = random(10, 2), random(2, 6), random(10, 2, seed=1), random(2, 6, seed=1)
    hada = {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": c, "hada_w2_b": d, "alpha": torch.tensor(1.0)}
    save_file({f"{LAYER}.{role}": tensor for role, tensor in hada.items()}, tmp_path / "loha.safetensors")
    whole = (a @ b) * (c @ d) / 2
    assert strengths(tmp_path / "loha.safetensors") == pytest.approx({"IN04": float(whole.norm())}, rel=1e-5)
    kron = {"lokr_w1": random(4, 3), "lokr_w2_a": random(5, 2), "lokr_w2_b": random(2, 7), "alpha": torch.tensor(1.0)}
    save_file({f"{LAYER}.{role}": tensor for role, tensor in kron.items()}, tmp_path / "lokr.safetensors")
    whole = torch.kron(kron["lokr_w1"], kron["lokr_w2_a"] @ kron["lokr_w2_b"]) / 2
    assert strengths(tmp_path / "lokr.safetensors") == pytest.approx({"IN04": float(whole.norm())}, rel=1e-5)
    assert [read_lora(tmp_path / f"{kind}.safetensors").kind for kind in ("loha", "lokr")] == ["LoHa", "LoKr"]


def test_the_strength_of_an_oft_is_unknown(tmp_path):
    tensors = {f"{LAYER}.oft_blocks": random(5, 4, 4), f"{LAYER}.alpha": torch.tensor(0.0)}
    save_file(tensors, tmp_path / "oft.safetensors")
    file = read_lora(tmp_path / "oft.safetensors")
    assert (file.kind, file.ranks) == ("OFT", ())
    (block,) = file.blocks()
    assert (block.name, block.layers, block.ranks, block.strength, block.unknown) == ("IN04", 1, (), None, 1)


def test_loha_and_lokr_with_tucker_cores_are_counted(tmp_path):
    """Against LyCORIS' own einsum: "i j k l, j r, i p -> p r k l" of core, inner and outer matrix."""

    def whole(core, outer, inner):
        return torch.einsum("ijkl,jr,ip->prkl", core.double(), inner.double(), outer.double()).contiguous()

    outer, inner, core = (random(2, 10), random(2, 6), random(2, 2, 3, 3))
    others = random(2, 10, seed=1), random(2, 6, seed=1), random(2, 2, 3, 3, seed=1)
    hada = dict(zip(("hada_w1_a", "hada_w1_b", "hada_t1"), (outer, inner, core), strict=True))
    hada |= dict(zip(("hada_w2_a", "hada_w2_b", "hada_t2"), others, strict=True))
    file = {f"{LAYER}.{role}": tensor for role, tensor in (hada | {"alpha": torch.tensor(1.0)}).items()}
    save_file(file, tmp_path / "loha.safetensors")
    expected = whole(core, outer, inner) * whole(others[2], others[0], others[1]) / 2
    assert strengths(tmp_path / "loha.safetensors") == pytest.approx({"IN04": float(expected.norm())}, rel=1e-12)
    kron = {
        "lokr_w1": random(4, 3),
        "lokr_w2_a": outer,
        "lokr_w2_b": inner,
        "lokr_t2": core,
        "alpha": torch.tensor(6.0),
    }
    save_file({f"{LAYER}.{role}": tensor for role, tensor in kron.items()}, tmp_path / "lokr.safetensors")
    expected = torch.kron(kron["lokr_w1"].double()[:, :, None, None], whole(core, outer, inner)) * 3
    assert strengths(tmp_path / "lokr.safetensors") == pytest.approx({"IN04": float(expected.norm())}, rel=1e-12)


@pytest.mark.parametrize(("name", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_every_number_of_eight_bits_is_read_as_torch_reads_it(name, dtype):
    codes = bytes(range(256))
    expected = torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(dtype).double().numpy()
    np.testing.assert_array_equal(strength._DECODERS[name](codes).astype(np.float64), expected)


def test_an_adapter_of_eight_bits_has_a_strength(tmp_path):
    down, up = random(4, 8, dtype=torch.float8_e4m3fn), random(6, 4, dtype=torch.float8_e5m2)
    save_file({f"{LAYER}.lora_down.weight": down, f"{LAYER}.lora_up.weight": up}, tmp_path / "a.safetensors")
    whole = up.double() @ down.double()
    assert strengths(tmp_path / "a.safetensors") == pytest.approx({"IN04": float(whole.norm())}, rel=1e-12)


def test_diffusers_alphas_come_from_the_metadata(tmp_path):
    name = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    down, up = random(4, 2048), random(640, 4)
    told = {"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 2, "unet.r": 4})}
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, tmp_path / "a.safetensors", told)
    made = read_lora(tmp_path / "a.safetensors").blocks()
    assert [(block.name, block.ranks, block.alphas) for block in made] == [("IN04", (4,), (2.0,))]
    assert made[0].strength == pytest.approx(float((up.double() @ down.double() / 2).norm()), rel=1e-12)


def test_what_is_no_number_is_told_as_such_and_what_does_not_fit_is_counted_out(tmp_path):
    tensors = {
        "lora_unet_input_blocks_1_1_proj_in": (torch.full((4, 8), math.nan), torch.ones(8, 4)),
        "lora_unet_input_blocks_2_1_proj_in": (torch.full((4, 8), 1e38), torch.full((8, 4), 1e38)),
        "lora_unet_input_blocks_4_1_proj_in": (torch.ones(4, 8), torch.ones(8, 5)),
        "lora_unet_input_blocks_5_1_proj_in": (torch.ones(4, 8), torch.zeros(8, 4)),
        "lora_unet_input_blocks_6_1_proj_in": (torch.ones(4, 8, dtype=torch.float8_e8m0fnu), torch.ones(8, 4)),
    }
    file = {f"{layer}.lora_down.weight": pair[0] for layer, pair in tensors.items()}
    file |= {f"{layer}.lora_up.weight": pair[1] for layer, pair in tensors.items()}
    save_file(file, tmp_path / "a.safetensors")
    blocks = {block.name: block for block in read_lora(tmp_path / "a.safetensors").blocks()}
    assert math.isnan(blocks["IN01"].strength)
    assert blocks["IN02"].strength == pytest.approx(32e76, rel=1e-6)
    assert [(blocks[name].strength, blocks[name].unknown) for name in ("IN04", "IN05", "IN06")] == [
        (None, 1),
        (0.0, 0),
        (None, 1),
    ]


def test_a_file_that_became_shorter_is_told_and_a_wish_that_ended_is_heard(tmp_path):
    path = lora(tmp_path, SDXL, {})
    found = read_lora(path)
    assert found.blocks(lambda: False) == []
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(OSError, match="became shorter"):
        found.blocks()


# What it says of itself.


def test_what_kohya_tells_is_told(tmp_path):
    found = read_lora(lora(tmp_path, SD15, FOLDER, rank=32))
    assert (found.kind, found.family, found.ranks, found.parts) == (
        "LoRA",
        "sd15",
        (32,),
        {"UNet": 1, "text encoder": 1},
    )
    assert found.about == {"title": "mika_v2", "base": "animefull-final.safetensors"}
    assert (found.triggers, found.triggers_stated) == ("secret folder", False)
    assert found.tags == (("mika", 30),)
    assert ("Rank", "32") in found.settings
    assert ("Optimizer", "bitsandbytes.optim.adamw.AdamW8bit(weight_decay=0.1,betas=(0.9, 0.99))") in found.settings
    assert dict(found.metadata) == FOLDER


def test_what_a_dataset_file_and_modelspec_tell_is_told(tmp_path):
    tags = [{"tag_frequency": {"a": {"cat": 2, "dog": 1}, "b": {"cat": 3}}}]
    found = read_lora(lora(tmp_path, SDXL, {**DATASETS, "ss_datasets": json.dumps(tags)}))
    assert (found.about["title"], found.about["author"], found.about["license"]) == ("Gouache/XL", "Zoë", "CC-BY-4.0")
    assert (found.triggers, found.triggers_stated) == ("gch, soft light", True)
    assert found.tags == (("cat", 5), ("dog", 1))


def test_pictures_come_from_the_metadata_or_from_beside(tmp_path):
    told = {"modelspec.thumbnail": f"data:image/png;base64,{TINY}", "ssmd_cover_images": json.dumps([TINY, "?", 3])}
    path = lora(tmp_path, SDXL, told)
    assert [(each.width, each.height, each.rgb[:3]) for each in read_lora(path).images] == [(8, 8, b"\xff\0\0")] * 2
    bomb = {"modelspec.thumbnail": f"data:image/png;base64,{png_of_size(60_000, 60_000)}"}
    assert read_lora(lora(tmp_path, SDXL, bomb)).images == ()
    Image.new("RGB", (1024, 512), "blue").save(tmp_path / "a.preview.png")
    [beside] = read_lora(lora(tmp_path, SDXL, {})).images
    assert (beside.width, beside.height) == (256, 128)


HOSTILE = {
    "a header of 100 MB": lambda path: path.write_bytes(struct.pack("<Q", 100 << 20) + b'{"a":' + bytes(1 << 20)),
    "too many keys": lambda path: write_raw(
        path, {f"k{n}": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]} for n in range(11_000)}
    ),
    "too many metadata": lambda path: write_shapes(
        path, {f"{LAYER}.lora_down.weight": (4, 8)}, {f"k{n}": "" for n in range(60_000)}
    ),
    "cut off": lambda path: path.write_bytes(
        write_shapes(path, {f"{LAYER}.lora_down.weight": (4, 8)}).read_bytes()[:-9]
    ),
    "cut in the header": lambda path: path.write_bytes(write_shapes(path, {f"{LAYER}.alpha": ()}).read_bytes()[:30]),
    "empty": lambda path: path.write_bytes(b""),
    "a web page": lambda path: path.write_text("<!DOCTYPE html><html>", encoding="utf-8"),
    "no LoRA": lambda path: write_shapes(path, {"model.diffusion_model.a": (4,)}),
    "only alphas": lambda path: write_shapes(path, {f"{LAYER}.alpha": ()}),
    "deep": lambda path: path.write_bytes(struct.pack("<Q", 20_000) + b'{"a":' + b"[" * 19_995),
    "a folder": lambda path: path.mkdir(),
    "missing": lambda path: None,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_words(kind, tmp_path):
    path = tmp_path / "a.safetensors"
    HOSTILE[kind](path)
    with pytest.raises(LoraFileError) as caught:
        read_lora(path)
    assert caught.value.sentence
    assert caught.value.remedy


def test_texts_are_cut_and_cannot_steer(tmp_path):
    told = {
        "modelspec.title": "a\u202eb\nc\x1b[0m" + "x" * 5000,
        "ss_tag_frequency": json.dumps({"1_<b>x</b>": {f"tag {n}": n for n in range(5000)} | {"bad": "x", "f": -1}}),
        **{f"k{n}": "v" for n in range(3000)},
    }
    found = read_lora(lora(tmp_path, SDXL, told))
    assert found.about["title"].startswith("a b c [0mxxx")
    assert len(found.about["title"]) == LONGEST_TEXT + 1
    assert (len(found.tags), len(found.metadata)) == (MOST_ROWS, MOST_ROWS)
    assert found.tags[0] == ("tag 4999", 4999)
    assert found.triggers == "<b>x</b>"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["ss_tag_frequency", "ss_datasets", "ssmd_cover_images", "lora_adapter_metadata", "modelspec.thumbnail"]
)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, JSON.map(json.dumps) | st.text(max_size=20), max_size=5))
def test_any_metadata_are_told_or_passed_over(tmp_path_factory, metadata):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_raw(path, header_of({f"{LAYER}.lora_down.weight": (1, 2), f"{LAYER}.lora_up.weight": (2, 1)}, metadata))
    found = read_lora(path)
    assert len(found.blocks()) == 1


def test_layers_are_those_of_the_header(tmp_path):
    path = lora(tmp_path, SDXL, {})
    assert set(layers_of(read_header(path, "lora"))) == set(SDXL)
