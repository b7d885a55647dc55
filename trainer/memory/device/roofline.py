"""Estimate how long a trace takes from its work, the device's rates and the CPU's launch rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

from trainer.files.assets import asset_path
from trainer.memory.device.gpu_specs import GpuSpec
from trainer.memory.trace.memory_trace import Work
from trainer.protocol.forecast import DeviceSpeed, TimedOperation
from trainer.protocol.reading import read_toml

# Cost of returning the cache to the driver and allocating it again: the GPU runs idle, and each of some tens of
# segments takes up to a millisecond to free and allocate. An estimate, until it is measured on real GPUs.
RETRY_SECONDS = 0.05
# A streamed base costs this factor where its copies overlap with computation, as kohya-ss/musubi-tuner#972 measured
# for blocks that are copied ahead from pinned memory. An estimate, until it is measured here.
STREAMING_LOSS = 1.1


def seconds(work: Iterable[Work], rate: DeviceSpeed) -> float:
    """Return the seconds that a device takes for the work of one or more traces in sequence.

    An operation takes the larger of flops / rate and bytes / bandwidth (the roofline of Williams et al. 2009), plus a
    fixed cost. The total is at least the time that the CPU takes to launch all operations, and at least that of the
    copies from main memory, which overlap with everything else at the cost of `STREAMING_LOSS`.
    """
    device, operations, copied = 0.0, 0, 0
    nearest: dict[tuple[str, str, int, int], float] = {}
    for piece in work:
        if piece.kind == "copy":
            copied += piece.count * piece.bytes
            continue
        key = (piece.kind, piece.dtype, piece.flops, piece.bytes)
        if key not in nearest:
            nearest[key] = _operation_seconds(piece, rate)
        device += piece.count * nearest[key]
        operations += piece.count
    return max(device, operations * rate.host, copied / rate.bus) * (STREAMING_LOSS if copied else 1.0)


def loading_seconds(size: int, rate: DeviceSpeed) -> float:
    """Return the seconds to read ``size`` bytes of weights and move them to the device."""
    return size / rate.disk


def rate_of(gpu: GpuSpec, system: str) -> DeviceSpeed:
    """Return the expected rates of a GPU on ``system``, a platform.system() name."""
    efficiency, operation = _table()["efficiency"], _table()["operation"]
    bandwidth = gpu.bandwidth * efficiency["bandwidth"]
    timed = [TimedOperation("other", "float32", 0.0, bandwidth, 1.0)]
    for kind in ("gemm", "conv", "attention"):
        for dtype, dense in _dense_rates(gpu, kind).items():
            timed.append(TimedOperation(kind, dtype, 1e12 * dense * efficiency[kind], 1.0, 1.0))
    host = operation["host"].get(system, operation["host"]["other"])
    share = efficiency["bus"].get(system, efficiency["bus"]["other"])
    bus = share * (gpu.bus or _table()["link"]["usual"])
    return DeviceSpeed(gpu.name, tuple(timed), bandwidth, operation["launch"], host, bus=bus)


def _dense_rates(gpu: GpuSpec, kind: str) -> dict[str, float]:
    """Return TFLOP/s by dtype for a kind of work; by default, fp32 convolutions use TF32 but fp32 GEMMs do not."""
    single = gpu.tflops["tf32" if kind == "conv" else "float32"]
    half = gpu.tflops["float16"]
    # Without hardware support bf16 is widened to fp32; 8- and 4-bit weights are multiplied in a 16-bit dtype.
    brain = gpu.tflops.get("bfloat16", gpu.tflops["float32"])
    # int8 products have int32 results. Matrix units since Turing multiply them at least twice as fast; on a GPU without
    # such units runs dequantize the weights instead.
    units = gpu.capability >= (7, 5) and half > gpu.tflops["float32"]
    whole = 2 * half if units else half
    return {"float32": single, "float16": half, "bfloat16": brain, "uint8": half, "int8": half, "int32": whole}


def _operation_seconds(work: Work, rate: DeviceSpeed) -> float:
    like = _most_similar(work, rate)
    if like.flops and work.flops:
        return max(work.flops * like.seconds / like.flops, work.bytes / rate.bandwidth) + rate.launch
    return work.bytes * like.seconds / like.bytes + rate.launch


def _most_similar(work: Work, rate: DeviceSpeed) -> TimedOperation:
    """Return the timed operation closest in FLOPs and bytes, of the same kind and, if possible, the same dtype."""
    kind = work.kind if work.flops else "other"
    of_kind = [timed for timed in rate.timed if timed.kind == kind]
    alike = [timed for timed in of_kind if timed.dtype == work.dtype] or of_kind
    return min(alike, key=lambda timed: _distance(work.flops, timed.flops) + _distance(work.bytes, timed.bytes))


def _distance(one: float, other: float) -> float:
    return abs(math.log(max(one, 1.0) / max(other, 1.0)))


@cache
def _table() -> dict[str, Any]:
    return read_toml(asset_path("memory", "rates.toml"), "config")
