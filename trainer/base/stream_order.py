"""Order in which the blocks of a streamed base are needed. Does not require torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

AHEAD = 2
"""Number of blocks that are copied ahead of the one that computes; an SDXL block takes up to 70 MB in bf16."""

Pass = Literal["forward", "backward", "inference"]
"""A forward that backward follows, its backward, or a forward that another one follows."""


def streamed_places(count: int, amount: int) -> list[int]:
    """Return which of ``count`` blocks are streamed if ``amount`` are: evenly spread, so that copies are too."""
    some = min(amount, count)
    return [place for place in range(count) if (place + 1) * some // count > place * some // count]


def following(index: int, count: int, now: Pass) -> list[int]:
    """Return the up to AHEAD of ``count`` streamed blocks that are needed next after block ``index`` in the same step.

    The last block of a forward is followed by the one before it, because backward runs the blocks in reverse.
    """
    later = range(index + 1, min(index + 1 + AHEAD, count))
    earlier = range(index - 1, max(index - 1 - AHEAD, -1), -1)
    if now == "backward":
        return list(earlier)
    return [*later, *(earlier[: AHEAD - len(later)] if now == "forward" else ())]


def exchanged(held: Iterable[int], needed: Iterable[int]) -> tuple[list[int], list[int]]:
    """Return which blocks to free and which to fetch, so that exactly the ``needed`` ones are on the device."""
    before, now = set(held), list(dict.fromkeys(needed))
    return sorted(before - set(now)), [index for index in now if index not in before]
