"""The bars and cells of the charts, read off what `Health` keeps: no picture is looked at for them."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple, cast

from app.core.health.health import Health

Size = tuple[int, int]


class Bar(NamedTuple):
    """One bar: its label, how many pictures it stands for, and these."""

    label: str
    images: int
    ids: Set[int]
    value: float = 0.0
    """Where it begins on the axis, where there is one."""


class SizeCell(NamedTuple):
    """Pictures of about one width and height; `left` to `right` and `top` to `bottom` are pixels."""

    left: float
    right: float
    top: float
    bottom: float
    ids: Set[int]


def buckets(health: Health) -> list[Bar]:
    """Return the shapes that training will see, from wide to tall."""
    shapes = [(cast("Size", shape), ids) for shape, ids in health.files.all("bucket").items()]
    shapes.sort(key=lambda one: (-one[0][0] / one[0][1], one[0]))
    return [Bar(f"{width} × {height}", len(ids), ids, width / height) for (width, height), ids in shapes]


def caption_lengths(health: Health) -> list[Bar]:
    """Return how many captions have how many tokens, in steps; the last bar holds all longer ones."""
    from app.core.health.judging import TOKEN_BARS, TOKEN_STEP

    bars = health.files.all("tokens")
    last = min(TOKEN_BARS, max((int(str(bar)) for bar in bars), default=-1) + 1)
    made = []
    for bar in range(max(last, 225 // TOKEN_STEP)):
        ids = health.files.under("tokens", bar)
        first = bar * TOKEN_STEP + (1 if bar else 0)
        label = f"{first} or more" if bar == TOKEN_BARS - 1 else f"{first} to {(bar + 1) * TOKEN_STEP}"
        made.append(Bar(label, len(ids), ids, bar * TOKEN_STEP))
    return made


def frequent_tags(health: Health) -> list[Bar]:
    """Return the most frequent tags among the pictures that are trained."""
    return [Bar(tag, count, health.tagged(tag)) for tag, count in health.tags.top]


def sizes(health: Health) -> list[SizeCell]:
    """Return where the pictures' sizes lie, on logarithmic axes, as cells that hold at least one."""
    from app.core.health.judging import CELLS_PER_DOUBLING

    def side(step: int) -> float:
        return float(2 ** (step / CELLS_PER_DOUBLING))

    cells = []
    for place, ids in health.files.all("cell").items():
        column, row = cast("Size", place)
        cells.append(SizeCell(side(column), side(column + 1), side(row), side(row + 1), ids))
    return cells
