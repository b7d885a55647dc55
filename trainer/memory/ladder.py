"""The rungs below a plan: what a run changes, one after the other, each time memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainer.config.fit import FitConfig
from trainer.config.ladder import RungConfig
from trainer.memory.grid import Checkpointing, micro_batches, within

# A rung that saves less than this share is not worth the repeated step that it costs.
WORTH = 0.03

Need = Callable[[Checkpointing, int], int]


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
    then, where the job allows it, a quantised base. ``sets`` are nested, and ``need`` estimates the bytes that
    training takes with one of them and a micro-batch.
    """
    rungs: list[RungConfig] = []
    if previews:
        rungs += _of_previews(fit, written)
    checkpointing, size = fit.checkpointing or "none", fit.micro_batch or 1
    if written.checkpointing is None:
        for more in _worthwhile(checkpointing, size, sets, need):
            rungs.append(RungConfig(exact=True, checkpointing=more))
    if written.micro_batch is None:
        smaller = [fewer for fewer in micro_batches(effective_batch) if fewer < size]
        rungs += [RungConfig(exact=False, micro_batch=fewer) for fewer in smaller]
    if fit.allow_quantised and written.quantise is None:
        rungs += _of_quantising(fit)
    return tuple(rungs)


def _of_previews(fit: FitConfig, written: FitConfig) -> Iterator[RungConfig]:
    if not fit.vae_tiling and written.vae_tiling is None:
        yield RungConfig(exact=True, vae_tiling=True)
    if not fit.preview_offload and written.preview_offload is None:
        yield RungConfig(exact=True, preview_offload=True)


def _worthwhile(now: Checkpointing, size: int, sets: Sequence[Checkpointing], need: Need) -> Iterator[Checkpointing]:
    """Larger sets that save enough against the one before; all blocks are always the last."""
    least = need(now, size)
    for more in sets:
        if more == now or not within(now, more):
            continue
        needed = need(more, size)
        if more == "full" or needed <= (1.0 - WORTH) * least:
            least = needed
            yield more


def _of_quantising(fit: FitConfig) -> Iterator[RungConfig]:
    if (fit.quantise or "none") == "none":
        yield RungConfig(exact=False, quantise="int8")
    if fit.quantise != "nf4":
        yield RungConfig(exact=False, quantise="nf4")
