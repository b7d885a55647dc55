"""What a planner may choose among: micro-batches, block sets to checkpoint, and their product with the other keys."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from trainer.config.fit import LARGEST_MICRO_BATCH, FitConfig
from trainer.memory.tape import Tape
from trainer.protocol.forecast import SEARCHED

Checkpointing = Literal["none", "full"] | tuple[str, ...]

# Micro-batches closer together than this make no difference worth a trace.
CLOSE = 0.8

# A block that holds less than this share of what all hold is not worth a set of its own.
WORTH = 0.02

_BLOCK = re.compile(r"\bunet\.(down_blocks\.\d|mid_block|up_blocks\.\d)\b")


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


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the UNet, as one forward without checkpointing leaves it."""

    name: str
    held: int
    """Bytes of activations that wait for backward when the forward ends."""
    cost: float
    """How much work it is to compute again, on a scale of its own."""


def unet_block(module: str) -> str | None:
    """The block that a module's path lies in, by the name that a job may list; None outside."""
    found = _BLOCK.search(module)
    return found.group(1) if found else None


def held_after_forward(tape: Tape) -> dict[str | None, int]:
    """Bytes born in a micro-batch's forward and alive when its backward begins, by block; None: outside of blocks."""
    backward = np.array([storage.stage.startswith("backward") for storage in tape.storages], dtype=bool)
    births = tape.events >= 0
    of_backward = np.flatnonzero(births & backward[np.where(births, tape.events, 0)])
    before = tape.events[: of_backward[0]] if len(of_backward) else tape.events
    alive = set(before[before >= 0].tolist()) - set((~before[before < 0]).tolist())
    held: defaultdict[str | None, int] = defaultdict(int)
    for index in alive:
        storage = tape.storages[index]
        if storage.name is None:
            held[unet_block(storage.module)] += storage.bytes
    return dict(held)


def blocks(weights: Tape, micro: Tape) -> list[Block]:
    """The UNet's blocks by what checkpointing them saves for its cost, the best first.

    ``micro`` is a micro-batch without checkpointing. The cost is counted as weights times places they are applied to:
    a quarter with each level down. That ignores attention's own products; it only decides which sets are looked at.
    """
    held = held_after_forward(micro)
    sizes: defaultdict[str, int] = defaultdict(int)
    for storage in weights.storages:
        if (name := unet_block(storage.module)) is not None and storage.kind == "weights":
            sizes[name] += storage.bytes
    levels = sum(name.startswith("down_blocks.") for name in sizes)
    found = [Block(name, held.get(name, 0), size / 4 ** _level(name, levels)) for name, size in sizes.items()]
    return sorted(found, key=lambda block: (-block.held / max(block.cost, 1.0), block.name))


def _level(name: str, levels: int) -> int:
    """How often the picture was halved where a block works."""
    if name == "mid_block":
        return levels - 1
    index = int(name.rpartition(".")[2])
    return index if name.startswith("down_blocks.") else levels - 1 - index


def nested_sets(ordered: Sequence[Block]) -> tuple[Checkpointing, ...]:
    """No block, the first, the first two, ..., all: each holds less than the one before and computes more again.

    Blocks that hold next to nothing come last; a set that differs from all blocks in such ones alone is left out.
    """
    least = WORTH * sum(block.held for block in ordered)
    names = [block.name for block in ordered if block.held >= least]
    partial = [tuple(sorted(names[:count], key=_forward_order)) for count in range(1, len(names))]
    return ("none", *partial, "full")


def _forward_order(name: str) -> tuple[int, str]:
    """Down, middle, up."""
    return "dmu".index(name[0]), name


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
