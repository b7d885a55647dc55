"""Recipes of the adapters in LyCORIS's format, and the changes that LyCORIS's own modules make."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from tests.support.loras import EVERYTHING
from trainer.config.recipe import RecipeConfig

logging.getLogger("LyCORIS").setLevel(logging.ERROR)  # it logs a line per large rank


def recipe(kind: str, **changes: Any) -> RecipeConfig:
    return RecipeConfig.model_validate({**EVERYTHING.model_dump(), "adapter": kind, **changes})


def change_of(twin: Any, frozen: Any) -> Tensor:
    """The change of the weight that LyCORIS trains with; its get_diff_weight scales LoHa and LoKr twice."""
    shape = frozen.weight.shape
    if getattr(twin, "wd", False):
        merged: Tensor = twin.get_merged_weight(shape=shape)[0]
        return merged - frozen.weight
    is_product = twin.name in ("hada", "loha", "kron")
    change: Tensor = twin.get_weight(shape) if is_product else twin.get_diff_weight(shape=shape)[0]
    return change.view(shape)
