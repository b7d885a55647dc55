"""Give a LoRA other ranks, by the singular value decomposition of each layer's change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.adapter.low_rank import Decomposition, RankRule, of_matrix, of_product
from trainer.adapter.lycoris import CHANGES, scale_of
from trainer.adapter.names import Slot
from trainer.adapter.reading import LoraLayer, LycorisWeights
from trainer.adapter.rewriting import (
    Dtype,
    Layer,
    LayerError,
    Layers,
    dtype_of,
    for_base,
    metadata_for,
    open_alone,
    scaled_product,
    total_error,
    with_alpha,
    write_layers,
)
from trainer.config.base import Family
from trainer.config.methods import ADAPTERS
from trainer.errors import LoraFileError

_MOST_SIZES = 512  # singular values per layer that are reported
# Numbers in the largest change that is built: SDXL's largest layers have 13 million, SD 1.5's 30 million.
_LARGEST_CHANGE = 1 << 26
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Resized:
    """Layers with new ranks, in the file's order, and how far each is off."""

    layers: Layers
    errors: tuple[LayerError, ...]


def resize(
    path: Path,
    out: Path,
    rule: RankRule,
    *,
    dtype: Dtype | None = None,
    family: Family | None = None,
    progress: Progress | None = None,
) -> tuple[LayerError, ...]:
    """Write a LoRA file whose layers have the ranks that `rule` chooses; return how far each layer is off.

    Layers of LoHa and LoKr become plain LoRAs; those of other methods are refused, because their change depends on the
    base. The strength at which the file is used stays the same. All layers get the file's most frequent alpha, while
    sd-scripts keeps alpha / rank: diffusers 0.42 ignores alphas of attention layers that differ from the most frequent
    one, so that its images would be off.
    """
    with open_alone(path, family) as (lora, found, _):
        alphas = Counter(lora.layer(slot).alpha for slot in lora.slots)
        alpha = next((value for value, _ in alphas.most_common() if value), 1.0)
        resized: dict[Slot, Layer] = {}
        errors = []
        for done, slot in enumerate(lora.slots, start=1):
            layer = lora.layer(slot)
            change = layer if isinstance(layer, LoraLayer) else _limited_change(path, slot, layer, rule)
            resized[slot], error = resized_layer(slot, change, rule, found, layer.rank, alpha)
            errors.append(error)
            if progress:
                progress(done, len(lora.slots))
        metadata = metadata_for(resized, found, lora.metadata)
        comment = f"Resized by Impasto from {lora.metadata.get('ss_network_dim', '?')}; error {total_error(errors):.2%}"
        metadata["ss_training_comment"] = "; ".join(filter(None, [metadata.get("ss_training_comment"), comment]))[:2000]
        by_slot = {error.slot: error.error for error in errors}

        def expected(slot: Slot) -> tuple[Tensor, float]:
            return change_of(path, slot, lora.layer(slot)), by_slot[slot]

        write_layers(out, resized, found, metadata, dtype=dtype or dtype_of(lora), expected=expected)
    return tuple(errors)


def resized_layer(
    slot: Slot, change: LoraLayer | Tensor, rule: RankRule, family: Family, before: int | None, alpha: float
) -> tuple[LoraLayer, LayerError]:
    """Return a layer with the rank that `rule` chooses and this alpha, and how far it is off.

    `change` is a plain LoRA, or the change as a matrix (outputs, inputs · kernel) for a rule with a highest rank;
    `before` is the rank to report.
    """
    if isinstance(change, LoraLayer):
        found, scale = of_product(change.up.flatten(1), change.down.flatten(1)), change.alpha / change.rank
        kernel = tuple(change.down.shape[2:])
    else:
        assert rule.rank is not None
        found, scale, kernel = of_matrix(change, rule.rank), 1.0, (slot.kernel, slot.kernel)
    rank = rule.ranks(found)
    error = layer_error(slot, before, rank, found, scale)
    if isinstance(change, LoraLayer) and rank >= change.rank:
        return for_base(slot, with_alpha(change, alpha), family), error
    down, up = found.factors(rank, kernel)
    return for_base(slot, with_alpha(LoraLayer(down, up, scale * rank), alpha), family), error


def _limited_change(path: Path, slot: Slot, layer: LycorisWeights, rule: RankRule) -> Tensor:
    """Return the change of a LoHa or LoKr; raises LoraFileError if `rule` does not limit its many ranks."""
    if rule.rank is None:
        sentence = f"Could not resize {path.name}: {ADAPTERS[layer.kind].title} at {slot.kohya} has too many ranks."
        raise LoraFileError("lora.rank", sentence, "Add --rank with the most ranks that a layer may get.")
    return change_of(path, slot, layer)


def layer_error(slot: Slot, before: int | None, after: int, found: Decomposition, scale: float) -> LayerError:
    """Return the error of keeping `after` ranks of a decomposition whose matrix is used at `scale`."""
    sizes = tuple((found.sizes[:_MOST_SIZES] * abs(scale)).tolist())
    return LayerError(slot, before, after, found.error(after), abs(scale) * math.sqrt(found.energy), sizes)


def change_of(path: Path, slot: Slot, layer: Layer, base: Tensor | None = None) -> Tensor:
    """Return a layer's change as a matrix (outputs, inputs · kernel) in fp32, with alpha.

    `base` is the layer's weight in the base, fp32. Without it, raises LoraFileError for DoRA and OFT, whose change
    depends on it. Also for changes that do not fit the base, or are larger than any layer.
    """
    if isinstance(layer, LoraLayer):
        _require_modest(path, slot, layer.up.shape[0] * layer.down[0].numel())
        return scaled_product(layer)
    shape = tuple(base.shape) if base is not None else _base_shape(slot, layer)
    if not shape:
        title = ADAPTERS[layer.kind].title
        sentence = f"Could not use {path.name}: the change of {title} at {slot.kohya} depends on the base."
        remedy = "Merge it into its base with `lora merge --into`, then use `lora extract` on both bases."
        raise LoraFileError("lora.kind", sentence, remedy)
    _require_modest(path, slot, math.prod(shape))
    kind, weights = CHANGES[layer.kind], layer.for_layer(len(shape))
    shapes = {role: tuple(tensor.shape) for role, tensor in weights.items()}
    if not kind.fits(shapes, shape):
        sentence = f"Could not use {path.name}: the matrices at {slot.kohya} do not fit together or to the base."
        raise LoraFileError("lora.shape", sentence, "Choose a LoRA for a base of the same family and size.")
    frozen = _frozen(base if base is not None else torch.empty(shape, device="meta"))
    with torch.no_grad():
        change = kind(frozen, shapes, scale_of(shapes, layer.alpha), torch.float32)
        return change.weight_change(weights, frozen).flatten(1)


def _base_shape(slot: Slot, layer: LycorisWeights) -> tuple[int, ...]:
    """Return the shape of the layer's weight in the base as far as its own tensors show it; () if they do not."""
    weights, kernel = layer.weights, (slot.kernel, slot.kernel) if slot.kernel > 1 else ()
    area = math.prod(kernel)
    if layer.kind == "loha":
        return (len(weights["hada_w1_a"]), weights["hada_w1_b"].shape[1] // area, *kernel)
    if layer.kind != "lokr":
        return ()
    rows, columns = weights["lokr_w1"].shape
    if "lokr_w2" in weights:
        second = weights["lokr_w2"].shape
        return (rows * second[0], columns * second[1], *kernel)
    return (rows * len(weights["lokr_w2_a"]), columns * (weights["lokr_w2_b"].shape[1] // area), *kernel)


def _frozen(weight: Tensor) -> nn.Linear | nn.Conv2d:
    """Return a layer of the base with this weight."""
    outputs, inputs, *kernel = weight.shape
    with torch.device("meta"):
        layer = nn.Conv2d(inputs, outputs, kernel[0], bias=False) if kernel else nn.Linear(inputs, outputs, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _require_modest(path: Path, slot: Slot, numbers: int) -> None:
    if numbers > _LARGEST_CHANGE:
        sentence = f"Could not use {path.name}: its layer {slot.kohya} would change {numbers:,} weights."
        raise LoraFileError("lora.shape", sentence, "Choose a LoRA for SD 1.5 or SDXL; no layer of them is so large.")
