"""Read a LoRA file of any naming without its base, and write its layers under the names of another program."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trainer.adapter.export import ALGORITHMS
from trainer.adapter.names import Slot, file_key, slots
from trainer.adapter.reading import LoraLayer, LycorisWeights, OpenLora, open_lora, with_dimensions
from trainer.config.base import ARCHITECTURES, BASE_VERSIONS, Family
from trainer.config.methods import ADAPTERS
from trainer.errors import LoraFileError
from trainer.files.assets import bundled_configs
from trainer.files.header import TensorInfo
from trainer.files.identify import identify_lora
from trainer.files.rewriting import minimal_metadata
from trainer.files.tensor_file import write_tensors

Names = Literal["kohya", "lycoris", "diffusers"]
"""kohya: plain LoRAs, which load everywhere; lycoris: the same names, with every method; diffusers: as PEFT."""
Dtype = Literal["fp16", "bf16", "fp32"]
Layer = LoraLayer | LycorisWeights
Layers = Mapping[Slot, Layer]

DTYPES: Mapping[Dtype, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS: Mapping[torch.dtype, str] = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
# What a written change may be off by rounding, relative to its norm.
_ROUNDING: Mapping[Dtype, float] = {"fp16": 2e-3, "bf16": 1.2e-2, "fp32": 1e-5}
_VERIFIED = 8  # layers of which the written change is compared
# Metadata about tensors and training method that no longer holds once they are written anew.
_OUTDATED = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", "lora_adapter_metadata")


@contextmanager
def open_alone(path: Path, family: Family | None = None) -> Iterator[tuple[OpenLora, Family, Sequence[Slot]]]:
    """Open a LoRA file without its base; yield it, its family and the layers that a base of the family has.

    Raises LoraFileError for unreadable files, for files with keys that belong to no such layer, because these would be
    lost, and if neither the file nor `family` says which family it is for.
    """
    found = family or identify_lora(path).family
    if found is None:
        sentence = f"Could not read {path.name}: it does not say whether it is for SD 1.5 or SDXL."
        raise LoraFileError("lora.family", sentence, "Add --family sd15 or --family sdxl.")
    table = family_slots(found)
    with open_lora(path, found, table) as lora:
        if lora.unmatched:
            others = f" and {len(lora.unmatched) - 1} more" if len(lora.unmatched) > 1 else ""
            sentence = f"Could not read all of {path.name}: {lora.unmatched[0][:100]}{others} would be lost."
            remedy = "Choose a LoRA whose layers are all in the UNet and text encoders of SD 1.5 or SDXL."
            raise LoraFileError("lora.unmatched", sentence, remedy)
        yield lora, found, table


def family_slots(family: Family) -> Sequence[Slot]:
    """Return the layers that can carry a LoRA in a family's original models; smaller models have some of them."""
    configs = bundled_configs(family)
    texts = [configs[part] for part in ("text_encoder", "text_encoder_2") if part in configs]
    return slots(family, configs["unet"], texts)


def dtype_of(lora: OpenLora) -> Dtype:
    """Return the number format to write a file's layers in: that of its tensors, or fp32 if it has several."""
    formats = lora.formats - {"F32", "F64"} or {"F32"}
    return {"F16": "fp16", "BF16": "bf16"}.get(next(iter(formats)), "fp32") if len(formats) == 1 else "fp32"  # type: ignore[return-value]


def require_plain(path: Path, slot: Slot, layer: Layer, remedy: str) -> LoraLayer:
    """Return a layer that is a plain LoRA; raises LoraFileError, with a remedy, for other methods."""
    if isinstance(layer, LoraLayer):
        return layer
    sentence = f"Could not use {path.name}: it contains {ADAPTERS[layer.kind].title}, for example at {slot.kohya}."
    raise LoraFileError("lora.kind", sentence, remedy)


def scaled_product(layer: LoraLayer) -> Tensor:
    """Return the change of a plain LoRA as a matrix (outputs, inputs · kernel) in fp32."""
    return layer.up.flatten(1) @ layer.down.flatten(1) * (layer.alpha / layer.rank)


def with_alpha(layer: LoraLayer, alpha: float) -> LoraLayer:
    """Return a layer with the same change and another alpha, for which `up` is scaled."""
    return layer if layer.alpha == alpha else LoraLayer(layer.down, layer.up * (layer.alpha / alpha), alpha)


def for_base(slot: Slot, layer: LoraLayer, family: Family) -> LoraLayer:
    """Return a plain LoRA with as many dimensions as the base's layer, which some programs need.

    Raises LoraFileError if the kernel of its down matrix is not that of the layer.
    """
    dimensions = 4 if is_convolution(slot, family) else 2
    down, up = with_dimensions(layer.down, dimensions), with_dimensions(layer.up, dimensions)
    kernel = (slot.kernel, slot.kernel) if dimensions == 4 else ()
    if tuple(down.shape[2:]) != kernel or any(side != 1 for side in up.shape[2:]):
        sentence = f"Could not use the LoRA: {slot.kohya} has the kernel {tuple(down.shape[2:])} instead of {kernel}."
        raise LoraFileError("lora.shape", sentence, "Choose a LoRA for SD 1.5 or SDXL.")
    return LoraLayer(down, up, layer.alpha)


def is_convolution(slot: Slot, family: Family) -> bool:
    """Return whether a layer is a convolution in its base; SDXL has matrices where SD 1.5 has some of 1 x 1."""
    projections = ("proj_in", "proj_out") if family == "sd15" else ()
    return slot.kernel > 1 or (slot.part == "unet" and slot.module.endswith(("conv_shortcut", *projections)))


class FileLayers(Mapping[Slot, Layer]):
    """Layers of an open LoRA file, each read when it is needed and passed through `change`."""

    def __init__(self, lora: OpenLora, change: Callable[[Slot, Layer], Layer]) -> None:
        self._lora = lora
        self._change = change
        self._last: tuple[Slot, Layer] | None = None

    def __getitem__(self, slot: Slot) -> Layer:
        # The last one is kept, because its tensors are written one after the other.
        if self._last is None or self._last[0] != slot:
            self._last = slot, self._change(slot, self._lora.layer(slot))
        return self._last[1]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._lora.slots)

    def __len__(self) -> int:
        return len(self._lora.slots)


def convert(
    path: Path,
    out: Path,
    names: Names,
    *,
    dtype: Dtype | None = None,
    minimal: bool = False,
    family: Family | None = None,
) -> int:
    """Write a LoRA file with the names of another program, and return its number of layers.

    `minimal` keeps only the metadata that programs need to load it. Raises LoraFileError for layers of other methods
    than LoRA, which only LyCORIS's names have keys for.
    """
    with open_alone(path, family) as (lora, found, _):

        def change(slot: Slot, layer: Layer) -> Layer:
            if isinstance(layer, LycorisWeights) and names == "lycoris":
                dimensions = 4 if is_convolution(slot, found) else 2
                return LycorisWeights(layer.kind, layer.for_layer(dimensions), layer.alpha)
            remedy = "Use --to lycoris, or make a plain LoRA of it with `lora resize FILE --rank 32`."
            return for_base(slot, require_plain(path, slot, layer, remedy), found)

        layers = FileLayers(lora, change)
        metadata = metadata_for(layers, found, lora.metadata, minimal=minimal, names=names)

        def expected(slot: Slot) -> tuple[Tensor, float]:
            return scaled_product(require_plain(path, slot, lora.layer(slot), "")), 0.0

        dtype = dtype or dtype_of(lora)
        write_layers(out, layers, found, metadata, dtype=dtype, names=names, expected=expected)
        return len(layers)


def metadata_for(
    layers: Layers, family: Family, metadata: Mapping[str, str], *, minimal: bool = False, names: Names = "kohya"
) -> dict[str, str]:
    """Return a file's metadata with what describes its layers replaced by what holds for these `layers`."""
    facts = {(_kind(layer), layer.rank, layer.alpha) for layer in layers.values()}
    kinds, ranks, alphas = ({fact[place] for fact in facts} for place in range(3))
    module = "lycoris.kohya" if names == "lycoris" or kinds != {"lora"} else "networks.lora"
    network = {
        "ss_base_model_version": BASE_VERSIONS[family],
        "ss_network_module": module,
        "ss_network_dim": str(ranks.pop()) if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": str(alphas.pop()) if len(alphas) == 1 else "Dynamic",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{ARCHITECTURES[family]}/lora",
    }
    kept = minimal_metadata(metadata, family) if minimal else dict(metadata)
    if kept.get("ss_network_module") != module:
        kept.pop("ss_network_args", None)
        if module == "lycoris.kohya" and len(kinds) == 1:
            network["ss_network_args"] = json.dumps(ALGORITHMS.get(str(kinds.pop()), {"algo": "locon"}))
    return {key: text for key, text in kept.items() if key not in _OUTDATED} | network


def _kind(layer: Layer) -> str:
    return layer.kind if isinstance(layer, LycorisWeights) else "lora"


def write_layers(
    path: Path,
    layers: Layers,
    family: Family,
    metadata: Mapping[str, str],
    *,
    dtype: Dtype,
    names: Names = "kohya",
    expected: Callable[[Slot], tuple[Tensor, float]],
) -> None:
    """Write layers as a LoRA file, tensor by tensor, and read it back before it replaces an existing one.

    `expected` returns a layer's change (outputs, inputs · kernel) and the relative error that is allowed besides
    rounding; some layers are compared with it. Layers of other methods than LoRA are compared tensor by tensor. Raises
    LoraFileError if values are not finite in `dtype`, or the file reads back differently.
    """
    sources = {key: (slot, role) for slot, layer in layers.items() for role, key in _keys(slot, layer, names).items()}
    tensors = {}
    for key, (slot, role) in sources.items():
        tensor = _tensor(layers[slot], role, names)
        tensors[key] = TensorInfo("F32" if role == "alpha" else FORMATS[DTYPES[dtype]], tuple(tensor.shape))

    def data(key: str) -> bytes:
        slot, role = sources[key]
        tensor = _tensor(layers[slot], role, names)
        return tensor_bytes(_cast(path, slot, tensor, torch.float32 if role == "alpha" else DTYPES[dtype]))

    write_tensors(
        path,
        tensors,
        data,
        metadata,
        "lora",
        check=lambda written: _verify(written, path, layers, family, dtype, expected),
    )


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's data, row by row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _keys(slot: Slot, layer: Layer, names: Names) -> dict[str, str]:
    """Return the file key of each of a layer's tensors, by role as in kohya's names."""
    if names == "diffusers":
        return {f"lora_{role}": f"{slot.part}.{slot.module}.lora_{end}.weight" for role, end in _PEFT.items()}
    roles = ("lora_down", "lora_up") if isinstance(layer, LoraLayer) else tuple(layer.weights)
    return {role: file_key(slot, role) for role in (*roles, "alpha")}


_PEFT = {"down": "A", "up": "B"}


def _tensor(layer: Layer, role: str, names: Names) -> Tensor:
    """Return a layer's tensor in fp32; diffusers' names have no key for alpha, so it is multiplied into up."""
    if role == "alpha":
        # OFT keeps a limit for its rotations in this place; 0 is none.
        unlimited = isinstance(layer, LycorisWeights) and layer.kind == "oft"
        return torch.tensor(0.0 if unlimited else layer.alpha, dtype=torch.float32)
    if isinstance(layer, LycorisWeights):
        return layer.weights[role]
    if role == "lora_down":
        return layer.down
    return layer.up * (layer.alpha / layer.rank) if names == "diffusers" else layer.up


def _cast(path: Path, slot: Slot, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    result = tensor.to(dtype)
    if result.isfinite().all():
        return result
    sentence = (
        f"Could not write {path.name}: {slot.kohya} has values too large for {str(dtype).removeprefix('torch.')}."
    )
    raise LoraFileError("lora.not_finite", sentence, "Add --dtype bf16 or --dtype fp32.")


def _verify(
    written: Path,
    path: Path,
    layers: Layers,
    family: Family,
    dtype: Dtype,
    expected: Callable[[Slot], tuple[Tensor, float]],
) -> None:
    """Raise LoraFileError unless the written file has these layers, and some of them the expected change."""
    with open_lora(written, family, tuple(layers)) as lora:
        wrong = [slot.kohya for slot in layers if slot not in lora.slots] + list(lora.unmatched)
        compared = set(list(layers)[:: math.ceil(len(layers) / _VERIFIED)])
        for slot in lora.slots:
            layer = lora.layer(slot)  # raises an error if it is incomplete or not finite
            if slot in compared and not _is_expected(layer, layers[slot], dtype, partial(expected, slot)):
                wrong.append(slot.kohya)
    if wrong:
        sentence = f"Could not write {path}: the written LoRA differs when read back ({wrong[0][:100]})."
        raise LoraFileError("lora.damaged", sentence, "Check the disk and try again.")


def _is_expected(layer: Layer, original: Layer, dtype: Dtype, expected: Callable[[], tuple[Tensor, float]]) -> bool:
    """Return whether a layer that was read back is what was to be written."""
    if isinstance(layer, LoraLayer) and isinstance(original, LoraLayer):
        wanted, allowed = expected()
        off = float((scaled_product(layer) - wanted).norm())
        return off <= (allowed + _ROUNDING[dtype]) * float(wanted.norm()) + 1e-30
    if isinstance(layer, LoraLayer) or isinstance(original, LoraLayer):
        return False
    rounded = {role: tensor.to(DTYPES[dtype]).float() for role, tensor in original.weights.items()}
    return layer.weights.keys() == rounded.keys() and all(
        torch.equal(tensor, layer.weights[role]) for role, tensor in rounded.items()
    )


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far a layer with fewer ranks is off."""

    slot: Slot
    before: int | None
    """Rank before; None for methods without one, and for differences of models."""
    after: int
    error: float
    """‖W - W'‖ / ‖W‖ (Frobenius) of the layer's change."""
    norm: float
    """‖W‖, with alpha."""
    sizes: tuple[float, ...]
    """The largest singular values of the change, with alpha."""


def total_error(errors: Sequence[LayerError]) -> float:
    """Return the relative error of all layers together: √(Σ ‖W - W'‖² / Σ ‖W‖²)."""
    whole = sum(each.norm**2 for each in errors)
    return math.sqrt(sum((each.error * each.norm) ** 2 for each in errors) / whole) if whole else 0.0
