"""Measures in about a second how fast this device works, at the sizes that a job works at."""

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
from trainer.protocol.forecast import Operation, Rate, Timed
from trainer.training.device.dispatched import is_allocation, is_view
from trainer.training.objective import NoiseSchedule
from trainer.training.step import MicroBatch, StepModels, training_step

Thunk = Callable[[], object]

_HEAD = 64
_NARROWEST = 8
# Of each kind and format as many sizes are timed as make up this share of its work, the largest shares first.
COVERED = 0.95
SIZES_OF_A_KIND = 12
LEAST_KERNEL = 3e-6  # seconds that a card takes for an empty kernel, from one to the next
_TRIES = 12
_CACHE = 1 << 21  # bytes: twice what a core has of the second level, so that nothing of it stays there
_COLD_TRIES = 11  # of pairs of steps that take some 0.12 s together
_TOGETHER = 1 << 30  # bytes of main memory that examples may take at once
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
    """Operations of one size; `trainer.protocol.forecast.Operation` says what the fields mean."""

    kind: str
    dtype: str
    stage: str
    flops: int
    bytes: int


def examples_of(size: OperationSize, device: torch.device) -> list[Thunk]:
    """Return calls that each take about as long as an operation of this size does; their mean stands for it.

    A trace knows flops and bytes but no shapes. Shapes are found that have both, as if matrices were square and
    convolutions had as many channels in as out.
    """
    return _MAKERS[size.kind](size, device)


def _random(size: OperationSize, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(_format(size))


def _format(size: OperationSize) -> torch.dtype:
    """The format to measure in: weights of 4 and 8 bits are multiplied in a 16-bit one."""
    found: torch.dtype = getattr(torch, size.dtype)
    return found if found.is_floating_point else torch.bfloat16


def _numbers(size: OperationSize) -> float:
    return size.bytes / _format(size).itemsize


def _gemm(size: OperationSize, device: torch.device) -> list[Thunk]:
    """M x N by N x N: 2 M N N flops, and M N + N N + M N numbers."""
    products = size.flops / 2
    side = round(_likely(_widths(1.0, _numbers(size), 2 * products), products ** (1 / 3)))
    left, right = _random(size, device, max(1, round(products / side**2)), side), _random(size, device, side, side)
    return [lambda: left @ right]


def _conv(size: OperationSize, device: torch.device) -> list[Thunk]:
    """k x k over P places, C channels in and out: 2 k k P C C flops, and the numbers of maps of P C and the weight.

    Backward goes to the input only, as with a frozen base; it reads one map more.
    """
    maps = 3 if size.stage == "backward" else 2
    kernels: dict[float, int] = {}
    for kernel in (1, 3):
        products = size.flops / 2 / kernel**2
        kernels |= dict.fromkeys(_widths(kernel**2, _numbers(size), maps * products), kernel)
    channels = _likely(list(kernels), (size.flops / 162) ** (1 / 3))  # otherwise 3 x 3 over as many places as channels
    kernel = kernels.get(channels, 3)
    channels = round(channels)
    side = max(1, round(math.sqrt(size.flops / 2) / kernel / channels))
    image = _random(size, device, 1, channels, side, side)
    weight = _random(size, device, channels, channels, kernel, kernel)
    around, ones = [kernel // 2] * 2, [1, 1]
    if size.stage != "backward":
        return [lambda: F.conv2d(image, weight, padding=around)]
    back = torch.ops.aten.convolution_backward
    return [lambda: back(image, image, weight, None, ones, around, ones, False, [0, 0], 1, [True, False, False])]


def _attention(size: OperationSize, device: torch.device) -> list[Thunk]:
    """S places attending to S with a width of D in all: 4 S S D flops and 4 S D numbers; backward 10 and 8."""
    backward = size.stage == "backward"
    flops, maps = (10, 8) if backward else (4, 4)
    plane = _numbers(size) / maps
    # No head is narrower than that, so there are no more places than these flops are enough for.
    places = max(1, round(min(size.flops / flops / plane, math.sqrt(size.flops / flops / _NARROWEST))))
    heads = max(1, round(plane / places / _HEAD))
    shape = (1, heads, places, max(_NARROWEST, min(_HEAD, round(plane / places / heads / 8) * 8)))
    query, key, value = (_random(size, device, *shape).requires_grad_(backward) for _ in range(3))
    if not backward:
        return [lambda: F.scaled_dot_product_attention(query, key, value)]
    result = F.scaled_dot_product_attention(query, key, value)
    above = torch.ones_like(result)
    return [lambda: torch.autograd.grad(result, (query, key, value), above, retain_graph=True)]


def _other(size: OperationSize, device: torch.device) -> list[Thunk]:
    """What moves that many bytes: a sum, an activation and a normalisation, as they follow each other in a UNet."""
    numbers = _numbers(size)
    one, other = (_random(size, device, max(1, round(numbers / 3))) for _ in range(2))
    width = min(_HEAD, max(1, round(numbers / 2)))
    rows = _random(size, device, max(1, round(numbers / 2 / width)), width)
    return [lambda: one + other, lambda: F.silu(rows), lambda: F.layer_norm(rows, (width,))]


_MAKERS = {"gemm": _gemm, "conv": _conv, "attention": _attention, "other": _other}


def _widths(weight: float, numbers: float, plane: float) -> list[float]:
    """Return the widths w of at least 1 with weight w w + plane / w = numbers: two in general, or none."""
    roots = np.roots([weight, 0.0, -numbers, plane])
    return [float(root.real) for root in roots if abs(root.imag) < 1e-6 * abs(root) and root.real >= 1]


def _likely(widths: list[float], otherwise: float) -> float:
    """Return the width nearest to a multiple of eight, as models have; where there is none, ``otherwise``."""
    return min(widths, key=lambda width: abs(width / 8 - round(width / 8)) / width, default=max(1.0, otherwise))


Clock = Callable[[Thunk], float]


def measure_rate(
    device: torch.device, operations: Iterable[Operation] = (), *, name: str | None = None, seconds: float = 1.0
) -> Rate:
    """Return what ``device`` takes for ``operations``: the largest are timed on matrices and pictures of their size.

    Without operations, sizes of SDXL are taken on a card and small ones on the CPU. As many threads work as are set;
    several tries are made of each, so that other programs disturb little. On a card, do it before anything is
    placed there: it leaves no memory of the allocator behind, but makes the CUDA context.
    """
    sizes = largest(operations) or typical_sizes(device)
    host = _operation_seconds(device, torch.get_num_threads())
    if device.type != "cuda":
        timed = _timed(sizes, device, _cpu_clock(), _bare_call(), seconds)
        return Rate(name or f"cpu, {torch.get_num_threads()} threads", timed, _fastest(timed), host, 0.0)
    timed = _timed(sizes, device, _card_clock(device), LEAST_KERNEL, seconds)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return Rate(name or str(device), timed, _fastest(timed), LEAST_KERNEL, host)


def largest(operations: Iterable[Operation]) -> list[OperationSize]:
    """Return of each kind and format the sizes in which most of the work is done."""
    work: Counter[OperationSize] = Counter()
    for one in operations:
        kind = one.kind if one.flops else "other"
        work[OperationSize(kind, one.dtype, one.stage, one.flops, one.bytes)] += one.count * (one.flops or one.bytes)
    whole: Counter[tuple[str, str]] = Counter()
    for size, amount in work.items():
        whole[size.kind, size.dtype] += amount
    chosen: list[OperationSize] = []
    covered: Counter[tuple[str, str]] = Counter()
    taken: Counter[tuple[str, str]] = Counter()
    for size, amount in work.most_common():
        group = size.kind, size.dtype
        if covered[group] < COVERED * whole[group] and taken[group] < SIZES_OF_A_KIND:
            chosen.append(size)
            covered[group] += amount
            taken[group] += 1
    return chosen


def typical_sizes(device: torch.device) -> list[OperationSize]:
    """Return sizes of SDXL at 1024 in the format that a card computes in, or small ones in fp32 for the CPU."""
    if device.type != "cuda":
        return list(_sizes("float32", 4, ((1024, 64), (256, 128))))
    brain = torch.cuda.get_device_capability(device) >= (8, 0)
    return list(_sizes("bfloat16" if brain else "float16", 2, ((4096, 640), (1024, 1280))))


def cpu_time() -> Callable[[], float]:
    """Return what to time the CPU with: where one thread works its own time, which other programs do not lengthen."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _sizes(dtype: str, item: int, shapes: Iterable[tuple[int, int]]) -> Iterator[OperationSize]:
    for tokens, width in shapes:
        plane, square = tokens * width, width * width
        yield OperationSize("gemm", dtype, "forward", 2 * tokens * square, item * (2 * plane + square))
        yield OperationSize("conv", dtype, "forward", 18 * tokens * square, item * (2 * plane + 9 * square))
        yield OperationSize("attention", dtype, "forward", 4 * tokens * plane, item * 4 * plane)
        yield OperationSize("other", dtype, "forward", 0, item * 3 * plane)


def _fastest(timed: Iterable[Timed]) -> float:
    """Bytes a second of the operation that moved them fastest."""
    return max(one.bytes / one.seconds for one in timed)


def _timed(
    sizes: Sequence[OperationSize], device: torch.device, clock: Clock, bare: float, budget: float
) -> tuple[Timed, ...]:
    """Time every size; ``bare`` seconds are in every timing, ``budget`` is for all.

    On the CPU they take turns, so that each finds the processor's caches as full of others' numbers as in a training
    step: alone and again and again, convolutions take 70 % of that. On a card memory for all at once may be wanting.
    """
    together = device.type != "cuda" and sum(size.bytes for size in sizes) < _TOGETHER
    groups = [sizes] if together else [[size] for size in sizes]
    taken = [mean for group in groups for mean in _seconds_each(group, device, clock, budget / len(groups))]
    # What each operation costs besides is reckoned apart; a tenth is left to those that are nothing but that.
    return tuple(
        Timed(size.kind, size.dtype, size.flops, size.bytes, max(mean - bare, 0.1 * mean))
        for size, mean in zip(sizes, taken, strict=True)
    )


def _seconds_each(sizes: Sequence[OperationSize], device: torch.device, clock: Clock, budget: float) -> list[float]:
    """Return the seconds of each size: the mean over its examples. The first two turns warm up.

    On a GPU the quickest try of an example counts, as nothing else runs between its events. On the CPU the median
    does: a training step meets the same clock speeds and other programs, and takes 10 to 25 % longer than the quickest.
    """
    examples = [examples_of(size, device) for size in sizes]
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


def _card_clock(device: torch.device, calls: int = 4) -> Clock:
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
    """Return the seconds of an operation on one number: what is in every timing and counted with the operations."""
    one, clock = torch.zeros(1), _cpu_clock()
    return min(clock(lambda: one + one) for _ in range(100))


@cache
def _operation_seconds(device: torch.device, threads: int) -> float:
    """Return the seconds that one operation costs the CPU in a training step, with next to nothing to compute.

    A diffusers UNet with a LoRA, in miniature: modules, autograd and dispatch are those of a real step. Where the
    CPU computes as well, each operation evicts what dispatching needs from the caches; on a GPU's host it stays there.

    This is the same for every job, so a process measures it once per number of ``threads``. Medians are taken because
    the quickest of a few tries varied by 40 % from one measurement to the next, and the whole forecast with it.
    """
    step, now = _miniature_step(device), cpu_time()
    counting = _Counting()
    with counting:
        step()

    def took() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = now()
        step()
        return now() - started

    seconds = statistics.median(took() for _ in range(_TRIES))
    if device.type != "cuda":
        seconds += _eviction_seconds(took)
    return seconds / counting.operations


def _eviction_seconds(took: Callable[[], float]) -> float:
    """Return by how many seconds a step is longer when a pass over memory before each operation empties the caches.

    Each step with passes is compared with one beside it whose passes are over nothing, so that both meet the same
    clock speed and the same other programs.
    """
    longer = [_seconds_after_passes(_CACHE, took) - _seconds_after_passes(0, took) for _ in range(_COLD_TRIES)]
    return max(0.0, statistics.median(longer))


def _seconds_after_passes(size: int, took: Callable[[], float]) -> float:
    """Return the seconds of a step whose operations each come after a pass over ``size`` bytes, without the passes."""
    passing = _Passing(size)
    with passing:
        return took() - passing.seconds


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations as traces do: all that cost a device something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not (is_view(func) or is_allocation(func))
        return func(*args, **(kwargs or {}))


class _Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes over so many bytes before each operation, which finds nothing of its own in the processor's caches."""

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
