"""Autotuning of int8 GEMMs: each linear layer size and direction is timed in int8 and in the base's dtype.

The time in int8 includes quantizing the activations; the other time includes dequantizing the int8 weights. If a
layer's forward or backward fails in int8 or gives different results, that direction is not computed in int8.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Literal

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from trainer.base.quantized import (
    NEVER,
    Directions,
    input_gradient,
    int8_directions,
    quantizable_linears,
    quantized_linear,
)
from trainer.base.source import BaseSource
from trainer.config.fit import ALL_LAYERS, MIN_INT8_ROWS, Int8LayerConfig
from trainer.config.job import Job, trains_text_encoder
from trainer.dataset.cache_keys import LATENT_SCALE
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import epoch_samples, usual_shape
from trainer.training.acceleration.attention_autotune import Clock, reason, retry_once_on_oom, stopwatch
from trainer.training.device.device import DTYPES, numeric_settings
from trainer.training.device.offload import empty_cache
from trainer.training.device.out_of_memory import is_out_of_memory

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

SECONDS = 2.0
"""Time budget in seconds for all sizes, formats and directions, warm-up calls not included."""
MIN_GAIN = 0.05
"""Minimum gain as a fraction of the time without int8 GEMMs; smaller gains are not worth the loss of precision."""
ROWS_TOLERANCE = 0.75
"""Minimum rows for int8 as a fraction of the timed rows.

Only the most frequent bucket is timed, and other buckets may have slightly fewer rows."""
TOLERANCE = 0.1
"""Largest allowed norm-relative difference of results. int8 rounding causes about 0.01, wrong sums about 1."""
_BOTH = Directions(MIN_INT8_ROWS, MIN_INT8_ROWS)


@dataclass(frozen=True)
class Linear:
    """Sizes of one call of a frozen linear layer in a micro-batch."""

    rows: int
    inputs: int
    outputs: int
    has_input_gradient: bool
    """Whether the input needs a gradient, which requires a GEMM in backward."""


@dataclass(frozen=True)
class Timing:
    """Measured seconds for one direction (forward or backward) of a linear layer."""

    linear: Linear
    direction: Direction
    unquantized: float
    """Seconds with unquantized weights."""
    dequantized: float
    """Seconds with int8 weights that are dequantized first."""
    int8: float
    """Seconds with an int8 GEMM; infinite if it failed."""
    refused: str = ""
    """Reason why int8 failed; empty if it works."""

    @property
    def is_faster(self) -> bool:
        """Return whether int8 is faster by enough to be used."""
        return self.int8 < (1 - MIN_GAIN) * self.dequantized

    @property
    def sentence(self) -> str:
        """Return a summary such as "640 to 5120 (4096 rows) 0.31 instead of 0.55 ms"."""
        linear = self.linear
        result = self.refused or f"{self.int8 * 1e3:.2f} instead of {self.dequantized * 1e3:.2f} ms"
        return f"{linear.inputs} to {linear.outputs} ({linear.rows} rows) {result}"


@dataclass(frozen=True)
class ProductChoice:
    """Layers of a run that use int8 GEMMs, and the reasons."""

    products: tuple[Int8LayerConfig, ...]
    sentences: tuple[str, ...]
    """Sentences for the run's log."""


def autotune_int8(
    job: Job, source: BaseSource, images: Iterable[ImageRecord], clock: Callable[[float], Clock] = stopwatch
) -> ProductChoice | None:
    """Choose the layers of a frozen, planned job that use int8 GEMMs; return None if there is nothing to decide.

    For a deterministic run the layers are tried but not timed, because timings vary.
    """
    if job.fit.quantize != "int8_products":
        return None
    if job.fit.int8_products is not None:
        return ProductChoice(job.fit.int8_products, ("int8 GEMMs are used for the layers in fit.int8_products.",))
    # Only the most frequent shape is timed: images have about the same number of pixels in all buckets.
    shapes = Counter(usual_shape(image, job.recipe) for image, _ in epoch_samples(images, 0))
    ((*sides, tokens), _), *_ = shapes.most_common(1)
    size = sides[0], sides[1]
    batch = min(job.fit.micro_batch or 1, job.recipe.effective_batch)
    layers = linear_calls(source.empty_unet(), size, batch, tokens + 2, live_text=trains_text_encoder(job))
    device, dtype = torch.device(job.fit.device or "cpu"), DTYPES[job.fit.dtype or "fp32"]
    with numeric_settings(job):
        if job.fit.deterministic:
            timings = time_all(layers, device, dtype, None)
            refused = "".join(f"; {timing.direction} {timing.sentence}" for timing in timings if timing.refused)
            sentence = f"int8 GEMMs are used wherever they work, untimed because the run is deterministic{refused}."
            return ProductChoice(choose_int8(timings), (sentence,))
        timings = time_all(layers, device, dtype, clock)
    shape = f"{batch} of {size[0]}x{size[1]}, {job.fit.dtype}"
    return ProductChoice(
        choose_int8(timings), tuple(_summary(timings, layers, direction, shape) for direction in DIRECTIONS)
    )


def linear_calls(
    unet: UNet2DConditionModel, size: tuple[int, int], images: int, text_tokens: int, *, live_text: bool
) -> Counter[Linear]:
    """Count the calls of quantizable linear layers by size in a forward pass of a UNet on the meta device.

    ``size`` is the images' (width, height) in pixels, ``text_tokens`` is the length of an encoded caption. Takes 1 to
    2 s for SDXL.
    """
    counts: Counter[Linear] = Counter()

    def count(linear: nn.Module, args: tuple[Any, ...]) -> None:
        x, (outputs, inputs) = args[0], tuple(linear.weight.shape)  # type: ignore[arg-type]
        counts[Linear(x.numel() // inputs, inputs, outputs, x.requires_grad)] += 1

    # The latents require a gradient in place of the first LoRA layer, so that all later inputs need one as in training.
    hooks = [linear.register_forward_pre_hook(count) for linear in quantizable_linears(unet).values()]
    config = unet.config
    meta_tensor = partial(torch.empty, device="meta")
    added_conditions = None
    if config["addition_embed_type"] == "text_time":
        text_width = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        added_conditions = {"text_embeds": meta_tensor(images, text_width), "time_ids": meta_tensor(images, 6)}
    latents = meta_tensor(images, 4, size[1] // LATENT_SCALE, size[0] // LATENT_SCALE, requires_grad=True)
    text = meta_tensor(images, text_tokens, config["cross_attention_dim"], requires_grad=live_text)
    unet.requires_grad_(False)(latents, meta_tensor(images), text, added_cond_kwargs=added_conditions)
    for hook in hooks:
        hook.remove()
    return counts


def time_all(
    layers: Mapping[Linear, int],
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[float], Clock] | None = stopwatch,
) -> list[Timing]:
    """Time each layer's forward and backward with and without int8; leave the random state and memory unchanged.

    ``clock`` returns a clock for a time budget in seconds; if it is None, nothing is timed, and int8 is used wherever
    it works. Raises RuntimeError if memory runs out.
    """
    tasks = [(linear, direction) for linear in layers for direction in DIRECTIONS if _is_candidate(linear, direction)]
    measure = clock(SECONDS / max(3 * len(tasks), 1)) if clock else None
    try:
        return [retry_once_on_oom(partial(_timing, *task, device, dtype, measure), device) for task in tasks]
    finally:
        if device.type == "cuda":  # cuBLAS would keep its workspaces; the run allocates them when it needs them
            torch._C._cuda_clearCublasWorkspaces()
        empty_cache(device)


def _timing(
    linear: Linear, direction: Direction, device: torch.device, dtype: torch.dtype, measure: Clock | None
) -> Timing:
    try:
        # What the run would do without int8 GEMMs is to dequantize first; `plain` is timed for the log only.
        plain, usual, int8 = (_product_call(linear, direction, device, dtype, how) for how in (None, NEVER, _BOTH))
        _require_same_results(int8, usual)
        return Timing(linear, direction, *(map(measure, (plain, usual, int8)) if measure else (1.0, 1.0, 0.0)))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return Timing(linear, direction, 0.0, 0.0, math.inf, reason(error))


def choose_int8(timings: Iterable[Timing]) -> tuple[Int8LayerConfig, ...]:
    """Return the layers to compute in int8.

    Each has a minimum number of rows for forward and for backward; with fewer rows int8 is not used.
    """
    by_size: dict[tuple[int, int, Direction], list[Timing]] = defaultdict(list)
    # Sorted by falling rows: int8 is used down to the last size at which it is faster.
    for timing in sorted(timings, key=lambda timing: -timing.linear.rows):
        by_size[timing.linear.inputs, timing.linear.outputs, timing.direction].append(timing)
    minimum_rows: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for (inputs, outputs, direction), descending in by_size.items():
        for timing in takewhile(lambda timing: timing.is_faster, descending):
            minimum_rows[inputs, outputs][direction] = max(MIN_INT8_ROWS, int(ROWS_TOLERANCE * timing.linear.rows))
    return tuple(
        Int8LayerConfig(inputs=size[0], outputs=size[1], **minimum_rows[size]) for size in sorted(minimum_rows)
    )


def _is_candidate(linear: Linear, direction: Direction) -> bool:
    fits = linear.rows >= MIN_INT8_ROWS and int8_directions(linear.inputs, linear.outputs, ALL_LAYERS) == _BOTH
    return fits and (direction == "forward" or linear.has_input_gradient)


def _product_call(
    linear: Linear, direction: Direction, device: torch.device, dtype: torch.dtype, directions: Directions | None
) -> Callable[[], Tensor]:
    """Return a function that computes a layer with random weights, which are unquantized if ``directions`` is None."""
    generator = torch.Generator(device).manual_seed(0)
    shape = linear.outputs, linear.inputs
    weight = torch.randint(-127, 128, shape, generator=generator, device=device, dtype=torch.int8)
    scales = torch.full((linear.outputs,), 0.1, device=device)
    width = linear.inputs if direction == "forward" else linear.outputs
    rows = torch.randn(linear.rows, width, generator=generator, device=device).to(dtype)
    if directions is None:
        values = weight.to(dtype)
        return lambda: rows @ (values.t() if direction == "forward" else values)
    if direction == "forward":
        return lambda: quantized_linear(rows, weight, scales, None, directions)
    return lambda: input_gradient(rows, weight, scales, directions)


def _require_same_results(int8: Callable[[], Tensor], usual: Callable[[], Tensor]) -> None:
    """Raise RuntimeError if the int8 GEMM is unsupported here or wrong, as it is with some versions of cuBLAS."""
    result, expected = int8().float(), usual().float()
    # `not <=` below, because NaN would pass a comparison with `>`.
    difference = float((result - expected).norm() / expected.norm())
    if not difference <= TOLERANCE:
        raise RuntimeError(f"wrong results (off by {100 * difference:.3g}%)")


def _summary(timings: Sequence[Timing], layers: Mapping[Linear, int], direction: Direction, shape: str) -> str:
    matching = [timing for timing in timings if timing.direction == direction]

    def total_ms(seconds: Callable[[Timing], float]) -> str:
        return f"{1e3 * sum(layers[timing.linear] * seconds(timing) for timing in matching):.1f}"

    best = total_ms(lambda timing: timing.int8 if timing.is_faster else timing.dequantized)
    usual, plain = total_ms(lambda timing: timing.dequantized), total_ms(lambda timing: timing.unquantized)
    parts = [
        f"Linear layers, {direction}: {best} ms with int8 GEMMs where faster, {usual} ms without, {plain} ms with an "
        f"unquantized base ({shape})"
    ]
    for verdict, pays in (("faster", True), ("not faster", False)):
        if layers_text := [timing.sentence for timing in matching if timing.is_faster == pays]:
            parts.append(f"{verdict}: {', '.join(layers_text)}")
    return "; ".join(parts) + "."
