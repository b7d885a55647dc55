"""Apply finished LoRAs, and files of other LyCORIS methods, to the models that render images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from torch import nn

from trainer.adapter.attach import Factors, inject, models_by_part, module_path
from trainer.adapter.layers import LayerSettings
from trainer.adapter.lycoris import CHANGES, Change, LycorisLayer, scale_of
from trainer.adapter.names import Slot
from trainer.adapter.products import Frozen, base_shape
from trainer.adapter.reading import LoraLayer, LoraWeights, LycorisWeights, reshape_to_layer
from trainer.errors import LoraFileError

WeightedLora = tuple[LoraWeights, float]  # strength
Scaled = tuple[LoraLayer, float]  # strength · alpha / rank
Weighted = tuple[LycorisWeights, float]  # strength


class AppliedLoras:
    """Finished LoRAs that are applied to the models that render images, and can be replaced or removed.

    They are not merged into the base: a small change added to fp16 or bf16 weights is mostly rounded away. Keeping them
    separate takes memory for their weights and a few percent more time, but leaves the base bit-identical. `dtype` is
    the one the base computes in. The models must have no LoRAs when this object is created.
    """

    def __init__(self, unet: nn.Module, text_encoders: Sequence[nn.Module], *, dtype: torch.dtype) -> None:
        self._models = models_by_part(unet, text_encoders)
        self._dtype = dtype
        self._factors: dict[Slot, Factors] = {}
        self._wrapped: dict[Slot, LycorisLayer] = {}

    def use(self, loras: Sequence[WeightedLora]) -> None:
        """Apply these LoRAs, each with its strength (1: as trained), in place of the current ones.

        A sum of LoRAs is a single LoRA whose rank is the sum of their ranks, so they are stacked into one. If the ranks
        are unchanged, as between steps of a run, only the values are overwritten. Raises LoraFileError for shapes that
        do not match the base; the models then have no LoRAs.
        """
        stacks: dict[Slot, list[Scaled]] = {}
        others: dict[Slot, list[Weighted]] = {}
        for lora, strength in loras:
            for slot, layer in lora.layers.items():
                if isinstance(layer, LycorisWeights):
                    others.setdefault(slot, []).append((layer, strength))
                else:
                    stacks.setdefault(slot, []).append((layer, strength * layer.alpha / layer.rank))
        ranks = {slot: sum(layer.rank for layer, _ in stack) for slot, stack in stacks.items()}
        try:
            self._unwrap()
            if ranks != {slot: factors.down.weight.shape[0] for slot, factors in self._factors.items()}:
                self.remove()
                self._inject(ranks)
            for slot, factors in self._factors.items():
                _fill(slot, factors, stacks[slot])
            for slot, weighted in others.items():
                self._wrap(slot, weighted)
        except BaseException:  # also Ctrl-C: partly filled layers would silently change every image
            self.remove()
            raise

    def remove(self) -> None:
        """Remove all LoRAs from the models."""
        self._unwrap()
        for model in self._models.values():
            recurse_remove_peft_layers(model)
            if hasattr(model, "peft_config"):
                del model.peft_config
        self._factors = {}

    def _inject(self, ranks: Mapping[Slot, int]) -> None:
        for part, model in self._models.items():
            # With alpha = rank, PEFT's scale is 1: `_fill` multiplies each LoRA's own scale into `up`.
            sizes = {slot: LayerSettings(rank, rank) for slot, rank in ranks.items() if slot.part == part}
            if sizes:
                self._factors |= inject(model, sizes, self._dtype)

    def _wrap(self, slot: Slot, weighted: Sequence[Weighted]) -> None:
        """Wrap a layer, which may have a stacked LoRA, in one with the changes of other methods."""
        model = self._models[slot.part]
        path = module_path(model, slot)
        layer = LycorisLayer(model.get_submodule(path), [])
        for each, strength in weighted:
            layer.changes.append(_filled(slot, layer.frozen, each, self._dtype))
            layer.strengths.append(strength)
        self._wrapped[slot] = layer
        model.set_submodule(path, layer)

    def _unwrap(self) -> None:
        for slot, layer in self._wrapped.items():
            model = self._models[slot.part]
            model.set_submodule(module_path(model, slot), layer.base_layer)
        self._wrapped = {}


def _filled(slot: Slot, frozen: Frozen, layer: LycorisWeights, dtype: torch.dtype) -> Change:
    """Return the change of one layer with a file's weights; raise LoraFileError if they do not fit."""
    base, kind = base_shape(frozen), CHANGES[layer.kind]
    weights = layer.for_layer(len(base))
    shapes = {role: tuple(tensor.shape) for role, tensor in weights.items()}
    if not kind.fits(shapes, base):
        found = " and ".join("×".join(map(str, shape)) for shape in shapes.values())
        raise LoraFileError(
            "lora.shape",
            f"The LoRA does not fit this base: {slot.kohya} has the shapes {found} for {'×'.join(map(str, base))}.",
            "Choose a LoRA for a base of the same family and size.",
        )
    change = kind(frozen, shapes, scale_of(shapes, layer.alpha), dtype).requires_grad_(False)
    for role, parameter in change.named_parameters():
        parameter.copy_(weights[role])
    return change


def _fill(slot: Slot, factors: Factors, stack: Sequence[Scaled]) -> None:
    """Fill `factors` with one layer's LoRAs, stacked along the rank, with each scale multiplied into `up`."""
    down, up = factors.down.weight, factors.up.weight
    downs = [reshape_to_layer(slot, layer.down, (layer.rank, *down.shape[1:])) for layer, _ in stack]
    ups = [reshape_to_layer(slot, layer.up, (up.shape[0], layer.rank, *up.shape[2:])) * scale for layer, scale in stack]
    down.requires_grad_(False).copy_(torch.cat(downs))
    up.requires_grad_(False).copy_(torch.cat(ups, dim=1))
