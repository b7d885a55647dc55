"""The adapter's fp32 master weights, which the optimizer updates; the model computes with rounded copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.errors import RunError

# As in torch.nn.utils.clip_grad_norm_: avoids a division by zero.
CLIP_EPS = 1e-6
# The defaults of torch.amp.GradScaler. This scaler reads nothing from the device, because the loop has already read the
# norm.
GROWTH = 2.0
BACK_OFF = 0.5
GOOD_STEPS_TO_GROW = 2000
LOWEST = 1.0


class MasterWeights:
    """fp32 master weights for the working weights that the model computes with, under the same keys.

    float64 working weights get float64 master weights. Low-precision gradients are added up here in fp32, so many
    small micro-batches are as precise as a large one.
    """

    def __init__(self, working: Mapping[str, Parameter]) -> None:
        self.working = dict(working)
        self.masters = {
            key: Parameter(weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True))
            for key, weight in self.working.items()
        }

    def accumulate(self) -> None:
        """Move the working weights' gradients into the master weights; call this after each micro-batch.

        One operation converts all of them to fp32 in a single block of memory; then they are added up.
        """
        with_gradient = [key for key, weight in self.working.items() if weight.grad is not None]
        if not with_gradient:
            return
        wide = self._widened([self.working[key] for key in with_gradient])
        totals: list[Tensor] = []
        additions: list[Tensor] = []
        for key, gradient in zip(with_gradient, wide, strict=True):
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
        """Copy the master weights, rounded, to the working weights; call this whenever they have changed."""
        torch._foreach_copy_(list(self.working.values()), list(self.masters.values()))

    def zero_grad(self, *, keep: bool = False) -> None:
        """Drop all gradients, including those that an interrupted micro-batch left in the working weights.

        With ``keep``, the master weights' gradients are zeroed in place, because recorded graphs add to that memory.
        """
        weights = self.working.values() if keep else (*self.masters.values(), *self.working.values())
        for weight in weights:
            weight.grad = None
        if keep and (gradients := self.gradients()):
            torch._foreach_zero_(gradients)

    def discard(self) -> None:
        """Free the memory of master weights and gradients even if they are referenced; they become unusable."""
        self.zero_grad()
        for master in self.masters.values():
            master.untyped_storage().resize_(0)

    def gradients(self) -> list[Tensor]:
        """Return the master weights' gradients, in order, omitting weights that have none."""
        return [master.grad for master in self.masters.values() if master.grad is not None]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy saved weights into the master weights and refresh the working weights.

        Raises RunError, and changes nothing, if the keys or shapes do not match this adapter.
        """
        unmatched = sorted(weights.keys() ^ self.masters.keys())
        unmatched += [
            key for key, master in self.masters.items() if key in weights and weights[key].shape != master.shape
        ]
        if unmatched:
            raise RunError(
                "run.adapter",
                f"Could not load the saved weights: {len(unmatched)} of them do not match this job's adapter, such as "
                f"{unmatched[0]}.",
                "Resume with the job that the run was started with, or start a new run.",
            )
        for key, master in self.masters.items():
            master.copy_(weights[key])
        self.refresh()


def measure(loss: Tensor, masters: MasterWeights, scale: float = 1.0) -> Tensor:
    """Return the loss and the norm of the whole unscaled gradient in one tensor (2,), so one read gets both.

    Each is infinite or NaN if anything that it is computed from is.
    """
    norms = torch._foreach_norm(masters.gradients())
    norm = torch.linalg.vector_norm(torch.stack(norms)) / scale
    return torch.stack([loss, norm.to(loss.dtype)])


def clip(masters: MasterWeights, norm: float, limit: float, scale: float = 1.0) -> None:
    """Unscale the gradients and clip their norm to ``limit``; 0 means no limit.

    ``norm`` comes from :func:`measure`. Equivalent to torch.nn.utils.clip_grad_norm_ over all master weights.
    """
    factor = 1.0 / scale
    if limit > 0.0:
        factor *= min(1.0, limit / (norm + CLIP_EPS))
    if factor != 1.0:
        torch._foreach_mul_(masters.gradients(), factor)


@dataclass(slots=True)
class LossScaler:
    """The fp16 loss scale and the number of finite steps since it last changed; checkpoints contain both."""

    scale: float = 65536.0
    good_steps: int = 0

    @property
    def may_back_off(self) -> bool:
        """Return whether the scale can be lowered after an overflow."""
        return self.scale > LOWEST

    def update(self, *, finite: bool) -> None:
        """Update the scale: halve it after a step that is not finite, double it after 2000 finite steps in a row."""
        if not finite:
            self.scale = max(LOWEST, self.scale * BACK_OFF)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS_TO_GROW:
            self.scale *= GROWTH
            self.good_steps = 0

    def state(self) -> dict[str, float | int]:
        """Return the scaler's state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float | int]) -> None:
        """Restore the scaler's state from a checkpoint."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
