"""Stop training text encoders after their last step, as OneTrainer does with stop_training_after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.adapter.attach import Adapter
from trainer.config.base import Part
from trainer.config.recipe import RecipeConfig
from trainer.errors import JobError
from trainer.training.optim.master_weights import MasterWeights
from trainer.training.optim.optimizer import averaged_weights


class TextEncoderStops:
    """Freezes the LoRAs of text encoders after their last steps, and frees what only training them needs.

    A frozen LoRA gets no gradients, and the optimizer does not know it, so that neither updates nor weight decay change
    it; its master weights stay for export and checkpoints. Captions are still encoded with it in each step, without
    dropout. What is frozen depends on the number of completed steps alone, so resumed and replayed runs agree.
    """

    def __init__(self, after: Mapping[Part, int], adapter: Adapter, masters: MasterWeights, optimizer: Optimizer):
        self.after = after
        """Number of steps for which each of these parts is trained."""
        self._adapter = adapter
        self._masters = masters
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = list(optimizer.param_groups)

    @classmethod
    def create(
        cls, recipe: RecipeConfig, adapter: Adapter, masters: MasterWeights, optimizer: Optimizer
    ) -> TextEncoderStops | None:
        """Return the stops of a recipe; None if it has none.

        Raises JobError if nothing would be trained after them, because blocks leave out all of the UNet.
        """
        after = recipe.stops
        if not after:
            return None
        if all(group["part"] in after for group in optimizer.param_groups):
            raise JobError(
                "job.stop_after",
                f"Could not train: nothing is left to train after step {max(after.values())}, when the text encoders "
                "stop, because no layer of the UNet is trained.",
                "Remove stop_after of a text encoder, or change recipe.blocks.",
            )
        return cls(after, adapter, masters, optimizer)

    def follow(self, done: int) -> bool:
        """Freeze the parts whose last step is among the ``done`` ones, and no others; return whether that changes any.

        Parts that are trained again, after a return to an earlier step, need their optimizer state restored.
        """
        frozen = frozenset(part for part, last in self.after.items() if done >= last)
        if frozen == self._adapter.frozen:
            return False
        self._settle(frozen - self._adapter.frozen)
        self._adapter.frozen = frozen
        for key, weight in self._masters.working.items():
            is_frozen = self._adapter.part_of[key] in frozen
            weight.requires_grad_(not is_frozen)
            if is_frozen:
                weight.grad = self._masters.masters[key].grad = None
        # In place, because libraries and hooks refer to this list.
        self._optimizer.param_groups[:] = [group for group in self._groups if group["part"] not in frozen]
        for group in self._groups:
            for weight in group["params"] if group["part"] in frozen else ():
                self._optimizer.state.pop(weight, None)
        return True

    def _settle(self, parts: frozenset[Part]) -> None:
        """Give the LoRAs of ``parts`` the averaged weights of Schedule-Free, which files have; others keep theirs."""
        keys = [key for key, part in self._adapter.part_of.items() if part in parts]
        with averaged_weights(self._optimizer, self._masters):
            kept = {key: self._masters.masters[key].detach().clone() for key in keys}
        with torch.no_grad():
            for key, average in kept.items():
                self._masters.masters[key].copy_(average)
        self._masters.refresh()
