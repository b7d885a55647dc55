"""Reads LoRA files of every common naming into one form: kohya names, fp32 matrices, alpha."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.adapter.names import Slot, aliases
from trainer.config.base import Family
from trainer.errors import LoraFileError
from trainer.files.architecture import NAMES
from trainer.files.header import Header, read_header
from trainer.protocol.files import long_path
from trainer.protocol.reading import UnusableFileError, parse_json

# kohya, PEFT, diffusers, and diffusers before 0.21, in this order; `to_q_lora.down` names the layer without a dot.
_KEY = re.compile(
    r"(?P<module>.+?)"
    r"(?:\.lora_(?P<kohya>down|up)\.weight"
    r"|\.lora_(?P<peft>[AB])(?:\.default)?\.weight"
    r"|[._]lora(?:_linear_layer)?\.(?P<diffusers>down|up)\.weight"
    r"|\.(?P<alpha>alpha))"
)
_ROLES = {"A": "down", "B": "up"}

# Marks of other kinds of adapter, in the order in which they are looked for.
_REFUSED = {
    "DoRA": r"\.(dora_scale|lora_magnitude_vector)",
    "LoHa": r"\.hada_",
    "LoKr": r"\.lokr_",
    "LoCon with Tucker decomposition": r"\.lora_mid\.",
    "OFT": r"\.oft_",
    "a full difference": r"\.diff(_b)?$",
}
_LARGEST_ALPHA = 1e9
_FORMATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
# Width of the text that a UNet's cross-attention reads, which tells the families apart.
_WIDTHS = {768: "SD 1.5", 1024: "SD 2", 2048: "SDXL"}


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """The LoRA of one layer: it adds alpha / rank · up @ down to the layer's weight."""

    down: Tensor
    """fp32, (rank, in_features), or (rank, in_channels, k, k) for a convolution."""
    up: Tensor
    """fp32, (out_features, rank), or (out_channels, rank, 1, 1)."""
    alpha: float

    @property
    def rank(self) -> int:
        """How many rows `down` has."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What a LoRA file holds."""

    layers: dict[Slot, LoraLayer]
    """The layers that the base has, in the order of the name table."""
    unmatched: tuple[str, ...]
    """Keys that fit no layer of the base and were left out: tell the user."""
    metadata: dict[str, str]
    """What the file says of itself."""


def read_lora(path: Path, family: Family, table: Sequence[Slot]) -> LoraWeights:
    """Read a LoRA file for a base whose layers are `table`.

    Understands kohya names with either block naming, PEFT's and diffusers' names with and without "text_model", alpha
    as a tensor or in diffusers' metadata, and a rank of its own for each layer. Raises LoraFileError for other kinds
    of adapter, another family, and files that are broken, incomplete or not finite.
    """
    header = read_header(path, "lora")
    _refuse_other_kinds(path, header)
    _refuse_other_family(path, header, family)
    keys, unmatched = _sort_keys(path, header, table)
    _refuse_other_formats(path, header, keys)
    if not keys:
        raise LoraFileError(
            "lora.unknown",
            f"{path.name} holds no LoRA layer of {NAMES[family]}; its first key is "
            f"{next(iter(header.tensors), 'missing')}.",
            "Choose a LoRA file that was made for the family of the base.",
        )
    alpha_of = _StatedAlpha(path, header.metadata)
    layers = {}
    with safe_open(long_path(path), framework="pt") as file:
        for slot in table:
            if slot in keys:
                layers[slot] = _read_layer(path, slot, keys[slot], file, alpha_of)
    return LoraWeights(layers, tuple(unmatched), dict(header.metadata))


def fitted(slot: Slot, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a matrix in its layer's own shape: some programs write 1x1 convolutions as matrices, or the other way."""
    if [size for size in tensor.shape if size != 1] != [size for size in shape if size != 1]:
        raise LoraFileError(
            "lora.shape",
            f"The LoRA does not fit this base: at {slot.kohya} it is {_shape(tensor.shape)}, not {_shape(shape)}.",
            "Choose a LoRA that was made for a base of the same family and size.",
        )
    return tensor.reshape(shape)


def _refuse_other_kinds(path: Path, header: Header) -> None:
    for kind, mark in _REFUSED.items():
        found = next((key for key in header.tensors if re.search(mark, key)), None)
        if found is not None:
            raise LoraFileError(
                "lora.kind",
                f"{path.name} is not a plain LoRA but holds {kind} (key {found}).",
                "Use a plain LoRA or LoCon file; other kinds can be resized to one by the program that made them.",
            )


def _refuse_other_family(path: Path, header: Header, family: Family) -> None:
    for key, info in header.tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or _role(match) != "down" or not _flatten(match["module"]).endswith("attn2_to_k"):
            continue
        made_for = _WIDTHS.get(info.shape[-1] if len(info.shape) == 2 else 0)
        if made_for not in (None, NAMES[family]):
            raise LoraFileError(
                "lora.family",
                f"{path.name} was made for {made_for}, but the base is {NAMES[family]}.",
                f"Choose a LoRA made for {NAMES[family]}, or a base that fits this one.",
            )
        return


def _sort_keys(path: Path, header: Header, table: Sequence[Slot]) -> tuple[dict[Slot, dict[str, str]], list[str]]:
    """Sort the file's keys into slot and role (down, up, alpha), and those that fit none."""
    names = aliases(table)
    keys: dict[Slot, dict[str, str]] = {}
    unmatched = []
    for key in header.tensors:
        match = _KEY.fullmatch(key)
        slot = names.get(_flatten(match["module"])) if match else None
        if match is None or slot is None:
            unmatched.append(key)
            continue
        other = keys.setdefault(slot, {}).setdefault(_role(match), key)
        if other != key:
            raise _broken(path, f"names the same layer twice, as {other} and as {key}")
    return keys, unmatched


def _refuse_other_formats(path: Path, header: Header, keys: Mapping[Slot, Mapping[str, str]]) -> None:
    """Refuse matrices of integers, which are packed by some rule of their own, and formats that PyTorch lacks."""
    for roles in keys.values():
        for role, key in roles.items():
            if role != "alpha" and header.tensors[key].dtype not in _FORMATS:
                raise _broken(path, f"has a number format that no LoRA has, {header.tensors[key].dtype}, at {key}")


def _flatten(module: str) -> str:
    """Bring a layer's name in any naming to the form that `names.aliases` lists."""
    name = module.replace(".processor.", ".").replace(".", "_").removeprefix("lora_")
    return f"{name}_0" if name.endswith("_to_out") else name


def _role(match: re.Match[str]) -> str:
    return match["kohya"] or match["diffusers"] or match["alpha"] or _ROLES[match["peft"]]


def _read_layer(path: Path, slot: Slot, keys: Mapping[str, str], file: Any, alpha_of: _StatedAlpha) -> LoraLayer:
    missing = {"down", "up"} - keys.keys()
    if missing:
        raise _broken(path, f"holds only half of a layer: {next(iter(keys.values()))} has no {missing.pop()} matrix")
    tensors = {role: _read_tensor(path, key, file) for role, key in keys.items()}
    down, up = tensors["down"], tensors["up"]
    if {down.ndim, up.ndim} - {2, 4} or down.shape[0] != up.shape[1] or not (down.numel() and up.numel()):
        shapes = f"{_shape(down.shape)} and {_shape(up.shape)}"
        raise _broken(path, f"has matrices that do not fit each other at {keys['down']}: {shapes}")
    if "alpha" not in tensors:
        return LoraLayer(down, up, alpha_of(slot, down.shape[0]))
    if tensors["alpha"].numel() != 1:
        raise _broken(path, f"has an alpha that is not one number: {keys['alpha']}")
    return LoraLayer(down, up, float(tensors["alpha"]))


def _read_tensor(path: Path, key: str, file: Any) -> Tensor:
    tensor: Tensor = file.get_tensor(key).to(torch.float32, copy=True)  # else fp32 files stay open as long as it lives
    if not tensor.isfinite().all():
        raise LoraFileError(
            "lora.not_finite",
            f"{path.name} holds values that are not numbers (NaN or infinity) in {key}.",
            "Use an earlier save of this LoRA: the training that made it had diverged.",
        )
    return tensor


class _StatedAlpha:
    """The alpha of layers that have no alpha tensor: as diffusers' metadata states it, else the rank (strength 1)."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self._path = path
        try:
            stated = parse_json(metadata.get("lora_adapter_metadata", "{}"))
        except UnusableFileError as error:
            raise _broken(path, f"has lora_adapter_metadata that cannot be read ({error.reason})") from error
        if not isinstance(stated, dict):
            raise _broken(path, "has lora_adapter_metadata that are not a table")
        self._stated: dict[str, Any] = stated

    def __call__(self, slot: Slot, rank: int) -> float:
        if self._stated.get(f"{slot.part}.use_dora"):
            raise _broken(self._path, "says that it is a DoRA but lacks its magnitudes")
        pattern = self._stated.get(f"{slot.part}.alpha_pattern") or {}
        if not isinstance(pattern, dict):
            raise _broken(self._path, "states an alpha_pattern that is not a table")
        own = [value for name, value in pattern.items() if f".{slot.module}".endswith(f".{name}")]
        alpha = own[0] if own else self._stated.get(f"{slot.part}.lora_alpha", rank)
        if not (isinstance(alpha, int | float) and abs(alpha) < _LARGEST_ALPHA):
            raise _broken(self._path, f"states an alpha that cannot be: {str(alpha)[:40]}")
        # Rank-stabilised LoRA acts with alpha / sqrt(rank) (PEFT's use_rslora).
        return alpha * rank**0.5 if self._stated.get(f"{slot.part}.use_rslora") else float(alpha)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _broken(path: Path, what: str) -> LoraFileError:
    remedy = "Get the file again from where it came, or use another one."
    return LoraFileError("lora.broken", f"{path.name} {what}.", remedy)
