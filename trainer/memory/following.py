"""Which tapes follow exactly from two others, so that they need no trace: those of other ranks, shapes and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trainer.config.base import Family
from trainer.memory.splicing import reshaped, scaled
from trainer.memory.subject import TracePart, Wish
from trainer.memory.tape import Tape

Size = tuple[int, int]
Derive = Callable[[Tape, Tape], Tape | None]

# Larger micro-batches follow from these two; one of a single picture spares itself copies and follows from none.
PICTURES = (2, 3)
# LoRAs of other ranks follow from these two, of which the built-in recipes have one and both ship.
RANKS = (16, 32)
# Other shapes follow from these two: what attention pads differs in them at every depth of the UNet, and from what is
# not padded, so that it is known again.
SHAPES: dict[Family, tuple[Size, Size]] = {"sd15": ((512, 512), (832, 832)), "sdxl": ((1024, 1024), (896, 896))}
# Sides that every UNet halves without a rest, and so that no single place is left, which has kernels of its own.
WHOLE_SIDE = 64
LEAST_SIDE = 128
# An optimizer's states and sums come in blocks; the others have no part in the LoRA.
NOT_RANKED: tuple[TracePart, ...] = ("optimizer", "cache_pictures", "cache_texts", "checkpoint")


@dataclass(frozen=True)
class Rule:
    """How the tapes of a wish follow, one by one, from those of two others."""

    sources: tuple[Wish, Wish]
    derive: Derive
    """None where the two turn out to differ in more than sizes."""


def rules(wish: Wish) -> list[Rule]:
    """The ways in which a wish's tapes may follow; which is taken first does not matter, as all are exact.

    The sources of each differ from the wish in one thing only: it is as no wish has it that follows by this rule. So
    asking for them by rules again comes to an end.
    """
    found = (_by_rank(wish), _by_pictures(wish), _by_shape(wish))
    return [rule for rule in found if rule is not None]


def _by_rank(wish: Wish) -> Rule | None:
    subject, rank = wish.subject, wish.subject.recipe.rank
    if wish.part in NOT_RANKED or rank in RANKS or not subject.has_one_rank:
        return None
    one, other = (replace(wish, subject=subject.at_rank(known)) for known in RANKS)
    return Rule((one, other), partial(scaled, sizes=RANKS, size=rank))


def _by_pictures(wish: Wish) -> Rule | None:
    if wish.part != "micro" or wish.more[1] <= max(PICTURES):
        return None
    bucket, pictures = wish.more
    one, other = (replace(wish, more=(bucket, known)) for known in PICTURES)
    return Rule((one, other), partial(scaled, sizes=PICTURES, size=pictures))


def _by_shape(wish: Wish) -> Rule | None:
    """Of attention by flash at the depths where published UNets attend; a shape matters only by its pixels."""
    fit = wish.subject.fit
    flash = fit.attention in ("auto", "flash") and fit.dtype in ("bf16", "fp16")
    if wish.part != "micro" or not flash or not wish.subject.has_published_unet:
        return None
    shapes = SHAPES[wish.subject.family]
    bucket, pictures = wish.more
    if bucket in shapes or min(bucket) < LEAST_SIDE or any(side % WHOLE_SIDE for side in bucket):
        return None
    one, other = (replace(wish, more=(known, pictures)) for known in shapes)
    return Rule((one, other), partial(reshaped, shapes=shapes, shape=bucket))
