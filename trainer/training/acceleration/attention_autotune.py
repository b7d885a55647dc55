"""Autotuning of the attention kernel: each kernel is timed once, with the shapes of the run.

The forecast was made for the planned kernel. Another kernel replaces it only if results and gradients agree,
memory use is no higher, and it is measurably faster. If anything fails, the planned kernel is used.
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
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import epoch_samples, usual_shape
from trainer.errors import JobError
from trainer.files.architecture import Config
from trainer.training.device.device import (
    DTYPES,
    KERNELS,
    AttentionChoice,
    choose_attention_kernel,
    head_widths,
    numeric_settings,
)
from trainer.training.device.offload import empty_cache
from trainer.training.device.out_of_memory import is_out_of_memory

T = TypeVar("T")
Clock = Callable[[Callable[[], object]], float]
"""Function that times another function and returns the seconds per call."""

CANDIDATES: dict[str, tuple[AttentionChoice, ...]] = {"cuda": ("flash", "efficient", "cudnn")}
"""Kernels to compare, by device type; other types have only one. "math", which stores all scores, is never faster."""

SECONDS = 1.0
"""Time budget in seconds for all kernels and shapes, warm-up calls not included."""
MOST_BUCKETS = 3
"""Maximum number of bucket sizes to time; the most frequent are chosen. All have about the same number of tokens."""
MIN_GAIN = 0.03
"""Minimum gain over the planned kernel, as a fraction of its time; smaller gains are measurement noise."""
PEAK_TOLERANCE = 32 << 20
"""Bytes by which a kernel's peak may exceed the planned kernel's: half of the smallest forecast safety margin."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest allowed norm-relative difference of two kernels' results. Generous: a wrong kernel is off by about 1."""

# What PyTorch reports when no allowed kernel supports the inputs: on a GPU, and on the CPU.
_NO_KERNEL_MESSAGES = ("No available kernel", "No viable backend")


@dataclass(frozen=True)
class Shape:
    """Sizes in one attention call of the UNet; ``queries`` and ``keys`` are token counts, ``width`` is per head."""

    images: int
    heads: int
    width: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Benchmark:
    """Result of timing the attention kernels."""

    chosen: AttentionChoice
    seconds: dict[AttentionChoice, float]
    """Seconds that all attention of one micro-batch takes, forward and backward, for each kernel that was timed."""
    refused: dict[AttentionChoice, str]
    """Reason why each excluded kernel is not used."""

    @property
    def sentence(self) -> str:
        """Return the sentence for the run's log."""
        times = ", ".join(f"{kernel} {seconds * 1e3:.2f} ms" for kernel, seconds in self.seconds.items())
        others = "".join(f"; {kernel}: {reason}" for kernel, reason in self.refused.items())
        measured = f"per micro-batch, forward and backward: {times}" if times else "no kernel could be timed"
        return f"Attention kernel: {self.chosen} ({measured}{others})."


def attention_shapes(unet: Config, size: tuple[int, int], images: int, text_tokens: int) -> Counter[Shape]:
    """Count the attention calls of a UNet by shape, for images of ``size`` (width, height) in pixels.

    ``text_tokens`` is the length of an encoded caption. Follows how diffusers' UNet2DConditionModel builds its blocks:
    an up block has one more layer than a down block, and the middle block is at the lowest resolution. The result is
    empty if the config does not give one whole number per depth.
    """
    depths = len(unet["block_out_channels"])
    # Despite its name, "attention_head_dim" is the number of heads: an old mistake that diffusers keeps.
    heads, transformers, layers = (
        by_depth(unet, key, default)
        for key, default in (("attention_head_dim", 8), ("transformer_layers_per_block", 1), ("layers_per_block", 2))
    )
    counts: Counter[Shape] = Counter()
    if not (heads and transformers and layers):
        return counts
    for depth, channels in enumerate(unet["block_out_channels"]):
        down = layers[depth] * ("CrossAttn" in unet["down_block_types"][depth])
        up = (layers[depth] + 1) * ("CrossAttn" in unet["up_block_types"][-1 - depth])
        calls = transformers[depth] * (down + up + (depth == depths - 1))
        tokens = math.prod(-(-side // (8 << depth)) for side in size)
        for keys in (tokens, text_tokens) if calls else ():
            counts[Shape(images, heads[depth], channels // heads[depth], tokens, keys)] += calls
    return counts


def by_depth(unet: Config, key: str, default: int) -> Sequence[int]:
    """Return the whole number that a UNet config sets for ``key`` at each depth; empty if it sets anything else.

    diffusers also allows a list for each depth, with one number per block; no published UNet uses that.
    """
    depths, value = len(unet["block_out_channels"]), unet.get(key) or default
    numbers = value if isinstance(value, list | tuple) else [value] * depths
    return numbers if len(numbers) == depths and all(isinstance(number, int) for number in numbers) else ()


def autotune(
    planned: AttentionChoice,
    shapes: Mapping[Shape, float],
    device: torch.device,
    dtype: torch.dtype,
    clock: Clock | None = None,
    *,
    widths: Set[int] = frozenset(),
) -> Benchmark | None:
    """Time ``planned`` against the other kernels for this device type; return None if there is nothing to compare.

    ``shapes`` maps each shape to its weight in a kernel's total time. A kernel that does not support heads of all
    ``widths`` is excluded. All memory is released at the end, and the random state is not changed.
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
                _require_head_widths(kernel, device, dtype, widths)
                _require_same_results(kernel, planned, shapes, device, dtype)
            seconds[kernel] = _seconds(kernel, shapes, device, dtype, measure)
        except RuntimeError as error:
            refused[kernel] = reason(error)
        empty_cache(device)  # after the except block: until then the traceback's frames keep the tensors alive
    # Without a time for the planned kernel there is nothing to compare with, so it stays.
    best = min(seconds, key=lambda kernel: seconds[kernel], default=planned)
    wins = planned in seconds and seconds[best] < (1 - MIN_GAIN) * seconds[planned]
    return Benchmark(best if wins else planned, seconds, refused)


def autotune_attention(
    job: Job, written: AttentionChoice | None, unet: Config, texts: Iterable[Config], images: Iterable[ImageRecord]
) -> Benchmark | None:
    """Time the attention kernels for a frozen, planned job, with the shapes of its most frequent buckets.

    ``texts`` are the text encoders' configs: the chosen kernel computes their attention too, so it must support their
    heads. Returns None if the user named a kernel, or if the run is deterministic, because timings vary.
    """
    if written not in (None, "auto") or job.fit.deterministic:
        return None
    trained = Counter(usual_shape(image, job.recipe) for image, _ in epoch_samples(images, 0))
    batch = min(job.fit.micro_batch or 1, job.recipe.effective_batch)
    frequent = trained.most_common(MOST_BUCKETS)
    total = sum(uses for _, uses in frequent)
    weights: dict[Shape, float] = defaultdict(float)
    for (width, height, tokens), uses in frequent:
        for shape, count in attention_shapes(unet, (width, height), batch, tokens + 2).items():
            weights[shape] += count * uses / total
    device, dtype = torch.device(job.fit.device or "cpu"), DTYPES[job.fit.dtype or "fp32"]
    with numeric_settings(job):
        return autotune(job.fit.attention or "auto", weights, device, dtype, widths=head_widths(unet, texts))


def stopwatch(seconds: float) -> Clock:
    """Return a clock that runs torch's benchmark timer for about ``seconds``; it warms up and synchronizes a GPU."""
    from torch.utils.benchmark import Timer  # imported here: takes 0.1 s, and most runs do not need it

    def clock(work: Callable[[], object]) -> float:
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=seconds).median)

    return clock


class _Attention:
    """One attention call with random inputs, laid out as in LeanAttention: heads are views into the token rows."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def rows(count: int) -> Tensor:
            values = torch.randn(
                shape.images, count, shape.heads, shape.width, generator=generator, device=device, dtype=dtype
            )
            return values.transpose(1, 2)

        self.grad_output = rows(shape.queries)
        self.inputs = tuple(rows(count).requires_grad_() for count in (shape.queries, shape.keys, shape.keys))

    def forward(self) -> Tensor:
        """Return the attention output (B, heads, queries, width)."""
        query, key, value = self.inputs
        return F.scaled_dot_product_attention(query, key, value)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """Return the output and the gradients of query, key and value."""
        result = self.forward()
        return result.detach(), *torch.autograd.grad(result, self.inputs, self.grad_output)


def _seconds(
    kernel: AttentionChoice, shapes: Mapping[Shape, float], device: torch.device, dtype: torch.dtype, clock: Clock
) -> float:
    """Return the weighted sum of forward and backward seconds over all shapes."""
    with _forced_kernel(kernel):
        return sum(
            weight * clock(_Attention(shape, device, dtype).forward_backward) for shape, weight in shapes.items()
        )


def _require_head_widths(kernel: AttentionChoice, device: torch.device, dtype: torch.dtype, widths: Set[int]) -> None:
    """Raise RuntimeError if ``kernel`` does not support all head ``widths`` of the UNet and the text encoders."""
    try:
        choose_attention_kernel(kernel, device, dtype, widths)
    except JobError as error:
        raise RuntimeError(f"does not support head widths {', '.join(map(str, sorted(widths)))}") from error


def _require_same_results(
    kernel: AttentionChoice,
    planned: AttentionChoice,
    shapes: Iterable[Shape],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise RuntimeError if, at any shape, ``kernel`` gives different results than ``planned`` or needs more memory."""
    for shape in shapes:
        # The same inputs for both kernels, or the results could not be compared.
        attention = _Attention(shape, device, dtype)
        expected, found = (_measure(candidate, attention, device) for candidate in (planned, kernel))
        if not (difference := _relative_difference(found.values, expected.values)) <= TOLERANCES.get(dtype, 0.0):
            raise RuntimeError(f"results differ from {planned} by {100 * difference:.3g}%")
        # Saved bytes add up over all layers until backward, so only 1 % more is allowed; a short peak may be higher.
        if found.saved > expected.saved + expected.saved // 100 or found.peak > expected.peak + PEAK_TOLERANCE:
            raise RuntimeError(f"needs more memory than {planned}")


@dataclass(frozen=True)
class _Measured:
    values: Sequence[Tensor]
    """The output and the gradients."""
    saved: int
    """Bytes saved for backward; 0 on devices other than CUDA, which do not count memory."""
    peak: int
    """Peak bytes of forward and backward."""


def _measure(kernel: AttentionChoice, attention: _Attention, device: torch.device) -> _Measured:
    with _forced_kernel(kernel):
        _, saved, _ = measure_memory(device, attention.forward)
        values, _, peak = measure_memory(device, attention.forward_backward)
    return _Measured(values, saved, peak)


@contextmanager
def _forced_kernel(kernel: AttentionChoice) -> Iterator[None]:
    """Allow only this kernel inside the block; attention that it does not support raises RuntimeError."""
    with warnings.catch_warnings(), sdpa_kernel(KERNELS[kernel]):
        warnings.simplefilter(
            "ignore", UserWarning
        )  # PyTorch warns once per rejected kernel, with details for developers
        yield


def measure_memory(device: torch.device, work: Callable[[], T]) -> tuple[T, int, int]:
    """Return the result of ``work``, the GPU bytes it left allocated, and its peak bytes (0 and 0 without CUDA)."""
    if device.type != "cuda":
        return work(), 0, 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    return result, torch.cuda.memory_allocated(device) - before, torch.cuda.max_memory_allocated(device) - before


def _relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest norm-relative difference between a tensor in ``found`` and the one in ``expected``."""
    pairs = [(actual.float(), wanted.float()) for actual, wanted in zip(found, expected, strict=True)]
    return max(float((actual - wanted).norm() / wanted.norm()) for actual, wanted in pairs)


def retry_once_on_oom(work: Callable[[], T], device: torch.device) -> T:
    """Call ``work``; if memory runs out, release the allocator's cache and call it again.

    A second out-of-memory error is raised: the choice is frozen for the whole run, so a candidate must not be excluded
    just because another program has briefly allocated memory.
    """
    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    empty_cache(device)
    return work()


def reason(error: RuntimeError) -> str:
    """Return a short reason why something could not be timed, for the run's log."""
    if is_out_of_memory(error):
        return "out of memory"
    if any(words in str(error) for words in _NO_KERNEL_MESSAGES):
        return "not supported here"
    return (str(error).splitlines() or [type(error).__name__])[0]
