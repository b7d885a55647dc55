"""Find a trace's memory high points, and name each after the work done and the part of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.memory.trace.memory_trace import MemoryTrace, Storage

# Smallest prominence of a high point, as a share of the highest: the small ups and downs of the forward are less.
STANDS_OUT = 0.05

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_BLOCK = re.compile(r"^unet\.(down|up)_blocks\.(\d+)")
_SIZED = re.compile(r"^(\w+) (\d+x\d+)$")
_PARTS: Mapping[str, str] = {
    "unet.mid_block": "the middle block",
    "unet.conv_in": "the input layer",
    "unet.conv_norm_out": "the output layer",
    "unet.conv_act": "the output layer",
    "unet.conv_out": "the output layer",
    "unet.time_": "the embeddings",
    "unet.add_": "the embeddings",
    "unet": "the UNet",
    "text_encoder_2": "the second text encoder",
    "text_encoder": "the text encoder",
    "vae": "the VAE",
    "noise_schedule": "the last weights",
}
# These names are stored in the shipped forecast results: changing one means generating the results again.
_STAGES: Mapping[str, str] = {
    "": "loading {part}",
    "load": "loading {part}",
    "quantise": "quantizing {part}",
    "texts": "encoding a text: {part}",
    "encode": "VAE encode of a {size} image",
    "validate": "validation at {size}: {part}",
    "draw": "rendering a {size} preview: {part}",
    "decode": "VAE decode of a {size} preview",
    "forward": "forward through {part}",
    "recompute": "backward through {part}",
    "backward": "backward through {part}",
    "accumulate": "end of the micro-batch: gradient accumulation",
    "optimizer": "end of the batch: optimizer step",
    "save": "copying to system memory",
}
# Common names for the ends of the network.
_ENDS: Mapping[str, str] = {
    "the last up block": "highest layer",
    "the output layer": "highest layer",
    "the first down block": "lowest layer",
    "the input layer": "lowest layer",
}


@dataclass(frozen=True, slots=True)
class HighPoint:
    """Moment at which more memory is allocated than shortly before and after."""

    event: int
    """Index of the allocation event that reached the high point."""
    name: str
    """Name for users, such as "backward through the last up block"."""
    module: str
    stage: str
    bytes: int
    """Allocated bytes, minus those allocated when the trace began."""


def moment_name(trace: MemoryTrace, event: int) -> str:
    """Return the name for users of the moment at which an event allocates a storage."""
    storage = trace.storages[trace.events[event]]
    return _words(storage.stage, storage.module, _blocks_of(trace.storages))


class BlockCounts(NamedTuple):
    """Numbers of down and up blocks in a model."""

    down: int
    up: int


@lru_cache(maxsize=64)
def high_points(trace: MemoryTrace) -> tuple[HighPoint, ...]:
    """Return the high points of ``trace`` in chronological order, the peak included; empty without allocations.

    A high point is the maximum of a span of work in one part of the model that uses more memory than the spans before
    and after it. This finds the known peaks of fine-tuning: quantization, forward through the highest layer, the
    center, backward through the highest and the lowest layer, the end of the batch.
    """
    live = _live_bytes(trace)
    spans = [_highest(trace, live, start, end, name) for start, end, name in _spans(trace)]
    if not spans:
        return ()
    least = STANDS_OUT * max(span.bytes for span in spans)
    prominent = [point for point, by in zip(spans, _prominences(spans, live), strict=True) if by > least]
    return tuple(_highest_of_each_name(prominent or [max(spans, key=lambda point: point.bytes)]))


@lru_cache(maxsize=1 << 15)
def _words(stage: str, module: str, blocks: BlockCounts) -> str:
    sized = _SIZED.match(stage)
    kind, size = sized.groups() if sized else (stage, "")
    if kind == "forward" and not module:
        return "the center: the loss, between forward and backward"
    part = _part(module, blocks)
    words = _STAGES.get(kind, f"{stage}: {{part}}").format(part=part, size=size)
    known = kind in ("forward", "recompute", "backward") and _ENDS.get(part)
    return f"{words} ({known})" if known else words


def _part(module: str, blocks: BlockCounts) -> str:
    """Return a description of the part of the model that contains a module; blocks are numbered in forward order."""
    if block := _BLOCK.match(module):
        side, index = block.group(1), int(block.group(2))
        place = "last" if index == getattr(blocks, side) - 1 else _ORDINALS[index]
        return f"the {place} {side} block"
    return next((words for prefix, words in _PARTS.items() if module.startswith(prefix)), module or "the weights")


def _blocks_of(storages: Iterable[Storage]) -> BlockCounts:
    counts = {"down": 0, "up": 0}
    for module in {storage.module for storage in storages}:
        if block := _BLOCK.match(module):
            counts[block.group(1)] = max(counts[block.group(1)], int(block.group(2)) + 1)
    return BlockCounts(**counts)


def _live_bytes(trace: MemoryTrace) -> NDArray[np.int64]:
    """Return, for each event, the bytes allocated after it minus those at the start; workspaces are left out."""
    sizes = np.array([0 if s.kind == "workspace" else s.bytes for s in trace.storages], dtype=np.int64)
    died = trace.events < 0
    changes = sizes[np.where(died, ~trace.events, trace.events)] if len(sizes) else np.zeros(0, np.int64)
    return np.cumsum(np.where(died, -changes, changes))


def _spans(trace: MemoryTrace) -> Iterator[tuple[int, int, str]]:
    """Yield each series of allocations with the same name as (first event, event after the last, name)."""
    blocks = _blocks_of(trace.storages)
    start, words = 0, None
    for event in np.flatnonzero(trace.events >= 0).tolist():
        storage = trace.storages[trace.events[event]]
        if storage.kind == "workspace":
            continue
        here = _words(storage.stage, storage.module, blocks)
        if here != words:
            if words is not None:
                yield start, event, words
            start, words = event, here
    if words is not None:
        yield start, len(trace.events), words


def _highest(trace: MemoryTrace, live: NDArray[np.int64], start: int, end: int, name: str) -> HighPoint:
    event = start + int(live[start:end].argmax())
    storage = trace.storages[trace.events[event]]  # an allocation has just reached the maximum
    return HighPoint(event, name, storage.module, storage.stage, int(live[event]))


def _prominences(points: list[HighPoint], live: NDArray[np.int64]) -> list[int]:
    """Return each point's prominence: its height above the higher of the two dips next to it.

    A dip is the minimum between a point and the nearest higher point on that side, or the level at the start of the
    trace if there is none.
    """
    result = []
    for index, point in enumerate(points):
        before = next((other.event for other in reversed(points[:index]) if other.bytes >= point.bytes), None)
        after = next((other.event for other in points[index + 1 :] if other.bytes > point.bytes), None)
        low = 0 if before is None else int(live[before : point.event + 1].min())
        lower = 0 if after is None else int(live[point.event : after].min())
        result.append(point.bytes - max(low, lower))
    return result


def _highest_of_each_name(points: list[HighPoint]) -> Iterator[HighPoint]:
    best: dict[str, HighPoint] = {}
    for point in points:
        if point.name not in best or point.bytes > best[point.name].bytes:
            best[point.name] = point
    return iter(sorted(best.values(), key=lambda point: point.event))
