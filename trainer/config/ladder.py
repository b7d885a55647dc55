"""The rungs that a run steps down when memory runs out: written by the planner, taken by recovery."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.config.fit import BlockNames
from trainer.config.model import Section


class RungConfig(Section):
    """One step down: the keys of the fit that change from there on; absent keys stay as they are."""

    exact: bool
    """Whether the result stays the same bit for bit (on the CPU or with deterministic = true)."""
    checkpointing: Literal["none", "full"] | BlockNames | None = None
    """As in the fit."""
    micro_batch: int | None = Field(default=None, ge=1, le=512)
    """As in the fit."""
    vae_dtype: Literal["bf16"] | None = None
    """As in the fit."""
    vae_encode_tiling: bool | None = None
    """As in the fit."""
    text_encoder_batch_size: int | None = Field(default=None, ge=1, le=64)
    """As in the fit."""
    vae_tiling: bool | None = None
    """As in the fit."""
    preview_offload: bool | None = None
    """As in the fit."""
    quantise: Literal["int8", "nf4"] | None = None
    """As in the fit; only where the job allows it."""
