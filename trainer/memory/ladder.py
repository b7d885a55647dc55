"""The rungs below a plan: what a run changes, one after the other, each time memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from trainer.config.fit import FitConfig
from trainer.config.ladder import RungConfig
from trainer.memory.grid import Checkpointing, micro_batches, within
from trainer.training.plan import encoding_ladder

# A rung that saves less than this share is not worth the repeated step that it costs.
WORTH = 0.03
QUANTISED: tuple[Literal["int8", "nf4"], ...] = ("int8", "nf4")

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
) -> tuple[RungConfig, ...]:
    """The rungs below ``fit``, each of which needs less than the one before; keys that the user wrote stay.

    First those that leave the result as it is bit for bit, then smaller micro-batches, which only round otherwise,
    then, where the job allows it, a quantised base, at last those of encoding. Each is taken only by phases that it
    helps. ``sets`` are nested.
    """
    rungs: list[RungConfig] = []
    if previews:
        rungs += _of_previews(fit, written)
    quantise, checkpointing, size = fit.quantise or "none", fit.checkpointing or "none", fit.micro_batch or 1
    if written.checkpointing is None:
        for more in _worthwhile(checkpointing, sets, lambda chosen: need(quantise, chosen, size)):
            rungs.append(RungConfig(exact=True, checkpointing=more))
            checkpointing = more
    if written.micro_batch is None:
        for fewer in [fewer for fewer in micro_batches(effective_batch) if fewer < size]:
            rungs.append(RungConfig(exact=False, micro_batch=fewer))
            size = fewer
    if fit.allow_quantised and written.quantise is None:
        rungs += _of_quantising(quantise, lambda bits: need(bits, checkpointing, size))
    return (*rungs, *encoding_ladder(fit, written))


def _of_previews(fit: FitConfig, written: FitConfig) -> Iterator[RungConfig]:
    if not fit.vae_tiling and written.vae_tiling is None:
        yield RungConfig(exact=True, vae_tiling=True)
    if not fit.preview_offload and written.preview_offload is None:
        yield RungConfig(exact=True, preview_offload=True)


def _worthwhile(
    now: Checkpointing, sets: Sequence[Checkpointing], need: Callable[[Checkpointing], int]
) -> Iterator[Checkpointing]:
    """Larger sets that save enough against the one before; all blocks are always the last."""
    least = need(now)
    for more in sets:
        if more == now or not within(now, more):
            continue
        needed = need(more)
        if more == "full" or needed <= (1.0 - WORTH) * least:
            least = needed
            yield more


def _of_quantising(now: str, need: Callable[[str], int]) -> Iterator[RungConfig]:
    """Fewer bits, where they save anything: of a small model only few weights are quantised at all."""
    least = need(now)
    for bits in QUANTISED[QUANTISED.index(now) + 1 if now in QUANTISED else 0 :]:
        if (needed := need(bits)) < least:
            least = needed
            yield RungConfig(exact=False, quantise=bits)
