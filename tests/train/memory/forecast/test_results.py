"""Plans from kept outcomes are those of runs that are played; they are kept under all that they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.plans import device_state_with, small_workload
from trainer.config.fit import FitConfig
from trainer.memory.allocator.settings import AllocatorSettings
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast import forecast
from trainer.memory.forecast.forecast import BudgetCheck, RunSimulator, forecast_of, retry_seconds, simulate_run
from trainer.memory.forecast.results import ResultStore, without_details
from trainer.memory.forecast.schedule import PhaseCounts, RunSchedule
from trainer.memory.planner.planner import plan
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import Workload

AMPLE = 400 * 2**20


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceLibrary:
    return TraceLibrary(TraceStore(tmp_path_factory.mktemp("traces")))


def never() -> None:
    raise AssertionError("something was played")


def course_of(subject: Workload, traces: TraceLibrary) -> RunSchedule:
    return RunSchedule(subject, traces, PhaseCounts(), device_state_with(AMPLE).rate)


def test_what_came_out_once_is_not_played_again(traces: TraceLibrary) -> None:
    """By another process too: all comes from the disk, and is what playing gives."""
    subject, situation = small_workload(effective_batch=2), device_state_with(AMPLE)
    written = FitConfig(quantize="none", gradient_checkpointing="none", vae_tiling=False)
    first = plan(subject, written, situation, traces, PhaseCounts())
    again = plan(
        subject,
        written,
        situation,
        TraceLibrary(TraceStore(traces.store.folder)),
        PhaseCounts(),
        runs=RunSimulator(situation, never),
    )
    assert again == first
    assert again.pick is not None
    course = course_of(replace(subject, fit=again.pick.fit), traces)
    played = simulate_run(course, situation, None)
    told = {phase.phase: phase for phase in again.pick.forecast.phases}
    assert told.keys() == played.phases.keys()
    for name, replayed in played.phases.items():
        assert told[name].allocated == replayed.allocated(replayed.peak_allocated())
        assert told[name].reserved == replayed.reserved(replayed.peak_reserved())
        assert told[name].timeline == replayed.timeline(forecast.SAMPLES)
        assert told[name].peaks


def test_a_brief_outcome_is_told_at_length_when_it_is_asked_for(traces: TraceLibrary) -> None:
    course, runs = (
        course_of(small_workload(previews=False, effective_batch=2), traces),
        RunSimulator(device_state_with(AMPLE)),
    )
    brief = runs.unlimited_result(course, brief=True)
    whole = runs.unlimited_result(course, brief=False)
    assert brief == without_details(whole) != whole
    later = RunSimulator(device_state_with(AMPLE), never)
    assert later.unlimited_result(course, brief=False) == whole
    assert later.unlimited_result(course, brief=True) == brief


def test_only_a_limit_that_may_hinder_is_played(traces: TraceLibrary) -> None:
    course = course_of(small_workload(previews=False, effective_batch=2), traces)
    need = simulate_run(course, device_state_with(AMPLE), None).reserved
    RunSimulator(device_state_with(AMPLE)).unlimited_result(course, brief=True)
    assert RunSimulator(device_state_with(need), never).check_budget(course, need) == BudgetCheck(None, 0.0)
    with pytest.raises(AssertionError, match="played"):
        RunSimulator(device_state_with(need), never).check_budget(course, need - 512)
    outcomes = set()
    for capacity in (need - 512, need * 9 // 10, need * 7 // 10, need // 2):
        within = RunSimulator(device_state_with(capacity)).check_budget(course, capacity)
        apart = simulate_run(course, device_state_with(capacity), capacity)
        assert within == BudgetCheck(apart.failed_in, retry_seconds(course, apart.round_retries))
        assert forecast_of(course, device_state_with(capacity)).fits == (apart.failure is None)
        outcomes.add(within.failed_in)
    assert len(outcomes) > 1


def test_what_a_limit_did_once_is_not_played_again_within_its_bounds(traces: TraceLibrary, tmp_path: Path) -> None:
    """Within the bounds every limit does the same, on either side of them not: then it is played."""
    course, situation = course_of(small_workload(previews=False, effective_batch=2), traces), device_state_with(AMPLE)
    course.results = ResultStore.for_traces(TraceStore(tmp_path))
    need = simulate_run(course, situation, None).reserved
    capacity, failed = need - 512, set()
    while capacity > need // 3:
        within, played = (
            RunSimulator(situation).check_budget(course, capacity),
            simulate_run(course, situation, capacity),
        )
        assert within == BudgetCheck(played.failed_in, retry_seconds(course, played.round_retries))
        (*_, kept) = course.results.oom_result(RunSimulator(situation).key(course))
        assert kept == played.oom_result
        assert kept.least <= capacity < kept.beyond <= need
        for other in (kept.least, kept.beyond - 1):
            assert RunSimulator(situation, never).check_budget(course, other) == within
            assert simulate_run(course, situation, other).oom_result == kept
        with pytest.raises(AssertionError, match="played"):
            RunSimulator(situation, never).check_budget(course, kept.least - 1)
        assert simulate_run(course, situation, kept.beyond).oom_result != kept
        failed.add(within.failed_in)
        capacity = kept.least - 1
    assert len(failed) > 1


def test_an_allocator_that_is_set_otherwise_is_followed(traces: TraceLibrary) -> None:
    """One whose segments expand asks for more than it then takes: what it took freely tells nothing of limits."""
    large = small_workload(previews=False, effective_batch=2, side=1024)
    course, usual = course_of(large, traces), device_state_with(AMPLE)
    expanding = replace(usual, allocator=AllocatorSettings(expandable=True))
    assert RunSimulator(expanding).key(course) != RunSimulator(usual).key(course)
    free = simulate_run(course, expanding, None)
    encoded, as_usual = free.phases["cache_pictures"], simulate_run(course, usual, None).phases["cache_pictures"]
    assert encoded.reserved(encoded.peak_reserved()) < as_usual.reserved(as_usual.peak_reserved())
    RunSimulator(expanding).unlimited_result(course, brief=True)
    for capacity in (free.reserved, free.reserved // 2):
        with pytest.raises(AssertionError, match="played"):
            RunSimulator(expanding, never).check_budget(course, capacity)
        apart = simulate_run(course, expanding, capacity)
        within = RunSimulator(expanding).check_budget(course, capacity)
        assert within == BudgetCheck(apart.failed_in, retry_seconds(course, apart.round_retries))
    assert within.failed_in is not None


def with_workspace(size: int) -> DeviceState:
    situation = device_state_with(AMPLE)
    return replace(situation, overheads=replace(situation.overheads, cublas_workspace_bytes=size))


def test_outcomes_are_kept_under_all_that_they_depend_on(traces: TraceLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, runs = small_workload(effective_batch=4), RunSimulator(device_state_with(AMPLE))
    fits = [subject.fit.replaced(**change) for change in (
        {}, {"micro_batch": 2}, {"micro_batch": 4}, {"gradient_checkpointing": "full"}, {"quantize": "int8"},
        {"dtype": "fp32"}, {"vae_tiling": False}, {"preview_offload": True}, {"vae_dtype": "bf16"},
    )]  # fmt: skip
    subjects = [replace(subject, fit=fit) for fit in fits]
    subjects += [small_workload(side=128), small_workload(rank=8)]
    subjects += [small_workload(effective_batch=1)]  # one micro-batch instead of several
    keys = [runs.key(course_of(each, traces)) for each in subjects]
    keys += [RunSimulator(with_workspace(size)).key(course_of(subject, traces)) for size in (1, 2)]
    monkeypatch.setattr(forecast, "RULES", 1000)
    keys += [runs.key(course_of(subject, traces))]
    assert len(set(keys)) == len(keys)


def test_effective_batches_that_are_split_alike_share_theirs(traces: TraceLibrary) -> None:
    runs = RunSimulator(device_state_with(AMPLE))
    assert len({runs.key(course_of(small_workload(effective_batch=size), traces)) for size in (2, 3, 8)}) == 1


def test_a_disk_that_refuses_costs_nothing_but_time(tmp_path: Path, traces: TraceLibrary) -> None:
    course = course_of(small_workload(previews=False, effective_batch=2), traces)
    blocked = tmp_path / "file"
    blocked.write_text("no folder", encoding="utf-8")
    course.results = ResultStore.for_traces(TraceStore(blocked / "below"))
    whole = RunSimulator(device_state_with(AMPLE)).unlimited_result(course, brief=False)
    assert whole == RunSimulator(device_state_with(AMPLE)).unlimited_result(course, brief=False)
