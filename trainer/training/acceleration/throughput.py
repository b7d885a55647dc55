"""Throughput of a device, measured in about a second with a job's operation sizes."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.adapter.attach import attach
from trainer.base.encoding import TextConditioning
from trainer.config.recipe import RecipeConfig
from trainer.protocol.forecast import DeviceSpeed, Operation, TimedOperation
from trainer.training.objective import NoiseSchedule
from trainer.training.step import MicroBatch, StepModels, training_step

aten = torch.ops.aten

Thunk = Callable[[], object]

_HEAD = 64  # usual attention head width
_NARROWEST = 8  # smallest attention head width
# For each kind and dtype, the largest sizes are timed until they cover this fraction of the work.
COVERED = 0.95
MAX_SIZES_PER_KIND = 12  # maximum number of sizes for each kind and dtype
COPIED_BYTES, COPIES = 64 << 20, 4  # enough to reach the bus's rate; takes 20 to 60 ms in total
EMPTY_KERNEL_SECONDS = 3e-6  # seconds per empty kernel on a GPU, launched back to back
_TRIES = 12
_CACHE = 1 << 21  # bytes: twice the L2 cache of a core, so that a pass over them evicts all of it
_COLD_TRIES = 11  # pairs of steps, each pair about 0.12 s
_TOGETHER = 1 << 30  # bytes of host memory that the example tensors may take at once
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# These return a view of their input although their schema does not declare one.
_UNDECLARED_VIEWS = {aten._unsafe_view, aten._reshape_alias}
# A UNet with every kind of block and next to no arithmetic, so that a step costs only Python and dispatch.
_MINIATURE: dict[str, Any] = {
    "sample_size": 4,
    "block_out_channels": (8, 8),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "cross_attention_dim": 8,
}


@dataclass(frozen=True, slots=True)
class OperationSize:
    """Kind and size of an operation; the fields are those of `trainer.protocol.forecast.Operation`."""

    kind: str
    dtype: str
    stage: str
    flops: int
    bytes: int


def is_view(func: OpOverload) -> bool:
    """Return whether an operation only returns a view of its input."""
    return func.is_view or func.overloadpacket in _UNDECLARED_VIEWS


def is_allocation(func: OpOverload) -> bool:
    """Return whether an operation only allocates memory, which starts no kernel."""
    return func.overloadpacket in _ALLOCATIONS


def sample_calls(size: OperationSize, device: torch.device) -> list[Thunk]:
    """Return functions whose mean time estimates how long an operation of this size takes.

    Traces record FLOPs and bytes but no shapes. The functions use shapes that match both, assuming square weight
    matrices and convolutions with as many input as output channels.
    """
    return _MAKERS[size.kind](size, device)


def _random(size: OperationSize, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(_compute_dtype(size))


def _compute_dtype(size: OperationSize) -> torch.dtype:
    """Return the dtype to measure with; GEMMs with 4-bit and 8-bit weights are computed in a 16-bit dtype."""
    dtype: torch.dtype = getattr(torch, size.dtype)
    return dtype if dtype.is_floating_point else torch.bfloat16


def _values(size: OperationSize) -> float:
    return size.bytes / _compute_dtype(size).itemsize


def _gemm(size: OperationSize, device: torch.device) -> list[Thunk]:
    """Return one function, an M x N by N x N GEMM: 2 M N N FLOPs, M N + N N + M N values read and written."""
    products = size.flops / 2
    side = round(_most_likely(_widths(1.0, _values(size), 2 * products), products ** (1 / 3)))
    left, right = _random(size, device, max(1, round(products / side**2)), side), _random(size, device, side, side)
    return [lambda: left @ right]


def _conv(size: OperationSize, device: torch.device) -> list[Thunk]:
    """Return one function, a k x k convolution over P pixels with C channels in and out: 2 k k P C C FLOPs.

    It reads and writes two maps of P C values and k k C C weights. Backward computes only the input gradient, as for a
    frozen base; traces count three maps for it.
    """
    map_count = 3 if size.stage == "backward" else 2
    kernels: dict[float, int] = {}
    for kernel in (1, 3):
        products = size.flops / 2 / kernel**2
        kernels |= dict.fromkeys(_widths(kernel**2, _values(size), map_count * products), kernel)
    channels = _most_likely(list(kernels), (size.flops / 162) ** (1 / 3))  # fallback: 3 x 3, pixels = 9 C
    kernel = kernels.get(channels, 3)
    channels = round(channels)
    side = max(1, round(math.sqrt(size.flops / 2) / kernel / channels))
    image = _random(size, device, 1, channels, side, side)
    weight = _random(size, device, channels, channels, kernel, kernel)
    padding, stride = [kernel // 2] * 2, [1, 1]
    if size.stage != "backward":
        return [lambda: F.conv2d(image, weight, padding=padding)]
    convolution_backward = torch.ops.aten.convolution_backward
    return [
        lambda: convolution_backward(
            image, image, weight, None, stride, padding, stride, False, [0, 0], 1, [True, False, False]
        )
    ]


def _attention(size: OperationSize, device: torch.device) -> list[Thunk]:
    """Return one function, self-attention over S tokens of width D.

    Forward has 4 S S D FLOPs and moves 4 S D values; backward has 10 S S D FLOPs and moves 8 S D values.
    """
    backward = size.stage == "backward"
    flops, map_count = (10, 8) if backward else (4, 4)
    map_values = _values(size) / map_count
    # With heads at least _NARROWEST wide, the FLOPs also limit the number of tokens.
    tokens = max(1, round(min(size.flops / flops / map_values, math.sqrt(size.flops / flops / _NARROWEST))))
    heads = max(1, round(map_values / tokens / _HEAD))
    shape = (1, heads, tokens, max(_NARROWEST, min(_HEAD, round(map_values / tokens / heads / 8) * 8)))
    query, key, value = (_random(size, device, *shape).requires_grad_(backward) for _ in range(3))
    if not backward:
        return [lambda: F.scaled_dot_product_attention(query, key, value)]
    result = F.scaled_dot_product_attention(query, key, value)
    grad_output = torch.ones_like(result)
    return [lambda: torch.autograd.grad(result, (query, key, value), grad_output, retain_graph=True)]


def _other(size: OperationSize, device: torch.device) -> list[Thunk]:
    """Return memory-bound functions that move ``size.bytes``: an addition, an activation and a normalization."""
    values = _values(size)
    a, b = (_random(size, device, max(1, round(values / 3))) for _ in range(2))
    width = min(_HEAD, max(1, round(values / 2)))
    rows = _random(size, device, max(1, round(values / 2 / width)), width)
    return [lambda: a + b, lambda: F.silu(rows), lambda: F.layer_norm(rows, (width,))]


_MAKERS = {"gemm": _gemm, "conv": _conv, "attention": _attention, "other": _other}


def _widths(weight: float, values: float, plane: float) -> list[float]:
    """Return the solutions w >= 1 of weight * w**2 + plane / w = values: usually two or none."""
    roots = np.roots([weight, 0.0, -values, plane])
    return [float(root.real) for root in roots if abs(root.imag) < 1e-6 * abs(root) and root.real >= 1]


def _most_likely(widths: list[float], otherwise: float) -> float:
    """Return the width nearest to a multiple of 8, as models use; max(1, ``otherwise``) if ``widths`` is empty."""
    return min(widths, key=lambda width: abs(width / 8 - round(width / 8)) / width, default=max(1.0, otherwise))


Clock = Callable[[Thunk], float]


def measure_rate(
    device: torch.device, operations: Iterable[Operation] = (), *, name: str | None = None, seconds: float = 1.0
) -> DeviceSpeed:
    """Measure how fast ``device`` computes ``operations``, by timing the largest of them on random data.

    Without operations, SDXL sizes are timed on a GPU and small sizes on the CPU, with the threads that PyTorch is set
    to use. Each size is timed several times to reduce the influence of other programs. On a GPU, call this before
    anything is allocated there: it returns all cached memory to the driver at the end, but creates the CUDA context.
    """
    sizes = dominant_sizes(operations) or typical_sizes(device)
    host = _operation_seconds(device, torch.get_num_threads())
    if device.type != "cuda":
        timed = _timed(sizes, device, _cpu_clock(), _bare_call(), seconds)
        return DeviceSpeed(name or f"cpu, {torch.get_num_threads()} threads", timed, _fastest(timed), host, 0.0)
    timed = _timed(sizes, device, _gpu_clock(device), EMPTY_KERNEL_SECONDS, seconds)
    bus = _bus_rate(device)
    # cuBLAS keeps a workspace per stream, which would count as used memory in the run's own budget.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return DeviceSpeed(name or str(device), timed, _fastest(timed), EMPTY_KERNEL_SECONDS, host, bus=bus)


def _bus_rate(device: torch.device) -> float:
    """Return the bytes per second of copies from pinned main memory to the GPU, the fastest of a few."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    seconds: list[float] = []
    for _ in range(COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return COPIED_BYTES / max(min(seconds), 1e-6)


def dominant_sizes(operations: Iterable[Operation]) -> list[OperationSize]:
    """Return the operation sizes that account for most of the work of each kind and dtype."""
    work: Counter[OperationSize] = Counter()
    for operation in operations:
        if operation.kind == "copy":
            continue
        kind = operation.kind if operation.flops else "other"
        work[OperationSize(kind, operation.dtype, operation.stage, operation.flops, operation.bytes)] += (
            operation.count * (operation.flops or operation.bytes)
        )
    total: Counter[tuple[str, str]] = Counter()
    for size, amount in work.items():
        total[size.kind, size.dtype] += amount
    chosen: list[OperationSize] = []
    covered: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for size, amount in work.most_common():
        group = size.kind, size.dtype
        if covered[group] < COVERED * total[group] and count[group] < MAX_SIZES_PER_KIND:
            chosen.append(size)
            covered[group] += amount
            count[group] += 1
    return chosen


def typical_sizes(device: torch.device) -> list[OperationSize]:
    """Return SDXL's operation sizes at 1024 px in the GPU's training dtype, or small fp32 operations for the CPU."""
    if device.type != "cuda":
        return list(_sizes("float32", 4, ((1024, 64), (256, 128))))
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return list(_sizes("bfloat16" if has_bf16 else "float16", 2, ((4096, 640), (1024, 1280))))


def cpu_time() -> Callable[[], float]:
    """Return a timer for CPU work: wall time, or the thread's CPU time if PyTorch uses only one thread."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _sizes(dtype: str, item: int, shapes: Iterable[tuple[int, int]]) -> Iterator[OperationSize]:
    for tokens, width in shapes:
        plane, square = tokens * width, width * width
        yield OperationSize("gemm", dtype, "forward", 2 * tokens * square, item * (2 * plane + square))
        yield OperationSize("conv", dtype, "forward", 18 * tokens * square, item * (2 * plane + 9 * square))
        yield OperationSize("attention", dtype, "forward", 4 * tokens * plane, item * 4 * plane)
        yield OperationSize("other", dtype, "forward", 0, item * 3 * plane)


def _fastest(timed: Iterable[TimedOperation]) -> float:
    """Return the highest bandwidth that any operation reached, in bytes per second."""
    return max(operation.bytes / operation.seconds for operation in timed)


def _timed(
    sizes: Sequence[OperationSize], device: torch.device, clock: Clock, bare: float, budget: float
) -> tuple[TimedOperation, ...]:
    """Time every size, within a total of ``budget`` seconds; ``bare`` is the fixed overhead to subtract.

    On the CPU the sizes take turns, so that the CPU caches contain other data, as in a training step; a convolution
    repeated back to back finds its data in the caches and takes only 70 % as long. On a GPU each size is timed
    separately, because memory may not suffice for all tensors at once.
    """
    together = device.type != "cuda" and sum(size.bytes for size in sizes) < _TOGETHER
    groups = [sizes] if together else [[size] for size in sizes]
    seconds = [mean for group in groups for mean in _seconds_each(group, device, clock, budget / len(groups))]
    # The fixed overhead is counted per operation elsewhere. Operations that are all overhead keep a tenth.
    return tuple(
        TimedOperation(size.kind, size.dtype, size.flops, size.bytes, max(mean - bare, 0.1 * mean))
        for size, mean in zip(sizes, seconds, strict=True)
    )


def _seconds_each(sizes: Sequence[OperationSize], device: torch.device, clock: Clock, budget: float) -> list[float]:
    """Return the seconds for each size, averaged over its example calls; the first two rounds are warm-up.

    On a GPU the fastest try is used, because nothing else runs between its events. On the CPU the median is used,
    which is 10 to 25 % longer than the fastest try: clock speeds and other programs affect a training step too.
    """
    examples = [sample_calls(size, device) for size in sizes]
    tries: list[list[list[float]]] = [[[] for _ in variants] for variants in examples]
    ends = time.perf_counter() + budget
    for turn in range(_TRIES):
        if turn > 4 and time.perf_counter() > ends:
            break
        for variants, taken in zip(examples, tries, strict=True):
            for variant, seconds in zip(variants, taken, strict=True):
                seconds.append(clock(variant))
    typical: Callable[[list[float]], float] = min if device.type == "cuda" else statistics.median
    return [statistics.fmean(typical(seconds[2:]) for seconds in taken) for taken in tries]


def _cpu_clock() -> Clock:
    now = cpu_time()

    def clock(example: Thunk) -> float:
        started = now()
        example()
        return now() - started

    return clock


def _gpu_clock(device: torch.device, calls: int = 4) -> Clock:
    def clock(example: Thunk) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(calls):
            example()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / calls / 1000

    return clock


def _bare_call() -> float:
    """Return the seconds that adding two single values takes: the fixed overhead in every CPU timing."""
    value, clock = torch.zeros(1), _cpu_clock()
    return min(clock(lambda: value + value) for _ in range(100))


@cache
def _operation_seconds(device: torch.device, threads: int) -> float:
    """Return the CPU overhead of one operation in a training step, in seconds: Python, autograd and dispatch.

    Measured on a miniature diffusers UNet with a LoRA, which has the same modules as a real one. When the CPU also
    computes, each operation evicts the dispatcher's code and data from the caches; with a GPU they stay cached.

    The result does not depend on the job, so a process measures it once per number of ``threads``. Medians are used
    because the fastest of a few tries varied by 40 % between measurements, and with it the whole forecast.
    """
    step, now = _miniature_step(device), cpu_time()
    counter = _OperationCounter()
    with counter:
        step()

    def step_seconds() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = now()
        step()
        return now() - started

    seconds = statistics.median(step_seconds() for _ in range(_TRIES))
    if device.type != "cuda":
        seconds += _eviction_seconds(step_seconds)
    return seconds / counter.operations


def _eviction_seconds(step_seconds: Callable[[], float]) -> float:
    """Return how many seconds longer a step takes when the CPU caches are overwritten before each operation.

    Each such step is compared with a step right after it that overwrites nothing, so that clock speed and other
    programs affect both equally.
    """
    longer = [
        _seconds_after_passes(_CACHE, step_seconds) - _seconds_after_passes(0, step_seconds) for _ in range(_COLD_TRIES)
    ]
    return max(0.0, statistics.median(longer))


def _seconds_after_passes(size: int, step_seconds: Callable[[], float]) -> float:
    """Return the seconds of a step that writes ``size`` bytes before each operation, excluding the time for writing."""
    eviction = _CacheEviction(size)
    with eviction:
        return step_seconds() - eviction.seconds


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations the way memory traces do: all except views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not (is_view(func) or is_allocation(func))
        return func(*args, **(kwargs or {}))


class _CacheEviction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes ``size`` bytes before each operation, which evicts the operation's data from the CPU caches."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes, self._now = torch.zeros(size, dtype=torch.int8), cpu_time()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = self._now()
        self._bytes.add_(1)
        self.seconds += self._now() - started
        return func(*args, **(kwargs or {}))


def _miniature_step(device: torch.device) -> Thunk:
    unet = UNet2DConditionModel(**_MINIATURE).requires_grad_(False).to(device)
    recipe = RecipeConfig(rank=1, alpha=1.0)
    adapter = attach("sd15", unet, (), recipe, dtype=torch.float32, generator=lambda _: np.random.default_rng(0))
    models = StepModels("sd15", unet, (), None, torch.float32)
    schedule = NoiseSchedule.create("epsilon", False).to(device, torch.float32)
    latents, text = torch.zeros(1, 4, 4, 4), TextConditioning(torch.zeros(1, 2, 8), None)
    timesteps = torch.zeros(1, dtype=torch.int64)
    batch = MicroBatch(latents, latents, None, timesteps, text, None, None, None, torch.ones(1)).to(device)

    def step() -> None:
        training_step(models, schedule, recipe.objective, batch)
        for weight in adapter.parameters.values():
            weight.grad = None

    return step
