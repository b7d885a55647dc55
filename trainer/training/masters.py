"""The adapter's fp32 masters: gradients add up in them, the optimizer moves them, the model computes with copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Parameter

from trainer.errors import RunError

# As in torch.nn.utils.clip_grad_norm_: keeps the division safe.
CLIP_EPS = 1e-6


class MasterWeights:
    """fp32 masters of the working weights that the model computes with, under the same keys.

    float64 working weights get float64 masters. Gradients of low precision are added up here in fp32, so small
    micro-batches lose nothing against a large one.
    """

    def __init__(self, working: Mapping[str, Parameter], *, together: bool = False) -> None:
        """With ``together`` gradients are widened in one piece: a few operations, not one for every weight."""
        self.working = dict(working)
        self.together = together
        self.masters = {
            key: Parameter(weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True))
            for key, weight in self.working.items()
        }

    def accumulate(self) -> None:
        """Adds the working weights' gradients to the masters' and drops them. Call it after each micro-batch."""
        if self.together:
            self._accumulate_together()
            return
        totals: list[Tensor] = []
        additions: list[Tensor] = []
        for key, weight in self.working.items():
            if weight.grad is None:
                continue
            master = self.masters[key]
            if master.grad is None:
                master.grad = weight.grad.to(master.dtype)
            else:
                totals.append(master.grad)
                additions.append(weight.grad)
            weight.grad = None
        if totals:
            torch._foreach_add_(totals, additions)

    def _accumulate_together(self) -> None:
        """The same, bit for bit: all gradients laid side by side and widened at once, their parts then taken over."""
        learning = [key for key, weight in self.working.items() if weight.grad is not None]
        gradients = [gradient for key in learning if (gradient := self.working[key].grad) is not None]
        if not gradients:
            return
        whole = _flatten_dense_tensors(gradients).to(self.masters[learning[0]].dtype)  # type: ignore[no-untyped-call]
        totals: list[Tensor] = []
        additions: list[Tensor] = []
        for key, part in zip(learning, _unflatten_dense_tensors(whole, gradients), strict=True):  # type: ignore[no-untyped-call]
            self.working[key].grad = None
            master = self.masters[key]
            if master.grad is None:
                master.grad = part
            else:
                totals.append(master.grad)
                additions.append(part)
        if totals:
            torch._foreach_add_(totals, additions)

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the masters into the working weights. Call it whenever the masters have changed."""
        torch._foreach_copy_(list(self.working.values()), list(self.masters.values()))

    def zero_grad(self) -> None:
        """Drops all gradients, the working weights' too (an interrupted micro-batch may have left some)."""
        for weight in (*self.masters.values(), *self.working.values()):
            weight.grad = None

    def gradients(self) -> list[Tensor]:
        """The masters' gradients, in their order; a weight that had no part in the step has none."""
        return [master.grad for master in self.masters.values() if master.grad is not None]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over saved masters and refreshes the working weights; nothing is changed if they do not fit.

        Raises RunError when the keys or shapes are not those of this adapter.
        """
        odd = sorted(weights.keys() ^ self.masters.keys())
        odd += [key for key, master in self.masters.items() if key in weights and weights[key].shape != master.shape]
        if odd:
            raise RunError(
                "run.adapter",
                f"The saved weights do not fit the adapter of this job: {len(odd)} of them differ, first {odd[0]}.",
                "Resume with the job that the run was started with, or start a new run.",
            )
        for key, master in self.masters.items():
            master.copy_(weights[key])
        self.refresh()


def measure(loss: Tensor, masters: MasterWeights, scale: float = 1.0) -> Tensor:
    """The loss and the norm of the whole gradient without the loss scale, in one tensor (2,): one host read for both.

    Either is infinite or NaN if anything in it is.
    """
    norms = torch._foreach_norm(masters.gradients())
    norm = torch.linalg.vector_norm(torch.stack(norms)) / scale
    return torch.stack([loss, norm.to(loss.dtype)])


def clip(masters: MasterWeights, norm: float, limit: float, scale: float = 1.0) -> None:
    """Takes the loss scale out of the gradients and shortens them to ``limit`` if ``norm`` is longer; 0: no limit.

    ``norm`` is what :func:`measure` gave. Equals torch.nn.utils.clip_grad_norm_ over all masters together.
    """
    factor = 1.0 / scale
    if limit > 0.0:
        factor *= min(1.0, limit / (norm + CLIP_EPS))
    if factor != 1.0:
        torch._foreach_mul_(masters.gradients(), factor)
