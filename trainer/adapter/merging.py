"""Merge LoRAs with each other, exactly by concatenation or to a lower rank, or into the weights of their base."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from trainer.adapter.low_rank import RankRule
from trainer.adapter.names import Slot
from trainer.adapter.reading import LoraLayer, OpenLora, open_lora, with_dimensions
from trainer.adapter.resizing import Progress, change_of, resized_layer
from trainer.adapter.rewriting import (
    DTYPES,
    FORMATS,
    Dtype,
    Layer,
    LayerError,
    dtype_of,
    family_slots,
    for_base,
    metadata_for,
    open_alone,
    tensor_bytes,
    with_alpha,
    write_layers,
)
from trainer.base.single_file import SingleFile, open_single_file
from trainer.config.base import Family
from trainer.config.methods import ADAPTERS
from trainer.errors import BaseModelError, LoraFileError
from trainer.files.architecture import NAMES
from trainer.files.header import TensorInfo
from trainer.files.identify import identify_base
from trainer.files.rewriting import minimal_metadata
from trainer.files.tensor_file import write_tensors

Source = tuple[Path, float]
"""A LoRA file and the strength at which it is merged."""
Opened = Sequence[tuple[OpenLora, float]]
MERGED_KEY = "impasto_merged"
"""Metadata key with the merged files' names and strengths."""
_FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
_VERIFIED = 4


class _Sum(Mapping[Slot, Layer]):
    """The layers of several plain LoRAs, of which each is concatenated when it is needed."""

    def __init__(self, opened: Opened, family: Family) -> None:
        self._opened = opened
        self._family = family
        self._slots = _all_slots(opened, family)
        self.alpha = float(
            max(sum(lora.layer(slot).rank or 1 for lora, _ in opened if slot in lora.slots) for slot in self._slots)
        )
        """The highest sum of ranks; all layers have this alpha, because diffusers does not read all different ones."""

    def __getitem__(self, slot: Slot) -> LoraLayer:
        return with_alpha(_concatenated(slot, self._opened, self._family), self.alpha)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def merge(
    sources: Sequence[Source],
    out: Path,
    rule: RankRule | None = None,
    *,
    dtype: Dtype | None = None,
    family: Family | None = None,
    progress: Progress | None = None,
) -> tuple[LayerError, ...]:
    """Write the sum of LoRAs as one LoRA file; return how far each layer is off, nothing if the sum is exact.

    Without `rule`, the ranks of each layer add up; with it, the sum gets the ranks that it chooses. Raises
    LoraFileError for files of different families, and for methods whose sum is not exact unless `rule` has a rank.
    """
    with ExitStack() as files:
        opened, found = _open_all(sources, family, files)
        formats = {dtype_of(lora) for lora, _ in opened}
        chosen: Dtype = dtype or (formats.pop() if len(formats) == 1 else "fp32")
        exact = _Sum(opened, found)
        layers: Mapping[Slot, Layer] = exact
        errors: list[LayerError] = []
        if rule is not None:
            resized = {}
            alpha = float(rule.rank or exact.alpha)
            for done, slot in enumerate(exact, start=1):
                change, before = _change(slot, opened, found)
                resized[slot], error = resized_layer(slot, change, rule, found, before, alpha)
                errors.append(error)
                if progress:
                    progress(done, len(exact))
            layers = resized
        metadata = metadata_for(layers, found, minimal_metadata(opened[0][0].metadata, found))
        metadata[MERGED_KEY] = _named(sources)
        off = {error.slot: error.error for error in errors}

        def expected(slot: Slot) -> tuple[Tensor, float]:
            parts = [change_of(lora.path, slot, lora.layer(slot)) * s for lora, s in opened if slot in lora.slots]
            return torch.stack(parts).sum(0), off.get(slot, 0.0)

        write_layers(out, layers, found, metadata, dtype=chosen, expected=expected)
    return tuple(errors)


def _named(sources: Sequence[Source]) -> str:
    return json.dumps([[path.stem, strength] for path, strength in sources], ensure_ascii=False)


def _open_all(sources: Sequence[Source], family: Family | None, files: ExitStack) -> tuple[Opened, Family]:
    """Open all files; raises LoraFileError if they are of different families."""
    opened, families = [], []
    for path, strength in sources:
        lora, found, _ = files.enter_context(open_alone(path, family))
        opened.append((lora, strength))
        families.append(found)
        if found != families[0]:
            first = sources[0][0].name
            sentence = f"Could not merge: {first} is for {NAMES[families[0]]}, but {path.name} is for {NAMES[found]}."
            raise LoraFileError("lora.family", sentence, "Merge LoRAs of the same family.")
    return opened, families[0]


def _all_slots(opened: Opened, family: Family) -> list[Slot]:
    return [slot for slot in family_slots(family) if any(slot in lora.slots for lora, _ in opened)]


def _concatenated(slot: Slot, opened: Opened, family: Family) -> LoraLayer:
    """Return the sum of a layer's plain LoRAs; its rank is the sum of theirs, and alpha equals the rank."""
    downs, ups = [], []
    for lora, strength in opened:
        if slot not in lora.slots:
            continue
        layer = lora.layer(slot)
        if not isinstance(layer, LoraLayer):
            sentence = f"Could not merge {lora.path.name} exactly: it contains {ADAPTERS[layer.kind].title}."
            raise LoraFileError("lora.kind", sentence, "Add --rank, such as --rank 64, to merge it approximately.")
        fitted = for_base(slot, layer, family)
        downs.append(fitted.down)
        ups.append(fitted.up * (strength * layer.alpha / layer.rank))
    _require_equal(slot, [(down.shape[1:], len(up)) for down, up in zip(downs, ups, strict=True)])
    down = torch.cat(downs)
    return LoraLayer(down, torch.cat(ups, dim=1), float(len(down)))


def _change(slot: Slot, opened: Opened, family: Family) -> tuple[LoraLayer | Tensor, int | None]:
    """Return a layer's sum as a plain LoRA, or as a matrix if other methods are in it, and its rank."""
    layers = [lora.layer(slot) for lora, _ in opened if slot in lora.slots]
    if all(isinstance(layer, LoraLayer) for layer in layers):
        joined = _concatenated(slot, opened, family)
        return joined, joined.rank
    changes = [change_of(lora.path, slot, lora.layer(slot)) * s for lora, s in opened if slot in lora.slots]
    _require_equal(slot, [change.shape for change in changes])
    return torch.stack(changes).sum(0), None


def _require_equal(slot: Slot, sizes: Sequence[object]) -> None:
    """Raise LoraFileError unless a layer has the same size in all files."""
    if any(size != sizes[0] for size in sizes):
        sentence = f"Could not merge: the files have different sizes at {slot.kohya}."
        raise LoraFileError("lora.shape", sentence, "Merge LoRAs that were made for the same kind of base.")


def merge_into_base(
    sources: Sequence[Source],
    base: Path,
    out: Path,
    *,
    dtype: Dtype | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a base with LoRAs merged into its weights as a single file; return the number of changed layers.

    The file has the original (LDM) layout, whether `base` is a single file or a diffusers folder, and the base's number
    formats unless `dtype` is given. Tensors are read, changed in fp32 and written one by one. Raises LoraFileError
    for files that do not fit the base, and BaseModelError for bases that cannot be read.
    """
    with ExitStack() as files:
        single = files.enter_context(open_single_file(base))
        opened = [(files.enter_context(open_lora(path, single.family, single.table)), s) for path, s in sources]
        for lora, _ in opened:
            if lora.unmatched:
                sentence = f"Could not merge all of {lora.path.name}: {lora.unmatched[0][:100]} would be lost."
                raise LoraFileError("lora.unmatched", sentence, "Choose a LoRA that fits this base.")
        merged = _MergedBase(single, opened, dtype)
        metadata = {**single.metadata, MERGED_KEY: _named(sources)}
        total = len(single.tensors)
        done = 0

        def data(name: str) -> bytes:
            nonlocal done
            done += 1
            if progress:
                progress(done, total)
            return tensor_bytes(merged.read(name))

        infos = {name: merged.info(name) for name in single.tensors}
        write_tensors(out, infos, data, metadata, "base", check=lambda written: _verify(written, out, merged))
        return sum(len(slots) for slots in merged.changed.values())


class _MergedBase:
    """The tensors of a base with LoRAs merged into them."""

    def __init__(self, single: SingleFile, opened: Opened, dtype: Dtype | None) -> None:
        self.single = single
        self._opened = opened
        self._dtype = DTYPES[dtype] if dtype else None
        self.changed: dict[str, list[Slot]] = {}
        """Layers that change, by the tensor that has their weights."""
        for slot in single.table:
            if any(slot in lora.slots for lora, _ in opened):
                single.require(slot)
                self.changed.setdefault(single.place(slot)[0], []).append(slot)

    def info(self, name: str) -> TensorInfo:
        """Return the format of a tensor in the output; markers without numbers and integers keep theirs."""
        info = self.single.tensors[name].info
        is_cast = self._dtype is not None and info.dtype in _FLOATS and info.bytes > 0
        return TensorInfo(FORMATS[self._dtype], info.shape) if is_cast and self._dtype else info

    def read(self, name: str) -> Tensor:
        """Return a merged tensor in its format; raises LoraFileError if values are too large for it."""
        tensor = self.single.tensors[name].read()
        wanted = self._dtype if self.info(name).dtype != self.single.tensors[name].info.dtype else tensor.dtype
        if name not in self.changed:
            return tensor.to(wanted)
        wide = tensor.float()
        for slot in self.changed[name]:
            _, part, parts = self.single.place(slot)
            rows = wide.chunk(parts)[part]
            rows += self.change(slot, rows)
        result = wide.to(wanted)
        if not result.isfinite().all():
            sentence = f"Could not merge: {name} gets values that are too large or not finite."
            raise LoraFileError("lora.not_finite", sentence, "Use lower strengths, or add --dtype bf16.")
        return result

    def change(self, slot: Slot, weight: Tensor) -> Tensor:
        """Return what the LoRAs add to a layer's weight, in its shape; raises LoraFileError if one does not fit."""
        total = torch.zeros_like(weight)
        for lora, strength in self._opened:
            if slot not in lora.slots:
                continue
            layer = lora.layer(slot)
            if isinstance(layer, LoraLayer):
                down, up = (with_dimensions(each, weight.ndim) for each in (layer.down, layer.up))
                if down.shape[1:] != weight.shape[1:] or len(up) != len(weight):
                    found = f"{tuple(up.shape)} and {tuple(down.shape)}"
                    sentence = f"{lora.path.name} does not fit this base: {slot.kohya} has the shapes {found}."
                    raise LoraFileError("lora.shape", sentence, "Choose a LoRA for a base of the same family and size.")
            total += strength * change_of(lora.path, slot, layer, weight).view(weight.shape)
        return total


def _verify(written: Path, out: Path, merged: _MergedBase) -> None:
    """Raise an error unless the written file is a base of the same family, and some layers have changed as asked."""
    is_sound = identify_base(written).family == merged.single.family
    with open_single_file(written) as found:
        names = list(merged.changed)
        for name in names[:: max(1, len(names) // _VERIFIED)]:
            slot = merged.changed[name][0]
            before, after = merged.single.weight(slot), found.weight(slot)
            off = (after - before - merged.change(slot, before)).norm()
            if not off <= _rounding(found.tensors[name].info.dtype) * after.norm() + 1e-12:
                is_sound = False
    if not is_sound:
        sentence = f"Could not write {out}: the written base differs when read back."
        raise BaseModelError("base.damaged", sentence, "Check the disk and try again.")


def _rounding(format: str) -> float:
    return {"F32": 1e-6, "F64": 1e-6, "F16": 1e-3, "BF16": 8e-3}.get(format, 0.1)
