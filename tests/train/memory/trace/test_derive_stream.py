"""Traces of a partially streamed base, derived from two others, are those that tracing would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.cpu_steps import tiny_workload
from trainer.base import streaming
from trainer.config.base import Family
from trainer.config.fit import FitConfig, StreamAmount
from trainer.config.recipe import RecipeConfig
from trainer.memory.allocator.allocator import Allocator
from trainer.memory.allocator.replay import SurvivingStorage, replay
from trainer.memory.trace.derive import rules
from trainer.memory.trace.derive_stream import stream_some
from trainer.memory.trace.memory_trace import MemoryTrace, Work
from trainer.memory.trace.train_step import trace_micro
from trainer.memory.trace.workload import TraceRequest, workload_without_base

BUCKET = (64, 64)
BLOCKS = ("down_blocks.1", "mid_block")


@pytest.fixture(autouse=True)
def _every_weight_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MIN_BYTES", 0)


def traced(family: Family, fit: Mapping[str, Any], stream: StreamAmount) -> tuple[MemoryTrace, ...]:
    workload = tiny_workload(family, {"layers": "attention"}, {**fit, "stream": stream})
    traces = trace_micro(workload, [BUCKET], 1)
    return traces.weights, traces.first[BUCKET], traces.more[BUCKET]


@pytest.mark.parametrize(
    ("family", "fit"),
    [
        ("sd15", {"gradient_checkpointing": "full", "quantize": "int8"}),
        pytest.param("sdxl", {"gradient_checkpointing": "none"}, marks=pytest.mark.slow),
        ("sdxl", {"gradient_checkpointing": BLOCKS, "quantize": "nf4", "dtype": "bf16"}),
    ],
)
def test_any_number_of_blocks_follows_from_none_and_all(family: Family, fit: Mapping[str, Any]) -> None:
    resident, streamed = traced(family, fit, "none"), traced(family, fit, "full")
    for amount in (2, 3, 7):
        for one, other, expected in zip(resident, streamed, traced(family, fit, amount), strict=True):
            found = stream_some(one, other, amount)
            assert found is not None
            assert found.storages == expected.storages
            assert np.array_equal(found.events, expected.events)
            assert found.work == expected.work
    assert resident[1].events.size < found.events.size < streamed[1].events.size
    # If all blocks are streamed, nothing moves in the forward of the last one, so it is not known where it begins.
    assert stream_some(resident[1], streamed[1], 1) is None


def test_traces_that_differ_in_more_than_weights_are_not_used() -> None:
    resident, streamed = traced("sd15", {}, "none"), traced("sd15", {}, "full")
    more = replace(resident[1], work=(*resident[1].work, Work("gemm", "float32", "forward", 1, 1, 1)))
    assert stream_some(more, streamed[1], 3) is None
    assert stream_some(resident[2], streamed[1], 3) is None


def test_only_published_unets_are_derived() -> None:
    published = workload_without_base("sdxl", RecipeConfig(resolution=1024), FitConfig(stream=9, micro_batch=1))
    sources = [rule.sources for rule in rules(TraceRequest(published, "micro", ((1024, 1024), 1)))]
    assert [[each.workload.fit.stream for each in pair] for pair in sources] == [["none", "full"]]
    assert not rules(TraceRequest(tiny_workload("sdxl", {}, {"stream": 9}), "micro", (BUCKET, 1)))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_micro_batch_begins_with_the_same_memory(checkpointing: str) -> None:
    """Blocks that stayed between steps would be at another address each time, which no forecast can follow."""
    weights, first, more = traced("sdxl", {"gradient_checkpointing": checkpointing}, "full")
    allocator, names = Allocator(), dict[str, SurvivingStorage]()
    assert replay([weights, first], allocator, names).failure is None
    before = {name: kept.handle for name, kept in names.items()}
    reserved = []
    for _ in range(4):
        replay([more], allocator, names)
        reserved.append(allocator.reserved)
        assert {name: kept.handle for name, kept in names.items()} == before
    assert len(set(reserved[1:])) == 1
