"""Plan runs when they start, print plans as JSON, and serve plan requests as JSON lines on stdin and stdout.

Serving does not require torch. Requests follow trainer/protocol/processes.py:

    {"id": 1, "job": "path/job.toml", "set": ["recipe.rank=8"], "gpu": "8GB"}
    {"id": 2, "family": "sdxl", "recipe": "style", "gpu": "here"}
    {"id": 3, "job": "path/job.toml", "gpu": "8GB", "sweep": true}

``set``, ``gpu`` and ``sweep`` are optional. Answers:

    {"id": 1, "state": "reading"}                    new images are being inspected
    {"id": 1, "state": "tracing", "stale": {...},    memory traces are missing and are being recorded, which takes
     "estimate": {...}}                              seconds; "stale" is the last plan for that job or recipe, or null;
                                                     "estimate" is what a similar recipe needs (`PlanEstimate`), or null
    {"id": 1, "state": "pick", "plan": {...}}        the pick, before its alternatives are known; if traces are missing,
                                                     a preliminary "pick" with "fits" in "left_out" is sent first, whose
                                                     fit works: the previous pick, or the one that needs least memory
    {"id": 1, "state": "done", "plan": {...}}        the whole plan, as `plan --json` prints it except
                                                     for "known_peaks", "optimizers", "caption_padding" and "estimate",
                                                     which is what a similar recipe needs, or null if all was known
    {"id": 3, "state": "done", "sweep": {...}}       the configurations that fill the GPU best, as `plan --sweep --json`
                                                     prints them

In a plan, "remarks" are codes with values, and "room" says how to free memory, as a code with programs and bytes; see
trainer/protocol/plan.py. "findings" are also codes with values, which trainer/dataset/findings.py turns into sentences.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainer.cli import plan_text, words
from trainer.cli.common import note
from trainer.errors import EXIT_DONE, JobError
from trainer.memory.forecast.forecast import RunSimulator
from trainer.memory.planner.estimate import estimated_plan
from trainer.memory.planner.planner import plan
from trainer.memory.planner.remarks import memory_advice, remarks_of
from trainer.memory.planner.request import request_of_job
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.library import TraceLibrary, prepare
from trainer.memory.trace.store import TraceStore
from trainer.protocol.processes import Handler, Request, Server
from trainer.protocol.records import to_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.base.source import BaseSource
    from trainer.config.fit import FitConfig
    from trainer.config.job import Job
    from trainer.config.resolve import Machine
    from trainer.dataset.image import ImageRecord
    from trainer.memory.allocator.settings import AllocatorSettings
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.planner.estimate import EstimatedPlan
    from trainer.memory.planner.planner import PlanResult
    from trainer.memory.planner.request import PlanRequest
    from trainer.protocol.processes import ActiveRequest, Answer
    from trainer.training.run.start import PlannedFit

# Idle seconds after which the server prepares to trace: by then the user has read the answer.
IDLE = 3.0


def plan_run(
    job: Job, written: FitConfig, source: BaseSource, images: Sequence[ImageRecord], machine: Machine
) -> PlannedFit:
    """Return the fit for a resolved job, its fallbacks and its forecast; see trainer.training.run.start.Planner.

    On the CPU, the fit has its default values, and only time and main memory are forecast. Raises JobError if the
    smallest fit is too large even without the safety margin, and RunError if a disk is too small for what the run
    writes.
    """
    import torch

    from trainer.config.fit import PLANNED
    from trainer.dataset.cache_keys import CacheKeys
    from trainer.memory.device.device_state import state_of_local_gpu
    from trainer.memory.forecast.schedule import phase_counts
    from trainer.memory.planner.on_cpu import plan_on_cpu
    from trainer.memory.planner.request import PlanRequest, require_disk_space
    from trainer.memory.trace.workload import workload_of_job
    from trainer.protocol.places import cache_folder
    from trainer.training.acceleration.throughput import measure_rate
    from trainer.training.device.device import numeric_settings, own_bytes
    from trainer.training.device.out_of_memory import gpu_info
    from trainer.training.run.start import PlannedFit

    traces = TraceLibrary(TraceStore.of_user())
    cached = CacheKeys(cache_folder(), job, source.family, source.vae_hash, source.text_hash)
    workload, counts = workload_of_job(job, source, images), phase_counts(job, source, images, cached)
    require_disk_space(job, workload, counts)
    if machine.device == "cpu":
        planned = plan_on_cpu(job, workload, counts, traces)
        assert planned.pick is not None  # a forecast does not limit main memory
        forecast = planned.pick.forecast
        return PlannedFit(job.fit, forecast=forecast, notices=(plan_text.on_cpu(forecast),))
    device = torch.device(machine.device)
    gpu = gpu_info(device.index or 0)
    deterministic = bool(job.fit.deterministic)
    own = own_bytes(gpu, device.index or 0)
    state_of_local_gpu(
        gpu, deterministic=deterministic, own=own
    ).require_budget()  # timing the GPU needs free memory too
    with numeric_settings(job):  # PyTorch keeps the workspace size of its first matrix product
        rate = measure_rate(device, name=gpu.name)
    device_state = state_of_local_gpu(gpu, rate=rate, deterministic=deterministic, own=own)
    # Flash and memory-efficient attention have the same peak, so both use the shipped traces of flash.
    stated = written.replaced(attention=written.attention or ("math" if job.fit.attention == "math" else "auto"))
    deadline = Deadline(START_PATIENCE)
    estimate = estimated_plan(PlanRequest(job.name, workload, stated, device_state, counts), traces)
    likely = estimate.fit if estimate else None
    with traces.with_prefetcher():
        planned = plan(workload, stated, device_state, traces, counts, deadline=deadline, others=False, likely=likely)
        if planned.pick is None and planned.excess_bytes > device_state.margin:
            deadline = Deadline(PATIENCE)  # to find a change that fits: the run cannot start anyway
            raise _too_large(plan(workload, stated, device_state, traces, counts, deadline=deadline), job, written)
    chosen = planned.pick or planned.smaller
    assert chosen is not None  # if nothing fits, `smaller` is the smallest fit
    fit = job.fit.replaced(**{name: value for name in PLANNED if (value := getattr(chosen.fit, name)) is not None})
    fallbacks = planned.fallbacks if planned.pick else None
    return PlannedFit(fit, fallbacks, chosen.forecast, tuple(_notices(planned, job)))


def _notices(planned: PlanResult, job: Job) -> Sequence[str]:
    chosen, batch = planned.pick or planned.smaller, job.recipe.effective_batch
    assert chosen is not None
    notices = [f"Planned for {planned.device_state.gpu.name}: {plan_text.sentence(chosen, batch)}"]
    if planned.pick is None:
        notices.append(
            f"This is {words.size(planned.excess_bytes)} above the safe limit, so memory may run out. If it does, the "
            "run stops with an error and keeps its last checkpoint."
        )
    if planned.left_out:
        notices.append("There was no time to try every fit; `python -m trainer plan JOB` tries more.")
    if planned.device_state.correction.damage:
        notices.append(planned.device_state.correction.damage)
    return notices


def _too_large(planned: PlanResult, job: Job, written: FitConfig) -> JobError:
    batch = job.recipe.effective_batch
    remedy = plan_text.what_would(planned.reduced_recipe, planned.device_state, planned.excess_bytes, batch)
    return JobError("plan.nothing_fits", f"{job.name}: {plan_text.nothing_fits(planned, written)}", remedy)


def plan_server(
    work: Handler, output: TextIO, *, idle: float | None = None, on_idle: Callable[[], None] = lambda: None
) -> Server:
    """Return a server that answers each request with the plan that ``work`` returns; see `Server` for ``on_idle``."""
    guide = "trainer/cli/planning.py"
    return Server(work, _fault, output, code="plan.request", guide=guide, idle=idle, on_idle=on_idle)


def _fault(request: Request) -> str | None:
    if ("job" in request) == ("family" in request):
        return 'it must have either "job" or "family"'
    for key in ("job", "family", "recipe", "gpu"):
        if not isinstance(request.get(key, ""), str):
            return f'"{key}" is not a string'
    settings = request.get("set", [])
    if not isinstance(settings, list) or not all(isinstance(text, str) for text in settings):
        return '"set" is not a list of strings'
    if not isinstance(request.get("sweep", False), bool):
        return '"sweep" is not true or false'
    if unknown := sorted(request.keys() - {"id", "job", "family", "recipe", "gpu", "set", "sweep"}):
        return f'"{unknown[0]}" is not a known key'
    return None


def serve() -> int:
    """Answer plan requests from stdin until it ends; return the exit code."""
    planner = _Planner()
    with planner.traces.with_prefetcher():
        plan_server(planner.answer, sys.stdout, idle=IDLE, on_idle=planner.look_ahead).run(sys.stdin)
    return EXIT_DONE


@dataclass
class _Planner:
    """Memory traces, simulations and the latest plans, which are reused from request to request."""

    traces: TraceLibrary = field(default_factory=lambda: TraceLibrary(TraceStore.of_user()))
    runs: dict[tuple[int, float, AllocatorSettings], RunSimulator] = field(default_factory=dict)
    """Simulators by workspace sizes and allocator settings; a simulator's results also depend on traces and limits."""
    plans: dict[str, Answer] = field(default_factory=dict)
    """The latest complete plan for each job or recipe."""
    picked: dict[str, FitConfig] = field(default_factory=dict)

    def answer(self, turn: ActiveRequest) -> Answer:
        """Return the complete plan for a request; send its pick as soon as it is known."""
        try:
            return self._answer(turn)
        finally:
            self.traces.stop_prefetching()

    def look_ahead(self) -> None:
        """Prepare to record a missing trace: import the needed modules, which takes seconds, in a background thread."""
        self.traces.restart_prefetcher()
        threading.Thread(target=prepare, name="preparing").start()

    def _answer(self, turn: ActiveRequest) -> Answer:
        key = json.dumps([turn.request.get(key) for key in ("job", "family", "recipe")])
        stale = self.plans.get(key)
        self.traces.set_before_tracing(_before_tracing(turn, stale, None))
        request = _requested(turn)
        if turn.request.get("sweep"):
            return {"sweep": to_record(swept(request, self.traces, turn.raise_if_overtaken))}

        def send_pick(planned: PlanResult) -> None:
            self._remember(key, planned)
            turn.raise_if_overtaken()
            turn.report_progress("pick", plan=as_json(request, planned, whole=False))

        if request.device_state.on_cpu:
            self.plans[key] = answer = as_json(request, planned_for(request, self.traces))
            return {"plan": answer}
        deadline, alternatives_deadline = Deadline(PATIENCE), Deadline(ALTERNATIVES_PATIENCE)
        estimate = estimated_plan(request, self.traces)
        self.traces.set_before_tracing(_before_tracing(turn, stale, estimate))
        planned = plan(
            request.workload,
            request.written,
            request.device_state,
            self.traces,
            request.counts,
            deadline=deadline,
            alternatives_deadline=alternatives_deadline,
            runs=self._runs(request.device_state, turn),
            likely=self.picked.get(key) or (estimate.fit if estimate else None),
            on_soon=send_pick,
            on_pick=send_pick,
        )
        self._remember(key, planned)
        self.plans[key] = answer = as_json(request, planned)
        return {"plan": answer}

    def _remember(self, key: str, planned: PlanResult) -> None:
        if planned.pick is not None:
            self.picked[key] = planned.pick.fit

    def _runs(self, device_state: DeviceState, turn: ActiveRequest) -> RunSimulator:
        overheads = device_state.overheads
        key = overheads.cublas_workspace_bytes, overheads.cudnn_workspace_share, device_state.allocator
        runs = self.runs.setdefault(key, RunSimulator(device_state))
        runs.before_playing = turn.raise_if_overtaken
        return runs


def _before_tracing(turn: ActiveRequest, stale: Answer | None, estimate: EstimatedPlan | None) -> Callable[[], None]:
    report = once(
        lambda: turn.report_progress("tracing", stale=stale, estimate=to_record(estimate.figures) if estimate else None)
    )

    def before_tracing() -> None:
        turn.raise_if_overtaken()
        report()

    return before_tracing


def _requested(turn: ActiveRequest) -> PlanRequest:
    request = turn.request
    if "job" in request:
        report = once(lambda: turn.report_progress("reading"))

        def progress(*_: object) -> None:
            turn.raise_if_overtaken()
            report()

        return request_of_job(Path(request["job"]), request.get("set", ()), request.get("gpu"), progress)
    family = request["family"]
    if family not in ("sd15", "sdxl"):
        raise JobError("plan.family", f'Could not plan: there is no family "{family[:40]}".', 'Use "sd15" or "sdxl".')
    return request_for_preset(family, request.get("recipe"), request.get("gpu"), request.get("set", ()))


if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.planner.planner import Plan, PlanResult
    from trainer.memory.planner.request import PlanRequest
    from trainer.protocol.plan import PlanEstimate
    from trainer.protocol.sweep import Sweep

# Seconds after which no more traces are recorded to find a better pick, because users do not wait longer.
PATIENCE = 15.0
# The same before a run starts: time that a better pick would have to save first.
START_PATIENCE = 5.0
# The same for the pick's alternatives, which are only suggestions.
ALTERNATIVES_PATIENCE = 12.0


def as_json(request: PlanRequest, planned: PlanResult, *, whole: bool = True) -> dict[str, Any]:
    """Return a plan as plain data (sizes in bytes, times in seconds); pass ``whole=False`` before its search ends."""
    device_state = planned.device_state

    def record(plan: Plan | None) -> dict[str, Any] | None:
        if plan is None:
            return None
        fit = plan.fit.model_dump(mode="json", exclude_none=True)
        return {"fit": fit, "quality": plan.quality, "forecast": to_record(plan.forecast)}

    reduced = planned.reduced_recipe
    return {
        "name": request.name,
        "gpu": {
            "name": device_state.gpu.name,
            "total": device_state.gpu.total_bytes,
            "free": device_state.free_bytes,
            "budget": device_state.budget,
            "outside": device_state.outside,
            "margin": {"bytes": device_state.margin, "reason": device_state.kept_free.reason},
            "uses": [{"name": use.name, "bytes": use.bytes} for use in device_state.uses],
        },
        "family": request.workload.family,
        "effective_batch": request.workload.recipe.effective_batch,
        "pick": record(planned.pick),
        "quicker": record(planned.faster),
        "missing": planned.excess_bytes,
        "room": to_record(memory_advice(planned.excess_bytes, device_state)) if planned.excess_bytes else None,
        "smaller": record(planned.smaller),
        "quantized": record(planned.quantized),
        "streamed": record(planned.streamed),
        "reduced_recipe": reduced and {"changes": dict(reduced.change.keys), **(record(reduced.plan) or {})},
        "fallbacks": [fallback.model_dump(mode="json", exclude_none=True) for fallback in planned.fallbacks],
        "left_out": planned.left_out,
        "remarks": [to_record(remark) for remark in remarks_of(request, planned, whole=whole)],
        "obstacles": [
            {"code": error.code, "sentence": error.sentence, "remedy": error.remedy} for error in request.obstacles
        ],
        "findings": [
            {"code": found.code, "severity": found.severity, "values": dict(found.values)} for found in request.findings
        ],
    }


def request_for_preset(
    family: Family, recipe: str | None, gpu: str | None, overrides: Sequence[str] = ()
) -> PlanRequest:
    """Return the request to plan a preset's recipe (None: the default recipe) on a GPU (None: this PC's)."""
    from trainer.config.presets.library import preset_with_recipe
    from trainer.memory.planner.request import request_without_job

    preset = preset_with_recipe(recipe, family) if recipe else None
    name = preset.name if preset else ""
    return request_without_job(family, preset.recipe if preset else None, gpu, name, overrides=overrides)


@contextmanager
def traces_of_user(*, quiet: bool = False) -> Iterator[TraceLibrary]:
    """Yield this user's library of memory traces; unless `quiet`, print a note before the first recording."""
    traces = TraceLibrary(TraceStore.of_user(), once(lambda: _say_tracing(as_json=quiet)))
    with traces.with_prefetcher():
        yield traces


def planned_for(
    request: PlanRequest,
    traces: TraceLibrary,
    on_pick: Callable[[PlanResult], None] = lambda _: None,
    *,
    on_estimate: Callable[[PlanEstimate], None] = lambda _: None,
    on_soon: Callable[[PlanResult], None] | None = None,
) -> PlanResult:
    """Return the best plan found within `PATIENCE` seconds; call `on_pick` with the pick first.

    If traces are missing, `on_estimate` is called before that with what a similar recipe needs, then `on_soon` with a
    fit that works.
    """
    from trainer.memory.planner.on_cpu import plan_on_cpu

    if request.device_state.on_cpu:
        assert request.resolved is not None
        planned = plan_on_cpu(request.resolved, request.workload, request.counts, traces)
        on_pick(planned)
        return planned
    deadline, alternatives_deadline = Deadline(PATIENCE), Deadline(ALTERNATIVES_PATIENCE)
    estimate = estimated_plan(request, traces)
    if estimate and estimate.figures:
        on_estimate(estimate.figures)
    return plan(
        request.workload,
        request.written,
        request.device_state,
        traces,
        request.counts,
        deadline=deadline,
        alternatives_deadline=alternatives_deadline,
        likely=estimate.fit if estimate else None,
        on_soon=on_soon,
        on_pick=on_pick,
    )


def swept(request: PlanRequest, traces: TraceLibrary, check: Callable[[], None] = lambda: None) -> Sweep:
    """Return the configurations that fill the request's GPU best; see `trainer.memory.planner.sweep`.

    Raises JobError on the CPU, whose memory is not forecast as that of a GPU.
    """
    from trainer.memory.planner.sweep import sweep

    if request.device_state.on_cpu:
        sentence = (
            "Could not look for configurations that fill the GPU: no NVIDIA GPU works here, or the job is for the CPU."
        )
        raise JobError("plan.sweep", sentence, "Choose another GPU, such as 8GB (on the command line: --gpu 8GB).")
    deadline = Deadline(ALTERNATIVES_PATIENCE)
    return sweep(request.workload, request.written, request.device_state, traces, deadline, check)


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `action` on its first call only."""
    waiting = [action]
    return lambda: waiting.pop()() if waiting else None


def _say_tracing(*, as_json: bool) -> None:
    if not as_json:
        note("Computing new settings (only once, up to half a minute)…")
