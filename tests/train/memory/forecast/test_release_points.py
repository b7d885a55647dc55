"""A forecast does what a run does, in the run's order, and returns cached memory to the driver where the run does."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.plans import device_state_with, small_workload
from tests.support.tiny import tiny_base
from trainer.memory.allocator.allocator import Allocator
from trainer.memory.forecast.forecast import simulate_run
from trainer.memory.forecast.schedule import PhaseCounts, RunSchedule
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.protocol import events
from trainer.protocol.forecast import AT_START, BETWEEN_STEPS, RELEASE_POINTS
from trainer.training.run.start import start

KINDS = {
    events.Validation: "validate",
    events.CheckpointEvent: "checkpoint",
    events.Saved: "save",
    events.Preview: "preview",
}
# Everything is due at each of the first two steps; the second is not the last, which saves under another name.
SETTINGS = (
    "recipe.steps=2",
    "report.validation.every=1",
    "report.saving.every_steps=1",
    "report.saving.checkpoint_every=1",
    "report.previews.every=1",
)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> RunSchedule:
    """The forecast of a small run."""
    traces = TraceLibrary(TraceStore(tmp_path_factory.mktemp("traces")))
    return RunSchedule(small_workload(effective_batch=1), traces, PhaseCounts(), device_state_with(1 << 30).rate)


def played_points(course: RunSchedule) -> list[str]:
    """The release points of a forecast: one round of what comes between steps."""
    acts = (*course.before_training(), *course.at_start(), *course.between_steps())
    return [tape.name for act in acts for tape in act.traces if tape.name in RELEASE_POINTS]


def test_a_run_releases_memory_where_its_forecast_does(
    tmp_path: Path, course: RunSchedule, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[events.Event] = []
    job = write_job(tmp_path, tiny_base("sd15", tmp_path, depth=1), photographs(tmp_path / "pictures", 2))
    with caplog.at_level(logging.DEBUG, logger="trainer.training.device.offload"):
        assert start(job, SETTINGS, told.append) == 0
    passed = [record.args[0] for record in caplog.records if record.args]
    between = played_points(course)[-2:]
    assert passed == [*played_points(course), *between]  # between steps twice: after the first step and the second
    done = [(event.step, KINDS[type(event)]) for event in told if type(event) in KINDS]  # type: ignore[attr-defined]
    assert tuple(kind for step, kind in done if step == 0) == AT_START
    assert tuple(kind for step, kind in done if step == 1) == BETWEEN_STEPS


def test_loading_a_quantized_base_is_a_release_point_too(course: RunSchedule) -> None:
    subject = replace(course.workload, fit=course.workload.fit.replaced(quantize="int8"))
    quantized = RunSchedule(subject, course._traces, course.counts, course.rate)
    assert played_points(quantized) == ["cache_pictures", "cache_texts", "quantise", "draw", "decode", "draw", "decode"]


def test_a_forecast_keeps_what_is_cached_between_its_release_points(
    course: RunSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and saved files come while training's memory is still reserved, and so reserve as much."""
    releases: list[int] = []
    empty_cache = Allocator.empty_cache

    def counted(allocator: Allocator) -> None:
        releases.append(allocator.reserved)
        empty_cache(allocator)

    monkeypatch.setattr(Allocator, "empty_cache", counted)
    played = simulate_run(course, device_state_with(1 << 40), None)
    assert len(releases) == len(played_points(course))
    reserved = {name: phase.reserved(phase.peak_reserved()) for name, phase in played.phases.items()}
    allocated = {name: phase.allocated(phase.peak_allocated()) for name, phase in played.phases.items()}
    assert reserved["checkpoint"] == reserved["save"] == reserved["validate"] >= reserved["first_step"]
    assert allocated["checkpoint"] < reserved["checkpoint"] // 2
