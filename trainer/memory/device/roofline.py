"""Seconds from the work of a trace: each operation by the rate of its kind, bounded by what the CPU can hand over."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

from trainer.files.assets import asset_path
from trainer.memory.device.gpu_specs import GpuSpec
from trainer.memory.trace.memory_trace import Work
from trainer.protocol.forecast import Rate, Timed
from trainer.protocol.reading import read_toml

# What it costs to give the cache back to the driver and take it again: the card's queue runs dry, and each of some tens
# of segments is freed and asked for anew at up to a millisecond. A round figure, until cards have been timed.
RETRY_SECONDS = 0.05


def seconds(work: Iterable[Work], rate: Rate) -> float:
    """Return the seconds that a device takes for the work of one or more tapes, one after the other.

    An operation takes the larger of flops / rate and bytes / bandwidth (the roofline of Williams et al. 2009) and what
    each operation costs besides; all together take no less than the CPU needs to hand them over, because it runs ahead.
    """
    device, operations = 0.0, 0
    nearest: dict[tuple[str, str, int, int], float] = {}
    for piece in work:
        key = (piece.kind, piece.dtype, piece.flops, piece.bytes)
        if key not in nearest:
            nearest[key] = _operation_seconds(piece, rate)
        device += piece.count * nearest[key]
        operations += piece.count
    return max(device, operations * rate.host)


def loading_seconds(size: int, rate: Rate) -> float:
    """Return the seconds to read and place so many bytes of weights."""
    return size / rate.disk


def rate_of(card: GpuSpec, system: str) -> Rate:
    """Return what a named card is expected to reach under a system, "Windows" or else, as platform.system() says."""
    efficiency, operation = _table()["efficiency"], _table()["operation"]
    bandwidth = card.bandwidth * efficiency["bandwidth"]
    timed = [Timed("other", "float32", 0.0, bandwidth, 1.0)]
    for kind in ("gemm", "conv", "attention"):
        for dtype, dense in _dense_rates(card, kind).items():
            timed.append(Timed(kind, dtype, 1e12 * dense * efficiency[kind], 1.0, 1.0))
    host = operation["host"].get(system, operation["host"]["other"])
    return Rate(card.name, tuple(timed), bandwidth, operation["launch"], host)


def _dense_rates(card: GpuSpec, kind: str) -> dict[str, float]:
    """TFLOP/s by number format. PyTorch lets convolutions in fp32 use TF32 unless told otherwise, matrices not."""
    single = card.tflops["tf32" if kind == "conv" else "float32"]
    half = card.tflops["float16"]
    # Without units for it bf16 is widened; 8- and 4-bit weights are multiplied in a 16-bit format.
    brain = card.tflops.get("bfloat16", card.tflops["float32"])
    # Products of int8 come out in int32. Matrix units since Turing's multiply them at least twice as fast; a card
    # without such units makes none, and runs on it restore the weights.
    units = card.capability >= (7, 5) and half > card.tflops["float32"]
    whole = 2 * half if units else half
    return {"float32": single, "float16": half, "bfloat16": brain, "uint8": half, "int8": half, "int32": whole}


def _operation_seconds(work: Work, rate: Rate) -> float:
    like = _most_similar(work, rate)
    if like.flops and work.flops:
        return max(work.flops * like.seconds / like.flops, work.bytes / rate.bandwidth) + rate.launch
    return work.bytes * like.seconds / like.bytes + rate.launch


def _most_similar(work: Work, rate: Rate) -> Timed:
    """Return the timed operation of the same kind and format, or else only kind, that is nearest in size and shape."""
    kind = work.kind if work.flops else "other"
    of_kind = [timed for timed in rate.timed if timed.kind == kind]
    alike = [timed for timed in of_kind if timed.dtype == work.dtype] or of_kind
    return min(alike, key=lambda timed: _distance(work.flops, timed.flops) + _distance(work.bytes, timed.bytes))


def _distance(one: float, other: float) -> float:
    return abs(math.log(max(one, 1.0) / max(other, 1.0)))


@cache
def _table() -> dict[str, Any]:
    return read_toml(asset_path("memory", "rates.toml"), "config")
