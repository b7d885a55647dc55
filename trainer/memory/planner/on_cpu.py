"""Plan a job for the CPU: forecast time and main memory without choosing a fit.

Small bases are traced in seconds and get an exact forecast. A full-size base would take minutes to trace and time, so
its forecast is an estimate: the work of a shipped trace, scaled to the job's pixels and steps, at a rate that is
measured in half a second. Finished runs on this CPU correct both (trainer.memory.device.calibration).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trainer.config.job import Job
from trainer.config.presets.exchange import load_preset
from trainer.dataset.cache_keys import text_batch_size
from trainer.files.assets import preset_path
from trainer.host import usable_cores
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState, state_of_cpu
from trainer.memory.forecast.forecast import PROCESS_BYTES, forecast_on_cpu
from trainer.memory.forecast.schedule import PhaseCounts, RunSchedule, bounding_shapes
from trainer.memory.planner.planner import Plan, PlanResult
from trainer.memory.planner.request import request_without_job
from trainer.memory.trace.library import Steps, TraceLibrary
from trainer.memory.trace.memory_trace import TraceSummary, Work, total_in_sequence
from trainer.memory.trace.workload import BucketUse, TracePart, TraceRequest, Workload
from trainer.protocol.forecast import CPU, PHASES, DeviceSpeed, Forecast, ForecastPhase, PhaseForecast, TimedOperation

# How long the rate is measured; each operation is timed three times at least, however long that takes.
MEASURED_SECONDS = 0.4
# An estimate may be off by this share: it knows neither the adapter's size nor how batches are composed.
ESTIMATE_ERROR = 0.5
# The built-in recipe and fit whose traces ship for both families.
REFERENCE, REFERENCE_GPU = "style", "24GB"
REFERENCE_FIT = {
    "dtype": "bf16",
    "quantize": "none",
    "vae_dtype": "fp32",
    "micro_batch": 1,
    "gradient_checkpointing": "none",
    "vae_tiling": True,
    "preview_offload": False,
}
REFERENCE_PARTS: tuple[TracePart, ...] = ("optimizer", "load", "cache_pictures", "cache_texts", "preview")
# A matrix product as in a full-size UNet, and the numbers of a sum that no cache holds.
ROWS, WIDTH, SUMMED, QUICK_SECONDS = 1024, 640, 8 << 20, 0.25
# Share of numpy's rate for such a product that PyTorch's operations reach, and the fixed seconds that each adds.
REACHED = {"gemm": 0.8, "conv": 0.8, "attention": 0.4}
LAUNCH = 2e-5
MOST_RATES = 32
_rates: dict[tuple[int | None, bool | None, tuple[Work, ...]], DeviceSpeed] = {}
"""Rates measured in this process; the keys are number of threads, determinism and timed work."""


def plan_on_cpu(job: Job, workload: Workload, counts: PhaseCounts, traces: TraceLibrary) -> PlanResult:
    """Return the plan of a resolved job on this computer's CPU, whose speed is measured.

    This takes only seconds: torch is loaded and the base is traced only if it is smaller than the published ones.
    """
    reference = _reference(workload, traces)
    if reference is None:
        return _traced(job, workload, counts, traces)
    device_state = state_of_cpu(_quick_rate(job.fit.threads))
    forecast = _Estimate(workload, counts, reference, traces, device_state).forecast()
    return PlanResult(device_state, Plan(job.fit, forecast))


def _traced(job: Job, workload: Workload, counts: PhaseCounts, traces: TraceLibrary) -> PlanResult:
    shape = bounding_shapes(workload)[0]
    steps = traces.step_summaries(workload, shape, workload.images_at_once(shape))
    rate = _rate(job, steps.micro_first.work)
    device_state = state_of_cpu(rate)
    forecast = forecast_on_cpu(RunSchedule(workload, traces, counts, rate), device_state)
    return PlanResult(device_state, Plan(job.fit, forecast))


def _rate(job: Job, work: tuple[Work, ...]) -> DeviceSpeed:
    """Return the CPU's rate for ``work`` with the job's number of threads, measured once per process."""
    import torch

    from trainer.training.acceleration.throughput import measure_rate
    from trainer.training.device.device import numeric_settings

    key = job.fit.threads, job.fit.deterministic, work
    if key not in _rates:
        if len(_rates) >= MOST_RATES:
            _rates.clear()
        with numeric_settings(job):
            _rates[key] = measure_rate(torch.device("cpu"), work, name=CPU, seconds=MEASURED_SECONDS)
    return _rates[key]


def _quick_rate(threads: int | None) -> DeviceSpeed:
    """Return the CPU's rate, measured in half a second with a matrix product and a sum in numpy on all cores.

    Torch is not used because loading it would take several seconds.
    """
    cores = usable_cores()
    share = min(threads or cores, cores) / cores
    left, right = (np.ones((rows, WIDTH), np.float32) for rows in (ROWS, WIDTH))
    flops = share * 2 * ROWS * WIDTH**2 / _quickest(lambda: left @ right)
    one, other = np.ones(SUMMED, np.float32), np.ones(SUMMED, np.float32)
    bandwidth = 3 * one.nbytes / _quickest(lambda: np.add(one, other, out=other))
    timed = [TimedOperation(kind, "float32", part * flops, 1.0, 1.0) for kind, part in REACHED.items()]
    return DeviceSpeed(CPU, (*timed, TimedOperation("other", "float32", 0.0, bandwidth, 1.0)), bandwidth, LAUNCH, 0.0)


def _quickest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of many calls, the one that other programs slowed down least."""
    best, ends = math.inf, time.perf_counter() + QUICK_SECONDS
    while time.perf_counter() < ends or math.isinf(best):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def _reference(workload: Workload, traces: TraceLibrary) -> Workload | None:
    """Return a workload of the same base whose traces ship with Impasto; None for other bases or PyTorch versions."""
    if not workload.has_published_unet:
        return None
    recipe = load_preset(preset_path("recipes") / f"{workload.family}-{REFERENCE}.toml").recipe
    reference = request_without_job(workload.family, recipe, REFERENCE_GPU).workload
    reference = replace(reference, fit=reference.fit.replaced(**REFERENCE_FIT))
    wishes = [TraceRequest(reference, part) for part in REFERENCE_PARTS]
    wishes.append(TraceRequest(reference, "micro", (reference.buckets[0].size, 1)))
    return reference if all(map(traces.has, wishes)) else None


@dataclass(frozen=True)
class _Estimate:
    """Estimate for a full-size job on the CPU, scaled from a reference workload."""

    workload: Workload
    counts: PhaseCounts
    reference: Workload
    traces: TraceLibrary
    device_state: DeviceState

    def forecast(self) -> Forecast:
        """Return the forecast of time and main memory."""
        timed, host, steps = self._seconds(), self._host(), self.workload.recipe.steps or 1
        by_bucket = {f"{one.width}x{one.height}": self._step(self._share(one)) for one in self.workload.buckets}
        mean = self._weighed(self._step)
        timed |= {"first_step": mean, "train": mean * (steps - 1)}
        phases = tuple(
            PhaseForecast(phase, 0, 0, PROCESS_BYTES + host.get(phase, 0), timed[phase])
            for phase in PHASES
            if phase in timed
        )
        return Forecast(
            gpu=CPU,
            phases=phases,
            allocated=0,
            reserved=0,
            outside=0,
            margin=0,
            budget=0,
            fits=True,
            seconds=sum(timed.values()),
            step_seconds=by_bucket,
            exact=False,
            error=ESTIMATE_ERROR,
            time_factor=self.device_state.correction.time_factor,
        )

    @cached_property
    def _size(self) -> BucketUse:
        return self.reference.buckets[0]

    @property
    def _pixels(self) -> int:
        return self._size.width * self._size.height

    @cached_property
    def _steps(self) -> Steps[TraceSummary]:
        return self.traces.step_summaries(self.reference, self._size.size, 1)

    def _seconds(self) -> dict[ForecastPhase, float]:
        """Return the seconds that the run spends in each phase except training."""
        done, texts = self.counts, text_batch_size(self.workload.fit)
        images, captions = done.images + done.later.images, done.texts + done.later.texts
        encoded, forward = self._stage("cache_pictures", "encode"), _forward(self._steps.micro_first)
        measured = done.validations * done.measured * self.workload.validation_timesteps
        return {
            "cache_pictures": images * self._weighed(lambda share: self._time(encoded, share)),
            "cache_texts": -(-captions // texts) * self._time(self._stage("cache_texts", "texts")),
            "load": roofline.loading_seconds(self._weights, self.device_state.rate),
            "validate": measured * self._weighed(lambda share: self._time(forward, share)),
            "preview": done.previews * self._preview(),
        }

    def _preview(self) -> float:
        """Return the seconds of one round of previews."""
        drawn, decoded = self._stage("preview", "draw"), self._stage("preview", "decode")
        prompts = self.reference.previews
        drawn_steps = sum(prompt.evaluations for prompt in prompts)
        total = 0.0
        for prompt in self.workload.previews:
            share = (prompt.width or 0) * (prompt.height or 0) / self._pixels
            # The reference is traced with guidance, which takes two passes of the UNet per step instead of one.
            passes = 1.0 if prompt.guidance > 1.0 else 0.5
            total += passes * prompt.evaluations / drawn_steps * self._time(drawn, share)
            total += self._time(decoded, share) / len(prompts)
        return total

    def _step(self, share: float) -> float:
        """Return the seconds of an optimizer step on images with ``share`` times the reference's pixels."""
        batch, steps = self.workload.recipe.effective_batch, self._steps
        # A set of blocks counts as half of the UNet; the estimate's tolerance covers the difference.
        again = {"none": 0.0, "full": 1.0}.get(str(self.workload.fit.gradient_checkpointing), 0.5)
        forward = self._time(_forward(steps.micro_more), share)
        return batch * (self._time(steps.micro_more.work, share) + again * forward) + self._time(steps.optimizer.work)

    def _weighed(self, seconds: Callable[[float], float]) -> float:
        """Return the mean of ``seconds`` over the job's images.

        The argument of ``seconds`` is an image's number of pixels divided by the reference's.
        """
        buckets = self.workload.buckets
        counts = [bucket.images for bucket in buckets]
        weights = counts if any(counts) else [1] * len(buckets)
        found = (
            weight * seconds(self._share(bucket)) for bucket, weight in zip(buckets, weights, strict=True) if weight
        )
        return sum(found) / sum(weights)

    def _share(self, bucket: BucketUse) -> float:
        return bucket.width * bucket.height / self._pixels

    def _stage(self, part: TracePart, stage: str) -> list[Work]:
        """Return the work of a part's stages whose names start with ``stage``."""
        summaries = self.traces.phase_summaries(self.reference, part)
        return [work for each in summaries for work in each.work if work.stage.startswith(stage)]

    def _time(self, work: Iterable[Work], share: float = 1.0) -> float:
        """Return the seconds of fp32 work with pixels scaled by ``share``, with the correction from finished runs."""
        scaled = [_in_fp32(each, share) for each in work]
        return self.device_state.correction.time_factor * roofline.seconds(scaled, self.device_state.rate)

    def _host(self) -> dict[ForecastPhase, int]:
        """Return each phase's bytes of main memory, without the process itself; fp32 takes twice the bytes of bf16."""
        micro = min(self.workload.fit.micro_batch or 1, self.workload.recipe.effective_batch)
        steps, share = self._steps, self._share(self.workload.buckets[0])
        step = total_in_sequence([steps.micro_first, steps.optimizer_first]).peak
        encoding, texts, drawing = (
            total_in_sequence(self.traces.phase_summaries(self.reference, part)).peak
            for part in ("cache_pictures", "cache_texts", "preview")
        )
        return {
            "cache_pictures": round(encoding * share),  # the VAE is in fp32 on a GPU too
            "cache_texts": 2 * texts,
            "load": self._weights,
            "first_step": self._weights + round(2 * step * micro * share),
            "train": self._weights + round(2 * step * micro * share),
            "validate": self._weights + round(2 * step * share),
            "preview": self._weights + 2 * drawing,
        }

    @cached_property
    def _weights(self) -> int:
        return 2 * total_in_sequence(self.traces.phase_summaries(self.reference, "load")).net


def _in_fp32(work: Work, share: float) -> Work:
    """Return work in fp32 with pixels scaled by ``share``; the FLOPs of attention scale with its square."""
    flops = work.flops * (share * share if work.kind == "attention" else share)
    moved = work.bytes * share * (1 if work.dtype == "float32" else 2)
    return replace(work, dtype="float32", flops=round(flops), bytes=round(moved))


def _forward(summary: TraceSummary) -> list[Work]:
    return [work for work in summary.work if work.stage == "forward"]
