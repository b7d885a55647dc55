"""Interpolate training steps to any batch, resolution and LoRA rank, as arrays. Does not require torch.

A sweep needs the memory of a thousand steps, and `derive` takes a tenth of a second for each. The rules are the same:
every size is linear in the number of images, in the pixels and in the rank, one by one, except for buffers that flash
attention pads to whole blocks of tokens, and the FLOPs of self-attention are quadratic in the pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.derive import DEPTHS, RANKS, SHAPES, have_same_events, padded_tokens
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import BLOCK, MemoryTrace, Storage, Totals, Work
from trainer.memory.trace.workload import TraceRequest, Workload

# Numbers of images to read or trace. One image is traced by itself, because PyTorch skips copies there.
COUNTS = (1, 2, 4)
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a training step works on."""

    batch: int
    """Images at once."""
    side: int
    """Side of the square images in pixels."""
    rank: int

    @property
    def pixels(self) -> int:
        """Return the pixels of an image."""
        return self.side * self.side


class StepFamily:
    """Training steps that differ only in batch, resolution and rank."""

    def __init__(self, weights: _Grid, steps: dict[int, _Grid], line: _Grid | None) -> None:
        """Create a family from grids of ``weights`` and of ``steps`` by number of images.

        ``line`` interpolates all numbers of images that have no grid of their own; None if there is none.
        """
        self._weights = weights
        self._steps = steps
        self._line = line

    def has(self, batch: int) -> bool:
        """Return whether steps of ``batch`` images can be interpolated."""
        return batch in self._steps or self._line is not None

    def weights_totals(self, rank: int) -> Totals:
        """Return the totals of placing base, adapter and master weights."""
        return self._weights.totals((rank,))

    def step_totals(self, shape: StepShape) -> Totals:
        """Return the totals of a step's micro-batch, without the optimizer."""
        grid, at = self._at(shape)
        return grid.totals(at)

    def work(self, shape: StepShape) -> list[Work]:
        """Return the work of a step's micro-batch."""
        grid, at = self._at(shape)
        return grid.work(at)

    def weights_trace(self, rank: int) -> MemoryTrace:
        """Return the trace of placing base, adapter and master weights."""
        return self._weights.trace((rank,))

    def traces(self, shape: StepShape) -> tuple[MemoryTrace, MemoryTrace]:
        """Return the traces of placing the weights and of a step's micro-batch."""
        grid, at = self._at(shape)
        return self.weights_trace(shape.rank), grid.trace(at)

    def _at(self, shape: StepShape) -> tuple[_Grid, tuple[int, ...]]:
        if shape.batch in self._steps:
            return self._steps[shape.batch], (shape.rank, shape.pixels)
        assert self._line is not None
        return self._line, (shape.rank, shape.pixels, shape.batch)


def read_family(workload: Workload, traces: TraceLibrary, deadline: Deadline) -> StepFamily | None:
    """Return the family of a workload; None if its traces are missing and cannot be recorded before ``deadline``.

    Without traces of several numbers of images, only that number can be interpolated.
    """
    _record(workload, traces, deadline)
    shapes = [width * height for width, height in SHAPES[workload.family]]
    corners: dict[int, list[MemoryTrace]] = {}
    steps: dict[int, _Grid] = {}
    weights = None
    for count in COUNTS:
        if all(map(traces.has, requests(workload, count))):
            found = [traces.read(request) for request in requests(workload, count)]
            corners[count] = [micro for _, micro, _ in found]
            weights = weights or _grid([found[0][0], found[len(shapes)][0]], (RANKS,))
            if grid := _grid(corners[count], (RANKS, shapes)):
                steps[count] = grid
    line = None
    if len(steps) > 1:
        pair = list(steps)[-2:]  # two numbers above one if possible: then every larger one is exact
        line = _grid([micro for alike in zip(*(corners[n] for n in pair), strict=True) for micro in alike],
                     (RANKS, shapes, pair))  # fmt: skip
    return StepFamily(weights, steps, line) if weights and steps else None


def requests(workload: Workload, count: int) -> list[TraceRequest]:
    """Return the requests for the traces at both ranks and both shapes, in this order, with the longest captions."""
    tokens = max(tokens for _, _, tokens in workload.shapes)
    return [
        TraceRequest(workload.at_rank(rank), "micro", ((*shape, tokens), count))
        for rank in RANKS
        for shape in SHAPES[workload.family]
    ]


def _record(workload: Workload, traces: TraceLibrary, deadline: Deadline) -> None:
    """Record missing traces until the time is over, those of one rank after the other: models are built once for each.

    What has been recorded is kept, so that the next sweep continues here.
    """
    wanted = sorted((each for count in COUNTS for each in requests(workload, count)), key=_rank_of)
    missing = [request for request in wanted if not traces.has(request)]
    traces.set_prefetch(lambda: missing[::-1])  # a second process begins at the other end
    for request in missing:
        if deadline.leaves_out(request):
            return
        traces.read(request)


def _rank_of(request: TraceRequest) -> int:
    return request.workload.recipe.rank


class _Grid:
    """Traces at the corners of a grid: all pairs of two ranks, two numbers of pixels, and two numbers of images."""

    def __init__(self, corners: Sequence[MemoryTrace], axes: Sequence[Sequence[int]]) -> None:
        self.example = corners[0]
        self.axes = axes
        storages = self.example.storages
        self._bytes = np.array([[each.bytes for each in corner.storages] for corner in corners], dtype=np.float64)
        self._counted = np.array([each.kind != "workspace" for each in storages], dtype=bool)
        died = self.example.events < 0
        self._index = np.where(died, ~self.example.events, self.example.events)
        self._sign = np.where(died, -1, 1).astype(np.int64)
        self._flops = np.array([[work.flops for work in corner.work] for corner in corners], dtype=np.float64)
        self._moved = np.array([[work.bytes for work in corner.work] for corner in corners], dtype=np.float64)
        self._quadratic = self._is_quadratic()
        self._padded = self._find_padded()

    def totals(self, at: tuple[int, ...]) -> Totals:
        """Return the totals at a point, as `memory_trace.totals` counts them."""
        sizes = np.where(self._counted, -(-self._sizes(at) // BLOCK) * BLOCK, 0)
        running = np.cumsum(self._sign * sizes[self._index])
        return Totals(int(running[-1]), max(0, int(running.max())))

    def trace(self, at: tuple[int, ...]) -> MemoryTrace:
        """Return the trace at a point."""
        storages = tuple(
            Storage(size, each.kind, each.module, each.stage, each.name)
            for size, each in zip(self._sizes(at).tolist(), self.example.storages, strict=True)
        )
        return MemoryTrace(self.example.name, storages, self.example.events, ())

    def work(self, at: tuple[int, ...]) -> list[Work]:
        """Return the work at a point."""
        linear = self._shares(at)
        flops = np.where(self._quadratic, self._shares(at, _squared) @ self._flops, linear @ self._flops)
        found = zip(self.example.work, np.rint(flops).tolist(), np.rint(linear @ self._moved).tolist(), strict=True)
        return [replace(work, flops=int(now), bytes=int(moved)) for work, now, moved in found]

    def _sizes(self, at: tuple[int, ...]) -> NDArray[np.int64]:
        sizes = self._shares(at) @ self._bytes
        for depth, places in self._padded.items():
            sizes[places] = self._shares(at, partial(padded_tokens, depth=depth)) @ self._bytes[:, places]
        return np.rint(sizes).astype(np.int64)

    def _shares(self, at: tuple[int, ...], of_pixels: Callable[[int], int] | None = None) -> Floats:
        """Return by how much each corner counts at a point: Lagrange's polynomials, multiplied over the axes.

        With ``of_pixels``, sizes are proportional to a function of the pixels instead of linear in them.
        """
        shares = np.ones(1)
        for axis, ((first, second), now) in enumerate(zip(self.axes, at, strict=True)):
            if of_pixels is not None and axis == 1:
                along = np.array([of_pixels(now) / of_pixels(first), 0.0])
            else:
                along = np.array([second - now, now - first], dtype=np.float64) / (second - first)
            shares = np.multiply.outer(shares, along)
        return np.asarray(shares, dtype=np.float64).reshape(-1)

    def _is_quadratic(self) -> NDArray[np.bool_]:
        """Return for each piece of work whether its FLOPs grow with the square of the pixels: self-attention."""
        attention = np.array([work.kind == "attention" for work in self.example.work], dtype=bool)
        if len(self.axes) < 2 or not len(attention):
            return attention
        (first, second), (one, other) = self.axes[1], self._ends_of_pixels(self._flops)
        return np.asarray(attention & (one * float(second) ** 2 == other * float(first) ** 2))

    def _find_padded(self) -> dict[int, NDArray[np.bool_]]:
        """Return which storages are padded at which depth of the UNet; see `derive.reshape`."""
        found: dict[int, NDArray[np.bool_]] = {}
        if len(self.axes) < 2:
            return found
        (first, second), (one, other) = self.axes[1], self._ends_of_pixels(self._bytes)
        possible = np.array([each.kind == "temporary" and each.stage == "backward" for each in self.example.storages])
        for depth in range(DEPTHS):
            before, after = padded_tokens(first, depth), padded_tokens(second, depth)
            if after != before and after * first != before * second:
                found[depth] = possible & (one * after == other * before) & (one != other)
                possible &= ~found[depth]
        return {depth: places for depth, places in found.items() if places.any()}

    def _ends_of_pixels(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the values at two corners that differ only in pixels."""
        return values[0], values[int(np.prod([len(axis) for axis in self.axes[2:]]))]


def _squared(pixels: int) -> int:
    return pixels * pixels


def _grid(corners: Sequence[MemoryTrace], axes: Sequence[Sequence[int]]) -> _Grid | None:
    """Return a grid; None if the traces differ in more than sizes, so that nothing can be interpolated."""
    first, *others = corners
    return _Grid(corners, axes) if all(have_same_events(first, other) for other in others) else None
