"""The adapter's fp32 masters: gradients add up in them, the optimizer moves them, the model computes with copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.errors import RunError

# As in torch.nn.utils.clip_grad_norm_: keeps the division safe.
CLIP_EPS = 1e-6
# torch.amp.GradScaler's defaults; ours reads nothing from the device, as the loop has read the norm already.
GROWTH = 2.0
BACK_OFF = 0.5
GOOD_STEPS_TO_GROW = 2000
LOWEST = 1.0


class MasterWeights:
    """fp32 masters of the working weights that the model computes with, under the same keys.

    float64 working weights get float64 masters. Gradients of low precision are added up here in fp32, so small
    micro-batches lose nothing against a large one.
    """

    def __init__(self, working: Mapping[str, Parameter]) -> None:
        self.working = dict(working)
        self.masters = {
            key: Parameter(weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True))
            for key, weight in self.working.items()
        }

    def accumulate(self) -> None:
        """Adds the working weights' gradients to the masters' and drops them. Call it after each micro-batch.

        They are widened side by side in one piece of memory, by one operation for all instead of one for each.
        """
        learning = [key for key, weight in self.working.items() if weight.grad is not None]
        if not learning:
            return
        wide = self._widened([self.working[key] for key in learning])
        totals: list[Tensor] = []
        additions: list[Tensor] = []
        for key, gradient in zip(learning, wide, strict=True):
            self.working[key].grad = None
            master = self.masters[key]
            if master.grad is None:
                master.grad = gradient
            else:
                totals.append(master.grad)
                additions.append(gradient)
        if totals:
            torch._foreach_add_(totals, additions)

    def _widened(self, weights: Sequence[Parameter]) -> list[Tensor]:
        gradients = [cast(Tensor, weight.grad) for weight in weights]
        dtype = next(iter(self.masters.values())).dtype
        whole = torch.empty(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)
        parts = torch.split(whole, [weight.numel() for weight in weights])
        wide = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        torch._foreach_copy_(wide, gradients)
        return wide

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the masters into the working weights. Call it whenever the masters have changed."""
        torch._foreach_copy_(list(self.working.values()), list(self.masters.values()))

    def zero_grad(self, *, keep: bool = False) -> None:
        """Drops all gradients, the working weights' too (an interrupted micro-batch may have left some).

        With ``keep`` the masters' become zeros where they lie, as recorded graphs add to them there.
        """
        weights = self.working.values() if keep else (*self.masters.values(), *self.working.values())
        for weight in weights:
            weight.grad = None
        if keep and (gradients := self.gradients()):
            torch._foreach_zero_(gradients)

    def discard(self) -> None:
        """Frees the memory of masters and gradients, whoever refers to them; they can only be thrown away then."""
        self.zero_grad()
        for master in self.masters.values():
            master.untyped_storage().resize_(0)

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


@dataclass(slots=True)
class LossScaler:
    """The scale in force and the good steps since it last changed; both are saved in checkpoints."""

    scale: float = 65536.0
    good_steps: int = 0

    @property
    def may_back_off(self) -> bool:
        """Whether an overflow can still be answered by a smaller scale."""
        return self.scale > LOWEST

    def update(self, *, finite: bool) -> None:
        """Notes a step: the scale halves when something was not finite, and doubles after 2000 good steps in a row."""
        if not finite:
            self.scale = max(LOWEST, self.scale * BACK_OFF)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS_TO_GROW:
            self.scale *= GROWTH
            self.good_steps = 0

    def state(self) -> dict[str, float | int]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float | int]) -> None:
        """Goes on from a checkpoint."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
