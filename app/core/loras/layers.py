"""Takes the names of a LoRA's tensors apart: which layer each belongs to, and in which block of the model that lies.

Names are those of kohya, of diffusers and PEFT, and of LyCORIS. Blocks are called as artists who weigh them know them:
IN00 to IN11, MID, OUT00 to OUT11 for the UNet (IN08 and OUT08 the last of SDXL), TE1 and TE2 for the text encoders.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from trainer.files.header import Header, TensorInfo

Layer = Mapping[str, TensorInfo]
"""The tensors of one layer by role: "down", "up", "mid", "alpha", "dora_scale", "hada_w1_a", "lokr_w1", ..."""

OTHER = "?"
"""The block of layers whose place nothing tells."""

_TENSOR = re.compile(
    r"(?P<layer>.+?)(?:"
    r"\.lora_(?P<kohya>down|up|mid|A|B)(?:\.default)?\.weight"
    r"|[._]lora(?:_linear_layer)?\.(?P<diffusers>down|up)\.weight"
    r"|\.(?P<lycoris>alpha|dora_scale|(?:hada|lokr)_[wt][12](?:_[ab])?))"
)
_ROLES = {"A": "down", "B": "up"}
_TEXT_ENCODER = re.compile(r"(?:lora_te|text_encoder_?)(?P<number>[12])?(?![a-z])")
# The paths of the original model, then those of diffusers; both have two residual layers a level.
_ORIGINAL = re.compile(r"_(?P<side>input|output)_blocks_(?P<index>\d{1,2})_")
_DIFFUSERS = re.compile(
    r"_(?P<side>down|up)_blocks_(?P<level>\d)_(?P<part>resnets|attentions|downsamplers|upsamplers)_(?P<index>\d)"
)


def layers_of(header: Header) -> dict[str, Layer]:
    """Return the layers that a LoRA adapts, in the file's order; tensors of no known role are passed over."""
    found: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, tensor in header.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match:
            role = match["kohya"] or match["diffusers"] or match["lycoris"]
            found[match["layer"]][_ROLES.get(role, role)] = tensor
    return {name: layer for name, layer in found.items() if layer.keys() - {"alpha", "dora_scale"}}


def block_of(layer: str) -> str:
    """Return the block in which a layer lies, `OTHER` where its name does not tell."""
    name = "_" + layer.replace(".", "_")
    if encoder := _TEXT_ENCODER.match(name, 1):
        return f"TE{encoder['number'] or 1}"
    if place := _ORIGINAL.search(name):
        return f"{'IN' if place['side'] == 'input' else 'OUT'}{int(place['index']):02}"
    if "_middle_block_" in name or "_mid_block_" in name:
        return "MID"
    place = _DIFFUSERS.search(name)
    return _as_original(place["side"], int(place["level"]), place["part"], int(place["index"])) if place else OTHER


def block_order(block: str) -> tuple[int, str]:
    """Sort blocks as data pass through them."""
    sides = ("TE", "IN", "MID", "OUT")
    return next((place for place, side in enumerate(sides) if block.startswith(side)), len(sides)), block


def rank_of(layer: Layer) -> int | None:
    """Return the rank of a layer as its shapes tell it; None where it has none (a whole matrix)."""
    for role, axis in (("down", 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
        if role in layer and layer[role].shape:
            return layer[role].shape[axis]
    return None


def _as_original(side: str, level: int, part: str, index: int) -> str:
    """down_blocks.i.resnets.j is input_blocks.(3i+j+1), its downsampler 3i+3; up_blocks.i.resnets.j is 3i+j."""
    if side == "down":
        return f"IN{3 * level + (3 if part == 'downsamplers' else index + 1):02}"
    return f"OUT{3 * level + (2 if part == 'upsamplers' else index):02}"
