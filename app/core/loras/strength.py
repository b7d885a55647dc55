"""Compute how strongly a LoRA changes each block: the norm of the weights it adds. Call it on worker threads.

A LoRA adds (alpha / rank) · up · down to a layer. The Frobenius norm can be computed without this large product: with
the small matrices U = upᵀ·up and D = down·downᵀ, both rank × rank, ‖up·down‖² = tr(U·D), the sum of U ∘ D. With a
Tucker core M between them (kernel positions k), it is Σₖ tr(U·Mₖ·D·Mₖᵀ). A Kronecker product has ‖a ⊗ b‖ = ‖a‖·‖b‖.
Only LoHa's elementwise product has to be materialized, with Tucker cores one kernel position at a time. LyCORIS stores
the outer matrices of its Tucker variants as rank × out. A block's strength is the square root of the sum of its layers'
squared norms. DoRA's magnitudes depend on the base's weights and are ignored; the strength of OFT is unknown, because
it multiplies them.

Tensor names of kohya, diffusers, PEFT and LyCORIS are recognized. Blocks have the names used for block weights: IN00
to IN11, MID and OUT00 to OUT11 for the UNet (SDXL ends at IN08 and OUT08), TE1 and TE2 for the text encoders.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainer.files.header import Header, TensorInfo
from trainer.protocol.reading import open_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


Layer = Mapping[str, TensorInfo]
"""Tensors of one layer, by role: "down", "up", "mid", "alpha", "dora_scale", "hada_w1_a", "lokr_w1", ..."""

OTHER = "?"
"""Block of layers whose position is unknown."""

_TENSOR = re.compile(
    r"(?P<layer>.+?)(?:"
    r"\.lora_(?P<kohya>down|up|mid|A|B)(?:\.default)?\.weight"
    r"|[._]lora(?:_linear_layer)?\.(?P<diffusers>down|up)\.weight"
    r"|\.(?P<lycoris>alpha|dora_scale|(?:hada|lokr)_[wt][12](?:_[ab])?|oft_blocks))"
)
_ROLES = {"A": "down", "B": "up"}
_TEXT_ENCODER = re.compile(r"(?:lora_te|text_encoder_?)(?P<number>[12])?(?![a-z])")
# Paths of the original model, then of diffusers; both have two residual layers per level.
_ORIGINAL = re.compile(r"_(?P<side>input|output)_blocks_(?P<index>\d{1,2})_")
_DIFFUSERS = re.compile(
    r"_(?P<side>down|up)_blocks_(?P<level>\d)_(?P<part>resnets|attentions|downsamplers|upsamplers)_(?P<index>\d)"
)
_MAX_RANK = 4096  # largest accepted rank; no real LoRA comes close
_MAX_ELEMENTS = 16 << 20  # elements of a materialized matrix: 128 MiB in float64
_DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "U8": "u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def layers_of(header: Header) -> dict[str, Layer]:
    """Return the layers that a LoRA adapts, in file order; tensors with unknown roles are skipped."""
    found: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, tensor in header.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match:
            role = match["kohya"] or match["diffusers"] or match["lycoris"]
            found[match["layer"]][_ROLES.get(role, role)] = tensor
    return {name: layer for name, layer in found.items() if layer.keys() - {"alpha", "dora_scale"}}


def block_of(layer: str) -> str:
    """Return the block of a layer, or `OTHER` if its name does not contain it."""
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
    """Return a sort key that puts blocks in the order in which data passes through them."""
    sides = ("TE", "IN", "MID", "OUT")
    return next((place for place, side in enumerate(sides) if block.startswith(side)), len(sides)), block


def rank_of(layer: Layer) -> int | None:
    """Return the rank of a layer from its shapes; None for a full matrix and for OFT."""
    for role, axis in (("down", 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
        if role in layer and layer[role].shape:
            return layer[role].shape[axis]
    return None


def _as_original(side: str, level: int, part: str, index: int) -> str:
    """Return the name that a block of the diffusers UNet has in the original UNet.

    down_blocks.i.resnets.j is input_blocks.(3i+j+1), its downsampler 3i+3; up_blocks.i.resnets.j is 3i+j.
    """
    if side == "down":
        return f"IN{3 * level + (3 if part == 'downsamplers' else index + 1):02}"
    return f"OUT{3 * level + (2 if part == 'upsamplers' else index):02}"


@dataclass(frozen=True, slots=True)
class BlockStrength:
    """A LoRA's layers and strength in one block of the model."""

    name: str
    layers: int
    ranks: tuple[int, ...]
    """Distinct ranks, ascending."""
    alphas: tuple[float, ...]
    """Distinct alphas stated in the file, ascending; a layer without an alpha uses its rank."""
    strength: float | None
    """Norm of the added weights; None if it cannot be computed, not finite if the file has NaN or infinity."""
    unknown: int = 0
    """Number of layers left out because their norm could not be computed."""


def read_blocks(
    path: Path, layers: Mapping[str, Layer], alpha: Callable[[str], float | None], wanted: Callable[[], bool]
) -> list[BlockStrength]:
    """Read a LoRA's tensors and return its blocks in the order of the data flow.

    `alpha` returns the metadata's alpha for a layer without an alpha tensor. Returns an empty list if `wanted` returns
    False. Raises OSError if the file cannot be read completely or its tensors do not fit into memory.
    """
    found: dict[str, list[tuple[Layer, float | None, float | None]]] = {}
    try:
        with open_file(path, "stream") as file:
            for name, layer in layers.items():
                if not wanted():
                    return []
                stated = _alpha(file, layer)
                stated = alpha(name) if stated is None else stated
                found.setdefault(block_of(name), []).append((layer, stated, _norm(file, layer, stated)))
    except MemoryError:
        raise OSError(None, "its tensors do not fit into the memory of this PC", str(path)) from None
    return [_block(name, found[name]) for name in sorted(found, key=block_order)]


def _block(name: str, parts: list[tuple[Layer, float | None, float | None]]) -> BlockStrength:
    norms = [norm for _, _, norm in parts if norm is not None]
    return BlockStrength(
        name,
        len(parts),
        tuple(sorted({rank for layer, _, _ in parts if (rank := rank_of(layer)) is not None})),
        tuple(sorted({alpha for _, alpha, _ in parts if alpha is not None and not math.isnan(alpha)})),
        math.hypot(*norms) if norms else None,
        len(parts) - len(norms),
    )


def _alpha(file: IO[bytes], layer: Layer) -> float | None:
    tensor = layer.get("alpha")
    if tensor is None or math.prod(tensor.shape) != 1:
        return None
    values = _read(file, tensor)
    return None if values is None else float(values.reshape(-1)[0])


def _norm(file: IO[bytes], layer: Layer, alpha: float | None) -> float | None:
    """Return the norm of a layer's change; None for unsupported types, shapes and number formats."""
    import numpy as np

    parts = {role: _read(file, tensor) for role, tensor in layer.items() if role not in ("alpha", "dora_scale")}
    if any(part is None or part.ndim < 2 or not part.size for part in parts.values()):
        return None
    rank = rank_of(layer)
    scale = 1.0 if alpha is None or not rank else alpha / rank
    try:
        with np.errstate(all="ignore"):  # overflow and NaN show in the result
            return abs(scale) * _unscaled({role: part for role, part in parts.items() if part is not None})
    except (ValueError, KeyError):  # shapes that do not match, or a missing matrix
        return None


def _unscaled(parts: Mapping[str, Array]) -> float:
    if "up" in parts:
        return _pair_norm(parts["down"], parts["up"], parts.get("mid"))
    if "hada_w1_a" in parts:
        return _tucker_loha_norm(parts) if "hada_t1" in parts else _loha_norm(parts)
    if parts.keys() & {"lokr_w1", "lokr_w1_a"}:
        return math.prod(_factor_norm(parts, name) for name in ("lokr_w1", "lokr_w2"))
    raise KeyError("unknown form")


def _pair_norm(down: Array, up: Array, mid: Array | None) -> float:
    import numpy as np

    below, above = _flat(down), _flat(up)
    if max(len(below), above.shape[1]) > _MAX_RANK:
        raise ValueError("rank too large")
    inner, outer = below @ below.T, above.T @ above
    if mid is None:
        return _root(np.sum(outer * inner))
    core = np.moveaxis(_kernel(mid), -1, 0)
    return _root(np.sum((outer @ core @ inner) * core))


def _loha_norm(parts: Mapping[str, Array]) -> float:
    import numpy as np

    if len(parts["hada_w1_a"]) * _flat(parts["hada_w1_b"]).shape[1] > _MAX_ELEMENTS:
        raise ValueError("larger than any layer")
    one, other = (_flat(parts[f"hada_w{n}_a"]) @ _flat(parts[f"hada_w{n}_b"]) for n in (1, 2))
    return float(np.linalg.norm(one * other))


def _tucker_loha_norm(parts: Mapping[str, Array]) -> float:
    """Return the norm of a LoHa layer that has Tucker cores."""
    import numpy as np

    if parts["hada_w1_a"].shape[1] * parts["hada_w1_b"].shape[1] > _MAX_ELEMENTS:
        raise ValueError("larger than any layer")
    cores = [np.moveaxis(_kernel(parts[f"hada_t{n}"]), -1, 0) for n in (1, 2)]
    squares = 0.0
    for places in zip(*cores, strict=True):
        one, other = (parts[f"hada_w{n}_a"].T @ core @ parts[f"hada_w{n}_b"] for n, core in enumerate(places, start=1))
        squares += float(np.sum(np.square(one * other)))
    return _root(squares)


def _factor_norm(parts: Mapping[str, Array], name: str) -> float:
    import numpy as np

    if name in parts:
        return float(np.linalg.norm(_flat(parts[name])))
    core = parts.get("lokr_t2") if name == "lokr_w2" else None
    outer = parts[f"{name}_a"]
    return _pair_norm(parts[f"{name}_b"], outer if core is None else outer.T, core)


def _root(square: Any) -> float:
    """Return the square root; 0 for values that rounding errors made negative."""
    value = float(square)
    return math.sqrt(max(value, 0.0)) if math.isfinite(value) else abs(value)


def _flat(weight: Array) -> Array:
    """Return a tensor as a matrix whose rows are the first dimension and whose columns are all others."""
    return weight.reshape(len(weight), -1)


def _kernel(weight: Array) -> Array:
    return weight.reshape(*weight.shape[:2], -1)


def _read(file: IO[bytes], tensor: TensorInfo) -> Array | None:
    """Return a tensor's values in float64; None for unsupported number formats. Raises OSError."""
    import numpy as np

    if tensor.dtype not in _DTYPES and tensor.dtype not in _DECODERS:
        return None
    file.seek(tensor.start)
    data = file.read(tensor.bytes)
    if len(data) != tensor.bytes:
        raise OSError(None, "the file became shorter while it was read")
    values = _DECODERS[tensor.dtype](data) if tensor.dtype in _DECODERS else np.frombuffer(data, _DTYPES[tensor.dtype])
    return values.astype(np.float64).reshape(tensor.shape)


def _bf16(data: bytes) -> NDArray[Any]:
    """Decode bfloat16: the upper half of a float32."""
    import numpy as np

    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _e5m2(data: bytes) -> NDArray[Any]:
    """Decode float8_e5m2: the upper half of a float16."""
    import numpy as np

    return (np.frombuffer(data, "u1").astype(np.uint16) << 8).view(np.float16)


def _e4m3(data: bytes) -> NDArray[Any]:
    """Decode float8_e4m3fn: 4 exponent bits (bias 7), 3 mantissa bits, no infinity (arXiv:2209.05433, table 1)."""
    import numpy as np

    codes = np.arange(128)
    exponent, mantissa = codes >> 3, (codes & 7) / 8
    values = np.where(exponent == 0, np.ldexp(mantissa, -6), np.ldexp(1 + mantissa, exponent - 7))
    values[127] = np.nan
    found: Array = np.concatenate((values, -values))[np.frombuffer(data, "u1")]
    return found


_DECODERS: Mapping[str, Callable[[bytes], NDArray[Any]]] = {"BF16": _bf16, "F8_E5M2": _e5m2, "F8_E4M3": _e4m3}
"""Decoders of number formats that numpy does not have."""
