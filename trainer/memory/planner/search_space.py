"""What a planner may choose among: micro-batches, block sets to checkpoint, and their product with the other keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Literal

from trainer.config.fit import LARGEST_MICRO_BATCH, FallbackStep, FitConfig
from trainer.memory.trace.memory_trace import UnetBlock, _forward_order
from trainer.protocol.forecast import SEARCHED
from trainer.training.active_plan import encoding_ladder

Checkpointing = Literal["none", "full"] | tuple[str, ...]

# Micro-batches closer together than this make no difference worth a trace.
CLOSE = 0.8

# A block that holds less than this share of what all hold is not worth a set of its own.
WORTH_A_SET = 0.02
# A rung that saves less than this share is not worth the repeated step that it costs.
WORTH_A_STEP = 0.03
QUANTISED: tuple[Literal["int8", "nf4"], ...] = ("int8", "nf4")


def micro_batches(effective_batch: int) -> tuple[int, ...]:
    """Sizes that cut an effective batch into parts as even as can be, the largest first, 1 last."""
    sizes: list[int] = []
    for parts in range(1, effective_batch + 1):
        size = -(-effective_batch // parts)
        if size <= LARGEST_MICRO_BATCH and (not sizes or size <= CLOSE * sizes[-1]):
            sizes.append(size)
        if size == 1:
            break
    return tuple(sizes) if sizes[-1] == 1 else (*sizes, 1)


def nested_sets(ordered: Sequence[UnetBlock]) -> tuple[Checkpointing, ...]:
    """No block, the first, the first two, ..., all: each holds less than the one before and computes more again.

    Blocks that hold next to nothing come last; a set that differs from all blocks in such ones alone is left out.
    """
    least = WORTH_A_SET * sum(block.held for block in ordered)
    names = [block.name for block in ordered if block.held >= least]
    partial = [tuple(sorted(names[:count], key=_forward_order)) for count in range(1, len(names))]
    return ("none", *partial, "full")


def candidates(
    constraints: FitConfig,
    start: FitConfig,
    *,
    effective_batch: int,
    checkpointing: Iterable[Checkpointing],
    quantise: Iterable[str],
    previews: bool,
) -> list[FitConfig]:
    """Every fit that keeps what the user wrote; what is not searched stays as ``start`` has it."""
    every: tuple[Sequence[Any], ...] = (
        tuple(quantise),
        tuple(checkpointing),
        micro_batches(effective_batch),
        (True, False) if previews else (True,),
        (False, True) if previews else (False,),
    )
    choices = dict(zip(SEARCHED, every, strict=True))
    for name in SEARCHED:
        if (written := getattr(constraints, name)) is not None:
            choices[name] = (min(written, effective_batch) if name == "micro_batch" else written,)
    return [start.changed(**dict(zip(choices, values, strict=True))) for values in product(*choices.values())]


def within(inner: Checkpointing, outer: Checkpointing) -> bool:
    """Whether all that ``inner`` checkpoints is checkpointed by ``outer`` too."""
    if inner == "none" or outer == "full":
        return True
    return outer != "none" and inner != "full" and set(inner) <= set(outer)


Need = Callable[[str, Checkpointing, int], int]
"""The bytes that training takes at the least with a base in these bits, a set, and a micro-batch."""


def ladder(
    fit: FitConfig,
    written: FitConfig,
    *,
    sets: Sequence[Checkpointing],
    effective_batch: int,
    previews: bool,
    need: Need,
) -> tuple[FallbackStep, ...]:
    """The rungs below ``fit``, each of which needs less than the one before; keys that the user wrote stay.

    First those that leave the result as it is bit for bit, then smaller micro-batches, which only round otherwise,
    then, where the job allows it, a quantised base, at last those of encoding. Each is taken only by phases that it
    helps. ``sets`` are nested.
    """
    rungs: list[FallbackStep] = []
    if previews:
        rungs += _of_previews(fit, written)
    quantise, checkpointing, size = fit.quantise or "none", fit.checkpointing or "none", fit.micro_batch or 1
    if written.checkpointing is None:
        for more in _worthwhile(checkpointing, sets, lambda chosen: need(quantise, chosen, size)):
            rungs.append(FallbackStep(exact=True, checkpointing=more))
            checkpointing = more
    if written.micro_batch is None:
        for fewer in [fewer for fewer in micro_batches(effective_batch) if fewer < size]:
            rungs.append(FallbackStep(exact=False, micro_batch=fewer))
            size = fewer
    if fit.allow_quantised and written.quantise is None:
        rungs += _of_quantising(quantise, lambda bits: need(bits, checkpointing, size))
    return (*rungs, *encoding_ladder(fit, written))


def _of_previews(fit: FitConfig, written: FitConfig) -> Iterator[FallbackStep]:
    if not fit.vae_tiling and written.vae_tiling is None:
        yield FallbackStep(exact=True, vae_tiling=True)
    if not fit.preview_offload and written.preview_offload is None:
        yield FallbackStep(exact=True, preview_offload=True)


def _worthwhile(
    now: Checkpointing, sets: Sequence[Checkpointing], need: Callable[[Checkpointing], int]
) -> Iterator[Checkpointing]:
    """Larger sets that save enough against the one before; all blocks are always the last."""
    least = need(now)
    for more in sets:
        if more == now or not within(now, more):
            continue
        needed = need(more)
        if more == "full" or needed <= (1.0 - WORTH_A_STEP) * least:
            least = needed
            yield more


def _of_quantising(now: str, need: Callable[[str], int]) -> Iterator[FallbackStep]:
    """Fewer bits, where they save anything: of a small model only few weights are quantised at all."""
    least = need(now)
    for bits in QUANTISED[QUANTISED.index(now) + 1 if now in QUANTISED else 0 :]:
        if (needed := need(bits)) < least:
            least = needed
            yield FallbackStep(exact=False, quantise=bits)
