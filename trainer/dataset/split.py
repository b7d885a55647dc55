"""Chooses the pictures that are held out to measure progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

AUTO_SHARE = 0.05
_AUTO_LEAST = 40


def held_out(ids: Sequence[str], alike: Iterable[Sequence[int]], share: float | Literal["auto"]) -> set[int]:
    """Return the places of the pictures to hold out, of training pictures given by content hash.

    "auto" holds out none of fewer than 40 pictures, else 5 %. Pictures that are `alike` (groups of places) stay
    together, so that no held-out picture was nearly learned. Groups are taken by their smallest hash, as far as
    they fit into the share: the choice depends on contents only, and a new picture moves few others.
    """
    if share == "auto":
        share = AUTO_SHARE if len(ids) >= _AUTO_LEAST else 0.0
    wanted = round(share * len(ids))
    together = {place: tuple(group) for group in alike for place in group}
    groups = {together.get(place, (place,)) for place in range(len(ids))}
    chosen: set[int] = set()
    for group in sorted(groups, key=lambda group: min(ids[place] for place in group)):
        if len(chosen) + len(group) <= wanted:
            chosen.update(group)
    return chosen
