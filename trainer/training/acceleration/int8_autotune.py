"""Times the linear layers of a run in int8 against the format of its base, each direction of each size on its own.

Rounding is in the times, and what a product of int8 weights in the base's format takes to restore them. Where anything
fails or gives other numbers, a direction stays as it was.
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

from trainer.base.quantized import NEVER, Directions, directions_of, input_gradient, product, quantisable
from trainer.base.source import BaseSource
from trainer.config.fit import EVERYWHERE, LEAST_ROWS, ProductConfig
from trainer.config.job import Job, live_text
from trainer.dataset.cache_keys import LATENT_SCALE
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import epoch_showings
from trainer.training.acceleration.attention_autotune import Clock, reason, stopwatch, tried_twice
from trainer.training.device.device import DTYPES, numerics
from trainer.training.device.offload import release
from trainer.training.device.out_of_memory import is_out_of_memory

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

SECONDS = 2.0
"""For timing all sizes in both formats and directions, beside the first call of each."""
WORTH = 0.05
"""By so much of the time int8 must be quicker: it is less exact, and less is chance."""
FEWER_ROWS = 0.75
"""A size is timed in the shape that most pictures have; down to this share of its rows, other shapes do alike."""
ALIKE = 0.1
"""Norm-relative: by how much results may differ. int8 rounds normally distributed numbers by 0.01; wrong sums by 1."""
_BOTH = Directions(LEAST_ROWS, LEAST_ROWS)


@dataclass(frozen=True)
class Linear:
    """A frozen linear layer at work in a micro-batch."""

    rows: int
    inputs: int
    outputs: int
    learns: bool
    """Whether what goes in needs a gradient, so that there is a backward."""


@dataclass(frozen=True)
class Timing:
    """One direction of a layer."""

    linear: Linear
    direction: Direction
    plain: float
    """Seconds with a base that is not rounded."""
    usual: float
    """Seconds with int8 weights that are restored."""
    int8: float
    """Seconds in int8; infinite where it cannot be."""
    refused: str = ""
    """Why it cannot be."""

    @property
    def pays(self) -> bool:
        """Whether int8 is worth it."""
        return self.int8 < (1 - WORTH) * self.usual

    @property
    def sentence(self) -> str:
        """Such as "640 to 5120 (4096 rows) 0.31 instead of 0.55 ms"."""
        one = self.linear
        told = self.refused or f"{self.int8 * 1e3:.2f} instead of {self.usual * 1e3:.2f} ms"
        return f"{one.inputs} to {one.outputs} ({one.rows} rows) {told}"


@dataclass(frozen=True)
class ProductChoice:
    """Which layers of a run multiply in int8, and why."""

    products: tuple[ProductConfig, ...]
    sentences: tuple[str, ...]
    """For the run's log."""


def products_of(
    job: Job, source: BaseSource, pictures: Iterable[Picture], clock: Callable[[float], Clock] = stopwatch
) -> ProductChoice | None:
    """What a frozen and planned job is to multiply in int8; None where nothing is to be found out.

    Where the user wants every run to be the same, layers are only tried and not timed: clocks differ.
    """
    if job.fit.quantise != "int8_products":
        return None
    if job.fit.int8_products is not None:
        return ProductChoice(job.fit.int8_products, ("Layers multiply in int8 where fit.int8_products says so.",))
    shown = Counter(picture.bucket for picture, _ in epoch_showings(pictures, 0))
    (size, _), *_ = shown.most_common(1)
    at_once = min(job.fit.micro_batch or 1, job.recipe.effective_batch)
    layers = linears(source.empty_unet(), size, at_once, job.recipe.token_chunks + 2, live_text=live_text(job))
    device, dtype = torch.device(job.fit.device or "cpu"), DTYPES[job.fit.dtype or "fp32"]
    with numerics(job):
        if job.fit.deterministic:
            timings = time_all(layers, device, dtype, None)
            refused = "".join(f"; {one.direction} {one.sentence}" for one in timings if one.refused)
            told = f"Layers multiply in int8 wherever they can, untimed, since every run is to be the same{refused}."
            return ProductChoice(worthwhile(timings), (told,))
        timings = time_all(layers, device, dtype, clock)
    shape = f"{at_once} of {size[0]}x{size[1]}, {job.fit.dtype}"
    return ProductChoice(
        worthwhile(timings), tuple(_told(timings, layers, direction, shape) for direction in DIRECTIONS)
    )


def linears(
    unet: UNet2DConditionModel, size: tuple[int, int], pictures: int, words: int, *, live_text: bool
) -> Counter[Linear]:
    """How often which linear layers of a UNet on the meta device work for pictures of ``size`` (width, height).

    ``words`` is the length of an encoded caption. Found by a forward on the meta device, of a second or two for SDXL.
    """
    found: Counter[Linear] = Counter()

    def note(linear: nn.Module, args: tuple[Any, ...]) -> None:
        x, (outputs, inputs) = args[0], tuple(linear.weight.shape)  # type: ignore[arg-type]
        found[Linear(x.numel() // inputs, inputs, outputs, x.requires_grad)] += 1

    hooks = [linear.register_forward_pre_hook(note) for linear in quantisable(unet).values()]
    config = unet.config
    empty = partial(torch.empty, device="meta")
    added = None
    if config["addition_embed_type"] == "text_time":
        wide = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        added = {"text_embeds": empty(pictures, wide), "time_ids": empty(pictures, 6)}
    latents = empty(pictures, 4, size[1] // LATENT_SCALE, size[0] // LATENT_SCALE, requires_grad=True)
    text = empty(pictures, words, config["cross_attention_dim"], requires_grad=live_text)
    unet.requires_grad_(False)(latents, empty(pictures), text, added_cond_kwargs=added)
    for hook in hooks:
        hook.remove()
    return found


def time_all(
    layers: Mapping[Linear, int],
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[float], Clock] | None = stopwatch,
) -> list[Timing]:
    """Each direction of each layer that there is, in int8 and as it is without. Leaves chance and memory as they were.

    ``clock`` makes what measures for so many seconds; without it nothing is timed, and int8 wins wherever it can be.
    Raises RuntimeError when memory runs out.
    """
    works = [(one, direction) for one in layers for direction in DIRECTIONS if _can_be(one, direction)]
    measure = clock(SECONDS / max(3 * len(works), 1)) if clock else None
    try:
        return [tried_twice(partial(_timing, *work, device, dtype, measure), device) for work in works]
    finally:
        if device.type == "cuda":  # what cuBLAS took would stay, and be taken again
            torch._C._cuda_clearCublasWorkspaces()
        release(device)


def _timing(
    linear: Linear, direction: Direction, device: torch.device, dtype: torch.dtype, measure: Clock | None
) -> Timing:
    try:
        plain, usual, int8 = (_work(linear, direction, device, dtype, how) for how in (None, NEVER, _BOTH))
        _require_alike(int8, usual)
        return Timing(linear, direction, *(map(measure, (plain, usual, int8)) if measure else (1.0, 1.0, 0.0)))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return Timing(linear, direction, 0.0, 0.0, math.inf, reason(error))


def worthwhile(timings: Iterable[Timing]) -> tuple[ProductConfig, ...]:
    """The layers that multiply in int8: from the fewest rows on from which it pays for all more that were timed."""
    alike: dict[tuple[int, int, Direction], list[Timing]] = defaultdict(list)
    for one in sorted(timings, key=lambda one: -one.linear.rows):
        alike[one.linear.inputs, one.linear.outputs, one.direction].append(one)
    found: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for (inputs, outputs, direction), most_first in alike.items():
        for one in takewhile(lambda one: one.pays, most_first):
            found[inputs, outputs][direction] = max(LEAST_ROWS, int(FEWER_ROWS * one.linear.rows))
    return tuple(ProductConfig(inputs=size[0], outputs=size[1], **found[size]) for size in sorted(found))


def _can_be(linear: Linear, direction: Direction) -> bool:
    able = linear.rows >= LEAST_ROWS and directions_of(linear.inputs, linear.outputs, EVERYWHERE) == _BOTH
    return able and (direction == "forward" or linear.learns)


def _work(
    linear: Linear, direction: Direction, device: torch.device, dtype: torch.dtype, directions: Directions | None
) -> Callable[[], Tensor]:
    """What a layer of random numbers computes; without directions as if its weights had never been rounded."""
    chance = torch.Generator(device).manual_seed(0)
    shape = linear.outputs, linear.inputs
    weight = torch.randint(-127, 128, shape, generator=chance, device=device, dtype=torch.int8)
    scales = torch.full((linear.outputs,), 0.1, device=device)
    width = linear.inputs if direction == "forward" else linear.outputs
    rows = torch.randn(linear.rows, width, generator=chance, device=device).to(dtype)
    if directions is None:
        values = weight.to(dtype)
        return lambda: rows @ (values.t() if direction == "forward" else values)
    if direction == "forward":
        return lambda: product(rows, weight, scales, None, directions)
    return lambda: input_gradient(rows, weight, scales, directions)


def _require_alike(int8: Callable[[], Tensor], usual: Callable[[], Tensor]) -> None:
    """Raises RuntimeError where int8 cannot be multiplied here, or gives other numbers, as some cuBLAS do."""
    found, expected = int8().float(), usual().float()
    off = float((found - expected).norm() / expected.norm())
    if not off <= ALIKE:
        raise RuntimeError(f"wrong numbers ({off:.2g} of them)")


def _told(timings: Sequence[Timing], layers: Mapping[Linear, int], direction: Direction, shape: str) -> str:
    of_this = [one for one in timings if one.direction == direction]

    def whole(seconds: Callable[[Timing], float]) -> str:
        return f"{1e3 * sum(layers[one.linear] * seconds(one) for one in of_this):.1f}"

    found = whole(lambda one: one.int8 if one.pays else one.usual)
    usual, plain = whole(lambda one: one.usual), whole(lambda one: one.plain)
    told = [
        f"In int8 where it is quicker, linear layers take {found} ms {direction}, else {usual}, and with a "
        f"base that is not rounded {plain} ({shape})"
    ]
    for what, pays in (("quicker", True), ("not quicker", False)):
        if ones := [one.sentence for one in of_this if one.pays == pays]:
            told.append(f"{what}: {', '.join(ones)}")
    return "; ".join(told) + "."
