"""The report of a finished run, from events written by hand and from a real run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.exhaustion import Trial
from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.host import private_bytes
from trainer.protocol import events
from trainer.protocol.events import MemoryExhausted, PhaseMemory, StepEvent
from trainer.protocol.forecast import Forecast, PhaseForecast
from trainer.protocol.report import CachingReport, Memory, RunReport, read_report
from trainer.training.reporting.report import make_report, summarize

GIB = 1 << 30
FORECAST = Forecast(
    gpu="RTX 3060",
    phases=(
        PhaseForecast("train", 5 * GIB, 6 * GIB, GIB, 8.0),
        PhaseForecast("preview", 3 * GIB, 4 * GIB, GIB, 2.0),
    ),
    allocated=5 * GIB,
    reserved=6 * GIB,
    outside=GIB,
    margin=0,
    budget=11 * GIB,
    fits=True,
    seconds=12.0,
    step_seconds={"1024x1024": 2.0},
    time_factor=1.25,
    flops=8e12,
    flops_limit=4e12,
)
# Two attempts: the first was killed after its second step, which the second attempt did again.
WRITTEN = [
    events.AttemptStarted(1, "cuda:0", time=10.0, attempt=1),
    events.CachingSpeed("cache_pictures", 200, 25.0, 22.0, 8.1, 400.0, time=11.0, attempt=1),
    StepEvent(1, 0, 0.1, 1.0, {}, 4, 2.0, data_seconds=1.9, time=12.0, attempt=1),
    StepEvent(2, 0, 0.1, 1.0, {}, 4, 2.0, data_seconds=0.05, time=14.0, attempt=1),
    PhaseMemory("train", 4.0, 5 * GIB, 7 * GIB, 8 * GIB, None, time=15.0, attempt=1),
    events.AttemptStarted(2, "cuda:0", time=100.0, attempt=2),
    events.CachingSpeed("cache_pictures", 1, 2.0, 4.0, 1.0, 80.0, time=100.0, attempt=2),
    MemoryExhausted("train", 1, 20, "forward", "unet", 1, 2, 3, time=101.0, attempt=2),
    MemoryExhausted("train", 1, 30, "backward", "", 1, 2, 3, time=101.0, attempt=2),
    StepEvent(2, 0, 0.1, 1.0, {}, 4, 1.0, data_seconds=0.9, time=102.0, attempt=2),
    PhaseMemory("train", 1.0, 4 * GIB, 5 * GIB, None, None, time=103.0, attempt=2),
    PhaseMemory("train", 2.5, 6 * GIB, 6 * GIB, None, None, time=104.0, attempt=2),
    PhaseMemory("load", 0.5, GIB, GIB, None, None, time=104.0, attempt=2),
]


def test_all_attempts_are_taken_together() -> None:
    report = make_report(WRITTEN, FORECAST, torch.device("cpu"), steps=2)
    assert (report.seconds, report.forecast_seconds, report.time_factor) == (5.0 + 4.0, 12.0, 1.25)
    assert report.images_per_second == 12 / 5.0
    # 4e12 a step, three steps in five seconds.
    assert report.flops_per_second == pytest.approx(12e12 / 5) and report.share_of_limit == pytest.approx(0.6)
    train, load, preview = (report.phases[name] for name in ("train", "load", "preview"))
    assert train.measured == Memory(6 * GIB, 7 * GIB, 8 * GIB)
    assert train.forecast == Memory(5 * GIB, 6 * GIB, 7 * GIB)
    assert (train.seconds, train.forecast_seconds, train.shortfall) == (6.5, 8.0, 30)
    assert load.forecast is None and load.measured == Memory(GIB, GIB, None)
    assert preview.measured is None and preview.forecast_seconds == 2.0
    assert report.exhausted == 2
    assert report.data_share == 0.05 / 2.0  # nothing can be loaded in advance for the first step of an attempt
    assert report.caching == {"cache_pictures": CachingReport(200, 25.0, 22.0, 8.1, 400.0)}


def test_it_is_told_in_short() -> None:
    report = make_report(WRITTEN, FORECAST, torch.device("cpu"), steps=2)
    assert summarize(report) == (
        "Speed: 2.4 images per second, 60% of the GPU's compute limit. Peak memory: 7.0 GiB (train, forecast "
        "6.0 GiB). Waiting for data: 2.5% of the training time. Time: 9 s, forecast 12 s. Memory ran out 2 times."
    )
    nothing = RunReport("cpu", "Linux", {}, 3725.0, None, 0.5, None, None)
    assert summarize(nothing) == "Speed: 0.5 images per second. Time: 1 h 02 min."


def test_a_real_run_leaves_its_report(tmp_path: Path) -> None:
    job = write_job(tmp_path, tiny_base("sd15", tmp_path / "bases"), photographs(tmp_path / "pictures"))
    trial = Trial(job, ["recipe.steps=3"]).start()
    assert trial.code == 0
    report = read_report(trial.run.report)
    expected = {"load", "cache_pictures", "cache_texts", "first_step", "train", "validate", "preview", "checkpoint"}
    assert set(report.phases) == expected | {"save"}
    assert all(phase.seconds > 0 and phase.measured is None for phase in report.phases.values())
    assert sum(phase.seconds for phase in report.phases.values()) <= report.seconds
    assert report.gpu == "cpu" and report.images_per_second > 0 and report.exhausted == 0
    assert {phase: one.count for phase, one in report.caching.items()} == {
        event.phase: event.total for event in trial.of(events.PhaseStarted) if event.phase in report.caching
    }
    assert report.data_share is not None and 0 <= report.data_share < 1
    held = [event.host for event in trial.of(PhaseMemory)]
    assert private_bytes() is None or all(host > 50 << 20 for host in held)  # torch alone takes that


HOLD = """
from trainer.host import private_bytes
before = private_bytes()
held = b"1" * (256 << 20)
after = private_bytes()
assert before is None or after is None or 0.9 * len(held) < after - before < 1.5 * len(held), (before, after)
"""


def test_private_memory_grows_with_what_is_held() -> None:
    subprocess.run([sys.executable, "-c", HOLD], check=True)  # nothing else is freed meanwhile in a process of its own
