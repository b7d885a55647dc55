"""Singular value decomposition of a layer's change, and the choice of how many ranks to keep.

The criteria are those of `networks/resize_lora.py` of kohya's sd-scripts: sv_fro (`share`), sv_ratio (`ratio`) and
sv_cumulative (`sum_share`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Up to this side, a whole decomposition takes less than a tenth of a second; beyond, only the largest singular values
# are computed.
_WHOLE = 320
_OVERSAMPLING = 16
_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The largest singular values of a matrix and their vectors: u · diag(sizes) · vᵀ is the nearest of its rank."""

    u: Tensor
    """(outputs, count)."""
    sizes: Tensor
    """Singular values, largest first: (count,)."""
    v: Tensor
    """(inputs, count)."""
    missed: float = 0.0
    """Sum of the squares of what the decomposition leaves out of the matrix."""

    @property
    def energy(self) -> float:
        """Return the sum of the squares of all numbers of the matrix."""
        return self.missed + float(self.sizes.double().square().sum())

    def error(self, rank: int) -> float:
        """Return the relative error of keeping `rank` ranks: ‖W - W_rank‖ / ‖W‖ (Frobenius); 0 for a zero matrix."""
        left = self.missed + float(self.sizes[rank:].double().square().sum())
        return (left / self.energy) ** 0.5 if left else 0.0

    def factors(self, rank: int, kernel: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return down (rank, inputs, *kernel) and up (outputs, rank, 1 for each side of a kernel) in fp32.

        Both get the roots of the singular values, because values of a wide range of sizes lose the most in fp16.
        """
        root = self.sizes[:rank].sqrt()
        down = (self.v[:, :rank] * root).t().float().contiguous().view(rank, -1, *kernel)
        up = (self.u[:, :rank] * root).float().contiguous().view(len(self.u), rank, *(1 for _ in kernel))
        return down, up


@dataclass(frozen=True, slots=True)
class RankRule:
    """How many ranks to keep; at least one of the first two or `sum_share` is set, and `rank` limits the others."""

    rank: int | None = None
    """Number of ranks."""
    share: float | None = None
    """Share of the change's Frobenius norm that stays (kohya: sv_fro), 0 to 1."""
    ratio: float | None = None
    """Largest singular value divided by the smallest that stays (kohya: sv_ratio), above 1."""
    sum_share: float | None = None
    """Share of the sum of singular values that stays (kohya: sv_cumulative), 0 to 1."""

    def ranks(self, found: Decomposition) -> int:
        """Return how many ranks to keep of a decomposition, at least 1."""
        sizes = found.sizes.cpu().double()
        count = int((sizes > 0).sum())
        wanted = count if self.rank is None else min(self.rank, count)
        if self.share is not None:
            kept = sizes.square().cumsum(0)
            wanted = min(wanted, int((kept < self.share**2 * found.energy * (1 - 1e-12)).sum()) + 1)
        if self.ratio is not None and count:
            wanted = min(wanted, int((sizes > sizes[0] / self.ratio).sum()))
        if self.sum_share is not None:
            kept = sizes.cumsum(0)
            wanted = min(wanted, int((kept < self.sum_share * kept[-1] * (1 - 1e-12)).sum()) + 1)
        return max(1, wanted)


def of_product(up: Tensor, down: Tensor) -> Decomposition:
    """Return the whole decomposition of up (outputs, rank) · down (rank, inputs) without building the product.

    By the QR decompositions of both factors and the singular values of the small matrix between them, in fp64.
    """
    q_up, r_up = torch.linalg.qr(up.double())
    q_down, r_down = torch.linalg.qr(down.double().t())
    u, sizes, v = torch.linalg.svd(r_up @ r_down.t())
    count = len(sizes)
    return Decomposition(q_up @ u[:, :count], sizes, q_down @ v[:count].t())


def of_matrix(matrix: Tensor, most: int) -> Decomposition:
    """Return the decomposition of a matrix (outputs, inputs) with at least its `most` largest singular values.

    Of large matrices only these are computed, as in Halko et al. 2011, with fixed random numbers so that equal matrices
    give equal results.
    """
    wanted = min(most + _OVERSAMPLING, *matrix.shape)
    if min(matrix.shape) <= max(_WHOLE, wanted):
        u, sizes, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        return Decomposition(u, sizes, v.t())
    with torch.random.fork_rng(devices=[] if matrix.device.type == "cpu" else [matrix.device]):
        torch.manual_seed(0)
        u, sizes, v = torch.svd_lowrank(matrix, wanted, niter=_ITERATIONS)
    return Decomposition(u, sizes, v, float((matrix - (u * sizes) @ v.t()).double().square().sum()))
