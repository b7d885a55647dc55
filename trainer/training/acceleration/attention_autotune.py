"""Times the attention kernels of a card at the shapes that a run attends in, once, and takes the quickest.

A kernel may win only if it does what the first one that suits does (its results and gradients are compared) and takes
no more memory, since a plan was made for that one. Where anything fails, that first one stays.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from trainer.config.job import Job
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import epoch_showings
from trainer.errors import JobError
from trainer.files.architecture import Config
from trainer.training.device.device import DTYPES, KERNELS, AttentionChoice, head_widths, numerics, settled
from trainer.training.device.offload import release
from trainer.training.device.out_of_memory import is_out_of_memory

T = TypeVar("T")
Clock = Callable[[Callable[[], object]], float]
"""The seconds that one call takes."""

CANDIDATES: dict[str, tuple[AttentionChoice, ...]] = {"cuda": ("flash", "efficient", "cudnn")}
"""By the kind of device; others have no choice. Math keeps all scores and is never worth it on a card."""

SECONDS = 1.0
"""For timing all kernels at all shapes, beside the first call of each."""
MOST_BUCKETS = 3
"""Of so many shapes of pictures attentions are timed, those shown most. All have about as many places."""
WORTH = 0.03
"""By so much of the time a kernel must be quicker than the one that a plan was made for: less is chance."""
SPARE = 32 << 20
"""Bytes that a kernel may take for a moment beyond what was planned: half of what forecasts hold back at the least."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Norm-relative: by how much results of two kernels may differ, taken widely. A wrong one is off by about 1."""

# What PyTorch says where no kernel is left that would do: on a card, and on the CPU.
_LACKING = ("No available kernel", "No viable backend")


@dataclass(frozen=True)
class Shape:
    """An attention of the UNet: each of ``queries`` places looks at ``keys`` others, by heads of ``width`` numbers."""

    pictures: int
    heads: int
    width: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Benchmark:
    """What came of it."""

    chosen: AttentionChoice
    seconds: dict[AttentionChoice, float]
    """Of all attentions of one micro-batch, forward and backward, by every kernel that was timed."""
    refused: dict[AttentionChoice, str]
    """Why others could not win."""

    @property
    def sentence(self) -> str:
        """For the run's log."""
        times = ", ".join(f"{kernel} {seconds * 1e3:.2f} ms" for kernel, seconds in self.seconds.items())
        others = "".join(f"; {kernel}: {reason}" for kernel, reason in self.refused.items())
        measured = f"measured for a micro-batch, forward and backward: {times}" if times else "nothing could be timed"
        return f"Attention is computed by {self.chosen} ({measured}{others})."


def attentions(unet: Config, size: tuple[int, int], pictures: int, words: int) -> Counter[Shape]:
    """How often a UNet of this config attends in which shapes, for pictures of ``size`` (width, height) in pixels.

    ``words`` is the length of an encoded caption. As diffusers' UNet2DConditionModel builds its blocks: an upward
    block has one layer more than a downward one, and the middle one stands at the last depth.
    """
    depths = len(unet["block_out_channels"])
    # The name is diffusers' mistake: it counts the heads.
    heads, transformers, layers = (
        by_depth(unet, key, default)
        for key, default in (("attention_head_dim", 8), ("transformer_layers_per_block", 1), ("layers_per_block", 2))
    )
    found: Counter[Shape] = Counter()
    if not (heads and transformers and layers):
        return found
    for depth, channels in enumerate(unet["block_out_channels"]):
        down = layers[depth] * ("CrossAttn" in unet["down_block_types"][depth])
        up = (layers[depth] + 1) * ("CrossAttn" in unet["up_block_types"][-1 - depth])
        times = transformers[depth] * (down + up + (depth == depths - 1))
        places = math.prod(-(-side // (8 << depth)) for side in size)
        for keys in (places, words) if times else ():
            found[Shape(pictures, heads[depth], channels // heads[depth], places, keys)] += times
    return found


def by_depth(unet: Config, key: str, default: int) -> Sequence[int]:
    """What a UNet's config says of each depth, downwards; empty where that is not one whole number for each.

    Blocks may differ among themselves at one depth, as in no published UNet.
    """
    depths, value = len(unet["block_out_channels"]), unet.get(key) or default
    numbers = value if isinstance(value, list | tuple) else [value] * depths
    return numbers if len(numbers) == depths and all(isinstance(number, int) for number in numbers) else ()


def race(
    planned: AttentionChoice,
    shapes: Mapping[Shape, float],
    device: torch.device,
    dtype: torch.dtype,
    clock: Clock | None = None,
    *,
    widths: Set[int] = frozenset(),
) -> Benchmark | None:
    """Times ``planned`` against the other kernels of this kind of device; None where there is nothing to choose.

    ``shapes`` says how much each counts; a kernel that does not suit heads of all ``widths`` cannot win. Leaves
    neither memory nor another state of chance behind.
    """
    candidates = CANDIDATES.get(device.type, ())
    if planned not in candidates or not shapes:
        return None
    measure = clock or stopwatch(SECONDS / (len(shapes) * len(candidates)))
    seconds: dict[AttentionChoice, float] = {}
    refused: dict[AttentionChoice, str] = {}
    for kernel in (planned, *(kernel for kernel in candidates if kernel != planned)):
        try:
            if kernel != planned:
                _require_widths(kernel, device, dtype, widths)
                _require_alike(kernel, planned, shapes, device, dtype)
            seconds[kernel] = _seconds(kernel, shapes, device, dtype, measure)
        except RuntimeError as error:
            refused[kernel] = reason(error)
        release(device)  # only here is the error gone, and with its frames all that they held
    best = min(seconds, key=lambda kernel: seconds[kernel], default=planned)
    wins = planned in seconds and seconds[best] < (1 - WORTH) * seconds[planned]
    return Benchmark(best if wins else planned, seconds, refused)


def race_of(
    job: Job, written: AttentionChoice | None, unet: Config, texts: Iterable[Config], pictures: Iterable[Picture]
) -> Benchmark | None:
    """The race of a frozen and planned job, for the shapes that most of its pictures have.

    ``texts`` are the text encoders' configs: what computes the UNet's attention computes theirs.

    None where the user has written which kernel is wanted, or that every run must be the same: clocks differ.
    """
    if written not in (None, "auto") or job.fit.deterministic:
        return None
    shown = Counter(picture.bucket for picture, _ in epoch_showings(pictures, 0))
    at_once = min(job.fit.micro_batch or 1, job.recipe.effective_batch)
    most = shown.most_common(MOST_BUCKETS)
    whole = sum(times for _, times in most)
    weights: dict[Shape, float] = defaultdict(float)
    for size, times in most:
        for shape, count in attentions(unet, size, at_once, job.recipe.token_chunks + 2).items():
            weights[shape] += count * times / whole
    device, dtype = torch.device(job.fit.device or "cpu"), DTYPES[job.fit.dtype or "fp32"]
    with numerics(job):
        return race(job.fit.attention or "auto", weights, device, dtype, widths=head_widths(unet, texts))


def stopwatch(seconds: float) -> Clock:
    """Times by torch's own benchmark for about so long, after a warm-up; waits for the card where there is one."""
    from torch.utils.benchmark import Timer  # a tenth of a second that most runs have no use for

    def clock(work: Callable[[], object]) -> float:
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=seconds).median)

    return clock


class _Attention:
    """One attention with inputs of its own, as LeanAttention calls it: heads are views into rows."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        chance = torch.Generator(device).manual_seed(0)

        def rows(count: int) -> Tensor:
            whole = torch.randn(
                shape.pictures, count, shape.heads, shape.width, generator=chance, device=device, dtype=dtype
            )
            return whole.transpose(1, 2)

        self.above = rows(shape.queries)
        self.inputs = tuple(rows(count).requires_grad_() for count in (shape.queries, shape.keys, shape.keys))

    def forward(self) -> Tensor:
        """(B, heads, queries, width)"""
        query, key, value = self.inputs
        return F.scaled_dot_product_attention(query, key, value)

    def both(self) -> tuple[Tensor, ...]:
        """The result, and the gradients of query, key and value."""
        result = self.forward()
        return result.detach(), *torch.autograd.grad(result, self.inputs, self.above)


def _seconds(
    kernel: AttentionChoice, shapes: Mapping[Shape, float], device: torch.device, dtype: torch.dtype, clock: Clock
) -> float:
    with _only(kernel):
        return sum(weight * clock(_Attention(shape, device, dtype).both) for shape, weight in shapes.items())


def _require_widths(kernel: AttentionChoice, device: torch.device, dtype: torch.dtype, widths: Set[int]) -> None:
    """Raises RuntimeError where ``kernel`` would not be settled for a run: not all heads are those of the UNet."""
    try:
        settled(kernel, device, dtype, widths)
    except JobError as error:
        raise RuntimeError(f"it does not suit heads as wide as {', '.join(map(str, sorted(widths)))}") from error


def _require_alike(
    kernel: AttentionChoice,
    planned: AttentionChoice,
    shapes: Iterable[Shape],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raises RuntimeError with the reason why ``kernel`` cannot stand for ``planned`` at one of the shapes."""
    for shape in shapes:
        attention = _Attention(shape, device, dtype)
        expected, found = (_observe(one, attention, device) for one in (planned, kernel))
        if not (off := _off(found.values, expected.values)) <= TOLERANCES.get(dtype, 0.0):
            raise RuntimeError(f"other results than {planned} ({off:.2g} of them)")
        if found.kept > expected.kept + expected.kept // 100 or found.most > expected.most + SPARE:
            raise RuntimeError(f"more memory than {planned}")


@dataclass(frozen=True)
class _Observed:
    values: Sequence[Tensor]
    """The result and the gradients."""
    kept: int
    """Bytes for backward; 0 where nobody counts."""
    most: int
    """Bytes at the peak."""


def _observe(kernel: AttentionChoice, attention: _Attention, device: torch.device) -> _Observed:
    with _only(kernel):
        _, kept, _ = held(device, attention.forward)
        values, _, most = held(device, attention.both)
    return _Observed(values, kept, most)


@contextmanager
def _only(kernel: AttentionChoice) -> Iterator[None]:
    """Inside, this kernel computes attention or an error tells that it cannot."""
    with warnings.catch_warnings(), sdpa_kernel(KERNELS[kernel]):
        warnings.simplefilter("ignore", UserWarning)  # one per kernel that was refused, with a reason for developers
        yield


def held(device: torch.device, work: Callable[[], T]) -> tuple[T, int, int]:
    """The result of ``work``, and bytes of the card that are taken while it lives, and at most meanwhile."""
    if device.type != "cuda":
        return work(), 0, 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    return result, torch.cuda.memory_allocated(device) - before, torch.cuda.max_memory_allocated(device) - before


def _off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """How far result or a gradient is from the expected one, as a share of it; the greatest."""
    pairs = [(one.float(), other.float()) for one, other in zip(found, expected, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def tried_twice(work: Callable[[], T], device: torch.device) -> T:
    """Call ``work``, again with all cached memory released if memory runs out.

    A shortage is no verdict on what is timed, so the second one is raised: a choice that is frozen for the whole run
    must not depend on what another program held for a moment.
    """
    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    release(device)
    return work()


def reason(error: RuntimeError) -> str:
    """Why something cannot be timed, in few words."""
    if is_out_of_memory(error):
        return "memory ran out"
    if any(words in str(error) for words in _LACKING):
        return "not to be had here"
    return (str(error).splitlines() or [type(error).__name__])[0]
