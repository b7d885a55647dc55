"""Extract a LoRA from the difference between a base and a model that was fine-tuned from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.adapter.low_rank import RankRule
from trainer.adapter.names import Slot
from trainer.adapter.reading import LoraLayer
from trainer.adapter.resizing import Progress, resized_layer
from trainer.adapter.rewriting import DTYPES, Dtype, LayerError, metadata_for, write_layers
from trainer.base.single_file import SingleFile, open_single_file
from trainer.errors import BaseModelError
from trainer.files.architecture import NAMES

_NOT_COMPARED = ("first_stage_model.", "model_ema.")


@dataclass(frozen=True, slots=True)
class Extracted:
    """How far each layer of an extracted LoRA is off, and what differs but cannot be in a LoRA."""

    errors: tuple[LayerError, ...]
    others: tuple[str, ...]
    """Tensors of UNet and text encoders that differ but cannot have a LoRA, such as norms and biases."""


def extract(
    base: Path, tuned: Path, out: Path, rule: RankRule, *, dtype: Dtype = "fp16", progress: Progress | None = None
) -> Extracted:
    """Write a LoRA with the nearest low-rank change of each layer between two bases; `rule` has a highest rank.

    Weights are read layer by layer; layers without a difference are left out. A base in another number format is first
    rounded to that of the tuned model, so that rounding is no difference. Raises BaseModelError for models of different
    families or sizes, and for equal ones.
    """
    with open_single_file(base) as first, open_single_file(tuned) as second:
        if first.family != second.family:
            names = NAMES[first.family], NAMES[second.family]
            sentence = f"Could not compare the models: {base.name} is {names[0]}, but {tuned.name} is {names[1]}."
            raise BaseModelError("base.wrong_family", sentence, "Choose the base that the model was tuned from.")
        layers: dict[Slot, LoraLayer] = {}
        errors = []
        for done, slot in enumerate(first.table, start=1):
            change = _difference(slot, first, second)
            if change.any():
                layer, error = resized_layer(slot, change.flatten(1), rule, first.family, None, float(rule.rank or 1))
                # In the output's format, because all layers of a high rank in fp32 would take gigabytes.
                down, up = layer.down.to(DTYPES[dtype]), layer.up.to(DTYPES[dtype])
                layers[slot] = LoraLayer(down, up, layer.alpha)
                errors.append(error)
            if progress:
                progress(done, len(first.table))
        if not layers:
            sentence = f"Could not extract a LoRA: no layer of {tuned.name} differs from {base.name}."
            raise BaseModelError("base.equal", sentence, "Choose the base, then the model that was tuned from it.")
        off = {error.slot: error.error for error in errors}

        def expected(slot: Slot) -> tuple[Tensor, float]:
            return _difference(slot, first, second).flatten(1), off[slot]

        described = {"modelspec.title": out.stem, "ss_training_comment": f"Extracted by Impasto from {tuned.stem}"}
        if second.prediction in ("v", "epsilon"):
            described["modelspec.prediction_type"] = second.prediction
        metadata = metadata_for(layers, first.family, described)
        write_layers(out, layers, first.family, metadata, dtype=dtype, expected=expected)
        return Extracted(tuple(errors), tuple(_other_differences(first, second)))


def _difference(slot: Slot, first: SingleFile, second: SingleFile) -> Tensor:
    """Return what a layer's weight gains from the first to the second model, in fp32; raises BaseModelError."""
    before, after = first.weight(slot), second.weight(slot)
    if before.numel() != after.numel() or len(before) != len(after):
        sentence = (
            f"Could not compare the models: {slot.kohya} has the shape {tuple(before.shape)} in {first.path.name}"
        )
        sentence += f", but {tuple(after.shape)} in {second.path.name}."
        raise BaseModelError("base.other_shape", sentence, "Choose the base that the model was tuned from.")
    return after - _rounded(before.view(after.shape), first, second, slot)


def _rounded(weight: Tensor, first: SingleFile, second: SingleFile, slot: Slot) -> Tensor:
    """Return the first model's weight, rounded to the number format of the second if that is another one."""
    format = second.tensors[second.place(slot)[0]].info.dtype
    if format == first.tensors[first.place(slot)[0]].info.dtype:
        return weight
    narrow = {"F16": torch.float16, "BF16": torch.bfloat16}.get(format)
    return weight.to(narrow).float() if narrow else weight


def _other_differences(first: SingleFile, second: SingleFile) -> Iterator[str]:
    """Yield the names of the tensors that differ but belong to no layer that can carry a LoRA."""
    places = {first.place(slot)[0] for slot in first.table}
    for name, stored in first.tensors.items():
        if name in places or name not in second.tensors or name.startswith(_NOT_COMPARED):
            continue
        other = second.tensors[name]
        if stored.info.shape != other.info.shape:
            yield name
        elif stored.info.bytes and stored.info.dtype.startswith(("F", "BF")):
            before, after = stored.read(), other.read()
            if not torch.equal(before.to(after.dtype), after):
                yield name
