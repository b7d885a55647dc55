"""EMA of the adapter: an exponential moving average of its master weights, which is exported and previewed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.errors import RunError
from trainer.training.optim.master_weights import MasterWeights

# The first averages would be mostly the untrained weights; the formula of `decay_at` lets them go early.
_WARMUP_NUMERATOR = 1
_WARMUP_DENOMINATOR = 10


class WeightAverage:
    """Exponential moving average (EMA) of the master weights, under the same keys and in the same dtype.

    It is next to the master weights on the device, so an update is one pass over memory that reads nothing back; in
    main memory, each step would have to wait for a copy of all master weights. Costs 4 bytes for each trained number.
    """

    def __init__(self, decay: float, masters: MasterWeights) -> None:
        self._decay = decay
        self._masters = masters
        self.weights = {key: master.detach().clone() for key, master in masters.masters.items()}

    @classmethod
    def create(cls, decay: float | None, masters: MasterWeights) -> WeightAverage | None:
        """Return the average that a recipe asks for; None if ``decay`` is None."""
        return None if decay is None else cls(decay, masters)

    def decay_at(self, updates: int) -> float:
        """Return the share of the average that remains in the next update, after ``updates`` earlier ones.

        min(decay, (1 + t) / (10 + t)), as in TensorFlow's ExponentialMovingAverage with num_updates, and in OneTrainer.
        """
        return min(self._decay, (_WARMUP_NUMERATOR + updates) / (_WARMUP_DENOMINATOR + updates))

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Move the average toward the master weights, in place; call this after each step that changed them."""
        masters: list[Tensor] = list(self._masters.masters.values())
        torch._foreach_lerp_(list(self.weights.values()), masters, 1.0 - self.decay_at(updates))

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy saved averages into this one.

        Raises RunError, and changes nothing, if the keys or shapes do not match this adapter.
        """
        shapes = {key: weight.shape for key, weight in weights.items()}
        if shapes != {key: weight.shape for key, weight in self.weights.items()}:
            raise RunError(
                "run.ema",
                "Could not load the saved EMA weights: they do not match this job's adapter.",
                "Resume with the job that the run was started with, or start a new run.",
            )
        for key, weight in self.weights.items():
            weight.copy_(weights[key])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the model compute with the average inside the block; needs no memory, because it is only copied."""
        working = self._masters.working
        try:
            with torch.no_grad():
                torch._foreach_copy_(list(working.values()), list(self.weights.values()))
            yield
        finally:
            # After running out of memory, an offloaded UNet may be without memory; recovery then builds it again.
            if all(weight.untyped_storage().nbytes() for weight in working.values()):
                self._masters.refresh()

    def discard(self) -> None:
        """Free the memory of the average even if it is referenced; it becomes unusable."""
        for weight in self.weights.values():
            weight.untyped_storage().resize_(0)
