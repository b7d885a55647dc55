"""Estimates before a plan: from traces of a similar recipe, without tracing, and sure of nothing near the limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.forecasts import known_job
from trainer.cli import plan_text
from trainer.config.base import Family
from trainer.files.assets import asset_path
from trainer.memory.device.device_state import state_of_cpu
from trainer.memory.planner.estimate import EstimatedPlan, _fits, _trained_bytes, estimated_plan
from trainer.memory.planner.planner import plan
from trainer.memory.planner.request import PlanRequest, request_of_job
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import complete_fit
from trainer.protocol.plan import PlanEstimate


def shipped(folder: Path) -> TraceLibrary:
    """The traces that ship; recording any more is an error."""
    return TraceLibrary(TraceStore(folder / "own", asset_path("traces")), _refuse)


def _refuse() -> None:
    raise AssertionError("an estimate must not trace")


def asked(folder: Path, family: Family, *settings: str, gpu: str = "8GB") -> PlanRequest:
    return request_of_job(known_job(folder / "_".join((family, *settings)).replace('"', ""), family), settings, gpu)


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[TraceLibrary]:
    yield shipped(tmp_path)


def test_a_new_setting_is_estimated_from_the_built_in_recipe_without_tracing(
    tmp_path: Path, traces: TraceLibrary
) -> None:
    known = asked(tmp_path, "sdxl")
    assert estimated_plan(known, traces) is None  # its own traces ship
    usual = plan(known.workload, known.written, known.device_state, traces, known.counts, others=False).pick
    found = estimated_plan(asked(tmp_path, "sdxl", "recipe.dropout=0.1"), traces)
    assert usual is not None and found is not None
    assert found.fit == usual.fit
    assert found.figures is not None
    assert found.figures.seconds == pytest.approx(usual.forecast.seconds, rel=0.05)
    assert found.figures.reserved == min(usual.forecast.reserved, usual.forecast.budget)
    assert found.figures.budget == known.device_state.budget
    larger = estimated_plan(asked(tmp_path, "sdxl", "recipe.resolution=2048"), traces)
    assert larger == EstimatedPlan(usual.fit, None)  # worth a try, but its figures say nothing about larger images


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_what_is_trained_is_counted_as_traces_have_it(tmp_path: Path, traces: TraceLibrary, family: Family) -> None:
    """Working weights in bf16 and master weights, twice for their gradients, and AdamW's two moments."""
    workload = asked(tmp_path, family).workload
    workload = replace(workload, fit=complete_fit(workload.fit.replaced(dtype="bf16")))
    steps = traces.steps(workload, workload.buckets[0].size, 1)
    weights = sum(storage.bytes for storage in steps.weights.storages if storage.kind == "adapter")
    moments = sum(
        storage.bytes
        for storage in steps.optimizer_first.storages
        if storage.kind == "optimizer" and (storage.name or "").startswith("exp_avg")
    )
    assert _trained_bytes(workload) == pytest.approx(2 * weights + moments, rel=0.01)
    half = replace(workload, recipe=workload.recipe.model_copy(update={"rank": 16, "conv_rank": 16}))
    assert _trained_bytes(half) == pytest.approx(_trained_bytes(workload) / 2, rel=0.01)
    averaged = replace(workload, recipe=workload.recipe.model_copy(update={"ema_decay": 0.999}))
    # In fp32, as the master weights, which are two thirds of the bytes with the working weights in bf16.
    assert _trained_bytes(averaged) - _trained_bytes(workload) == pytest.approx(weights * 2 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("reserved", "fits"), [(960, True), (971, None), (1000, None), (1029, None), (1031, False), (5000, False)]
)
def test_near_the_limit_an_estimate_does_not_say_whether_a_job_fits(reserved: int, fits: bool | None) -> None:
    assert _fits(reserved, 1000) is fits


def test_other_architectures_and_the_cpu_are_not_estimated(tmp_path: Path, traces: TraceLibrary) -> None:
    request = asked(tmp_path, "sd15", "recipe.dropout=0.1")
    assert estimated_plan(request, traces) is not None
    config = {**request.workload.unet_config, "block_out_channels": [32, 64, 64, 64]}
    assert estimated_plan(replace(request, workload=replace(request.workload, unet_config=config)), traces) is None
    assert estimated_plan(replace(request, device_state=state_of_cpu()), traces) is None


def test_an_estimate_is_worded_as_one() -> None:
    gib = 2**30
    words = plan_text.estimate(PlanEstimate(6 * gib, 8 * gib, 3600.0, True))
    assert words.startswith("Estimate, judged by a similar recipe: about 6.0 of 8.0 GiB (likely to fit), about ")
    assert "too close to say" in plan_text.estimate(PlanEstimate(8 * gib, 8 * gib, 3600.0, None))


@pytest.mark.slow
def test_estimates_are_near_the_plans_that_they_announce(tmp_path: Path) -> None:
    request = asked(tmp_path, "sd15", 'recipe.layers="attention"', "recipe.rank=64", gpu="12GB")
    found = estimated_plan(request, shipped(tmp_path))
    real = plan(
        request.workload,
        request.written,
        request.device_state,
        TraceLibrary(TraceStore(tmp_path / "real", asset_path("traces"))),
        request.counts,
        others=False,
    ).pick
    assert found is not None and found.figures is not None and real is not None
    assert found.figures.reserved == pytest.approx(real.forecast.reserved, rel=0.2)
    assert found.figures.seconds == pytest.approx(real.forecast.seconds, rel=0.2)
