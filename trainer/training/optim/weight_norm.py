"""Limit the norm of each layer's LoRA after every optimizer step, as sd-scripts does with scale_weight_norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.adapter.attach import Adapter
from trainer.training.optim.master_weights import MasterWeights


class _Alike(NamedTuple):
    """Layers whose matrices have the same shapes and scale, so that one batched product measures all of them."""

    downs: Sequence[Parameter]
    ups: Sequence[Parameter]
    scale: float
    """alpha / rank."""


class WeightNormLimit:
    """Scales down layers whose change of the base weight, alpha / rank · up · down, has a larger Frobenius norm.

    Both matrices are multiplied by sqrt(limit / norm) (sd-scripts, LoRANetwork.apply_max_norm_regularization). Nothing
    is read from the device.
    """

    def __init__(self, limit: float, groups: Sequence[_Alike]) -> None:
        self._limit = limit
        self._groups = groups

    @classmethod
    def create(cls, limit: float | None, adapter: Adapter, masters: MasterWeights) -> WeightNormLimit | None:
        """Return the limit for the master weights that an adapter trains; None if the recipe sets none."""
        if limit is None:
            return None
        alike: defaultdict[tuple[torch.Size, torch.Size, float], list[tuple[Parameter, Parameter]]] = defaultdict(list)
        for slot in adapter.slots:
            if slot.part in adapter.frozen:
                continue
            down, up = masters.masters[slot.down], masters.masters[slot.up]
            scale = adapter.alpha[slot.kohya] / adapter.rank[slot.kohya]
            alike[down.shape, up.shape, scale].append((down, up))
        groups = [
            _Alike([down for down, _ in layers], [up for _, up in layers], scale)
            for (_, _, scale), layers in alike.items()
        ]
        return cls(limit, groups)

    @torch.no_grad()
    def apply(self) -> None:
        """Scale down the layers that are above the limit; costs a copy of the largest group of equal shapes."""
        for downs, ups, scale in self._groups:
            factors = (self._limit / scale / _norms(downs, ups)).clamp(max=1.0).sqrt().unbind()
            for weights in (downs, ups):
                torch._foreach_mul_(list(weights), factors)


def _norms(downs: Sequence[Tensor], ups: Sequence[Tensor]) -> Tensor:
    """Return the Frobenius norm of each product up · down, (layers,), from two matrices of rank × rank.

    |U D|² is the trace of (UᵀU)(DDᵀ), so no matrix of the base weight's size is needed. A convolution's kernel counts
    as inputs of `down`.
    """
    down = torch.stack([weight.flatten(1) for weight in downs])
    up = torch.stack([weight.flatten(1) for weight in ups])
    squares = (down @ down.mT) * (up.mT @ up)
    return squares.sum(dim=(1, 2)).clamp(min=0.0).sqrt()
