"""What a single-file checkpoint is, by the names and shapes in its header."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.errors import BaseModelError
from trainer.files.architecture import (
    CHOOSE_A_BASE,
    NAMES,
    Config,
    Family,
    refuse_channels,
    refuse_distilled,
    refuse_text_width,
)
from trainer.files.configs import EMBEDDED, bundled_configs, embedded_configs
from trainer.files.header import Header

_UNET = "model.diffusion_model."
_VAE = "first_stage_model."
_TEXT_ENCODERS: Mapping[Family, tuple[str, ...]] = {
    "sd15": ("cond_stage_model.transformer.",),
    "sdxl": ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."),
}
# The deepest layer of some blocks, which distilled bases lack.
_DEEPEST: Mapping[Family, tuple[str, ...]] = {
    "sd15": tuple(
        f"{_UNET}{block}.1.transformer_blocks.0.attn2.to_k.weight"
        for block in ("input_blocks.2", "input_blocks.8", "middle_block", "output_blocks.3", "output_blocks.11")
    ),
    "sdxl": tuple(
        f"{_UNET}{block}.1.transformer_blocks.{depth}.attn2.to_k.weight"
        for block, depth in (("input_blocks.5", 1), ("input_blocks.8", 9), ("middle_block", 9), ("output_blocks.2", 9))
    ),
}
# Parts of tensor names by which other kinds of file show themselves; the first that is found decides.
_OTHERS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("lora_down.", "lora_up.", ".lora_A.", ".lora_B.", ".lora.down.", "lora_linear_layer.", ".hada_w1", ".lokr_w1"),
        "a LoRA, not a base",
        "Give the model the LoRA was made for as the base; to train on from a LoRA name it under base.continue_from.",
    ),
    (("control_model.", "controlnet_", "input_hint_block."), "a ControlNet", CHOOSE_A_BASE),
    (("image_proj.", "ip_adapter."), "an IP-Adapter", CHOOSE_A_BASE),
    (("motion_modules.",), "an AnimateDiff motion module", CHOOSE_A_BASE),
    (("double_blocks.", "single_transformer_blocks."), "a Flux model", CHOOSE_A_BASE),
    (("joint_blocks.", "text_encoders.clip_g.transformer."), "an SD 3 model", CHOOSE_A_BASE),
    (("adaln_single.",), "a PixArt model", CHOOSE_A_BASE),
    (("cap_embedder.",), "a Lumina or Z-Image model", CHOOSE_A_BASE),
    (("clip_txt_mapper.", "clf.1."), "a Stable Cascade model", CHOOSE_A_BASE),
    (("edm_vpred.sigma_max", "edm_mean", "edm_std"), "an EDM model (CosXL, Playground)", CHOOSE_A_BASE),
    (("cond_stage_model.model.",), "an SD 2 model", CHOOSE_A_BASE),
)
# Whole files of one part, by a tensor that only it has.
_PARTS: tuple[tuple[str, str, str], ...] = (
    ("emb_params", "a textual-inversion embedding", CHOOSE_A_BASE),
    ("string_to_param.*", "a textual-inversion embedding", CHOOSE_A_BASE),
    ("clip_g", "a textual-inversion embedding", CHOOSE_A_BASE),
    (f"{_VAE}encoder.conv_in.weight", "a VAE alone", "Name it under base.vae, and a whole model under base.model."),
    ("encoder.conv_in.weight", "a VAE alone", "Name it under base.vae, and a whole model under base.model."),
    ("input_blocks.0.0.weight", "a UNet alone", "Get the whole model (with text encoders and VAE) as one file."),
    ("time_embedding.linear_1.weight", "a UNet alone", "Give the diffusers folder that it belongs to."),
    ("text_model.embeddings.token_embedding.weight", "a text encoder alone", CHOOSE_A_BASE),
    ("embeddings.token_embedding.weight", "a text encoder alone", CHOOSE_A_BASE),
    ("token_embedding.weight", "a text encoder alone", CHOOSE_A_BASE),
)


def single_file_architecture(path: Path, header: Header) -> tuple[Family, Mapping[str, Config], str]:
    """Return a single file's family and configs, and the sentence that says how they were found.

    Raises BaseModelError that names what the file is when it is no whole SD 1.5 or SDXL base.
    """
    _refuse_other_kinds(path, header)
    _refuse_parts(path, header)
    family, configs, how = _architecture(path, header)
    _require_text_encoders(path, header, family)
    return family, configs, how


def has_vae(header: Header) -> bool:
    """Tell whether a single file holds a VAE."""
    return f"{_VAE}encoder.conv_in.weight" in header.tensors


def _refuse_other_kinds(path: Path, header: Header) -> None:
    for marks, kind, remedy in _OTHERS:
        if any(mark in name for name in header.tensors for mark in marks):
            raise BaseModelError("base.other_model", f'"{path}" is {kind}.', remedy)


def _refuse_parts(path: Path, header: Header) -> None:
    if f"{_UNET}input_blocks.0.0.weight" in header.tensors:
        return
    for mark, kind, remedy in _PARTS:
        if mark in header.tensors:
            raise BaseModelError("base.part_alone", f'"{path}" is {kind}.', remedy)
    first = next(iter(header.tensors), "nothing at all")
    raise BaseModelError(
        "base.unknown", f'"{path}" holds no model that is known here: it begins with "{first[:80]}".', CHOOSE_A_BASE
    )


def _architecture(path: Path, header: Header) -> tuple[Family, Mapping[str, Config], str]:
    """Tell the family by the shapes that decide it, or by the configs that a small file carries."""
    if EMBEDDED in header.metadata:
        family, configs = embedded_configs(str(path), header.metadata[EMBEDDED])
        return family, configs, f"It is {NAMES[family]}: the configs in its metadata say so."
    family = _family_by_shapes(path, header)
    return family, bundled_configs(family), f"It is {NAMES[family]}: the shapes of its UNet are those of that model."


def _family_by_shapes(path: Path, header: Header) -> Family:
    channels = _inputs(header, f"{_UNET}input_blocks.0.0.weight")
    if channels != 4:
        refuse_channels(str(path), channels)
    width = _inputs(header, next((name for name in header.tensors if name.endswith("attn2.to_k.weight")), ""))
    if width not in (768, 2048):
        refuse_text_width(str(path), width)
    family: Family = "sd15" if width == 768 else "sdxl"
    if any(name not in header.tensors for name in _DEEPEST[family]):
        refuse_distilled(str(path), family, "layers are missing")
    return family


def _inputs(header: Header, name: str) -> int:
    """Return how many inputs a layer takes by its weight's shape; 0 when there is no such weight."""
    info = header.tensors.get(name)
    return info.shape[1] if info and len(info.shape) > 1 else 0


def _require_text_encoders(path: Path, header: Header, family: Family) -> None:
    missing = [
        prefix for prefix in _TEXT_ENCODERS[family] if not any(name.startswith(prefix) for name in header.tensors)
    ]
    if missing:
        sentence = f'"{path}" is an {NAMES[family]} UNet without its text encoders.'
        raise BaseModelError(
            "base.part_alone", sentence, "Get the whole model (with text encoders and VAE) as one file or folder."
        )
