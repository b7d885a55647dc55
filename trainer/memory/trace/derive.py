"""Tapes joined into one, and carried over to other micro-batches, ranks and shapes. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from trainer.config.base import Family
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, Work
from trainer.memory.trace.workload import TracePart, TraceRequest

Size = tuple[int, int]
# The number that follows from two, each with what it is of.
Linear = Callable[[int, int], int | None]
BytesOf = Callable[[Storage, int, int], int | None]
FlopsOf = Callable[[Work, int, int], int | None]

# Flash attention takes so many places at a time (flash_api.cpp).
FLASH_BLOCK = 128
# A place of a UNet's latents is a square of 8 pixels.
PIXELS_A_PLACE = 64
# So often at most, plus one, a UNet halves its sides, where published ones attend.
DEPTHS = 4
# Larger micro-batches follow from these two; one of a single picture spares itself copies and follows from none.
PICTURES = (2, 3)
# LoRAs of other ranks follow from these two, of which the built-in recipes have one and both ship.
RANKS = (16, 32)
# Other shapes follow from these two: what attention pads differs in them at every depth of the UNet, and from what is
# not padded, so that it is known again.
SHAPES: dict[Family, tuple[Size, Size]] = {
    "sd15": ((512, 512), (832, 832)),
    "sdxl": ((1024, 1024), (896, 896)),
}
# Sides that every UNet halves without a rest, and so that no single place is left, which has kernels of its own.
WHOLE_SIDE = 64
LEAST_SIDE = 128
# An optimizer's states and sums come in blocks; the others have no part in the LoRA.
NOT_RANKED: tuple[TracePart, ...] = ("optimizer", "cache_pictures", "cache_texts", "checkpoint")


def joined(name: str, traces: Iterable[MemoryTrace]) -> MemoryTrace:
    """One tape that does what ``tapes`` do in their order; what passes between them is known by its name."""
    storages: list[Storage] = []
    events: list[int] = []
    work: list[Work] = []
    left: dict[str | None, int] = {}
    for trace in traces:
        indices: dict[int, int] = {}
        for event in trace.events.tolist():
            index = event if event >= 0 else ~event
            if event >= 0:
                indices[index] = len(storages)
                storages.append(trace.storages[index])
                events.append(indices[index])
                continue
            index_in_joined = indices.pop(index, None)
            if index_in_joined is None:
                index_in_joined = left.pop(trace.storages[index].name, None)
            if index_in_joined is None:  # left by a tape before all of these
                index_in_joined = len(storages)
                storages.append(trace.storages[index])
            events.append(~index_in_joined)
        left |= {storages[index_in_joined].name: index_in_joined for index_in_joined in indices.values()}
        work += trace.work
    return MemoryTrace(name, tuple(storages), np.array(events, dtype=np.int32), tuple(work))


def scaled(one: MemoryTrace, other: MemoryTrace, sizes: tuple[int, int], size: int) -> MemoryTrace | None:
    """The tape for micro-batches of ``size``, or a LoRA of that rank, from those of two other ``sizes``.

    It follows exactly where both have the same events: then every storage and every operation has bytes and flops
    a + b * size. None where it does not follow. Micro-batches of one picture are no good for this: PyTorch spares
    itself copies there. Nor are ranks for optimizers, whose states and sums come in blocks.
    """
    linear = partial(_on_line, sizes, size)
    return _interpolate(one, other, linear, lambda _, a, b: linear(a, b), lambda _, a, b: linear(a, b))


def reshaped(one: MemoryTrace, other: MemoryTrace, shapes: tuple[Size, Size], shape: Size) -> MemoryTrace | None:
    """The tape of micro-batches of ``shape`` from those of two other ``shapes`` (width, height), as for ``scaled``.

    Bytes and flops are a + b * pixels, but for two things of attention by flash: what it takes in backward is padded to
    whole blocks of places, and the flops of a picture's places with each other are b * pixels**2. No shape follows but
    those whose sides the UNet halves without a rest.
    """
    pixels = (shapes[0][0] * shapes[0][1], shapes[1][0] * shapes[1][1])
    now = shape[0] * shape[1]
    linear = partial(_on_line, pixels, now)

    def bytes_of(storage: Storage, first: int, second: int) -> int | None:
        if storage.kind == "temporary" and storage.stage == "backward":
            for depth in range(DEPTHS):
                before, after = (_padded(count, depth) for count in pixels)
                identifies = after != before and after * pixels[0] != before * pixels[1]  # from what is not padded
                if identifies and first * after == second * before:
                    return first * _padded(now, depth) // before
        return linear(first, second)

    def flops_of(work: Work, first: int, second: int) -> int | None:
        if work.kind == "attention" and first * pixels[1] ** 2 == second * pixels[0] ** 2:
            return first * now**2 // pixels[0] ** 2
        return linear(first, second)

    return _interpolate(one, other, linear, bytes_of, flops_of)


def _interpolate(
    one: MemoryTrace, other: MemoryTrace, linear: Linear, bytes_of: BytesOf, flops_of: FlopsOf
) -> MemoryTrace | None:
    """A tape with the events of two, whose numbers follow from theirs; None where one of them does not."""
    if not _have_same_events(one, other):
        return None
    storages: list[Storage] = []
    for a, b in zip(one.storages, other.storages, strict=True):
        size = a.bytes if a.bytes == b.bytes else bytes_of(a, a.bytes, b.bytes)
        if size is None:
            return None
        storages.append(a if size == a.bytes else Storage(size, a.kind, a.module, a.stage, a.name))
    work: list[Work] = []
    for c, d in zip(one.work, other.work, strict=True):
        flops, moved = flops_of(c, c.flops, d.flops), linear(c.bytes, d.bytes)
        if flops is None or moved is None:
            return None
        work.append(replace(c, flops=flops, bytes=moved))
    return MemoryTrace(one.name, tuple(storages), one.events, tuple(work))


def _on_line(sizes: tuple[int, int], size: int, first: int, second: int) -> int | None:
    """On the linear line through both; None where that is no whole number, so that no such line is meant."""
    found, rest = divmod((second - first) * (size - sizes[0]), sizes[1] - sizes[0])
    return None if rest else first + found


def _padded(pixels: int, depth: int) -> int:
    """Places that attention takes at a depth of the UNet, in whole blocks."""
    return -(-pixels // (PIXELS_A_PLACE << 2 * depth) // FLASH_BLOCK) * FLASH_BLOCK


def _have_same_events(one: MemoryTrace, other: MemoryTrace) -> bool:
    """Whether two tapes have the same events, on storages and with operations that differ in size alone."""
    return (
        np.array_equal(one.events, other.events)
        and len(one.storages) == len(other.storages)
        and all(map(_same_storage, one.storages, other.storages))
        and len(one.work) == len(other.work)
        and all(map(_same_work, one.work, other.work))
    )


def _same_storage(a: Storage, b: Storage) -> bool:
    return a.name == b.name and a.module == b.module and a.stage == b.stage and a.kind == b.kind


def _same_work(a: Work, b: Work) -> bool:
    return (a.kind, a.dtype, a.stage, a.count) == (b.kind, b.dtype, b.stage, b.count)


Derive = Callable[[MemoryTrace, MemoryTrace], MemoryTrace | None]


@dataclass(frozen=True)
class DerivationRule:
    """How the tapes of a wish follow, one by one, from those of two others."""

    sources: tuple[TraceRequest, TraceRequest]
    derive: Derive
    """None where the two turn out to differ in more than sizes."""


def rules(request: TraceRequest) -> list[DerivationRule]:
    """The ways in which a wish's tapes may follow; which is taken first does not matter, as all are exact.

    The sources of each differ from the wish in one thing only: it is as no wish has it that follows by this rule. So
    asking for them by rules again comes to an end.
    """
    found = (_by_rank(request), _by_image_count(request), _by_shape(request))
    return [rule for rule in found if rule is not None]


def _by_rank(request: TraceRequest) -> DerivationRule | None:
    workload, rank = request.subject, request.subject.recipe.rank
    if request.part in NOT_RANKED or rank in RANKS or not workload.has_one_rank:
        return None
    one, other = (replace(request, subject=workload.at_rank(known)) for known in RANKS)
    return DerivationRule((one, other), partial(scaled, sizes=RANKS, size=rank))


def _by_image_count(request: TraceRequest) -> DerivationRule | None:
    if request.part != "micro" or request.more[1] <= max(PICTURES):
        return None
    bucket, images = request.more
    one, other = (replace(request, more=(bucket, known)) for known in PICTURES)
    return DerivationRule((one, other), partial(scaled, sizes=PICTURES, size=images))


def _by_shape(request: TraceRequest) -> DerivationRule | None:
    """Of attention by flash at the depths where published UNets attend; a shape matters only by its pixels."""
    fit = request.subject.fit
    flash = fit.attention in ("auto", "flash") and fit.dtype in ("bf16", "fp16")
    if request.part != "micro" or not flash or not request.subject.has_published_unet:
        return None
    shapes = SHAPES[request.subject.family]
    bucket, images = request.more
    if bucket in shapes or min(bucket) < LEAST_SIDE or any(side % WHOLE_SIDE for side in bucket):
        return None
    one, other = (replace(request, more=(known, images)) for known in shapes)
    return DerivationRule((one, other), partial(reshaped, shapes=shapes, shape=bucket))
