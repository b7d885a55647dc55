"""Gives stored tensors the names that diffusers' and transformers' models have."""

from __future__ import annotations

from collections.abc import Mapping

from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from torch import nn

from trainer.base.family import TextEncoderFacts
from trainer.base.stored import StoredTensor

_UNET = "model.diffusion_model."
_VAE = "first_stage_model."
# diffusers before 0.18 named the VAE's attention so; the published SD 1.5 folder and sd-vae-ft-mse still do.
_OLD_VAE_ATTENTION = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}

Stored = Mapping[str, StoredTensor]


def unet_of_single_file(stored: Stored, unet: nn.Module) -> Stored:
    """Return the UNet's tensors of a single file (LDM layout) under diffusers' names."""
    return _converted(convert_ldm_unet_checkpoint(_starting(stored, _UNET), unet.config))


def vae_of_file(stored: Stored, vae: nn.Module) -> Stored:
    """Return the VAE's tensors under diffusers' names, from a whole single file or a VAE alone in either layout."""
    own = {name.removeprefix(_VAE): tensor for name, tensor in _starting(stored, _VAE).items()} or dict(stored)
    if "encoder.conv_norm_out.weight" in own:
        return {_modern(name): tensor for name, tensor in own.items()}
    return _converted(convert_ldm_vae_checkpoint(own, vae.config))


def text_encoder_of_single_file(facts: TextEncoderFacts, stored: Stored, encoder: nn.Module) -> Stored:
    """Return a text encoder's tensors of a single file under transformers' names."""
    own = _starting(stored, facts.prefix)
    if facts.open_clip:
        return _converted(convert_open_clip_checkpoint(encoder, own, facts.prefix))
    return {name.removeprefix(facts.prefix): tensor for name, tensor in own.items()}


def _starting(stored: Stored, prefix: str) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}


def _converted(tensors: Mapping[str, StoredTensor | None]) -> Stored:
    """Leave out what a converter looked for and did not find; placing names what is missing in the end."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _modern(name: str) -> str:
    for old, new in _OLD_VAE_ATTENTION.items():
        name = name.replace(old, new)
    return name
