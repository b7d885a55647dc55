"""Which tapes follow from which others: asking on comes to an end, and nothing follows that would not be exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from trainer.config.fit import FitConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.trace.derive import RANKS, SHAPES, rules
from trainer.memory.trace.workload import TracePart, TraceRequest, Workload, workload_without_base


def subject(rank: int = 24, **fit: Any) -> Workload:
    return workload_without_base("sdxl", RecipeConfig(resolution=1024), FitConfig(**fit)).at_rank(rank)


def micro(subject: Workload, shape: tuple[int, int] = (832, 1216), pictures: int = 4) -> TraceRequest:
    return TraceRequest(subject, "micro", (shape, pictures))


def ends(wish: TraceRequest) -> Iterator[TraceRequest]:
    """What is asked for last, by all ways."""
    found = rules(wish)
    for rule in found:
        for source in rule.sources:
            yield from ends(source)
    if not found:
        yield wish


def test_other_ranks_shapes_and_larger_batches_follow_from_the_few_that_ship() -> None:
    last = [(wish.workload.recipe.rank, *wish.more) for wish in ends(micro(subject()))]
    assert set(last) == {(rank, shape, pictures) for rank in RANKS for shape in SHAPES["sdxl"] for pictures in (2, 3)}


@pytest.mark.parametrize(
    "wish",
    [
        micro(subject(16, dtype="fp32"), pictures=2),  # attention is not flash's
        micro(subject(16, attention="efficient"), pictures=2),
        micro(subject(16), (1000, 1024), pictures=2),  # a side that leaves a rest when it is halved
        micro(subject(16), (64, 1024), pictures=2),  # of which a single place is left
        micro(replace(subject(16), unet_config={**subject().unet_config, "layers_per_block": 3}), pictures=2),
        TraceRequest(subject(), "optimizer"),
        TraceRequest(subject(), "cache_pictures"),
        micro(replace(subject(), recipe=subject().recipe.replaced(conv_rank=4)), SHAPES["sdxl"][0], pictures=3),
    ],
)
def test_nothing_follows_that_would_not_be_exact(wish: TraceRequest) -> None:
    assert not rules(wish)


@pytest.mark.parametrize("part", ["load", "quantise", "validate", "preview", "save"])
def test_phases_follow_by_rank_alone(part: TracePart) -> None:
    assert [
        source.workload.recipe.rank for rule in rules(TraceRequest(subject(), part)) for source in rule.sources
    ] == [
        16,
        32,
    ]
    assert not rules(TraceRequest(subject(RANKS[0]), part))
