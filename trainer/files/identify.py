"""Identify base and LoRA files by their headers and configs; errors for other models say what they are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from trainer.config.base import BASE_VERSIONS, BaseConfig
from trainer.errors import BaseModelError, LoraFileError
from trainer.files.architecture import (
    CHOOSE_A_BASE,
    NAMES,
    Config,
    Family,
    refuse_channels,
    refuse_distilled,
    refuse_text_width,
)
from trainer.files.assets import EMBEDDED, PARTS, bundled_configs, embedded_configs, folder_configs, read_json
from trainer.files.header import Header, read_header
from trainer.files.statements import (
    FLOW_SAMPLING,
    FLOW_SCHEDULER,
    METADATA,
    SAMPLING,
    SCHEDULER,
    YAML,
    JobKey,
    Prediction,
    Statement,
    doubts,
    predicted,
)
from trainer.files.weights import remembered_sha256, weight_files
from trainer.protocol.reading import open_file

_NAMED: Mapping[Prediction, str] = {
    "epsilon": "the noise (epsilon)",
    "v": "the velocity (v)",
    "flow": "the flow from image to noise (rectified flow)",
}
_HINT = re.compile(r"v[-_ ]?pred|v[-_ ]?param|z(?:t|ero)?[-_ ]?(?:terminal[-_ ]?)?snr", re.IGNORECASE)
_YAML_LINE = re.compile(r"^[ \t]*(?:-[ \t]+)?(\w+)[ \t]*:[ \t]*(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_YAML_TARGET = re.compile(r"\.(\w*(scaling|discretization|sampling)\w*)$", re.IGNORECASE)
_YAML_ZERO_SNR = ("zero_terminal_snr", "rescale_betas_zero_snr", "ztsnr", "zsnr")
_LARGEST_YAML = 1 << 20
_UNET = "model.diffusion_model."
_VAE = "first_stage_model."
_TEXT_ENCODERS: Mapping[Family, tuple[str, ...]] = {
    "sd15": ("cond_stage_model.transformer.",),
    "sdxl": ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."),
}
# Parts of tensor names that identify other kinds of models; the first match decides.
_OTHERS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        (
            *("lora_down.", "lora_up.", ".lora_A.", ".lora_B.", ".lora.down.", "lora_linear_layer."),
            *(".hada_w1", ".lokr_w1", ".oft_blocks"),
        ),
        "a LoRA, not a base",
        "Use the model that the LoRA was made for as the base; to continue a LoRA, set base.continue_from.",
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
# Files of a single part, by a tensor that only this part has.
_PARTS: tuple[tuple[str, str, str], ...] = (
    ("emb_params", "a textual-inversion embedding", CHOOSE_A_BASE),
    ("string_to_param.*", "a textual-inversion embedding", CHOOSE_A_BASE),
    ("clip_g", "a textual-inversion embedding", CHOOSE_A_BASE),
    (f"{_VAE}encoder.conv_in.weight", "only a VAE", "Set base.vae to it, and base.model to a whole model."),
    ("encoder.conv_in.weight", "only a VAE", "Set base.vae to it, and base.model to a whole model."),
    ("input_blocks.0.0.weight", "only a UNet", "Get the whole model (with text encoders and VAE) as one file."),
    ("time_embedding.linear_1.weight", "only a UNet", "Specify the diffusers folder that it belongs to."),
    ("text_model.embeddings.token_embedding.weight", "only a text encoder", CHOOSE_A_BASE),
    ("embeddings.token_embedding.weight", "only a text encoder", CHOOSE_A_BASE),
    ("token_embedding.weight", "only a text encoder", CHOOSE_A_BASE),
)
_GET_A_VAE = "Choose a .safetensors VAE for SD 1.5 or SDXL, or a diffusers folder that contains one."
_OLD_SCALING = 0.18215  # the default of diffusers, which old VAE folders omit
_PICKLES = {".ckpt", ".pt", ".pth", ".bin", ".pkl"}
# Suffixes of tensor names in all LoRA formats, of which each layer has at least one; the part before is the layer.
# The first dimension of a ranked tensor is the rank, its second one the layer's inputs, or one factor of them in LoKr.
_LORA_LAYER = re.compile(
    r"(?P<layer>.+?)(?:(?P<ranked>\.lora_(?:down|A)(?:\.default)?\.weight|[._]lora(?:_linear_layer)?\.down\.weight"
    r"|\.hada_w1_b|\.lokr_w[12]_b)|\.hada_w1_a|\.lokr_w1(?:_a)?|\.oft_blocks)"
)
_LORA_KINDS = {
    "dora_scale": "DoRA",
    ".hada_": "LoHa",
    ".lokr_": "LoKr",
    ".oft_blocks": "OFT",
    ".lora_mid.": "LoCon with Tucker decomposition",
}
_LORA_FAMILIES: Mapping[int, Family] = {768: "sd15", 2048: "sdxl"}


@dataclass(frozen=True, slots=True)
class PredictionTarget:
    """What a base was trained to predict.

    Fields are None if the user must decide; `evidence` explains how the values were found.
    """

    prediction: Prediction | None
    zero_terminal_snr: bool | None
    evidence: tuple[str, ...]


def single_file_target(path: Path, header: Header, scheduler: Mapping[str, Any] | None) -> PredictionTarget:
    """Return what a single file predicts, based on marker tensors, metadata, its .yaml, or embedded configs.

    If there are none of these, the base is assumed to predict noise; if its name suggests otherwise, the target is
    undecided. Raises BaseModelError for a training process that Impasto does not support.
    """
    yaml = path.with_suffix(".yaml")
    sibling_statements = tuple(_yaml_statements(yaml))
    metadata = [Statement("its metadata", key, header.metadata[key]) for key in METADATA if key in header.metadata]
    unknown = doubts(str(path), metadata, METADATA)
    unknown |= doubts(str(path), sibling_statements, YAML)
    unknown |= _scheduler_doubts(str(path), scheduler, "the scheduler config in its metadata")
    target = (
        _from_markers(header)
        or _from_metadata(header.metadata)
        or _from_yaml(yaml.name, sibling_statements)
        or _from_scheduler(scheduler, "the scheduler config in its metadata")
        or _by_custom(path.name)
    )
    return _with_doubts(target, unknown)


def folder_target(folder: Path, scheduler: Mapping[str, Any] | None, index: Mapping[str, Any]) -> PredictionTarget:
    """Return what a diffusers folder predicts, based on its scheduler config and its model_index.json.

    Raises BaseModelError for a training process that Impasto does not support.
    """
    named = list(_named_in_index(index))
    unknown = doubts(str(folder), named, SCHEDULER)
    unknown |= _scheduler_doubts(str(folder), scheduler, "scheduler_config.json")
    if any(statement.value == FLOW_SCHEDULER for statement in named):
        return _with_doubts(_target("flow", False, "its model index"), unknown)
    target = _from_scheduler(scheduler, "its scheduler config") or _by_custom(folder.name)
    return _with_doubts(target, unknown)


def _with_doubts(target: PredictionTarget, unknown: Mapping[JobKey, str]) -> PredictionTarget:
    """Return the target with the fields in ``unknown`` set to None and the reasons added to its evidence."""
    if not unknown:
        return target
    prediction = None if "prediction" in unknown else target.prediction
    zero_snr = None if "zero_terminal_snr" in unknown else target.zero_terminal_snr
    return PredictionTarget(
        prediction, zero_snr, (*target.evidence, *(_capitalized(text) for text in unknown.values()))
    )


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _named_in_index(index: Mapping[str, Any]) -> Iterator[Statement]:
    """Yield the scheduler class that the index names as `"scheduler": [library, class]`; nothing if both are null."""
    named = index.get("scheduler")
    if named is not None and named != [None, None]:
        value = named[1] if isinstance(named, list) and len(named) == 2 else named
        yield Statement("model_index.json", "_class_name", value)


def _scheduler_doubts(base: str, scheduler: Mapping[str, Any] | None, source: str) -> dict[JobKey, str]:
    stated = scheduler or {}
    sampling = SAMPLING | FLOW_SAMPLING if stated.get("_class_name") == FLOW_SCHEDULER else SAMPLING
    return doubts(base, [Statement(source, *item) for item in stated.items() if item[0] not in sampling], SCHEDULER)


def _from_scheduler(scheduler: Mapping[str, Any] | None, evidence: str) -> PredictionTarget | None:
    stated = scheduler or {}
    if stated.get("_class_name") == FLOW_SCHEDULER:
        return _target("flow", False, evidence)
    prediction = predicted(stated.get("prediction_type"))
    if prediction is None:
        return None
    return _target(prediction, stated.get("rescale_betas_zero_snr", False) is True, evidence)


def _from_markers(header: Header) -> PredictionTarget | None:
    """Return the target according to zero-size marker tensors, which NoobAI and other bases have, or None.

    The marker ztsnr has no effect without v_pred.
    """
    if "v_pred" not in header.tensors:
        return None
    zero_snr = "ztsnr" in header.tensors
    markers = 'its marker tensors "v_pred" and "ztsnr"' if zero_snr else 'its marker tensor "v_pred"'
    return _target("v", zero_snr, markers)


def _from_metadata(metadata: Mapping[str, str]) -> PredictionTarget | None:
    prediction = predicted(metadata.get("modelspec.prediction_type"))
    if prediction is None:
        return None
    stated = {"true": True, "false": False}.get(metadata.get("ss_zero_terminal_snr", "").lower())
    return _target(prediction, stated, "modelspec.prediction_type in its metadata")


def _from_yaml(name: str, statements: Sequence[Statement]) -> PredictionTarget | None:
    stated = {statement.key: statement.value for statement in statements}
    prediction = predicted(stated.get("parameterization")) or predicted(stated.get("scaling"))
    if prediction is None:
        return None
    zero_snr = next((stated[key] for key in _YAML_ZERO_SNR if isinstance(stated.get(key), bool)), None)
    return _target(prediction, zero_snr, f"{name} next to it")


def _target(prediction: Prediction, zero_snr: bool | None, evidence: str) -> PredictionTarget:
    if prediction == "flow" or (prediction == "epsilon" and zero_snr is None):
        zero_snr = False  # noise in pure noise cannot be predicted; a flow has a schedule of its own
    ending = " with zero terminal SNR" if zero_snr else ""
    sentence = f"It predicts {_NAMED[prediction]}{ending}, according to {evidence}."
    return PredictionTarget(prediction, zero_snr, (sentence,))


def _by_custom(name: str) -> PredictionTarget:
    if hint := _HINT.search(name):
        evidence = f'Its name contains "{hint[0]}", but neither the file nor one next to it states what it predicts.'
        return PredictionTarget(None, None, (evidence,))
    evidence = f"It is assumed to predict {_NAMED['epsilon']}, the default, because no other prediction is stated."
    return PredictionTarget("epsilon", False, (evidence,))


def _yaml_statements(path: Path) -> Iterator[Statement]:
    """Yield the statements about training in a .yaml file, which most bases don't have."""
    try:
        with open_file(path, "stream") as file:
            text = file.read(_LARGEST_YAML).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return
    for key, value in _YAML_LINE.findall(text):
        scalar = _yaml_scalar(value)
        if key == "target" and (found := _YAML_TARGET.search(str(scalar))):
            yield Statement(path.name, found[2].lower(), found[1])
        elif key in YAML:
            yield Statement(path.name, key, scalar)


def _yaml_scalar(text: str) -> Any:
    """Return the value of a plain or quoted YAML scalar."""
    if quoted := re.match(r"""(["'])(.*?)\1""", text):
        return quoted[2]
    text = re.sub(r"\s+#.*", "", text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "~"):
        return None
    with contextlib.suppress(ValueError):
        return float(text)
    return text


# The deepest layers of some blocks, which distilled bases don't have.
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


def single_file_architecture(path: Path, header: Header) -> tuple[Family, Mapping[str, Config], str]:
    """Return the family and configs of a single file, and a sentence on how they were determined.

    Raises BaseModelError, which says what the file is, if it is not a complete SD 1.5 or SDXL base.
    """
    _refuse_other_kinds(path, header)
    _refuse_parts(path, header)
    family, configs, how = _architecture(path, header)
    _require_text_encoders(path, header, family)
    return family, configs, how


def has_vae(header: Header) -> bool:
    """Return whether a single file contains a VAE."""
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
    first = next(iter(header.tensors), "no tensor")
    raise BaseModelError(
        "base.unknown", f'"{path}" is not a known model: its first tensor is "{first[:80]}".', CHOOSE_A_BASE
    )


def _architecture(path: Path, header: Header) -> tuple[Family, Mapping[str, Config], str]:
    """Return family, configs and evidence, based on tensor shapes or on the configs embedded in a tiny test base."""
    if EMBEDDED in header.metadata:
        family, configs = embedded_configs(str(path), header.metadata[EMBEDDED])
        return family, configs, f"It is {NAMES[family]}, according to the configs in its metadata."
    family = _family_by_shapes(path, header)
    return family, bundled_configs(family), f"It is {NAMES[family]}, according to the shapes of its UNet."


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
    """Return a layer's number of inputs, based on the shape of its weight; 0 if there is no such weight."""
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


_FAMILIES: Mapping[str, Family] = {version: family for family, version in BASE_VERSIONS.items()}


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """What a base is, according to its header or configs; undecided fields are None.

    `configs` are the diffusers configs by part ("unet", "vae", "text_encoder", …); `evidence` contains sentences on how
    the base was identified.
    """

    form: Literal["single", "folder"]
    family: Family
    prediction: Prediction | None
    zero_terminal_snr: bool | None
    evidence: tuple[str, ...]
    configs: Mapping[str, Config]
    has_vae: bool


def identify_base(path: Path) -> BaseIdentity:
    """Identify a base by its headers and configs alone; raises BaseModelError if it is not usable."""
    if path.is_dir():
        return _identify_folder(path)
    if path.suffix.lower() in _PICKLES and path.exists():
        sentence = f'"{path}" is a pickle ({path.suffix}): loading it could run malicious code.'
        remedy = "Get this model as .safetensors, or convert it with a tool you trust, on an isolated computer."
        raise BaseModelError("base.pickle", sentence, remedy)
    header = read_header(path)
    family, configs, how = single_file_architecture(path, header)
    target = single_file_target(path, header, configs["scheduler"] if EMBEDDED in header.metadata else None)
    evidence = (how, *target.evidence)
    return BaseIdentity(
        "single", family, target.prediction, target.zero_terminal_snr, evidence, configs, has_vae(header)
    )


def decide_process(config: BaseConfig, identity: BaseIdentity) -> tuple[Prediction, bool]:
    """Return what a base predicts and whether it has zero terminal SNR, as set in the job, else as identified.

    Raises BaseModelError, which names the job key to set, if neither decides it.
    """
    prediction = identity.prediction if config.prediction == "auto" else config.prediction
    zero_snr = identity.zero_terminal_snr if config.zero_terminal_snr == "auto" else config.zero_terminal_snr
    if config.prediction in ("epsilon", "flow") and config.zero_terminal_snr == "auto":
        zero_snr = False  # what was found is for v-prediction: noise in pure noise cannot be predicted
    if prediction is not None and zero_snr is not None:
        return prediction, zero_snr
    missing = (
        'prediction = "v" (or "epsilon" or "flow")' if prediction is None else "zero_terminal_snr = true (or false)"
    )
    sentence = f'Could not determine how "{config.model}" was trained: {identity.evidence[-1]}'
    remedy = f"Look it up on the model's page and set base.{missing} in the job."
    raise BaseModelError("base.undecided", sentence, remedy)


def identify_vae(path: Path) -> tuple[tuple[Path, ...], Config | None]:
    """Return the weight files of a separate VAE, and its config if it is a diffusers folder.

    Raises BaseModelError if `path` is not a VAE with four latent channels.
    """
    if path.is_dir():
        config = read_json(path / "config.json")
        if config.get("_class_name") != "AutoencoderKL" or config.get("latent_channels", 4) != 4:
            sentence = (
                f'"{path}" is not a VAE of SD 1.5 or SDXL: its config names {config.get("_class_name", "no class")}.'
            )
            raise BaseModelError("base.not_a_vae", sentence, _GET_A_VAE)
        return weight_files(path, ""), {"scaling_factor": _OLD_SCALING, **config}
    if path.suffix.lower() in _PICKLES and path.exists():
        _refuse_pickle(path)
    header = read_header(path)
    if not any(name.endswith("encoder.conv_in.weight") for name in header.tensors):
        first = next(iter(header.tensors), "no tensor")
        sentence = f'"{path}" is not a VAE: its first tensor is "{first[:80]}".'
        raise BaseModelError("base.not_a_vae", sentence, _GET_A_VAE)
    return (path,), None


@dataclass(frozen=True, slots=True)
class LoraIdentity:
    """What a LoRA file is, according to its header; `family` is None if it cannot be determined."""

    kind: str
    family: Family | None
    layers: Mapping[str, int]
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    metadata: Mapping[str, str]


def identify_lora(path: Path) -> LoraIdentity:
    """Identify a LoRA file; raises LoraFileError if it is damaged or not a LoRA."""
    return lora_of_header(path, read_header(path, "lora"))


def lora_of_header(path: Path, header: Header) -> LoraIdentity:
    """Identify a LoRA by its header; raises LoraFileError if it is not a LoRA."""
    found: dict[str, Sequence[int]] = {}
    for name, tensor in header.tensors.items():
        if match := _LORA_LAYER.fullmatch(name):
            found[match["layer"]] = tensor.shape if match["ranked"] else found.get(match["layer"], ())
    if not found:
        first = next(iter(header.tensors), "no tensor")
        sentence = f'"{path}" is not a LoRA: its first tensor is "{first[:80]}".'
        raise LoraFileError("lora.unknown", sentence, "Choose a LoRA file.")
    kind = next((kind for mark, kind in _LORA_KINDS.items() if any(mark in name for name in header.tensors)), "LoRA")
    # Text encoder layers determine the family; UNet layers alone may not, then the metadata decides.
    family = _lora_family(found) or _FAMILIES.get(header.metadata.get("ss_base_model_version", ""))
    layers = Counter(_lora_part(layer) for layer in found)
    ranks = tuple(sorted({shape[0] for shape in found.values() if shape}))
    return LoraIdentity(kind, family, layers, ranks, _lora_sentences(kind, family, layers, ranks), header.metadata)


def _lora_family(found: Mapping[str, Sequence[int]]) -> Family | None:
    """Return a LoRA's family, based on the width of its cross-attention layers or else on names; None if unclear.

    `found` contains the shape of each layer's ranked tensor, or () if it has none.
    """
    for layer, shape in found.items():
        if layer.endswith(("attn2_to_k", "attn2.to_k")) and len(shape) == 2 and shape[1] in _LORA_FAMILIES:
            return _LORA_FAMILIES[shape[1]]
    if any(layer.startswith(("lora_te1_", "lora_te2_", "text_encoder_2.")) for layer in found):
        return "sdxl"
    return "sd15" if any(layer.startswith("lora_te_") for layer in found) else None


def _lora_part(layer: str) -> str:
    if layer.startswith(("lora_te2", "text_encoder_2")):
        return "text encoder 2"
    return "text encoder" if layer.startswith(("lora_te", "text_encoder")) else "UNet"


def _lora_sentences(
    kind: str, family: Family | None, layers: Mapping[str, int], ranks: tuple[int, ...]
) -> tuple[str, ...]:
    made_for = f"for {NAMES[family]}" if family else "for an unknown base"
    counts = ", ".join(f"{count} {'layer' if count == 1 else 'layers'} of the {part}" for part, count in layers.items())
    ends = f" with rank {ranks[0]}" if len(ranks) == 1 else f" with ranks {ranks[0]} to {ranks[-1]}" if ranks else ""
    article = "an" if kind == "OFT" else "a"
    return (f"It is {article} {kind} {made_for}{ends}.", f"It adapts {counts}.")


def _identify_folder(path: Path) -> BaseIdentity:
    family, configs = folder_configs(path)
    target = folder_target(path, configs.get("scheduler"), read_json(path / "model_index.json"))
    how = f"It is {NAMES[family]}, according to its UNet config."
    for part in PARTS[family]:
        for file in weight_files(path, part) if part in configs else ():
            read_header(file)
    evidence = (how, *target.evidence)
    return BaseIdentity(
        "folder", family, target.prediction, target.zero_terminal_snr, evidence, configs, "vae" in configs
    )


def _refuse_pickle(path: Path) -> NoReturn:
    """Raise BaseModelError for a .ckpt, .pt or .bin file."""
    sentence = f'"{path}" is a pickle ({path.suffix}): loading it could run malicious code.'
    remedy = "Get this model as .safetensors; most sites offer both, and ComfyUI can save a model in this format."
    raise BaseModelError("base.pickle", sentence, remedy)


@dataclass(frozen=True)
class PartFiles:
    """Weight files and config of one model."""

    files: tuple[Path, ...]
    config: Config

    def digest(self, hashes: Mapping[Path, str]) -> str:
        """Return a hash of the files' content and the config, which is equal only for equal models."""
        content = [self.config, sorted(hashes[path] for path in self.files)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def part_files(path: Path, identity: BaseIdentity, name: str) -> PartFiles:
    """Return the files of a base's model called `name` ("unet"); raises BaseModelError if they are missing."""
    files = weight_files(path, name) if identity.form == "folder" else (path,)
    return PartFiles(files, identity.configs[name])


def vae_files(path: Path, identity: BaseIdentity, other: Path | None) -> PartFiles:
    """Return the files of the VAE: `other` or, if None, the base's own; raises BaseModelError if there is none."""
    if other is None:
        return part_files(path, identity, "vae")
    files, config = identify_vae(other)
    return PartFiles(files, config or identity.configs["vae"])


def joint_digest(parts: Iterable[PartFiles], hashes: Mapping[Path, str]) -> str:
    """Return one hash for several models, which also depends on their order."""
    return hashlib.sha256("".join(part.digest(hashes) for part in parts).encode()).hexdigest()


def known_hashes(parts: Iterable[PartFiles]) -> dict[Path, str] | None:
    """Return the remembered SHA-256 of each of the parts' files; None if any of them is unknown."""
    hashes = {path: remembered_sha256(path) for path in {path for part in parts for path in part.files}}
    known = {path: digest for path, digest in hashes.items() if digest is not None}
    return known if len(known) == len(hashes) else None
