"""Bars and cells of the health charts, computed from the indexes in `Health` instead of from each image."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple, cast

from app.core.health.health import Health

Size = tuple[int, int]


class Bar(NamedTuple):
    """One bar of a chart: its label, the number of its images and their ids."""

    label: str
    images: int
    ids: Set[int]
    value: float = 0.0
    """Start of the bar on a numeric axis; 0 if the axis is not numeric."""


class SizeCell(NamedTuple):
    """Cell of the size chart: a range of widths and heights in pixels, with the ids of images in it."""

    left: float
    right: float
    top: float
    bottom: float
    ids: Set[int]


def buckets(health: Health) -> list[Bar]:
    """Return one bar for each bucket used in training, from wide to tall."""
    shapes = [(cast("Size", shape), ids) for shape, ids in health.image_index.all("bucket").items()]
    shapes.sort(key=lambda entry: (-entry[0][0] / entry[0][1], entry[0]))
    return [Bar(f"{width} × {height}", len(ids), ids, width / height) for (width, height), ids in shapes]


def caption_lengths(health: Health) -> list[Bar]:
    """Return the histogram of caption lengths in tokens; the last bar includes all longer captions."""
    from app.core.health.judging import TOKEN_BARS, TOKEN_STEP

    bars = health.image_index.all("tokens")
    last = min(TOKEN_BARS, max((int(str(bar)) for bar in bars), default=-1) + 1)
    histogram = []
    for bar in range(max(last, 225 // TOKEN_STEP)):
        ids = health.image_index.under("tokens", bar)
        first = bar * TOKEN_STEP + (1 if bar else 0)
        label = f"{first} or more" if bar == TOKEN_BARS - 1 else f"{first} to {(bar + 1) * TOKEN_STEP}"
        histogram.append(Bar(label, len(ids), ids, bar * TOKEN_STEP))
    return histogram


def frequent_tags(health: Health) -> list[Bar]:
    """Return one bar for each of the most frequent tags of the training images."""
    return [Bar(tag, count, health.tagged(tag)) for tag, count in health.tags.top]


def sizes(health: Health) -> list[SizeCell]:
    """Return the non-empty cells of the size chart, whose axes are logarithmic."""
    from app.core.health.judging import CELLS_PER_DOUBLING

    def side(step: int) -> float:
        return float(2 ** (step / CELLS_PER_DOUBLING))

    cells = []
    for cell, ids in health.image_index.all("cell").items():
        column, row = cast("Size", cell)
        cells.append(SizeCell(side(column), side(column + 1), side(row), side(row + 1), ids))
    return cells
