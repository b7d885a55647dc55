"""Build the planner's search space (micro-batches, block sets to checkpoint, other keys) and its fallback steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from trainer.config.fit import LARGEST_MICRO_BATCH, FallbackStep, FitConfig, StreamAmount
from trainer.memory.trace.memory_trace import UnetBlock, _forward_order
from trainer.training.active_plan import encoding_fallbacks

Checkpointing = Literal["none", "full"] | tuple[str, ...]


class Placement(NamedTuple):
    """How a base is stored: the bits of its weights, and how many of its blocks stay in main memory."""

    quantize: str
    stream: StreamAmount

    @property
    def streams(self) -> bool:
        """Return whether any blocks are streamed."""
        return self.stream != "none"


def placement_of(fit: FitConfig) -> Placement:
    """Return how a fit stores the base."""
    return Placement(fit.quantize or "none", fit.stream or "none")


def placements(written: FitConfig) -> tuple[Placement, ...]:
    """Return the ways of storing the base to consider, the most precise and fastest first.

    Streaming is only considered for the most precise base: it saves more memory than any quantization, so that one is
    never needed in addition.
    """
    bits = (written.quantize,) if written.quantize else ("none", "int8", "nf4")
    if written.stream is not None:
        return tuple(Placement(quantize, written.stream) for quantize in bits)
    plain = [Placement(quantize, "none") for quantize in bits]
    return (plain[0], Placement(bits[0], "full"), *plain[1:])


# Sizes of micro-batches that differ by less than this ratio are not worth a trace each.
CLOSE = 0.8

# A block that saves less than this share of all bytes saved for backward gets no set of its own.
WORTH_A_SET = 0.02
# A fallback step that saves less than this share is not worth the training step that it repeats.
WORTH_A_STEP = 0.03
QUANTISED: tuple[Literal["int8", "nf4"], ...] = ("int8", "nf4")


def micro_batches(effective_batch: int) -> tuple[int, ...]:
    """Return micro-batch sizes that split an effective batch as evenly as possible, from the largest to 1."""
    sizes: list[int] = []
    for parts in range(1, effective_batch + 1):
        size = -(-effective_batch // parts)
        if size <= LARGEST_MICRO_BATCH and (not sizes or size <= CLOSE * sizes[-1]):
            sizes.append(size)
        if size == 1:
            break
    return tuple(sizes) if sizes[-1] == 1 else (*sizes, 1)


def nested_sets(ordered: Sequence[UnetBlock]) -> tuple[Checkpointing, ...]:
    """Return nested sets of blocks to checkpoint, from none to all.

    Each saves more memory and recomputes more than the one before. Blocks that save hardly any memory are checkpointed
    only in the full set.
    """
    least = WORTH_A_SET * sum(block.saved_bytes for block in ordered)
    names = [block.name for block in ordered if block.saved_bytes >= least]
    partial = [tuple(sorted(names[:count], key=_forward_order)) for count in range(1, len(names))]
    return ("none", *partial, "full")


def candidates(
    constraints: FitConfig,
    start: FitConfig,
    *,
    effective_batch: int,
    checkpointing: Iterable[Checkpointing],
    placements: Iterable[Placement],
    previews: bool,
) -> list[FitConfig]:
    """Return every fit to consider: the user's keys do not change; keys that are not searched stay as in ``start``.

    A streamed base is combined with no or full checkpointing only: streaming is for GPUs whose memory is far too
    small, and every other set would need a trace of its own.
    """
    choices: dict[str, Sequence[Any]] = {
        "gradient_checkpointing": tuple(checkpointing),
        "micro_batch": micro_batches(effective_batch),
        "vae_tiling": (True, False) if previews else (True,),
        "preview_offload": (False, True) if previews else (False,),
    }
    for name in choices:
        if (written := getattr(constraints, name)) is not None:
            choices[name] = (min(written, effective_batch) if name == "micro_batch" else written,)
    found: list[FitConfig] = []
    for placement in placements:
        sets = choices["gradient_checkpointing"]
        if placement.streams and constraints.gradient_checkpointing is None:
            sets = [chosen for chosen in sets if chosen in ("none", "full")]
        of_placement = {**choices, "gradient_checkpointing": sets}
        base = start.replaced(quantize=placement.quantize, stream=placement.stream)
        found += [base.replaced(**dict(zip(choices, each, strict=True))) for each in product(*of_placement.values())]
    return found


def within(inner: Checkpointing, outer: Checkpointing) -> bool:
    """Return whether ``outer`` checkpoints every block that ``inner`` does."""
    if inner == "none" or outer == "full":
        return True
    return outer != "none" and inner != "full" and set(inner) <= set(outer)


Need = Callable[[Placement, Checkpointing, int], int]
"""Function that returns the minimum bytes of training for a placement of the base, a block set and a micro-batch."""


def fallbacks_below(
    fit: FitConfig,
    written: FitConfig,
    *,
    sets: Sequence[Checkpointing],
    effective_batch: int,
    previews: bool,
    need: Need,
) -> tuple[FallbackStep, ...]:
    """Return the fallback steps from ``fit``, which reduce its memory one by one; the user's keys do not change.

    Steps with a bit-for-bit equal result and little cost come first, then smaller micro-batches, which differ by
    rounding, then a streamed base, which is exact but slow, then a quantized base if the job allows it, and finally the
    steps for encoding. When a phase runs out of memory, only the steps that reduce its memory are taken.
    ``sets`` are nested.
    """
    steps: list[FallbackStep] = []
    if previews:
        steps += _preview_steps(fit, written)
    placement, checkpointing, size = placement_of(fit), fit.gradient_checkpointing or "none", fit.micro_batch or 1
    if written.gradient_checkpointing is None:
        for more in _worthwhile(checkpointing, sets, lambda chosen: need(placement, chosen, size)):
            steps.append(FallbackStep(exact=True, gradient_checkpointing=more))
            checkpointing = more
    if written.micro_batch is None:
        for fewer in [fewer for fewer in micro_batches(effective_batch) if fewer < size]:
            steps.append(FallbackStep(exact=False, micro_batch=fewer))
            size = fewer
    if not placement.streams and written.stream is None:
        steps.append(FallbackStep(exact=True, stream="full"))
    if fit.allow_quantized and written.quantize is None:
        steps += _quantization_steps(
            placement.quantize, lambda bits: need(Placement(bits, placement.stream), checkpointing, size)
        )
    return (*steps, *encoding_fallbacks(fit, written))


def _preview_steps(fit: FitConfig, written: FitConfig) -> Iterator[FallbackStep]:
    if not fit.vae_tiling and written.vae_tiling is None:
        yield FallbackStep(exact=True, vae_tiling=True)
    if not fit.preview_offload and written.preview_offload is None:
        yield FallbackStep(exact=True, preview_offload=True)


def _worthwhile(
    now: Checkpointing, sets: Sequence[Checkpointing], need: Callable[[Checkpointing], int]
) -> Iterator[Checkpointing]:
    """Yield the sets larger than ``now`` that save enough compared to the previous one, and always the full set."""
    least = need(now)
    for more in sets:
        if more == now or not within(now, more):
            continue
        needed = need(more)
        if more == "full" or needed <= (1.0 - WORTH_A_STEP) * least:
            least = needed
            yield more


def _quantization_steps(now: str, need: Callable[[str], int]) -> Iterator[FallbackStep]:
    """Yield steps to fewer bits if they save memory, which they may not in small models with few quantized weights."""
    least = need(now)
    for bits in QUANTISED[QUANTISED.index(now) + 1 if now in QUANTISED else 0 :]:
        if (needed := need(bits)) < least:
            least = needed
            yield FallbackStep(exact=False, quantize=bits)
