"""The programs that compare forecasts with a card, on the device that every machine has: main memory, small models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import bitsandbytes.optim
import pytest
import torch
import torch.utils.checkpoint
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks import memory_truth, record_traces
from tests.benchmarks.record_traces import births, likeness, recorded_jobs, traces_of, work_of
from tests.support.meters import CpuMeter, Measured
from tests.support.real_phases import RealRun
from tests.support.truth import LATER, PhaseForecast, Prediction, measure, measure_run, percentile, predict, predict_run
from tests.support.truth_jobs import emulated_jobs, truth_jobs
from tests.support.truth_report import Edge, Row, lines_of, report
from trainer.memory.device.device_state import state_of_listed_gpu
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.protocol.forecast import PHASES
from trainer.training.objective import NoiseSchedule

CPU = torch.device("cpu")
MIB = 2**20


def test_there_are_sixty_configurations_that_all_differ() -> None:
    jobs = truth_jobs()
    assert len(jobs) >= 60
    assert len({job.name for job in jobs}) == len(jobs)
    subjects = [job.workload() for job in jobs]
    assert len({repr(subject) for subject in subjects}) == len(jobs)
    assert len({subject.recipe.optimizer.name for subject in subjects}) >= 6
    assert {subject.fit.dtype for subject in subjects} == {"bf16", "fp16", "fp32"}
    assert {subject.fit.quantize for subject in subjects} == {"none", "int8", "nf4"}


@pytest.mark.slow
def test_what_recomputing_training_asks_for_is_forecast_to_a_ten_thousandth(tmp_path: Path) -> None:
    """Against PyTorch's CPU allocator."""
    job = next(job for job in truth_jobs() if job.name == "sd15 r16 full b4")
    subject, situation = job.workload(tiny=True, dtype="fp32"), memory_truth.state_of_main_memory()
    prediction = predict(job, subject, situation, tmp_path)
    row = Row(job.name, prediction, dict(measure(job, subject, CpuMeter())), 0, "")
    lines = {line.phase: line for line in lines_of(row)}
    assert {line.measure for line in lines.values()} == {"requested"}
    assert set(lines) == {"load", "first_step", "train"}
    assert max(abs(line.error) for line in lines.values()) < 1e-4
    text = report("cpu", "2026-01-01", situation, [row], [], 1)
    assert "| sd15 r16 full b4 | train | requested |" in text
    assert "s a step" not in text


@pytest.mark.slow
def test_every_phase_of_a_whole_run_is_compared(tmp_path: Path) -> None:
    """Also those that the comparison on the emulated GPU adds: checkpoint, export, and encoding between epochs."""
    job = next(job for job in emulated_jobs() if job.name == "sd15 r16 full schedulefree")
    workload = job.workload(tiny=True, dtype="fp32")
    prediction = predict_run(workload, memory_truth.state_of_main_memory(), tmp_path)
    phases = dict(measure_run(job, RealRun(workload, CPU), CpuMeter()))
    lines = {line.phase: line for line in lines_of(Row(job.name, prediction, phases, 0, ""))}
    assert set(lines) == {*PHASES, *LATER.values()} - {"quantise"}
    # On the CPU, the copies that these three make in main memory count too.
    copying = ("preview", "checkpoint", "save")
    assert {name: line.error for name, line in lines.items() if abs(line.error) > 0.01 and name not in copying} == {}


@pytest.mark.parametrize("side", [8, 64])
def test_what_convolutions_do_inside_themselves_is_not_measured(side: int) -> None:
    """Small ones unfold their input, larger ones are oneDNN's; what they return counts, forward and backward."""
    weight, picture = torch.randn(16, 8, 3, 3), torch.randn(1, 8, side, side)
    kept: list[torch.Tensor] = []

    def convolve() -> None:
        kept.append(torch.nn.functional.conv2d(picture, weight, padding=1))
        kept.extend(torch.ops.aten.convolution_backward(
            kept[0], picture, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )[:2])  # fmt: skip

    meter = CpuMeter()
    assert meter.measure(convolve).requested == sum(tensor.nbytes for tensor in kept) == meter.live


def test_an_8_bit_update_counts_as_what_it_leaves() -> None:
    """On the CPU, bitsandbytes computes updates in fp32 copies, also for small weights."""
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (4096, 1024)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer, meter = bitsandbytes.optim.AdamW8bit(weights), CpuMeter()
    state = 2 * (4096 + 4096 // 256 * 4) + 2 * 1024 * 4
    assert meter.measure(optimizer.step).requested - state in range(64)  # and numbers that multiply


def test_what_lies_in_main_memory_beside_a_card_is_not_measured() -> None:
    """Checkpointing keeps the state of the random numbers; the noise schedule is made in float64 there."""
    kept: list[object] = []

    def work() -> None:
        x = torch.ones(1024, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
        schedule = NoiseSchedule.create("epsilon", zero_terminal_snr=True)
        kept.extend((x, y, schedule.to("cpu", torch.float32)))

    meter = CpuMeter()
    assert meter.measure(work).requested == meter.live == 2 * 4096 + 4 * 4000


def test_a_table_says_how_near_forecasts_came() -> None:
    foreseen = {"train": PhaseForecast(0, 101 * MIB, 110 * MIB)}
    row = Row("job", Prediction(foreseen, 0.5), {"train": Measured(0, 100 * MIB, 100 * MIB, 3.0)}, 480 * MIB, "")
    edges = [Edge("job", 90 * MIB, foreseen=True, fitted=False), Edge("job", 80 * MIB, foreseen=False, fitted=True)]
    text = report("RTX 3060", "2026-01-01", state_of_listed_gpu(find_gpu("12GB")), [row], edges, 3)
    assert "1 of 3 configurations" in text
    assert "| job | train | allocated | 100.00 | 101.00 | +1.000% |" in text
    assert "| job | train | reserved | 100.00 | 110.00 | +10.000% |" in text
    assert "| job | train | s a step | 1.000 | 0.500 | -50.0% |" in text
    assert "Of 2 runs 1 did not fit though forecast to, 1 fitted though not forecast to." in text
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 2.0, 3.0, 3.0]


def asked_for(job: record_traces.RecordedJob) -> list[int]:
    """What a job asks PyTorch's CPU allocator for, in order."""
    run = RealRun(job.workload(tiny=True), CPU)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for work in work_of(job, run):
            work()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    taken = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return [size for _, size in taken if size > 0]


def test_a_trace_asks_for_what_the_device_was_asked_for(tmp_path: Path) -> None:
    job = next(job for job in recorded_jobs() if job.name == "sdxl_lora")
    tapes = traces_of(job, job.workload(tiny=True), TraceLibrary(TraceStore(tmp_path)))
    traced, real = births(tapes, cublas=0), asked_for(job)
    assert not Counter(size for size in traced if size > 4096) - Counter(real)
    assert likeness(real, traced).startswith(f"{len(real)} real, {len(traced)} traced")


def test_likeness_tells_what_is_only_on_one_side() -> None:
    assert "100.0% of the real in both, all in order" in likeness([1, 2, 3], [1, 2, 3])
    text = likeness([1, 2, 3, 3], [1, 3, 5])
    assert "50.0% of the real in both, the first 1 in order" in text
    assert "only real (bytes, times): [(2, 1), (3, 1)]; only traced: [(5, 1)]" in text


@pytest.mark.parametrize("job", recorded_jobs(), ids=lambda job: job.name)
def test_every_recorded_job_has_parts_and_fits_its_name(job: record_traces.RecordedJob) -> None:
    subject = job.workload(tiny=False)
    assert job.name.startswith(subject.family)
    assert len(work_of(job, RealRun(subject, CPU))) == len([part for part in job.parts if part != "quantise"])


def test_the_profiler_s_sum_is_what_tensors_hold() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.append(torch.empty(1 << 20, dtype=torch.uint8))
        torch.empty(1 << 22, dtype=torch.uint8)

    meter = CpuMeter()
    measured = meter.measure(work)
    assert (measured.requested, meter.live) == (5 << 20, 1 << 20)
    assert meter.measure(lambda: kept.append(torch.empty(1 << 10, dtype=torch.uint8))).requested == (1 << 20) + (
        1 << 10
    )
