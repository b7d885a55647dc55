"""Read LoRA and LyCORIS files with any common naming; return fp32 tensors and alpha for each slot of the base."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.adapter.names import RANKED_ROLES, Slot, aliases
from trainer.config.base import Family
from trainer.config.recipe import AdapterKind
from trainer.errors import LoraFileError
from trainer.files.architecture import NAMES
from trainer.files.header import Header, read_header
from trainer.protocol.files import long_path
from trainer.protocol.reading import UnusableFileError, parse_json

# In this order: kohya, PEFT, diffusers, diffusers before 0.21, where `to_q_lora.down` has no dot after the layer,
# LyCORIS, and PEFT's DoRA.
_KEY = re.compile(
    r"(?P<module>.+?)"
    r"(?:\.lora_(?P<kohya>down|up)\.weight"
    r"|\.lora_(?P<peft>[AB])(?:\.default)?\.weight"
    r"|[._]lora(?:_linear_layer)?\.(?P<diffusers>down|up)\.weight"
    r"|\.(?P<lycoris>alpha|dora_scale|hada_w[12]_[ab]|lokr_w[12](?:_[ab])?|oft_blocks)"
    r"|\.(?P<magnitude>lora_magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
_ROLES = {"A": "down", "B": "up"}

# Key patterns of unsupported kinds of adapter, checked in this order.
_REFUSED = {
    "a Tucker decomposition": r"\.(lora_mid\.|hada_t[12]|lokr_t[12])",
    "rotations of other forms than LyCORIS' diagonal OFT": r"\.(oft_(?!blocks)|rescale$)",
    "full weight differences (LyCORIS full)": r"\.diff(_b)?$",
}
# Roles of a layer's tensors, without alpha.
_KINDS: tuple[tuple[AdapterKind, set[str]], ...] = (
    ("dora", {"lora_down", "lora_up", "dora_scale"}),
    ("loha", {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),
    ("lokr", {"lokr_w1", "lokr_w2"}),
    ("lokr", {"lokr_w1", "lokr_w2_a", "lokr_w2_b"}),
    ("oft", {"oft_blocks"}),
)
# Roles with a kernel in convolutions; some programs write 1x1 kernels as matrices, or vice versa.
_WITH_KERNEL = ("lora_down", "lora_up", "dora_scale", "lokr_w2")
# Numbers of dimensions that tensors of these roles may have; all others are matrices.
_DIMENSIONS = {"oft_blocks": (3,)} | dict.fromkeys(_WITH_KERNEL, (2, 4))
_LARGEST_ALPHA = 1e9
_FORMATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
# Width of the text embedding that the UNet's cross-attention reads; it identifies the family.
_WIDTHS = {768: "SD 1.5", 1024: "SD 2", 2048: "SDXL"}


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """LoRA of one layer; it adds alpha / rank · up @ down to the layer's weight."""

    down: Tensor
    """Down matrix: fp32, (rank, in_features), or (rank, in_channels, k, k) for a convolution."""
    up: Tensor
    """Up matrix: fp32, (out_features, rank), or (out_channels, rank, 1, 1) for a convolution."""
    alpha: float

    @property
    def rank(self) -> int:
        """Return the rank: the number of rows of `down`."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class LycorisWeights:
    """Tensors of one layer of another method than LoRA."""

    kind: AdapterKind
    weights: dict[str, Tensor]
    """fp32 tensors by role, such as "hada_w1_a"; see trainer.adapter.lycoris."""
    alpha: float
    """Alpha; the change is scaled by alpha / rank, except for rotations and LoKr of full rank."""

    @property
    def rank(self) -> int | None:
        """Return the rank; None for rotations and LoKr of full rank."""
        return next((self.weights[role].shape[0] for role in RANKED_ROLES if role in self.weights), None)

    def for_layer(self, dimensions: int) -> dict[str, Tensor]:
        """Return the tensors for a base weight of 2 dimensions (linear) or 4 (convolution)."""
        return {
            role: with_dimensions(tensor, dimensions) if role in _WITH_KERNEL else tensor
            for role, tensor in self.weights.items()
        }


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Contents of a LoRA file."""

    layers: dict[Slot, LoraLayer | LycorisWeights]
    """Layers that match the base, in the order of the `table` given to `read_lora`."""
    unmatched: tuple[str, ...]
    """Keys that match no layer of the base and were ignored; callers report them to the user."""
    metadata: dict[str, str]
    """The file's metadata."""


def read_lora(path: Path, family: Family, table: Sequence[Slot]) -> LoraWeights:
    """Read a LoRA file for a base whose layers are `table`.

    Supports kohya names with diffusers' or LDM's block names, PEFT's and diffusers' names with and without
    "text_model", alpha as a tensor or in diffusers' metadata, different ranks per layer, and DoRA (with one magnitude
    per input or per output), LoHa, LoKr and diagonal OFT. Raises LoraFileError for other kinds of adapters, for other
    families, and for files that are broken, incomplete or contain NaN or infinity.
    """
    with open_lora(path, family, table) as lora:
        return LoraWeights({slot: lora.layer(slot) for slot in lora.slots}, lora.unmatched, lora.metadata)


@contextmanager
def open_lora(path: Path, family: Family, table: Sequence[Slot]) -> Iterator[OpenLora]:
    """Open a LoRA file whose layers are read one by one; what is supported and raised is as in `read_lora`."""
    header = read_header(path, "lora")
    _refuse_other_kinds(path, header)
    _refuse_other_family(path, header, family)
    keys, unmatched = _sort_keys(path, header, table)
    _refuse_other_formats(path, header, keys)
    if not keys:
        raise LoraFileError(
            "lora.unknown",
            f"{path.name} contains no LoRA layer for {NAMES[family]}; its first key is "
            f"{next(iter(header.tensors), 'missing')}.",
            "Choose a LoRA file for the same family as the base.",
        )
    sorted_keys = {slot: keys[slot] for slot in table if slot in keys}
    with safe_open(long_path(path), framework="pt") as file:
        yield OpenLora(path, header, sorted_keys, tuple(unmatched), file)


class OpenLora:
    """An open LoRA file, of which `layer` reads one layer at a time."""

    def __init__(
        self, path: Path, header: Header, keys: Mapping[Slot, Mapping[str, str]], unmatched: tuple[str, ...], file: Any
    ) -> None:
        self.path = path
        self.unmatched = unmatched
        """Keys that match no layer of the base."""
        self.metadata = dict(header.metadata)
        self.formats = frozenset(header.tensors[keys[slot][role]].dtype for slot in keys for role in keys[slot])
        """Number formats of the layers' tensors, as safetensors spells them ("F16")."""
        self._keys = keys
        self._file = file
        self._alpha_of = _MetadataAlpha(path, header.metadata)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return the layers that the file changes, in the order of the table."""
        return tuple(self._keys)

    def layer(self, slot: Slot) -> LoraLayer | LycorisWeights:
        """Read the fp32 tensors of one layer; raises LoraFileError if it is incomplete or not finite."""
        return _read_layer(self.path, slot, self._keys[slot], self._file, self._alpha_of)


def reshape_to_layer(slot: Slot, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a matrix or kernel in the shape of its layer; raises LoraFileError if the layer has another size."""
    fitted = with_dimensions(tensor, len(shape))
    if fitted.shape != shape:
        raise LoraFileError(
            "lora.shape",
            f"The LoRA does not fit this base: {slot.kohya} has shape {_shape(tensor.shape)}, not {_shape(shape)}.",
            "Choose a LoRA for a base of the same family and size.",
        )
    return fitted


def with_dimensions(tensor: Tensor, dimensions: int) -> Tensor:
    """Return a matrix as a 1x1 kernel if the layer has 4 dimensions, and a 1x1 kernel as a matrix if it has 2."""
    if dimensions == 2 and tensor.shape[2:] == (1, 1):
        return tensor.flatten(1)
    return tensor[:, :, None, None] if dimensions == 4 and tensor.ndim == 2 else tensor


def _refuse_other_kinds(path: Path, header: Header) -> None:
    for kind, key in _unsupported(header):
        raise LoraFileError(
            "lora.kind",
            f"{path.name} cannot be read: it contains {kind} (key {key}).",
            "Use a LoRA, LoCon, DoRA, LoHa, LoKr or diagonal OFT, or convert this file with the program that made it.",
        )


def _unsupported(header: Header) -> Iterator[tuple[str, str]]:
    """Yield the keys of adapters of unsupported kinds, each with the kind."""
    for kind, mark in _REFUSED.items():
        yield from ((kind, key) for key in header.tensors if re.search(mark, key))
    decomposed = {key.removesuffix(".dora_scale") for key in header.tensors if key.endswith(".dora_scale")}
    for key, info in header.tensors.items():
        module, _, role = key.rpartition(".")
        if role == "oft_blocks" and len(info.shape) == 4:
            yield "butterfly rotations (BOFT)", key
        if module in decomposed and role.startswith(("hada_", "lokr_")):
            yield "LoHa or LoKr with the magnitudes of DoRA", key


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
    """Return the file's keys by slot and role (down, up, alpha, or as in LyCORIS), and those that match no slot."""
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
            raise _broken(path, f"contains the same layer twice, as {other} and as {key}")
    return keys, unmatched


def _refuse_other_formats(path: Path, header: Header, keys: Mapping[Slot, Mapping[str, str]]) -> None:
    """Raise LoraFileError for integer matrices, whose packing is unknown, and for dtypes unknown to PyTorch."""
    for roles in keys.values():
        for role, key in roles.items():
            if role != "alpha" and header.tensors[key].dtype not in _FORMATS:
                raise _broken(path, f"has the unsupported number format {header.tensors[key].dtype} at {key}")


def _flatten(module: str) -> str:
    """Convert a layer name of any naming scheme to the flattened form that `names.aliases` uses."""
    name = module.replace(".processor.", ".").replace(".", "_").removeprefix("lora_")
    return f"{name}_0" if name.endswith("_to_out") else name


def _role(match: re.Match[str]) -> str:
    if match["peft"]:
        return _ROLES[match["peft"]]
    return match["kohya"] or match["diffusers"] or match["lycoris"] or "dora_scale"


def _read_layer(
    path: Path, slot: Slot, keys: Mapping[str, str], file: Any, alpha_of: _MetadataAlpha
) -> LoraLayer | LycorisWeights:
    if keys.keys() <= {"down", "up", "alpha"}:
        return _read_plain(path, slot, keys, file, alpha_of)
    tensors = {role: _read_tensor(path, key, file) for role, key in keys.items()}
    alpha = tensors.pop("alpha", None)
    if alpha is not None and alpha.numel() != 1:
        raise _broken(path, f"has an alpha that is not a single number: {keys['alpha']}")
    weights = {f"lora_{role}" if role in ("down", "up") else role: tensor for role, tensor in tensors.items()}
    magnitudes = weights.get("dora_scale")
    # PEFT's are per output, also those of convolutions, which have the shape (1, outputs, 1, 1).
    if magnitudes is not None and (magnitudes.ndim == 1 or "lora_magnitude_vector" in keys["dora_scale"]):
        weights["dora_scale"] = magnitudes.reshape(-1, 1)
    for role, tensor in weights.items():
        if tensor.ndim not in _DIMENSIONS.get(role, (2,)) or not tensor.numel():
            shape = _shape(tensor.shape) or "none"
            raise _broken(path, f"has a tensor of an impossible shape: {shape} in {slot.kohya}.{role}")
    if "lokr_w1_a" in weights and "lokr_w1_b" in weights:
        weights = _with_whole_w1(path, keys, weights, alpha)
    kind = next((kind for kind, roles in _KINDS if weights.keys() == roles), None)
    if kind is None:
        raise _broken(path, f"contains only a part of a layer: {next(iter(keys.values()))} is not complete")
    if kind == "oft" and alpha is not None and alpha.item() != 0:
        raise _broken(path, f"limits its rotations, which is not supported ({keys['alpha']} is not 0)")
    if alpha is not None:
        return LycorisWeights(kind, weights, float(alpha))
    rank = LycorisWeights(kind, weights, 1.0).rank or 1
    return LycorisWeights(kind, weights, alpha_of(slot, rank, dora=kind == "dora"))


def _with_whole_w1(
    path: Path, keys: Mapping[str, str], weights: dict[str, Tensor], alpha: Tensor | None
) -> dict[str, Tensor]:
    """Return LoKr weights with the two factors of w1 multiplied, and with the scale in w1 if w2 has no factors."""
    a, b = weights["lokr_w1_a"], weights["lokr_w1_b"]
    if a.shape[1] != b.shape[0]:
        raise _broken(path, f"has matrices whose shapes do not match at {keys['lokr_w1_a']}")
    scale = 1.0 if alpha is None or "lokr_w2" not in weights else float(alpha) / len(b)
    others = {role: tensor for role, tensor in weights.items() if not role.startswith("lokr_w1")}
    return {"lokr_w1": a @ b * scale, **others}


def _read_plain(path: Path, slot: Slot, keys: Mapping[str, str], file: Any, alpha_of: _MetadataAlpha) -> LoraLayer:
    missing = {"down", "up"} - keys.keys()
    if missing:
        raise _broken(path, f"contains only half of a layer: {next(iter(keys.values()))} has no {missing.pop()} matrix")
    tensors = {role: _read_tensor(path, key, file) for role, key in keys.items()}
    down, up = tensors["down"], tensors["up"]
    if {down.ndim, up.ndim} - {2, 4} or down.shape[0] != up.shape[1] or not (down.numel() and up.numel()):
        shapes = f"{_shape(down.shape)} and {_shape(up.shape)}"
        raise _broken(path, f"has matrices whose shapes do not match at {keys['down']}: {shapes}")
    if "alpha" not in tensors:
        return LoraLayer(down, up, alpha_of(slot, down.shape[0]))
    if tensors["alpha"].numel() != 1:
        raise _broken(path, f"has an alpha that is not a single number: {keys['alpha']}")
    return LoraLayer(down, up, float(tensors["alpha"]))


def _read_tensor(path: Path, key: str, file: Any) -> Tensor:
    tensor: Tensor = file.get_tensor(key).to(torch.float32, copy=True)  # a copy: a view would keep the file mapped
    if not tensor.isfinite().all():
        raise LoraFileError(
            "lora.not_finite",
            f"{path.name} contains NaN or infinity in {key}.",
            "Use an earlier save of this LoRA: its training diverged.",
        )
    return tensor


class _MetadataAlpha:
    """Alpha for layers without an alpha tensor: from diffusers' metadata, else equal to the rank (a scale of 1)."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self._path = path
        try:
            metadata_table = parse_json(metadata.get("lora_adapter_metadata", "{}"))
        except UnusableFileError as error:
            raise _broken(path, f"has unreadable lora_adapter_metadata ({error.reason})") from error
        if not isinstance(metadata_table, dict):
            raise _broken(path, "has lora_adapter_metadata that is not a table")
        self._metadata: dict[str, Any] = metadata_table

    def __call__(self, slot: Slot, rank: int, *, dora: bool = False) -> float:
        if self._metadata.get(f"{slot.part}.use_dora") and not dora:
            raise _broken(self._path, "is marked as a DoRA but has no magnitude vectors")
        pattern = self._metadata.get(f"{slot.part}.alpha_pattern") or {}
        if not isinstance(pattern, dict):
            raise _broken(self._path, "has an alpha_pattern that is not a table")
        matches = [value for name, value in pattern.items() if f".{slot.module}".endswith(f".{name}")]
        alpha = matches[0] if matches else self._metadata.get(f"{slot.part}.lora_alpha", rank)
        if not (isinstance(alpha, int | float) and abs(alpha) < _LARGEST_ALPHA):
            raise _broken(self._path, f"has an impossible alpha: {str(alpha)[:40]}")
        # Rank-stabilized LoRA scales by alpha / sqrt(rank) (PEFT's use_rslora), so alpha is converted to alpha / rank.
        return alpha * rank**0.5 if self._metadata.get(f"{slot.part}.use_rslora") else float(alpha)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _broken(path: Path, what: str) -> LoraFileError:
    remedy = "Download or export the file again, or use another one."
    return LoraFileError("lora.broken", f"{path.name} {what}.", remedy)
