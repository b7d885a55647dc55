"""Copy an adapter of another method as a plain LoRA, which every program loads, and measure how far it is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from trainer.adapter.attach import Adapter
from trainer.adapter.lycoris import LycorisLayer
from trainer.adapter.names import Slot, file_key
from trainer.adapter.products import apply_weight

MOST_RANKS = 64
"""Most ranks of a layer's copy; SDXL's linear layers then take 0.7 GiB in fp16."""
_OVERSAMPLING = 16
_ITERATIONS = 4
# A layer's copy has no more ranks than it needs to keep all but this share of its change (Frobenius norm).
_NEGLIGIBLE = 1e-3


def plain_copy(adapter: Adapter, weights: Mapping[str, Tensor]) -> tuple[Adapter, dict[str, Tensor]]:
    """Return a LoRA and its fp32 weights with the changes nearest to those of an adapter with these master weights.

    By the truncated singular value decomposition of each layer's change (Eckart and Young 1936), computed as in Halko
    et al. 2011 with fixed random numbers, so that equal weights give equal copies.
    """
    copied: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for slot, layer in adapter.changes.items():
        down, up = _low_rank(_change(slot, layer, weights))
        ranks[slot.kohya] = len(down)
        copied[slot.down], copied[slot.up] = down.cpu(), up.cpu()
    copy = Adapter(
        table=adapter.table,
        slots=adapter.slots,
        rank=ranks,
        alpha={name: float(rank) for name, rank in ranks.items()},
    )
    return copy, copied


def output_error(
    adapter: Adapter, weights: Mapping[str, Tensor], copied: Mapping[str, Tensor], forward: Callable[[], object]
) -> float:
    """Return how far the copy's outputs are off in all layers that `forward` runs, as a share of the adapter's.

    ‖(ΔW - U D) x‖ / ‖ΔW x‖ over the layers' real inputs x; 0 if the adapter changes nothing.
    """
    sums: list[Tensor] = []

    def measure(slot: Slot, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        frozen, x = cast(LycorisLayer, layer).frozen, inputs[0].float()
        change = _change(slot, cast(LycorisLayer, layer), weights)
        up, down = (copied[key].to(x.device).flatten(1) for key in (slot.up, slot.down))
        outputs = [apply_weight(frozen, x, matrix) for matrix in (change, change - (up @ down).view(change.shape))]
        sums.append(torch.stack([output.square().sum() for output in outputs]))

    hooks = [
        layer.register_forward_pre_hook(lambda module, inputs, slot=slot: measure(slot, module, inputs))
        for slot, layer in adapter.changes.items()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    whole, missing = torch.stack(sums).sum(0).tolist()
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
    matrix = change.flatten(1)
    wanted = min(MOST_RANKS + _OVERSAMPLING, *matrix.shape)
    with torch.random.fork_rng(devices=[] if matrix.device.type == "cpu" else [matrix.device]):
        torch.manual_seed(0)
        u, sizes, v = torch.svd_lowrank(matrix, wanted, niter=_ITERATIONS)
    # Energy of the parts that are left out after each rank; what the decomposition itself missed counts as well.
    left = (matrix.square().sum() - sizes.square().cumsum(0)).clamp(min=0.0)
    needed = int((left > _NEGLIGIBLE**2 * matrix.square().sum()).sum()) + 1
    rank = min(needed, MOST_RANKS, len(sizes))
    root = sizes[:rank].sqrt()
    kernel = change.shape[2:]
    down = (v[:, :rank] * root).t().contiguous().view(rank, -1, *kernel)
    return down, (u[:, :rank] * root).contiguous().view(len(matrix), rank, *(1 for _ in kernel))
