"""A tape: every storage that a phase takes and gives back, in order, and the work done between. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

StorageKind = Literal["weights", "adapter", "gradients", "optimizer", "activations", "temporary", "workspace"]
WorkKind = Literal["gemm", "conv", "attention", "other"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of device memory."""

    bytes: int
    """As requested, before the allocator rounds."""
    kind: StorageKind
    module: str
    """Dotted path of the module it belongs to, such as "unet.up_blocks.1.attentions.0"; "" for none."""
    stage: str
    """What was going on when it was born, such as "forward" or "backward"."""
    name: str | None = None
    """Set when it outlives its tape, so that a later tape can free it: unique among what lives at once."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one kind and size: what their time on a card is computed from."""

    kind: WorkKind
    dtype: str
    """The number format it computes in: "bfloat16", "float16", "float32", "uint8"."""
    stage: str
    flops: int
    """Of one operation: a multiply-add counts two."""
    bytes: int
    """That one operation reads and writes."""
    count: int
    """How many operations of this shape there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """What one phase, or one repeatable part of it, does to memory; each is itself alone."""

    name: str
    storages: tuple[Storage, ...]
    events: NDArray[np.int32]
    """In order: ``i`` where storage i is born, ``~i`` (negative) where it dies. A storage that dies without a birth
    was left by an earlier tape under its name; one that never dies is left to later tapes under its name."""
    work: tuple[Work, ...]
