"""Copy an adapter of another method as a plain LoRA, which every program loads, and measure how far it is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer.adapter.attach import Adapter
from trainer.adapter.low_rank import RankRule, of_matrix
from trainer.adapter.lycoris import LycorisLayer
from trainer.adapter.names import Slot, file_key
from trainer.adapter.products import apply_weight

MOST_RANKS = 64
"""Most ranks of a layer's copy; SDXL's linear layers then take 0.7 GiB in fp16."""
# A layer's copy has no more ranks than it needs to keep all but this share of its change (Frobenius norm).
_NEGLIGIBLE = 1e-3


class PlainCopy(NamedTuple):
    """A LoRA that is near to an adapter of another method."""

    adapter: Adapter
    weights: dict[str, Tensor]
    """fp32 weights by file key, on the CPU."""
    error: float
    """How far its outputs are off in all layers that were run, as a share of the adapter's: ‖(ΔW - U D) x‖ / ‖ΔW x‖."""


def plain_copy(adapter: Adapter, weights: Mapping[str, Tensor], forward: Callable[[], object]) -> PlainCopy:
    """Return the LoRA with the changes nearest to those of an adapter with these master weights.

    By the truncated singular value decomposition of each layer's change (Eckart and Young 1936), computed as in Halko
    et al. 2011 with fixed random numbers, so that equal weights give equal copies. Each layer is copied while `forward`
    runs it: the change of a rotation depends on the base's weight, which a streamed base has only then, and the error
    is measured on the layer's inputs. Layers that do not run, such as those that clip_skip leaves out, come last.
    """
    factors: dict[Slot, tuple[Tensor, Tensor]] = {}
    sums: list[Tensor] = []

    def copy(slot: Slot, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if slot in factors:
            return
        change = _change(slot, cast(LycorisLayer, layer), weights)
        down, up = _low_rank(change)
        factors[slot] = down.cpu(), up.cpu()
        missing = change - (up.flatten(1) @ down.flatten(1)).view(change.shape)
        outputs = [
            apply_weight(cast(LycorisLayer, layer).frozen, inputs[0].float(), each) for each in (change, missing)
        ]
        sums.append(torch.stack([output.square().sum() for output in outputs]))

    hooks = [
        layer.register_forward_pre_hook(lambda module, inputs, slot=slot: copy(slot, module, inputs))
        for slot, layer in adapter.changes.items()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    for slot in adapter.changes.keys() - factors.keys():
        factors[slot] = _low_rank(_change(slot, adapter.changes[slot], weights))
    ranks = {slot.kohya: len(factors[slot][0]) for slot in adapter.slots}
    copied = Adapter(
        table=adapter.table,
        slots=adapter.slots,
        rank=ranks,
        alpha={name: float(rank) for name, rank in ranks.items()},
    )
    keys = {slot.down: down for slot, (down, _) in factors.items()} | {slot.up: up for slot, (_, up) in factors.items()}
    return PlainCopy(copied, {key: tensor.cpu() for key, tensor in keys.items()}, _share(sums))


def _share(sums: Sequence[Tensor]) -> float:
    """Return the root of the second sum of squares as a share of the first; 0 if there are none."""
    whole, missing = torch.stack(list(sums)).sum(0).tolist() if sums else (0.0, 0.0)
    return float((missing / whole) ** 0.5) if whole else 0.0


@torch.no_grad()
def _change(slot: Slot, layer: LycorisLayer, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the change of a layer's base weight in fp32, on the layer's device."""
    roles = [role for role, _ in layer.only.named_parameters(recurse=False)]
    device = layer.frozen.weight.device
    own = {role: weights[file_key(slot, role)].detach().to(device, torch.float32) for role in roles}
    return layer.only.weight_change(own, layer.frozen)


def _low_rank(change: Tensor) -> tuple[Tensor, Tensor]:
    """Return down and up, fp32, whose product is nearest to a change among those of at most `MOST_RANKS` ranks."""
    found = of_matrix(change.flatten(1), MOST_RANKS)
    rank = RankRule(rank=MOST_RANKS, share=(1 - _NEGLIGIBLE**2) ** 0.5).ranks(found)
    return found.factors(rank, change.shape[2:])
