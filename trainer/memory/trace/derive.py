"""Join memory traces, and derive them for other micro-batches, ranks and shapes. Does not require torch.

Deriving a trace is much faster than tracing and just as exact: if a rule does not hold exactly, the result is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from trainer.config.base import Family
from trainer.memory.trace.derive_stream import stream_some
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, Work
from trainer.memory.trace.workload import TracePart, TraceRequest

Size = tuple[int, int]
# Each takes the sizes in the two source traces and returns the derived size, or None if it cannot be derived.
Linear = Callable[[int, int], int | None]
BytesOf = Callable[[Storage, int, int], int | None]
FlopsOf = Callable[[Work, int, int], int | None]

# Flash attention processes this many tokens at a time (flash_api.cpp).
FLASH_BLOCK = 128
# A token of the UNet's latents covers a square of 8 × 8 pixels.
PIXELS_PER_TOKEN = 64
# Depths at which published UNets attend: one more than they halve their sides.
DEPTHS = 4
# Larger micro-batches are derived from these two. One image is no source: PyTorch skips copies there.
IMAGE_COUNTS = (2, 3)
# LoRAs of other ranks are derived from these two. The built-in recipes use one of them, and both ship.
RANKS = (16, 32)
# Other shapes are derived from these two. At every depth of the UNet, the padded token counts of the two are in another
# ratio than their pixels, which tells padded sizes from unpadded ones.
SHAPES: dict[Family, tuple[Size, Size]] = {
    "sd15": ((512, 512), (832, 832)),
    "sdxl": ((1024, 1024), (896, 896)),
}
# Sides of this multiple can be halved by every UNet; shorter ones leave a single token, which has kernels of its own.
WHOLE_SIDE = 64
LEAST_SIDE = 128
# An optimizer's state and sums are rounded up to blocks; the other parts do not depend on the LoRA.
RANK_INDEPENDENT: tuple[TracePart, ...] = ("optimizer", "cache_pictures", "cache_texts", "checkpoint")


def join(name: str, traces: Iterable[MemoryTrace]) -> MemoryTrace:
    """Return ``traces`` joined into one; storages that are freed in a later trace are matched by name."""
    storages: list[Storage] = []
    events: list[int] = []
    work: list[Work] = []
    left: dict[str | None, int] = {}  # storages that earlier traces left, as indices in the joined trace
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
            if index_in_joined is None:  # left by a trace before all of these
                index_in_joined = len(storages)
                storages.append(trace.storages[index])
            events.append(~index_in_joined)
        left |= {storages[index_in_joined].name: index_in_joined for index_in_joined in indices.values()}
        work += trace.work
    return MemoryTrace(name, tuple(storages), np.array(events, dtype=np.int32), tuple(work))


def scale(one: MemoryTrace, other: MemoryTrace, sizes: tuple[int, int], size: int) -> MemoryTrace | None:
    """Return the trace for micro-batches (or a LoRA rank) of ``size``, derived from two traces for other ``sizes``.

    Both traces must have the same events, and all bytes and FLOPs must be a + b * size; otherwise returns None.
    Micro-batches of one image cannot be sources, because PyTorch skips copies for them, and the optimizer's traces
    cannot be derived for other ranks, because its state and sums are rounded up to blocks.
    """
    linear = partial(_on_line, sizes, size)
    return _interpolate(one, other, linear, lambda _, a, b: linear(a, b), lambda _, a, b: linear(a, b))


def reshape(one: MemoryTrace, other: MemoryTrace, shapes: tuple[Size, Size], shape: Size) -> MemoryTrace | None:
    """Return the trace for micro-batches of ``shape`` (width, height), derived from two traces for other ``shapes``.

    Bytes and FLOPs are a + b * pixels, with two exceptions in flash attention: its buffers in backward are padded to
    whole blocks of tokens, and the FLOPs of self-attention are b * pixels**2. Only shapes whose sides the UNet can
    halve without remainder can be derived. Returns None like ``scale``.
    """
    pixels = (shapes[0][0] * shapes[0][1], shapes[1][0] * shapes[1][1])
    now = shape[0] * shape[1]
    linear = partial(_on_line, pixels, now)

    def bytes_of(storage: Storage, first: int, second: int) -> int | None:
        # A padded buffer shows by its ratio in the two sources, which is that of the padded counts at its depth.
        if storage.kind == "temporary" and storage.stage == "backward":
            for depth in range(DEPTHS):
                before, after = (padded_tokens(count, depth) for count in pixels)
                identifies = after != before and after * pixels[0] != before * pixels[1]  # unlike an unpadded one
                if identifies and first * after == second * before:
                    return first * padded_tokens(now, depth) // before
        return linear(first, second)

    def flops_of(work: Work, first: int, second: int) -> int | None:
        # Cross-attention is linear in the pixels, self-attention quadratic; both have the same kind.
        if work.kind == "attention" and first * pixels[1] ** 2 == second * pixels[0] ** 2:
            return first * now**2 // pixels[0] ** 2
        return linear(first, second)

    return _interpolate(one, other, linear, bytes_of, flops_of)


def _interpolate(
    one: MemoryTrace, other: MemoryTrace, linear: Linear, bytes_of: BytesOf, flops_of: FlopsOf
) -> MemoryTrace | None:
    """Return a trace with the events of both traces and derived sizes; None if events differ or a rule fails."""
    if not have_same_events(one, other):
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
    """Return the value at ``size`` on the line through two points; None if it is not an integer."""
    found, rest = divmod((second - first) * (size - sizes[0]), sizes[1] - sizes[0])
    return None if rest else first + found


def padded_tokens(pixels: int, depth: int) -> int:
    """Return the number of tokens at a depth of the UNet, rounded up to whole flash attention blocks."""
    return -(-pixels // (PIXELS_PER_TOKEN << 2 * depth) // FLASH_BLOCK) * FLASH_BLOCK


def have_same_events(one: MemoryTrace, other: MemoryTrace) -> bool:
    """Return whether two traces have the same events and differ only in sizes."""
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
    """Rule that derives a request's traces one by one from those of two other requests."""

    sources: tuple[TraceRequest, TraceRequest]
    derive: Derive
    """Function that derives one trace; returns None if the sources differ in more than sizes."""


def rules(request: TraceRequest) -> list[DerivationRule]:
    """Return the rules by which a request's traces may be derived; all are exact, so their order does not matter.

    The sources of a rule differ from the request in only one property, and no source can be derived by the same rule.
    Therefore, deriving the sources recursively terminates.
    """
    found = (_by_rank(request), _by_image_count(request), _by_shape(request), _by_streamed_blocks(request))
    return [rule for rule in found if rule is not None]


def _by_rank(request: TraceRequest) -> DerivationRule | None:
    workload, rank = request.workload, request.workload.recipe.rank
    if request.part in RANK_INDEPENDENT or rank in RANKS or not workload.scales_with_rank:
        return None
    one, other = (replace(request, workload=workload.at_rank(known)) for known in RANKS)
    return DerivationRule((one, other), partial(scale, sizes=RANKS, size=rank))


def _by_image_count(request: TraceRequest) -> DerivationRule | None:
    if request.part != "micro" or request.more[1] <= max(IMAGE_COUNTS):
        return None
    bucket, images = request.more
    one, other = (replace(request, more=(bucket, known)) for known in IMAGE_COUNTS)
    return DerivationRule((one, other), partial(scale, sizes=IMAGE_COUNTS, size=images))


def _by_shape(request: TraceRequest) -> DerivationRule | None:
    """Return the rule that derives one shape from two others, for published UNets with flash attention; else None."""
    fit = request.workload.fit
    flash = fit.attention in ("auto", "flash") and fit.dtype in ("bf16", "fp16")
    if request.part != "micro" or not flash or not request.workload.has_published_unet:
        return None
    shapes = SHAPES[request.workload.family]
    bucket, images = request.more
    if bucket in shapes or min(bucket) < LEAST_SIDE or any(side % WHOLE_SIDE for side in bucket):
        return None
    one, other = (replace(request, more=(known, images)) for known in shapes)
    return DerivationRule((one, other), partial(reshape, shapes=shapes, shape=bucket))


def _by_streamed_blocks(request: TraceRequest) -> DerivationRule | None:
    """Return the rule that derives a number of streamed blocks of a published UNet from none and all; else None."""
    workload, amount = request.workload, request.workload.fit.stream
    if request.part != "micro" or not isinstance(amount, int) or not workload.has_published_unet:
        return None
    fits = (workload.fit.replaced(stream=known) for known in ("none", "full"))
    one, other = (replace(request, workload=replace(workload, fit=fit)) for fit in fits)
    return DerivationRule((one, other), partial(stream_some, amount=amount))
