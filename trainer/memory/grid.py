"""What a planner may choose among: micro-batches, block sets to checkpoint, and their product with the other keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, Literal

from trainer.config.fit import LARGEST_MICRO_BATCH, FitConfig
from trainer.memory.tape import Block, _forward_order
from trainer.protocol.forecast import SEARCHED

Checkpointing = Literal["none", "full"] | tuple[str, ...]

# Micro-batches closer together than this make no difference worth a trace.
CLOSE = 0.8

# A block that holds less than this share of what all hold is not worth a set of its own.
WORTH = 0.02


def micro_batches(effective_batch: int) -> tuple[int, ...]:
    """Sizes that cut an effective batch into parts as even as can be, the largest first, 1 last."""
    sizes: list[int] = []
    for parts in range(1, effective_batch + 1):
        size = -(-effective_batch // parts)
        if size <= LARGEST_MICRO_BATCH and (not sizes or size <= CLOSE * sizes[-1]):
            sizes.append(size)
        if size == 1:
            break
    return tuple(sizes) if sizes[-1] == 1 else (*sizes, 1)


def nested_sets(ordered: Sequence[Block]) -> tuple[Checkpointing, ...]:
    """No block, the first, the first two, ..., all: each holds less than the one before and computes more again.

    Blocks that hold next to nothing come last; a set that differs from all blocks in such ones alone is left out.
    """
    least = WORTH * sum(block.held for block in ordered)
    names = [block.name for block in ordered if block.held >= least]
    partial = [tuple(sorted(names[:count], key=_forward_order)) for count in range(1, len(names))]
    return ("none", *partial, "full")


def candidates(
    constraints: FitConfig,
    start: FitConfig,
    *,
    effective_batch: int,
    checkpointing: Iterable[Checkpointing],
    quantise: Iterable[str],
    previews: bool,
) -> list[FitConfig]:
    """Every fit that keeps what the user wrote; what is not searched stays as ``start`` has it."""
    every: tuple[Sequence[Any], ...] = (
        tuple(quantise),
        tuple(checkpointing),
        micro_batches(effective_batch),
        (True, False) if previews else (True,),
        (False, True) if previews else (False,),
    )
    choices = dict(zip(SEARCHED, every, strict=True))
    for name in SEARCHED:
        if (written := getattr(constraints, name)) is not None:
            choices[name] = (min(written, effective_batch) if name == "micro_batch" else written,)
    return [start.changed(**dict(zip(choices, values, strict=True))) for values in product(*choices.values())]


def within(inner: Checkpointing, outer: Checkpointing) -> bool:
    """Whether all that ``inner`` checkpoints is checkpointed by ``outer`` too."""
    if inner == "none" or outer == "full":
        return True
    return outer != "none" and inner != "full" and set(inner) <= set(outer)
