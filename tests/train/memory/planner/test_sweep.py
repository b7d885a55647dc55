"""Configurations that fill a GPU: against all combinations, one by one, and against the forecast of a whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.support.plans import small_workload
from trainer.cli.planning import request_for_preset
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.errors import JobError
from trainer.memory.device import roofline
from trainer.memory.forecast.forecast import forecast_of
from trainer.memory.forecast.schedule import RunSchedule, step_seconds, training_totals
from trainer.memory.planner.request import PlanRequest
from trainer.memory.planner.sweep import BATCHES, RANKS, SHOWN, SIDES, sweep
from trainer.memory.trace import interpolate
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.derive import SHAPES
from trainer.memory.trace.interpolate import COUNTS, StepShape, read_family
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import BucketUse, Workload, complete_fit
from trainer.protocol.records import to_record
from trainer.protocol.sweep import Sweep, SweepPoint, sweep_from

# The only way of training SD 1.5 whose traces ship; nothing here has to be traced.
KNOWN = FitConfig(quantize="none", gradient_checkpointing="none")


@pytest.fixture(scope="module")
def traces() -> TraceLibrary:
    return TraceLibrary(TraceStore.of_user())


def asked(gpu: str = "8GB", family: Family = "sd15") -> PlanRequest:
    return request_for_preset(family, "style", gpu)


@cache
def swept(traces: TraceLibrary, gpu: str = "8GB", written: FitConfig = KNOWN) -> Sweep:
    request = asked(gpu)
    return sweep(request.workload, written, request.device_state, traces, Deadline(0))


def workload_at(shape: StepShape, optimizer: str = "adamw") -> Workload:
    """Return the job's workload with another batch, resolution and rank."""
    workload = asked().workload.at_rank(shape.rank)
    recipe = workload.recipe.model_copy(
        update={"effective_batch": shape.batch, "optimizer": workload.recipe.optimizer.model_copy()}
    )
    assert recipe.optimizer.name == optimizer
    fit = complete_fit(KNOWN.replaced(dtype="bf16", micro_batch=shape.batch))
    return replace(workload, recipe=recipe, fit=fit, buckets=(BucketUse(shape.side, shape.side, 20),))


@pytest.mark.parametrize("shape", [StepShape(1, 768, 8), StepShape(2, 1024, 128), StepShape(4, 512, 16)], ids=str)
def test_an_interpolated_step_equals_the_derived_one(traces: TraceLibrary, shape: StepShape) -> None:
    family = read_family(workload_at(shape), traces, Deadline(0))
    assert family is not None
    steps = traces.step_summaries(workload_at(shape), (shape.side, shape.side), shape.batch)
    assert family.step_totals(shape) == steps.micro_first.totals
    assert family.weights_totals(shape.rank) == steps.weights.totals
    assert family.work(shape) == list(steps.micro_first.work)
    placed, micro = family.traces(shape)
    derived = traces.steps(workload_at(shape), (shape.side, shape.side), shape.batch)
    assert placed.storages == derived.weights.storages
    assert micro.storages == derived.micro_first.storages


def test_missing_traces_are_recorded_while_there_is_time_and_continued_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At rank 32 some operations are as large as others of so small a model, and would be counted together.
    monkeypatch.setattr(interpolate, "RANKS", (12, 20))
    workload, recorded = small_workload(previews=False), TraceLibrary(TraceStore(tmp_path))
    assert read_family(workload, recorded, Deadline(0)) is None and not recorded.traced
    recorded.set_before_tracing(_stop_after(recorded, 3))
    with pytest.raises(Stopped):
        read_family(workload, recorded, Deadline())
    again = TraceLibrary(TraceStore(tmp_path))
    family = read_family(workload, again, Deadline())
    assert family is not None and len(again.traced) == len(COUNTS) * 4 - 3
    # Three images and rank 15 are between those that were recorded.
    steps = again.step_summaries(workload.at_rank(15), SHAPES["sd15"][0], 3)
    assert family.step_totals(StepShape(3, SHAPES["sd15"][0][0], 15)) == steps.micro_first.totals


class Stopped(Exception):
    pass


def _stop_after(traces: TraceLibrary, count: int) -> Callable[[], None]:
    def before_tracing() -> None:
        if len(traces.traced) == count:
            raise Stopped

    return before_tracing


def test_early_stopping_skips_nothing_that_fits(traces: TraceLibrary) -> None:
    """For each rank and resolution, the largest batch that fits, found by trying all of them."""
    found, budget = swept(traces), asked().device_state.budget
    points = [*found.points, *found.others]
    family = read_family(workload_at(StepShape(1, 512, 32)), traces, Deadline(0))
    assert family is not None
    for rank, side in product((8, 128), SIDES["sd15"]):
        steps = traces.step_summaries(workload_at(StepShape(1, side, rank)), (side, side), 1)
        fitting = [0]
        for batch in BATCHES:
            totals = family.step_totals(StepShape(batch, side, rank))
            grown = replace(steps, micro_first=replace(steps.micro_first, totals=totals))
            if training_totals(workload_at(StepShape(batch, side, rank)), (side, side, 75), grown).peak <= budget:
                fitting.append(batch)
        here = [p.batch for p in points if (p.rank, p.resolution, p.optimizer) == (rank, side, "adamw")]
        # If a simulation has shown that the largest one does not fit after all, the next smaller one is there as well.
        assert max(here, default=0) == max(fitting)
    assert found.total == len(BATCHES) * len(SIDES["sd15"]) * len(RANKS) * 2
    assert found.computed < found.total / 4 and found.missing == 0
    assert found.skipped == found.total - found.computed


def test_memory_and_time_of_a_configuration_are_those_of_its_forecast(traces: TraceLibrary) -> None:
    found = swept(traces, "24GB", KNOWN.replaced(micro_batch=4))
    point = next(p for p in (*found.points, *found.others) if (p.resolution, p.rank, p.optimizer) == (512, 32, "adamw"))
    request, workload = asked("24GB"), workload_at(StepShape(4, 512, 32))
    steps = traces.step_summaries(workload, (512, 512), 4)
    assert point.allocated == pytest.approx(training_totals(workload, workload.shapes[0], steps).peak, abs=2**20)
    rate = request.device_state.rate
    expected = step_seconds(workload, workload.shapes[0], steps, lambda work: roofline.seconds(work, rate)) / 4
    assert point.seconds_per_image == pytest.approx(expected, rel=0.01)


def test_simulated_configurations_fill_the_gpu_in_order_and_none_beats_another(traces: TraceLibrary) -> None:
    found = swept(traces)
    assert 5 < len(found.points) <= SHOWN
    fills = [point.fill for point in found.points]
    assert fills == sorted(fills, reverse=True) and fills[0] > 0.9 and fills[0] <= 1.0
    for point in found.points:
        assert point.reserved is not None and point.allocated <= point.reserved <= found.budget
        assert not any(_beats(other, point) for other in found.points if other != point)


def test_what_is_reserved_is_what_a_whole_run_reserves_in_training(traces: TraceLibrary) -> None:
    """The traces of all phases ship for the recipe's own batch; encoding comes before, and leaves no cache behind."""
    found = swept(traces, "6GB", KNOWN.replaced(micro_batch=4))
    point = next((p for p in found.points if (p.resolution, p.rank, p.optimizer) == (512, 32, "adamw")), None)
    assert point is not None
    request = asked("6GB")
    workload = replace(request.workload, fit=workload_at(StepShape(4, 512, 32)).fit)
    schedule = RunSchedule(workload, traces, request.counts, request.device_state.rate)
    train = forecast_of(schedule, request.device_state, brief=True).of("train")
    assert train is not None and point.reserved == pytest.approx(train.reserved, rel=0.02)


def test_the_front_has_no_faster_configuration_that_needs_less(traces: TraceLibrary) -> None:
    found = swept(traces)
    points = [*found.points, *found.others]
    for side in SIDES["sd15"]:
        alike = [point for point in points if point.resolution == side]
        front = [point for point in alike if point.front]
        assert front or not alike
        for point in front:
            assert not any(
                other.allocated <= point.allocated and other.seconds_per_image < point.seconds_per_image
                for other in alike
            )


def test_without_traces_and_time_ways_of_training_are_left_out_by_name(traces: TraceLibrary) -> None:
    """No trace ships for a LoRA of the attention layers alone."""
    request = asked()
    workload = replace(request.workload, recipe=request.workload.recipe.replaced(layers="attention"))
    found = sweep(workload, FitConfig(), request.device_state, traces, Deadline(0))
    assert found.left_out == tuple(product(("none", "int8", "nf4"), ("none", "full")))
    assert (found.points, found.others, found.computed, found.skipped) == ((), (), 0, 0)
    assert found.missing == found.total == len(found.left_out) * len(BATCHES) * len(SIDES["sd15"]) * len(RANKS) * 2


def test_written_keys_do_not_change_and_a_sweep_survives_json(traces: TraceLibrary) -> None:
    found = swept(traces, written=KNOWN.replaced(micro_batch=2))
    assert {point.batch for point in (*found.points, *found.others)} == {2}
    assert sweep_from(to_record(found)) == found


def test_it_can_be_canceled(traces: TraceLibrary) -> None:
    class Canceled(Exception):
        pass

    def cancel() -> None:
        raise Canceled

    request = asked()
    with pytest.raises(Canceled):
        sweep(request.workload, KNOWN, request.device_state, traces, Deadline(0), cancel)


def test_a_full_gpu_is_an_error(traces: TraceLibrary) -> None:
    request = asked()
    with pytest.raises(JobError, match="none of its memory can be used"):
        sweep(request.workload, KNOWN, replace(request.device_state, free_bytes=0), traces, Deadline(0))


@pytest.mark.parametrize("adapter", ["lokr", "oft"])
def test_adapters_whose_size_does_not_rise_evenly_with_the_rank_are_refused(traces: TraceLibrary, adapter: str) -> None:
    request = asked()
    other = replace(request.workload, recipe=request.workload.recipe.replaced(adapter=adapter))
    with pytest.raises(JobError, match="does not rise evenly with the rank"):
        sweep(other, KNOWN, request.device_state, traces, Deadline(0))


def _beats(one: SweepPoint, other: SweepPoint) -> bool:
    """Return whether one is at least as good in every respect, and clearly better in one."""
    respects = [
        (one.batch, other.batch),
        (one.resolution, other.resolution),
        (one.rank, other.rank),
        (other.optimizer.endswith("8bit"), one.optimizer.endswith("8bit")),
        (0.98 * other.seconds_per_image, one.seconds_per_image),
    ]
    return all(mine >= theirs for mine, theirs in respects)
