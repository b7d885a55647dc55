"""Names of all layers that can carry a LoRA, in models and in LoRA files, computed from a base's configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.base import Family, Part
from trainer.errors import BaseModelError

Kind = Literal["attention", "linear", "conv"]

# The projections of a CLIP layer, which A1111 and diffusers accept only together.
TEXT_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")

RANKED_ROLES = ("lora_down", "hada_w1_b", "lokr_w2_b")
"""Tensors of adapters whose first dimension is the rank; each kind has at most one of them."""
_KOHYA_PREFIX: dict[tuple[Family, Part], str] = {
    ("sd15", "unet"): "lora_unet",
    ("sd15", "text_encoder"): "lora_te",
    ("sdxl", "unet"): "lora_unet",
    ("sdxl", "text_encoder"): "lora_te1",
    ("sdxl", "text_encoder_2"): "lora_te2",
}
# Defaults of UNet2DConditionModel for keys that old configs do not have.
_DIFFUSERS_DEFAULTS = {
    "layers_per_block": 2,
    "transformer_layers_per_block": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
}
_RESNET_LDM = {"conv1": "in_layers.2", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One layer of a base that can carry a LoRA."""

    part: Part
    """Part of the base that the layer belongs to."""
    module: str
    """Module path as in diffusers; in a text encoder, always with the leading "text_model."."""
    ldm: str
    """Path as in single-file (LDM) checkpoints; in a text encoder, the same as `module`."""
    kohya: str
    """Layer name in LoRA files with kohya naming, which load everywhere."""
    kind: Kind
    """attention: query, key, value and output projections; conv: the layers that LoCon adds; linear: the rest."""
    kernel: Literal[1, 3] = 1
    """Kernel size; 1 for linear layers. 3x3 convolutions have their own rank (recipe.conv_rank)."""

    @property
    def down(self) -> str:
        """Return the file key of the down matrix."""
        return f"{self.kohya}.lora_down.weight"

    @property
    def up(self) -> str:
        """Return the file key of the up matrix."""
        return f"{self.kohya}.lora_up.weight"


def slots(
    family: Family, unet_config: Mapping[str, Any], text_configs: Sequence[Mapping[str, Any]]
) -> tuple[Slot, ...]:
    """Return every layer that can carry a LoRA: the UNet's in the order of its forward pass, then the text encoders'.

    The names are computed, not read from the modules: transformers 5.6 removed a level from them that other programs
    expect in files. The diffusers and transformers configs may describe models of any size. Raises BaseModelError
    for a UNet with blocks that SD 1.5 and SDXL do not have.
    """
    table = list(_unet_slots(family, unet_config))
    parts: tuple[Part, ...] = ("text_encoder", "text_encoder_2")
    for part, config in zip(parts, text_configs, strict=False):
        table += _text_slots(_KOHYA_PREFIX[family, part], part, int(config["num_hidden_layers"]))
    return tuple(table)


def file_key(slot: Slot, role: str) -> str:
    """Return the file key of a layer's tensor, such as its "lora_down", "hada_w1_a" or "alpha"."""
    return f"{slot.kohya}.{role}{'.weight' if role.startswith('lora_') else ''}"


def aliases(table: Sequence[Slot]) -> dict[str, Slot]:
    """Map every flattened layer name that a program may use in a LoRA file to its layer.

    A flattened name has underscores instead of dots and no leading "lora_", so that `lora_unet_mid_block_...` and
    `unet.mid_block....` become the same. Covers diffusers and LDM block names, and text encoders with and without
    "text_model".
    """
    prefixes = {
        "unet": ("unet",),
        "text_encoder": ("te", "te1", "text_encoder"),
        "text_encoder_2": ("te2", "text_encoder_2"),
    }
    names = {}
    for slot in table:
        for prefix in prefixes[slot.part]:
            for path in {slot.module, slot.ldm, slot.module.removeprefix("text_model.")}:
                names[f"{prefix}.{path}".replace(".", "_")] = slot
    return names


def _unet_slots(family: Family, config: Mapping[str, Any]) -> Iterator[Slot]:
    for module, ldm, kind, kernel in _unet_layers(config):
        path = ldm if family == "sdxl" else module
        yield Slot("unet", module, ldm, f"lora_unet_{path.replace('.', '_')}", kind, kernel)


def _text_slots(prefix: str, part: Part, layers: int) -> Iterator[Slot]:
    for layer in range(layers):
        for name in (*(f"self_attn.{name}" for name in TEXT_ATTENTION), "mlp.fc1", "mlp.fc2"):
            module = f"text_model.encoder.layers.{layer}.{name}"
            kind: Kind = "attention" if name.startswith("self_attn") else "linear"
            yield Slot(part, module, module, f"{prefix}_{module.replace('.', '_')}", kind)


_Layer = tuple[str, str, Kind, Literal[1, 3]]  # diffusers path, LDM path, kind, kernel


def _unet_layers(config: Mapping[str, Any]) -> Iterator[_Layer]:
    """Yield the UNet's layers in the order in which diffusers' UNet2DConditionModel builds them.

    With n resnets per level, LDM numbers n + 1 input blocks per level (the last one is the downsampler; the very
    first block is the first convolution) and n + 1 output blocks per level.
    """
    config = {**_DIFFUSERS_DEFAULTS, **config}
    channels = list(config["block_out_channels"])
    levels, resnets = len(channels), config["layers_per_block"]
    if not isinstance(resnets, int):
        raise _unsupported(f"a different number of layers in each level ({resnets})")
    depths = _per_level(config["transformer_layers_per_block"], levels)

    for level, block in enumerate(config["down_block_types"]):
        attends = _attends(block, "CrossAttnDownBlock2D", "DownBlock2D")
        for j in range(resnets):
            # Only a level's first resnet can change the channels; if it does, it has a shortcut convolution.
            source = channels[max(level - 1, 0)] if j == 0 else channels[level]
            here, ldm = f"down_blocks.{level}", f"input_blocks.{(resnets + 1) * level + j + 1}"
            yield from _resnet(f"{here}.resnets.{j}", f"{ldm}.0", shortcut=source != channels[level])
            if attends:
                yield from _transformer(f"{here}.attentions.{j}", f"{ldm}.1", depths[level])
        if level < levels - 1:
            ldm = f"input_blocks.{(resnets + 1) * (level + 1)}.0.op"
            yield f"down_blocks.{level}.downsamplers.0.conv", ldm, "conv", 3

    _attends(config["mid_block_type"], "UNetMidBlock2DCrossAttn")
    yield from _resnet("mid_block.resnets.0", "middle_block.0", shortcut=False)
    yield from _transformer("mid_block.attentions.0", "middle_block.1", depths[-1])
    yield from _resnet("mid_block.resnets.1", "middle_block.2", shortcut=False)

    for level, block in enumerate(config["up_block_types"]):
        attends = _attends(block, "CrossAttnUpBlock2D", "UpBlock2D")
        mirror = levels - 1 - level
        for j in range(resnets + 1):
            # The input is the map from below, concatenated with a skip connection from the down path.
            source = channels[min(mirror + 1, levels - 1)] if j == 0 else channels[mirror]
            skip = channels[max(mirror - 1, 0)] if j == resnets else channels[mirror]
            here, ldm = f"up_blocks.{level}", f"output_blocks.{(resnets + 1) * level + j}"
            yield from _resnet(f"{here}.resnets.{j}", f"{ldm}.0", shortcut=source + skip != channels[mirror])
            if attends:
                yield from _transformer(f"{here}.attentions.{j}", f"{ldm}.1", depths[mirror])
        if level < levels - 1:
            ldm = f"output_blocks.{(resnets + 1) * level + resnets}.{2 if attends else 1}.conv"
            yield f"up_blocks.{level}.upsamplers.0.conv", ldm, "conv", 3


def _resnet(module: str, ldm: str, *, shortcut: bool) -> Iterator[_Layer]:
    for name, inner in _RESNET_LDM.items():
        yield f"{module}.{name}", f"{ldm}.{inner}", "conv", 3 if name.startswith("conv") else 1
    if shortcut:
        yield f"{module}.conv_shortcut", f"{ldm}.skip_connection", "conv", 1


def _transformer(module: str, ldm: str, depth: int) -> Iterator[_Layer]:
    yield f"{module}.proj_in", f"{ldm}.proj_in", "linear", 1
    for block in range(depth):
        for attention in ("attn1", "attn2"):
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                inner = f"transformer_blocks.{block}.{attention}.{name}"
                yield f"{module}.{inner}", f"{ldm}.{inner}", "attention", 1
        for name in ("ff.net.0.proj", "ff.net.2"):
            inner = f"transformer_blocks.{block}.{name}"
            yield f"{module}.{inner}", f"{ldm}.{inner}", "linear", 1
    yield f"{module}.proj_out", f"{ldm}.proj_out", "linear", 1


def _per_level(value: int | Sequence[int], levels: int) -> list[int]:
    return [value] * levels if isinstance(value, int) else list(value)


def _attends(block: str | None, attending: str, plain: str | None = None) -> bool:
    if block not in (attending, plain):
        raise _unsupported(f"a block of type {block}")
    return block == attending


def _unsupported(what: str) -> BaseModelError:
    return BaseModelError(
        "base.architecture",
        f"Could not use this base: its UNet has {what}, unlike SD 1.5 and SDXL.",
        "Choose a base of the Stable Diffusion 1.5 or SDXL family.",
    )
