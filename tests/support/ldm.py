"""Write diffusers weights under the names of single-file (LDM) checkpoints, without diffusers' own converters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_UNET_TOP = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_INNER = {
    "conv_shortcut": "nin_shortcut",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}
_OPEN_CLIP_TOP = {
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
}
_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def unet_to_ldm(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rename a UNet2DConditionModel's weights to those of `model.diffusion_model.*` (without that prefix)."""
    return {_unet_name(name, config): tensor for name, tensor in weights.items()}


def _unet_name(name: str, config: Mapping[str, Any]) -> str:
    step = config["layers_per_block"] + 1
    module, rest = _split_top(name)
    if module is not None:
        return f"{module}.{_replaced(rest, _UNET_RESNET)}"
    found = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name)
    assert found, name
    side, block, kind, index, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    if side == "down":
        if kind == "downsamplers":
            return f"input_blocks.{step * (block + 1)}.0.{rest.replace('conv.', 'op.', 1)}"
        place = f"input_blocks.{step * block + index + 1}"
    else:
        if kind == "upsamplers":
            slot = 2 if "CrossAttn" in config["up_block_types"][block] else 1
            return f"output_blocks.{step * block + step - 1}.{slot}.{rest}"
        place = f"output_blocks.{step * block + index}"
    return f"{place}.{'0' if kind == 'resnets' else '1'}.{_replaced(rest, _UNET_RESNET) if kind == 'resnets' else rest}"


def _split_top(name: str) -> tuple[str | None, str]:
    for ours, theirs in _UNET_TOP.items():
        if name.startswith(ours + "."):
            return theirs, name[len(ours) + 1 :]
    return None, name


def _replaced(rest: str, table: Mapping[str, str]) -> str:
    for ours, theirs in table.items():
        if rest.startswith(ours + "."):
            return theirs + rest[len(ours) :]
    return rest


def vae_to_ldm(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rename an AutoencoderKL's weights to those of `first_stage_model.*`; attention as 1x1 convolutions."""
    last = len(config["block_out_channels"]) - 1
    renamed = {}
    for name, tensor in weights.items():
        target = name.replace("conv_norm_out", "norm_out")
        target = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", target)
        target = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", target)
        target = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", lambda m: f"up.{last - int(m[1])}.block.{m[2]}", target)
        target = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{last - int(m[1])}.upsample", target)
        target = re.sub(r"mid_block\.resnets\.(\d+)", lambda m: f"mid.block_{int(m[1]) + 1}", target)
        attention = "mid_block.attentions.0." in target
        target = target.replace("mid_block.attentions.0.", "mid.attn_1.")
        head, _, tail = target.rpartition("mid.attn_1.") if attention else _inner_split(target)
        target = head + ("mid.attn_1." if attention else "") + _replaced(tail, _VAE_INNER)
        is_projection = attention and name.endswith("weight") and "group_norm" not in name
        renamed[target] = tensor[:, :, None, None] if is_projection else tensor
    return renamed


def _inner_split(target: str) -> tuple[str, str, str]:
    found = re.match(r"(.*(?:block\.\d+|block_\d)\.)(.+)", target)
    return (found[1], "", found[2]) if found else ("", "", target)


def open_clip_to_ldm(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a CLIPTextModelWithProjection's weights to OpenCLIP's: q, k, v fused by rows, projection transposed."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name == "text_projection.weight":
            renamed["text_projection"] = tensor.T.contiguous()
        elif name in _OPEN_CLIP_TOP:
            renamed[_OPEN_CLIP_TOP[name]] = tensor
        elif ".self_attn.q_proj." in name:
            kind = name.rsplit(".", 1)[1]
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            layer = name.removeprefix("text_model.encoder.layers.").split(".", 1)[0]
            renamed[f"transformer.resblocks.{layer}.attn.in_proj_{kind}"] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            layer, rest = name.removeprefix("text_model.encoder.layers.").split(".", 1)
            renamed[f"transformer.resblocks.{layer}.{_replaced(rest, _OPEN_CLIP_LAYER)}"] = tensor
    renamed["logit_scale"] = torch.tensor(4.6052)
    return renamed


def with_text_model(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a CLIP text encoder's weights as in published files, with the level that transformers 5.6 removed."""
    return {
        name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}": t
        for name, t in weights.items()
    }
