"""Measures in about a second how fast this device works, at the sizes that a job works at."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.adapter.attach import attach
from trainer.base.text import TextConditioning
from trainer.config.recipe import RecipeConfig
from trainer.protocol.rate import Operation, Rate, Timed
from trainer.training.dispatched import is_allocation, is_view
from trainer.training.examples import Size, Thunk, examples_of
from trainer.training.objective import NoiseSchedule
from trainer.training.step import MicroBatch, StepModels, training_step

Clock = Callable[[Thunk], float]

# Of each kind and format as many sizes are timed as make up this share of its work, the largest shares first.
COVERED = 0.95
SIZES_OF_A_KIND = 12
LEAST_KERNEL = 3e-6  # seconds that a card takes for an empty kernel, from one to the next
_TRIES = 12
_CACHE = 1 << 21  # bytes: twice what a core has of the second level, so that nothing of it stays there
_COLD_TRIES = 5  # of steps that take some 0.04 s
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


def measure_rate(
    device: torch.device, operations: Iterable[Operation] = (), *, name: str | None = None, seconds: float = 1.0
) -> Rate:
    """Return what ``device`` takes for ``operations``: the largest are timed on matrices and pictures of their size.

    Without operations, sizes of SDXL are taken on a card and small ones on the CPU. As many threads work as are set;
    the quickest of several tries counts, so that other programs disturb little. On a card, do it before anything is
    placed there: it leaves no memory of the allocator behind, but makes the CUDA context.
    """
    sizes = largest(operations) or typical_sizes(device)
    host = _operation_seconds(device)
    if device.type != "cuda":
        timed = _timed(sizes, device, _cpu_clock(), _bare_call(), seconds)
        return Rate(name or f"cpu, {torch.get_num_threads()} threads", timed, _fastest(timed), host, 0.0)
    timed = _timed(sizes, device, _card_clock(device), LEAST_KERNEL, seconds)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return Rate(name or str(device), timed, _fastest(timed), LEAST_KERNEL, host)


def largest(operations: Iterable[Operation]) -> list[Size]:
    """Return of each kind and format the sizes in which most of the work is done."""
    work: Counter[Size] = Counter()
    for one in operations:
        kind = one.kind if one.flops else "other"
        work[Size(kind, one.dtype, one.stage, one.flops, one.bytes)] += one.count * (one.flops or one.bytes)
    whole: Counter[tuple[str, str]] = Counter()
    for size, amount in work.items():
        whole[size.kind, size.dtype] += amount
    chosen: list[Size] = []
    covered: Counter[tuple[str, str]] = Counter()
    taken: Counter[tuple[str, str]] = Counter()
    for size, amount in work.most_common():
        group = size.kind, size.dtype
        if covered[group] < COVERED * whole[group] and taken[group] < SIZES_OF_A_KIND:
            chosen.append(size)
            covered[group] += amount
            taken[group] += 1
    return chosen


def typical_sizes(device: torch.device) -> list[Size]:
    """Return sizes of SDXL at 1024 in the format that a card computes in, or small ones in fp32 for the CPU."""
    if device.type != "cuda":
        return list(_sizes("float32", 4, ((1024, 64), (256, 128))))
    brain = torch.cuda.get_device_capability(device) >= (8, 0)
    return list(_sizes("bfloat16" if brain else "float16", 2, ((4096, 640), (1024, 1280))))


def cpu_time() -> Callable[[], float]:
    """Return what to time the CPU with: where one thread works its own time, which other programs do not lengthen."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _sizes(dtype: str, item: int, shapes: Iterable[tuple[int, int]]) -> Iterator[Size]:
    for tokens, width in shapes:
        plane, square = tokens * width, width * width
        yield Size("gemm", dtype, "forward", 2 * tokens * square, item * (2 * plane + square))
        yield Size("conv", dtype, "forward", 18 * tokens * square, item * (2 * plane + 9 * square))
        yield Size("attention", dtype, "forward", 4 * tokens * plane, item * 4 * plane)
        yield Size("other", dtype, "forward", 0, item * 3 * plane)


def _fastest(timed: Iterable[Timed]) -> float:
    """Bytes a second of the operation that moved them fastest."""
    return max(one.bytes / one.seconds for one in timed)


def _timed(sizes: Sequence[Size], device: torch.device, clock: Clock, bare: float, budget: float) -> tuple[Timed, ...]:
    """Time every size; ``bare`` seconds are in every timing, ``budget`` is for all.

    On the CPU they take turns, so that each finds the processor's caches as full of others' numbers as in a training
    step: alone and again and again, convolutions take 70 % of that. On a card memory for all at once may be wanting.
    """
    together = device.type != "cuda" and sum(size.bytes for size in sizes) < _TOGETHER
    groups = [sizes] if together else [[size] for size in sizes]
    taken = [mean for group in groups for mean in _quickest(group, device, clock, budget / len(groups))]
    # What each operation costs besides is reckoned apart; a tenth is left to those that are nothing but that.
    return tuple(
        Timed(size.kind, size.dtype, size.flops, size.bytes, max(mean - bare, 0.1 * mean))
        for size, mean in zip(sizes, taken, strict=True)
    )


def _quickest(sizes: Sequence[Size], device: torch.device, clock: Clock, budget: float) -> list[float]:
    """Return the seconds of each size: its examples' quickest tries, averaged. The first two turns warm up."""
    examples = [examples_of(size, device) for size in sizes]
    best = [[math.inf] * len(variants) for variants in examples]
    ends = time.perf_counter() + budget
    for turn in range(_TRIES):
        if turn > 2 and time.perf_counter() > ends:
            break
        for variants, quickest in zip(examples, best, strict=True):
            quickest[:] = [min(known, clock(variant)) for variant, known in zip(variants, quickest, strict=True)]
    return [sum(quickest) / len(quickest) for quickest in best]


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


def _operation_seconds(device: torch.device) -> float:
    """Return the seconds that one operation costs the CPU in a training step, with next to nothing to compute.

    A UNet of diffusers' with a LoRA, in miniature: modules, autograd and dispatch are those of a real step. Where the
    CPU computes as well, what it dispatches with has left its caches each time; on a card's host it stays there.
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

    seconds = min(took() for _ in range(_TRIES))
    if device.type != "cuda":
        seconds += max(0.0, _passing_between(_CACHE, took) - _passing_between(0, took))
    return seconds / counting.operations


def _passing_between(size: int, took: Callable[[], float]) -> float:
    """Return the seconds of a step whose operations each come after a pass over ``size`` bytes, without the passes."""
    quickest = math.inf
    for _ in range(_COLD_TRIES):
        with _Passing(size) as passing:
            quickest = min(quickest, took() - passing.seconds)
    return quickest


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
