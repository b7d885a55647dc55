"""The name table against the golden lists of what sd-scripts writes."""

from __future__ import annotations

import gzip
from collections import Counter
from typing import Any

import pytest

from tests.support import ROOT
from trainer.adapter.names import aliases, slots
from trainer.config.base import Family
from trainer.errors import BaseModelError

GOLDEN = ROOT / "tests" / "golden" / "names"
UNETS: dict[Family, dict[str, Any]] = {
    "sd15": {
        "block_out_channels": [320, 640, 1280, 1280],
        "layers_per_block": 2,
        "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    },
    "sdxl": {
        "block_out_channels": [320, 640, 1280],
        "layers_per_block": 2,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
    },
}
TEXTS: dict[Family, list[dict[str, Any]]] = {
    "sd15": [{"num_hidden_layers": 12}],
    "sdxl": [{"num_hidden_layers": 12}, {"num_hidden_layers": 32}],
}
COUNTS: dict[Family, dict[tuple[str, bool], int]] = {
    "sd15": {("unet", False): 192, ("text_encoder", False): 72, ("unet", True): 86},
    "sdxl": {("unet", False): 722, ("text_encoder", False): 72, ("text_encoder_2", False): 192, ("unet", True): 66},
}
FAMILIES: list[Family] = ["sd15", "sdxl"]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_exactly_those_of_sd_scripts(family: Family) -> None:
    lines = gzip.decompress((GOLDEN / f"{family}.tsv.gz").read_bytes()).decode().splitlines()
    golden = {name: (kind == "conv", "x3x3" in down) for name, kind, down, _ in (line.split("\t") for line in lines)}
    table = slots(family, UNETS[family], TEXTS[family])
    assert {slot.kohya: (slot.kind == "conv", slot.kernel == 3) for slot in table} == golden
    assert len(table) == len(golden)
    assert Counter((slot.part, slot.kind == "conv") for slot in table) == COUNTS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_naming_of_a_layer_leads_to_it(family: Family) -> None:
    table = slots(family, UNETS[family], TEXTS[family])
    known = aliases(table)
    for slot in table:
        assert known[slot.kohya.removeprefix("lora_")] is slot
        assert known[f"{slot.part}_{slot.module}".replace(".", "_")] is slot
        assert known[f"{slot.part}_{slot.ldm}".replace(".", "_")] is slot
    # Two paths for each UNet layer, or three prefixes with and without text_model: none hides another.
    per_slot = {"unet": 2, "text_encoder": 6, "text_encoder_2": 4}
    assert len(known) == sum(per_slot[slot.part] for slot in table)


def test_sdxl_blocks_by_hand() -> None:
    """Rows of the arithmetic in sd-scripts' own conversion table."""
    ldm = {slot.module: slot.ldm for slot in slots("sdxl", UNETS["sdxl"], TEXTS["sdxl"])}
    assert ldm["down_blocks.0.downsamplers.0.conv"] == "input_blocks.3.0.op"
    assert ldm["down_blocks.1.attentions.0.proj_in"] == "input_blocks.4.1.proj_in"
    assert ldm["down_blocks.2.resnets.1.time_emb_proj"] == "input_blocks.8.0.emb_layers.1"
    assert ldm["mid_block.resnets.1.conv1"] == "middle_block.2.in_layers.2"
    assert ldm["up_blocks.1.upsamplers.0.conv"] == "output_blocks.5.2.conv"
    assert ldm["up_blocks.2.resnets.2.conv_shortcut"] == "output_blocks.8.0.skip_connection"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("down_block_types", ["DownBlock2D", "AttnDownBlock2D", "CrossAttnDownBlock2D"]),
        ("mid_block_type", "UNetMidBlock2D"),
        ("layers_per_block", [1, 2, 2]),
    ],
)
def test_unknown_unets_are_refused_by_what_is_strange(key: str, value: object) -> None:
    with pytest.raises(BaseModelError, match=r"AttnDownBlock2D|UNetMidBlock2D|\[1, 2, 2\]"):
        slots("sdxl", UNETS["sdxl"] | {key: value}, TEXTS["sdxl"])
