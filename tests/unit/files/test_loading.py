"""What programs do with LoRA files of each kind, as their own code did when it read such files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.raw import write_shapes
from trainer.config.base import Family
from trainer.config.methods import PROGRAMS
from trainer.files.header import read_header
from trainer.files.loading import verdicts

Shapes = dict[str, tuple[int, ...]]
MARKS = {"loads": "+", "partly": "~", "refused": "-"}


def kohya(layer: str, inputs: int = 8, outputs: int = 8) -> Shapes:
    return {
        f"{layer}.lora_down.weight": (2, inputs),
        f"{layer}.lora_up.weight": (outputs, 2),
        f"{layer}.alpha": (),
    }


def dotted(layer: str, down: str = "lora_A", up: str = "lora_B") -> Shapes:
    return {f"{layer}.{down}.weight": (2, 8), f"{layer}.{up}.weight": (8, 2)}


def text(prefix: str, *names: str) -> Shapes:
    parts = names or ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "self_attn_out_proj", "mlp_fc1")
    return {key: shape for name in parts for key, shape in kohya(f"{prefix}_{name}").items()}


CROSS = "attentions_0_transformer_blocks_0_attn2_to_k"
SD15 = kohya(f"lora_unet_down_blocks_1_{CROSS}", 768)
SDXL = kohya("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", 2048)
TE = text("lora_te_text_model_encoder_layers_0")
TE1 = text("lora_te1_text_model_encoder_layers_0")
TE2 = text("lora_te2_text_model_encoder_layers_0")
PEFT = dotted("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k")
DIFFUSERS = dotted("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k", "lora.down", "lora.up")
LOHA = {f"lora_unet_mid_block_{CROSS}.{role}": (4, 4) for role in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")}
LOKR = {f"lora_unet_mid_block_{CROSS}.{role}": (4, 4) for role in ("lokr_w1", "lokr_w2")}
LOKR_SDXL = {key.replace("mid_block_attentions_0", "middle_block_1"): shape for key, shape in LOKR.items()}
LDM_NAME = kohya("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q")
Q_AND_V = text("lora_te2_text_model_encoder_layers_0", "self_attn_q_proj", "self_attn_v_proj")
EMBEDDINGS: Shapes = {f"bundle_emb.{number}.clip_l": (1, 768) for number in range(14)}

# Programs in the order of PROGRAMS: ComfyUI, Forge, A1111, InvokeAI, diffusers, sd-scripts. As in the matrix of the
# study of file formats, whose rows were measured with the programs' own code.
CASES: list[tuple[str, Family, Shapes, str]] = [
    ("kohya", "sd15", SD15 | TE, "++++++"),
    ("kohya", "sdxl", SDXL | TE1 | TE2, "++++++"),
    ("SDXL text encoders only", "sdxl", TE1 | TE2, "+++-++"),
    ("SD 1.5 text encoder only", "sd15", TE, "++++++"),
    (
        "SD 1.5 with LDM names",
        "sd15",
        LDM_NAME | TE,
        "+++~-~",
    ),
    ("PEFT", "sd15", PEFT, "~---+-"),
    ("diffusers", "sd15", DIFFUSERS, "----+-"),
    ("diffusers", "sdxl", DIFFUSERS, "~---+-"),
    ("lora_te1_ in SD 1.5", "sd15", SD15 | TE1, "+++~+~"),
    ("lora_te_ in SDXL", "sdxl", SDXL | TE, "++~-+~"),
    ("no text_model", "sd15", SD15 | text("lora_te_encoder_layers_0"), "~-~~+~"),
    (
        "q and v only",
        "sdxl",
        SDXL | Q_AND_V,
        "++~+-+",
    ),
    ("DoRA per input", "sd15", SD15 | {f"lora_unet_down_blocks_1_{CROSS}.dora_scale": (1, 768)}, "++++~~"),
    ("DoRA per output", "sd15", SD15 | {f"lora_unet_down_blocks_1_{CROSS}.dora_scale": (8, 1)}, "~~~~~~"),
    ("LoHa", "sd15", SD15 | LOHA, "++++--"),
    ("LoKr", "sd15", SD15 | LOKR, "+++---"),
    ("LoKr", "sdxl", SDXL | LOKR_SDXL, "++++--"),
    ("14 bundled keys", "sdxl", SDXL | EMBEDDINGS, "~-+~-~"),
    ("half a layer", "sd15", {key: shape for key, shape in SD15.items() if "lora_up" not in key}, "------"),
    ("text projection", "sdxl", SDXL | kohya("lora_te2_text_projection"), "++~++~"),
]


@pytest.mark.parametrize(("name", "family", "shapes", "expected"), CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_each_program_does_what_it_was_seen_to_do(
    name: str, family: Family, shapes: Shapes, expected: str, tmp_path: Path
) -> None:
    header = read_header(write_shapes(tmp_path / "a.safetensors", shapes), "lora")
    found = verdicts(header, family)
    assert [each.program for each in found] == list(PROGRAMS)
    assert "".join(MARKS[each.outcome] for each in found) == expected
    assert all(bool(each.reasons) == (each.outcome != "loads") for each in found)
