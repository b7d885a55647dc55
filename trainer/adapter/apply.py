"""Gives finished LoRAs to a base, for drawing with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from torch import nn

from trainer.adapter.layers import Factors, Size, inject, models_by_part
from trainer.adapter.names import Slot
from trainer.adapter.reading import LoraLayer, LoraWeights, fitted

Weighted = tuple[LoraWeights, float]  # strength
Scaled = tuple[LoraLayer, float]  # strength · alpha / rank


class AppliedLoras:
    """The LoRAs that models carry while pictures are drawn: others can take their place, or none.

    They stay apart from the base's weights, because a small change added to fp16 or bf16 weights is mostly rounded
    away; that costs the LoRAs' memory and some percent of the time, and leaves the base as it was, bit for bit.
    `dtype` is the one the base computes in. The models carry none when this is made.
    """

    def __init__(self, unet: nn.Module, text_encoders: Sequence[nn.Module], *, dtype: torch.dtype) -> None:
        self._models = models_by_part(unet, text_encoders)
        self._dtype = dtype
        self._factors: dict[Slot, Factors] = {}

    def use(self, loras: Sequence[Weighted]) -> None:
        """Put these LoRAs, each with its strength (1: as trained), in the place of those before.

        A sum of LoRAs is a LoRA of the sum of their ranks, so they become one. Where only strengths differ, or
        weights of the same ranks, as between steps of a run, just the numbers are written anew. Raises LoraFileError
        for other shapes; the models then carry none.
        """
        stacks: dict[Slot, list[Scaled]] = {}
        for lora, strength in loras:
            for slot, layer in lora.layers.items():
                stacks.setdefault(slot, []).append((layer, strength * layer.alpha / layer.rank))
        ranks = {slot: sum(layer.rank for layer, _ in stack) for slot, stack in stacks.items()}
        try:
            if ranks != {slot: factors.down.weight.shape[0] for slot, factors in self._factors.items()}:
                self.remove()
                self._inject(ranks)
            for slot, factors in self._factors.items():
                _fill(slot, factors, stacks[slot])
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Leave the models without LoRAs."""
        for model in self._models.values():
            recurse_remove_peft_layers(model)
            if hasattr(model, "peft_config"):
                del model.peft_config
        self._factors = {}

    def _inject(self, ranks: Mapping[Slot, int]) -> None:
        for part, model in self._models.items():
            sizes = {slot: Size(rank, rank) for slot, rank in ranks.items() if slot.part == part}
            if sizes:
                self._factors |= inject(model, sizes, self._dtype)


def _fill(slot: Slot, factors: Factors, stack: Sequence[Scaled]) -> None:
    """Stack the matrices of one layer's LoRAs along the rank; `up` takes the scale."""
    down, up = factors.down.weight, factors.up.weight
    downs = [fitted(slot, layer.down, (layer.rank, *down.shape[1:])) for layer, _ in stack]
    ups = [fitted(slot, layer.up, (up.shape[0], layer.rank, *up.shape[2:])) * scale for layer, scale in stack]
    down.requires_grad_(False).copy_(torch.cat(downs))
    up.requires_grad_(False).copy_(torch.cat(ups, dim=1))
