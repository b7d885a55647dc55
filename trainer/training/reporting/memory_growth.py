"""Detection of memory that keeps growing while a run trains, and of what it is that grows."""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

BLOCK = 25
"""Number of steps that are judged together, by the least memory that was held after any of them."""
RISES = 4
"""Number of rises of similar size that make a leak: one-time allocations are fewer, or differ in size."""
SIMILAR = 3.0
"""Factor by which rises may differ from their median."""
RATE = 0.01
"""Growth per 100 steps, as a fraction of the memory held, above which it is reported."""
NOISE = 2e-4
"""Fraction of the memory held by which two blocks may differ without counting as a rise or fall."""
WARM_UP = 10
"""Steps of an attempt to ignore: they allocate the optimizer's state and libraries' workspaces."""
MAX_LEVELS = 200
"""Number of blocks to compare, 5,000 steps: enough for leaks that rise only with every preview."""
MAX_NAMED = 3
NO_TENSOR = "other"
"""What grows if no tensor accounts for it, such as memory that a library allocated."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that keeps growing."""

    since: int
    """Last step before it began to grow."""
    rate: float
    """Growth per 100 steps, as a fraction of the memory held at `since`."""
    grown: int
    """Bytes by which it has grown since then."""


@dataclass(frozen=True, slots=True)
class _Level:
    step: int
    """Last step of the block."""
    held: int


class GrowthDetector:
    """Detects sustained growth of the memory that is held after each step.

    Memory at rest is compared, so buckets and micro-batches of different sizes make no difference. What validation or a
    preview allocates once and keeps is a single rise; a leak is a series of rises of about the same size.
    """

    def __init__(self) -> None:
        self._block: list[int] = []
        self._levels: deque[_Level] = deque(maxlen=MAX_LEVELS)
        self._ignored = WARM_UP
        self.rises = 0
        """Number of rises since memory last fell."""

    def add(self, step: int, held: int, needed: int = RISES) -> Growth | None:
        """Add the bytes held after a step; return the growth once ``needed`` similar rises exceed the rate."""
        if self._ignored:
            self._ignored -= 1
            return None
        self._block.append(held)
        if len(self._block) < BLOCK:
            return None
        level = _Level(step, min(self._block))
        self._block.clear()
        if self._levels and level.held < self._levels[-1].held * (1 - NOISE):
            self._levels.clear()  # what was held has been released
        self._levels.append(level)
        return self._growth(needed)

    def _growth(self, needed: int) -> Growth | None:
        levels = self._levels
        rises = [i for i in range(1, len(levels)) if levels[i].held > levels[i - 1].held * (1 + NOISE)]
        self.rises, latest = len(rises), rises[-needed:]
        if len(latest) < needed:
            return None
        sizes = [levels[i].held - levels[i - 1].held for i in latest]
        usual = statistics.median(sizes)
        first, last = levels[latest[0] - 1], levels[-1]
        grown = last.held - first.held
        rate = 100 * grown / max(first.held, 1) / (last.step - first.step)
        similar = all(usual / SIMILAR <= size <= usual * SIMILAR for size in sizes)
        return Growth(first.step, rate, grown) if similar and rate > RATE else None


Census = Mapping[str, int]
"""Bytes of tensors, by kind of memory or by dtype and shape, such as "float32 4x64x64"."""


def census(device: torch.device, known: Mapping[str, Sequence[Tensor]]) -> Census:
    """Return the bytes of all tensors on a device that Python can reach; takes about 0.1 s.

    ``known`` has the tensors of each kind of memory; all others are named by their dtype and shape.
    """
    kinds = {_address(tensor): kind for kind, tensors in known.items() for tensor in tensors}
    found: dict[str, int] = {}
    seen: set[int] = set()
    # The known tensors as well: a gradient has no Python object until it is asked for.
    for tensor in (*chain.from_iterable(known.values()), *_tensors(device)):
        if tensor.device.type != device.type:
            continue
        address = _address(tensor)
        if address and address not in seen:
            seen.add(address)
            name = kinds.get(address) or _described(tensor)
            found[name] = found.get(name, 0) + tensor.untyped_storage().nbytes()
    return found


def what_grew(before: Census, now: Census, grown: int) -> dict[str, int]:
    """Return the bytes of what grew between two censuses, largest first.

    If tensors account for less than half of the ``grown`` bytes, the rest is listed as `NO_TENSOR`.
    """
    rises = {name: size - before.get(name, 0) for name, size in now.items()}
    named = dict(sorted(((n, r) for n, r in rises.items() if r > 0), key=lambda item: -item[1])[:MAX_NAMED])
    rest = grown - sum(named.values())
    return {**named, NO_TENSOR: rest} if 2 * rest > grown else named


def _tensors(device: torch.device) -> Iterator[Tensor]:
    for found in gc.get_objects():
        # `isinstance` would ask lazy modules and deprecated objects for their class, which warns or imports.
        if issubclass(type(found), Tensor) and found.device.type == device.type and found.layout == torch.strided:
            yield found


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none, like fake tensors that a compiler left behind."""
    try:
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _described(tensor: Tensor) -> str:
    size = "x".join(map(str, tensor.shape)) or "1"
    return f"{str(tensor.dtype).removeprefix('torch.')} {size}"
