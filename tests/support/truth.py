"""Forecast and measurement of one workload, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from tests.support.meters import Measured, Meter
from tests.support.real_phases import RealRun
from tests.support.truth_jobs import TruthJob
from trainer.memory.allocator.replay import Replayed
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.cache_shards import LaterShards
from trainer.memory.forecast.forecast import RunSimulator, Simulation
from trainer.memory.forecast.schedule import OtherPhase, PhaseCounts, RunSchedule
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import Workload
from trainer.protocol.forecast import AT_START, BETWEEN_STEPS, ForecastPhase, load_phase

LATER_STEPS = 3
"""Optimizer steps that are measured after the first: reserved memory stops growing within them."""
LATER: Mapping[str, str] = {"cache_pictures": "cache_pictures_later", "cache_texts": "cache_texts_later"}
"""Names of the phases that encode between epochs, by the phase that does the same before training."""
PHASES: tuple[str, ...] = (*get_args(ForecastPhase), *LATER.values())
LEAST_TOLERANCE = 0.002
"""Largest relative error of the smallest capacity that `predict_run` finds."""


@dataclass(frozen=True)
class PhaseForecast:
    """Forecast of one phase."""

    requested: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Prediction:
    """Forecast of a workload."""

    phases: Mapping[str, PhaseForecast]
    step_seconds: float
    least: int = 0
    """The smallest capacity in which training completes; 0 if it was not searched for."""


def predict(
    job: TruthJob, workload: Workload, device_state: DeviceState, folder: Path, *, edge: bool = False
) -> Prediction:
    """Forecast the phases that :func:`measure` measures; traces are stored in ``folder``."""
    schedule = RunSchedule(workload, TraceLibrary(TraceStore(folder)), PhaseCounts(), device_state.rate)
    playing = play(job, schedule, device_state, None)
    assert playing.failure is None
    seconds = schedule.step_seconds(partial(roofline.seconds, rate=device_state.rate))[workload.shapes[0]]
    phases = {phase: _foreseen(replayed) for phase, replayed in playing.phases.items()}
    return Prediction(phases, seconds, _least_capacity(job, schedule, device_state, playing.reserved) if edge else 0)


def predict_run(workload: Workload, device_state: DeviceState, folder: Path, *, least: bool = False) -> Prediction:
    """Forecast a whole run as for a user, and the encoding between its epochs, without a memory limit.

    With ``least``, also find the smallest capacity within which the run is forecast to end; if encoding between epochs
    needs more, the trainer unloads the models first.
    """
    counts = PhaseCounts(later=LaterShards(shards=1, images=1, texts=1, epochs_per_shard=1))
    schedule = RunSchedule(workload, TraceLibrary(TraceStore(folder)), counts, device_state.rate)
    runs = RunSimulator(device_state)
    whole, between = runs.simulate(schedule, None), runs.between_epochs(schedule, None)
    phases = {str(phase): _foreseen(replayed) for phase, replayed in whole.phases.items()}
    phases |= {LATER[phase]: _foreseen(replayed) for phase, replayed in between.phases.items()}
    return Prediction(phases, 0.0, _least_of_run(runs, schedule, whole.reserved) if least else 0)


def _least_of_run(runs: RunSimulator, schedule: RunSchedule, enough: int) -> int:
    """Return the smallest capacity within which a run is forecast to end, by bisection."""
    low, high = enough // 2, enough
    while high - low > LEAST_TOLERANCE * high:
        middle = (low + high) // 2
        if runs.simulate(schedule, middle).failure is None:
            high = middle
        else:
            low = middle
    return high


def play(job: TruthJob, schedule: RunSchedule, device_state: DeviceState, capacity: int | None) -> Simulation:
    """Simulate the job's phases with the forecast's own code, without phases that are not measured for it."""
    before: tuple[OtherPhase, ...] = ("cache_pictures", "cache_texts") if job.other_phases else ()
    after: tuple[OtherPhase, ...] = ("validate", "preview") if job.other_phases else ()
    playing = Simulation(device_state, capacity)
    for phase in (*before, "load", "quantise"):
        playing.play(phase, schedule.traces(phase))
    playing.play("first_step", schedule.first_step())
    playing.play("train", schedule.round() * LATER_STEPS)
    for phase in after:
        playing.play(phase, schedule.traces(phase))
    return playing


def _foreseen(replayed: Replayed) -> PhaseForecast:
    requested = replayed.peak_requested()
    return PhaseForecast(
        requested=int(replayed.played[requested.trace].requested[requested.event]),
        allocated=replayed.allocated(replayed.peak_allocated()),
        reserved=replayed.reserved(replayed.peak_reserved()),
    )


def _least_capacity(job: TruthJob, schedule: RunSchedule, device_state: DeviceState, enough: int) -> int:
    """Return the smallest capacity in which the job completes, within 2 MiB, by bisection."""
    low, high = 0, enough
    while high - low > 2 << 20:
        middle = (low + high) // 2
        if play(job, schedule, device_state, middle).failure is None:
            high = middle
        else:
            low = middle
    return high


def measure_run(
    job: TruthJob, run: RealRun, meter: Meter, *, between_epochs: bool = True
) -> Iterator[tuple[str, Measured]]:
    """Run all phases of a whole run in its order, and yield what each takes; phases may occur several times."""
    workload = run.workload

    def train(steps: int) -> None:
        for bucket in workload.buckets * steps:
            run.train(bucket.size, job.pictures, job.micro_batches, steps=1)

    loading = load_phase(workload.fit.quantize)
    work: dict[str, Callable[[], None]] = {
        "cache_pictures": run.cache_pictures,
        "cache_texts": run.cache_texts,
        loading: run.load,
        "first_step": partial(run.train, workload.buckets[0].size, job.pictures, job.micro_batches, steps=1),
        "train": partial(train, LATER_STEPS),
        "validate": run.validate,
        "checkpoint": run.checkpoint,
        "save": run.save,
        "preview": run.preview,
    }
    order = ("cache_pictures", "cache_texts", loading, *AT_START, "first_step", "train", *BETWEEN_STEPS, "train")
    for phase in order:
        yield phase, meter.measure(work[phase])
    for phase, name in LATER.items() if between_epochs else ():
        yield name, meter.measure(work[phase])


def measure(job: TruthJob, workload: Workload, meter: Meter) -> Iterator[tuple[ForecastPhase, Measured]]:
    """Run the phases on the meter's device, and yield what each takes."""
    run = RealRun(workload, meter.device)
    size = workload.buckets[0].size
    train = partial(run.train, size, job.pictures, job.micro_batches)
    if job.other_phases:
        yield "cache_pictures", meter.measure(run.cache_pictures)
        yield "cache_texts", meter.measure(run.cache_texts)
    quantized = workload.fit.quantize in ("int8", "nf4")
    yield "quantise" if quantized else "load", meter.measure(run.load)
    yield "first_step", meter.measure(partial(train, steps=1))
    yield "train", meter.measure(partial(train, steps=LATER_STEPS))
    if job.other_phases:
        yield "validate", meter.measure(run.validate)
        yield "preview", meter.measure(run.preview)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest of ``values`` that this share of them do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
