"""Gives finished LoRAs to a base, for drawing with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer.adapter.layers import Factors, Size, inject, models_by_part
from trainer.adapter.names import Slot
from trainer.adapter.reading import LoraLayer, LoraWeights, fitted

Weighted = tuple[LoraWeights, float]  # strength
Scaled = tuple[LoraLayer, float]  # strength · alpha / rank


def apply_loras(
    unet: nn.Module, text_encoders: Sequence[nn.Module], loras: Sequence[Weighted], *, dtype: torch.dtype
) -> None:
    """Attach LoRAs, each with its strength (1: as trained), to models that carry none yet.

    A sum of LoRAs is a LoRA of the sum of their ranks, so they become one. They stay apart from the base's weights,
    because a small change added to fp16 or bf16 weights is mostly rounded away; that costs the LoRAs' memory and
    some percent of the time. `dtype` is the one the base computes in. Raises LoraFileError for other shapes.
    """
    stacks: dict[Slot, list[Scaled]] = {}
    for lora, strength in loras:
        for slot, layer in lora.layers.items():
            stacks.setdefault(slot, []).append((layer, strength * layer.alpha / layer.rank))
    for part, model in models_by_part(unet, text_encoders).items():
        ranks = {slot: sum(layer.rank for layer, _ in stack) for slot, stack in stacks.items() if slot.part == part}
        if ranks:
            sizes = {slot: Size(rank, rank) for slot, rank in ranks.items()}
            for slot, factors in inject(model, sizes, dtype).items():
                _fill(slot, factors, stacks[slot])


def _fill(slot: Slot, factors: Factors, stack: Sequence[Scaled]) -> None:
    """Stack the matrices of one layer's LoRAs along the rank; `up` takes the scale."""
    down, up = factors.down.weight, factors.up.weight
    downs = [fitted(slot, layer.down, (layer.rank, *down.shape[1:])) for layer, _ in stack]
    ups = [fitted(slot, layer.up, (up.shape[0], layer.rank, *up.shape[2:])) * scale for layer, scale in stack]
    down.requires_grad_(False).copy_(torch.cat(downs))
    up.requires_grad_(False).copy_(torch.cat(ups, dim=1))
