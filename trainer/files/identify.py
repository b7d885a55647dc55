"""Says what a base or LoRA file is, and refuses by name what cannot be one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from trainer.config.base import BaseConfig
from trainer.errors import BaseModelError, LoraFileError
from trainer.files.architecture import NAMES, Config, Family
from trainer.files.configs import EMBEDDED, PARTS, folder_configs, read_json
from trainer.files.header import Header, read_header
from trainer.files.modelspec import BASE_VERSIONS
from trainer.files.prediction import folder_target, single_file_target
from trainer.files.single import has_vae, single_file_architecture
from trainer.files.statements import Prediction
from trainer.files.weights import weight_files

_GET_A_VAE = "Give a .safetensors VAE of SD 1.5 or SDXL, or a diffusers folder of one."
_OLD_SCALING = 0.18215  # diffusers' default, which old VAE folders leave out
_PICKLES = {".ckpt", ".pt", ".pth", ".bin", ".pkl"}
# Names end so in every way of writing a LoRA; the part before is the layer.
_LORA_LAYER = re.compile(
    r"(?P<layer>.+?)(?:\.lora_(?:down|A)(?:\.default)?\.weight|[._]lora(?:_linear_layer)?\.down\.weight|\.(?:hada|lokr)_w1(?:_a)?)"
)
_LORA_KINDS = {
    "dora_scale": "DoRA",
    ".hada_": "LoHa",
    ".lokr_": "LoKr",
    ".lora_mid.": "LoCon with Tucker decomposition",
}
_LORA_FAMILIES: Mapping[int, Family] = {768: "sd15", 2048: "sdxl"}
_FAMILIES: Mapping[str, Family] = {version: family for family, version in BASE_VERSIONS.items()}


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """What a base is, as far as its header or configs tell; None where nothing decides it.

    `configs` are diffusers' by part ("unet", "vae", "text_encoder", ...); `evidence` tells in sentences what showed it.
    """

    form: Literal["single", "folder"]
    family: Family
    prediction: Prediction | None
    zero_terminal_snr: bool | None
    evidence: tuple[str, ...]
    configs: Mapping[str, Config]
    has_vae: bool


def identify_base(path: Path) -> BaseIdentity:
    """Identify a base by headers and configs alone; raises BaseModelError that names what is no usable base."""
    if path.is_dir():
        return _identify_folder(path)
    if path.suffix.lower() in _PICKLES and path.exists():
        sentence = f'"{path}" is a pickle ({path.suffix}): loading one can run any program hidden in it.'
        remedy = (
            "Get the .safetensors form of this model, or convert it with a tool you trust on a machine you can lose."
        )
        raise BaseModelError("base.pickle", sentence, remedy)
    header = read_header(path)
    family, configs, how = single_file_architecture(path, header)
    target = single_file_target(path, header, configs["scheduler"] if EMBEDDED in header.metadata else None)
    evidence = (how, *target.evidence)
    return BaseIdentity(
        "single", family, target.prediction, target.zero_terminal_snr, evidence, configs, has_vae(header)
    )


def decide_process(config: BaseConfig, identity: BaseIdentity) -> tuple[Prediction, bool]:
    """Return what a base predicts and whether it has zero terminal SNR: as the job states, otherwise as found.

    Raises BaseModelError, which names the job key to set, if neither decides it.
    """
    prediction = identity.prediction if config.prediction == "auto" else config.prediction
    zero_snr = identity.zero_terminal_snr if config.zero_terminal_snr == "auto" else config.zero_terminal_snr
    if config.prediction == "epsilon" and config.zero_terminal_snr == "auto":
        zero_snr = False  # what was found belongs to a v base: noise cannot be learned from pure noise
    if prediction is not None and zero_snr is not None:
        return prediction, zero_snr
    missing = 'prediction = "v" (or "epsilon")' if prediction is None else "zero_terminal_snr = true (or false)"
    sentence = f'Could not determine how "{config.model}" was trained: {identity.evidence[-1]}'
    remedy = f"Look it up on the model's page and set base.{missing} in the job."
    raise BaseModelError("base.undecided", sentence, remedy)


def identify_vae(path: Path) -> tuple[tuple[Path, ...], Config | None]:
    """Return a separate VAE's weight files, and its config where it is a diffusers folder.

    Raises BaseModelError when `path` is no VAE for latents of four channels.
    """
    if path.is_dir():
        config = read_json(path / "config.json")
        if config.get("_class_name") != "AutoencoderKL" or config.get("latent_channels", 4) != 4:
            sentence = (
                f'"{path}" is no VAE of SD 1.5 or SDXL: its config names {config.get("_class_name", "no class")}.'
            )
            raise BaseModelError("base.not_a_vae", sentence, _GET_A_VAE)
        return weight_files(path, ""), {"scaling_factor": _OLD_SCALING, **config}
    if path.suffix.lower() in _PICKLES and path.exists():
        _refuse_pickle(path)
    header = read_header(path)
    if not any(name.endswith("encoder.conv_in.weight") for name in header.tensors):
        first = next(iter(header.tensors), "nothing at all")
        raise BaseModelError("base.not_a_vae", f'"{path}" is no VAE: it begins with "{first[:80]}".', _GET_A_VAE)
    return (path,), None


@dataclass(frozen=True, slots=True)
class LoraIdentity:
    """What a LoRA file is by its header; `family` is None where no layer tells it."""

    kind: str
    family: Family | None
    layers: Mapping[str, int]
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    metadata: Mapping[str, str]


def identify_lora(path: Path) -> LoraIdentity:
    """Read a LoRA file's header; raises LoraFileError when it is broken or no LoRA."""
    return lora_of_header(path, read_header(path, "lora"))


def lora_of_header(path: Path, header: Header) -> LoraIdentity:
    """Tell what a LoRA is whose header is read; raises LoraFileError when it is none."""
    found = {match["layer"]: name for name in header.tensors if (match := _LORA_LAYER.fullmatch(name))}
    if not found:
        first = next(iter(header.tensors), "nothing at all")
        sentence = f'"{path}" is no LoRA: it begins with "{first[:80]}".'
        raise LoraFileError("lora.unknown", sentence, "Choose a LoRA file.")
    kind = next((kind for mark, kind in _LORA_KINDS.items() if any(mark in name for name in header.tensors)), "LoRA")
    # Layers of text encoders show the family, those of a UNet alone may not; then its metadata is asked.
    family = _lora_family(found, header) or _FAMILIES.get(header.metadata.get("ss_base_model_version", ""))
    layers = Counter(_lora_part(layer) for layer in found)
    ranks = tuple(sorted({header.tensors[name].shape[0] for name in found.values() if header.tensors[name].shape}))
    return LoraIdentity(kind, family, layers, ranks, _lora_story(kind, family, layers, ranks), header.metadata)


def _lora_family(found: Mapping[str, str], header: Header) -> Family | None:
    """Tell the family by the text's width where cross-attention is adapted, else by the layers' names."""
    for layer, name in found.items():
        shape = header.tensors[name].shape
        if layer.endswith(("attn2_to_k", "attn2.to_k")) and len(shape) == 2 and shape[1] in _LORA_FAMILIES:
            return _LORA_FAMILIES[shape[1]]
    if any(layer.startswith(("lora_te1_", "lora_te2_", "text_encoder_2.")) for layer in found):
        return "sdxl"
    return "sd15" if any(layer.startswith("lora_te_") for layer in found) else None


def _lora_part(layer: str) -> str:
    if layer.startswith(("lora_te2", "text_encoder_2")):
        return "text encoder 2"
    return "text encoder" if layer.startswith(("lora_te", "text_encoder")) else "UNet"


def _lora_story(kind: str, family: Family | None, layers: Mapping[str, int], ranks: tuple[int, ...]) -> tuple[str, ...]:
    made_for = f"for {NAMES[family]}" if family else "for an unknown base"
    counts = ", ".join(f"{count} layers of the {part}" for part, count in layers.items())
    ends = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank"
    return (f"It is a {kind} {made_for}, of {ends}.", f"It adapts {counts}.")


def _identify_folder(path: Path) -> BaseIdentity:
    family, configs = folder_configs(path)
    target = folder_target(path, configs.get("scheduler"), read_json(path / "model_index.json"))
    how = f"It is {NAMES[family]}: a diffusers folder with that UNet."
    for part in PARTS[family]:
        for file in weight_files(path, part) if part in configs else ():
            read_header(file)
    evidence = (how, *target.evidence)
    return BaseIdentity(
        "folder", family, target.prediction, target.zero_terminal_snr, evidence, configs, "vae" in configs
    )


def _refuse_pickle(path: Path) -> NoReturn:
    """Raise the error for a .ckpt, .pt or .bin file, with the way out."""
    sentence = f'"{path}" is a pickle ({path.suffix}): loading one can run any program hidden in it.'
    remedy = "Get the .safetensors form of this model; most sites offer both, and ComfyUI saves a loaded one as such."
    raise BaseModelError("base.pickle", sentence, remedy)
