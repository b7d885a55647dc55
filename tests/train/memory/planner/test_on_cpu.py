"""Forecasts for the CPU: full-size bases are estimated from shipped traces, without tracing anything."""

from __future__ import annotations

import subprocess
import sys
import timeit
from dataclasses import replace

import pytest
import torch

from tests.support.forecasts import known_job
from trainer.memory.forecast.schedule import PhaseCounts, RunSchedule
from trainer.memory.planner import on_cpu
from trainer.memory.planner.request import PlanRequest, request_of_job, request_without_job
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.protocol.forecast import DeviceSpeed, Forecast, TimedOperation

# Round figures for a CPU with a few cores, so that the estimate does not depend on the machine that runs the test.
COMPUTED = tuple(TimedOperation(kind, "float32", 2e11, 1e10, 1.0) for kind in ("gemm", "conv", "attention"))
RATE = DeviceSpeed("cpu", (*COMPUTED, TimedOperation("other", "float32", 0.0, 1e10, 1.0)), 1e10, 2e-5, 0.0)


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "_quick_rate", lambda _: RATE)


def never() -> None:
    raise AssertionError("nothing may be traced for an estimate")


def estimate(question: PlanRequest) -> Forecast:
    assert question.resolved is not None
    traces = TraceLibrary(TraceStore.of_user(), never)
    planned = on_cpu.plan_on_cpu(question.resolved, question.workload, question.counts, traces)
    assert planned.pick is not None and planned.device_state.on_cpu
    return planned.pick.forecast


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_full_size_base_is_estimated_without_tracing(family, tmp_path) -> None:
    question = request_of_job(known_job(tmp_path / "job", family), (), None)
    found = estimate(question)
    assert not found.exact and found.error > 0 and found.on_cpu
    assert {phase.phase for phase in found.phases} >= {"cache_pictures", "load", "train", "validate", "preview"}
    assert found.seconds == pytest.approx(sum(phase.seconds for phase in found.phases))
    # An SD 1.5 in fp32 takes 3.4 GB and an SDXL 10.3 GB before anything is computed.
    assert (3.4e9 if family == "sd15" else 10.3e9) < found.host < 80e9


def test_an_estimate_grows_with_steps_images_and_their_size() -> None:
    small = request_without_job("sd15", None, None)
    assert small.resolved is not None
    steps = small.workload.recipe.steps or 1
    longer = replace(small, workload=replace(small.workload, recipe=small.workload.recipe.replaced(steps=2 * steps)))
    wide = replace(small.workload.buckets[0], width=1024)
    wider = replace(small, workload=replace(small.workload, buckets=(wide,)))
    base, long, large = map(estimate, (small, longer, wider))
    assert training(long) == pytest.approx(2 * training(base), rel=1e-6)
    assert 1.8 * training(base) < training(large) < 2.5 * training(base)


def test_an_estimate_agrees_with_the_exact_forecast_where_that_is_traced() -> None:
    """The traced step of the very fit, in fp32, at the same rate: only the adapter and the bytes moved differ."""
    question = request_without_job("sd15", None, None)
    fit = question.workload.fit.replaced(micro_batch=1)
    subject = replace(question.workload, fit=fit, recipe=question.workload.recipe.replaced(rank=8, conv_rank=8))
    assert question.resolved is not None
    course = RunSchedule(subject, TraceLibrary(TraceStore.of_user()), PhaseCounts(previews=0, validations=0), RATE)
    exact = course.step_seconds(lambda work: on_cpu.roofline.seconds(work, RATE))[512, 512, 75]
    found = estimate(replace(question, workload=subject)).step_seconds["512x512"]
    assert exact / 1.25 < found < 1.25 * exact


def training(found: Forecast) -> float:
    return sum(phase.seconds for phase in found.phases if phase.phase in ("first_step", "train"))


def test_the_rate_of_an_estimate_is_that_of_this_cpu_without_torch() -> None:
    """Within a wide factor of PyTorch's own matrix product: other programs may disturb either."""
    words = [
        sys.executable,
        "-c",
        "import sys; from trainer.memory.planner import on_cpu; r = on_cpu._quick_rate(None); ",
    ]
    words[-1] += "print(r.timed[0].flops, 'torch' in sys.modules)"
    flops, loaded = subprocess.run(words, capture_output=True, encoding="utf-8", check=True).stdout.split()
    assert loaded == "False"
    left, right = torch.ones(1024, 640), torch.ones(640, 640)
    best = min(timeit.repeat(lambda: left @ right, number=1, repeat=50))
    assert 0.1 < float(flops) * best / (2 * 1024 * 640 * 640) < 10
