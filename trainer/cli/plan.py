"""The `plan` command, which forecasts what fits on a GPU, how long training takes, and where memory peaks."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import plan_text, words
from trainer.cli.common import Commands, add_command, add_set, echo_json, echo_lines, note
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, JobError, sentence_and_remedy
from trainer.protocol.records import to_record
from trainer.protocol.text import share

if TYPE_CHECKING:
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.planner.optimizers import OptimizerRow
    from trainer.memory.planner.planner import PlanResult
    from trainer.memory.planner.request import PlanRequest
    from trainer.memory.planner.suggestions import PaddingSaved
    from trainer.memory.trace.library import TraceLibrary
    from trainer.protocol.plan import KnownPeak, PlanEstimate

# A plan creates millions of long-lived objects; collecting garbage as often as by default would cost 10 %.
GC_THRESHOLD = 200_000


def add_commands(commands: Commands) -> None:
    """Add the command to the parser."""
    what = "forecast what fits on a GPU, how much memory and time it takes, and where memory peaks"
    plan = add_command(commands, "plan", what, run_plan)
    plan.add_argument("job", metavar="JOB", nargs="?", type=Path, help="the job file, job.toml")
    plan.add_argument("--family", choices=("sd15", "sdxl"), help="without a job: the base's family")
    plan.add_argument("--recipe", metavar="PRESET", help="without a job: the preset whose recipe to plan for")
    plan.add_argument(
        "--gpu", metavar="GPU", help='name or memory of a GPU, "RTX 3060" or 8GB (default: the one in this PC)'
    )
    add_set(plan, "override a key of the job or recipe, such as recipe.rank=32; repeatable")
    plan.add_argument("--explain", action="store_true", help="show each phase, its peaks, and how to use less memory")
    plan.add_argument("--sweep", action="store_true", help="show the configurations that fill the GPU best instead")
    plan.add_argument("--chart", metavar="FILE", type=Path, help="with --sweep: write memory against time as a PNG")
    plan.add_argument("--json", action="store_true", help="print everything as JSON, for programs")
    plan.add_argument("--serve", action="store_true", help="answer requests as JSON lines until the input ends")


def run_plan(options: argparse.Namespace) -> int:
    """Answer one request, or serve many; return exit code 2 if nothing fits."""
    from trainer.cli.planning import (
        serve,
        traces_of_user,
    )  # imports everything a plan needs, so that no request waits for it

    gc.set_threshold(GC_THRESHOLD)
    if options.serve:
        return serve()
    request = _request(options)
    with traces_of_user(quiet=options.json) as traces:
        return (_print_sweep if options.sweep else _print_plan)(request, traces, options)


def _print_plan(request: PlanRequest, traces: TraceLibrary, options: argparse.Namespace) -> int:
    """Print each part of the plan as soon as it is known; return the exit code."""
    from trainer.cli.planning import as_json, planned_for

    if options.json:
        estimates: list[PlanEstimate] = []
        planned = planned_for(request, traces, on_estimate=estimates.append)
        details = {
            "estimate": to_record(estimates[0]) if estimates else None,
            "known_peaks": [to_record(peak) for peak in _known_peaks(request, planned, traces)],
            "optimizers": [to_record(row) for row in _optimizers(request, planned, traces)],
            "caption_padding": to_record(_padding_saved(request, planned, traces)),
        }
        echo_json({**as_json(request, planned), **details}, indent=1)
        return EXIT_DONE if planned.pick else EXIT_BAD_INPUT
    echo_lines(_header(request))
    batch = _batch(request)
    planned = planned_for(
        request,
        traces,
        lambda found: echo_lines(plan_text.pick_rows(found, batch)),
        on_estimate=lambda figures: note(plan_text.estimate(figures)),
        on_soon=lambda found: note(plan_text.first_plan(found, batch)),
    )
    echo_lines(_answer(request, planned))
    if options.explain:
        echo_lines(_explained(request, planned, traces))
    return EXIT_DONE if planned.pick else EXIT_BAD_INPUT


def _print_sweep(request: PlanRequest, traces: TraceLibrary, options: argparse.Namespace) -> int:
    """Print the configurations that fill the GPU best; return exit code 2 if none fits."""
    from trainer.cli import sweep
    from trainer.cli.planning import swept

    found = swept(request, traces)
    if options.chart is not None:
        sweep.draw(found, f"{request.name} on {request.device_state.gpu.name}", options.chart)
    if options.json:
        echo_json(to_record(found), indent=1)
    else:
        echo_lines([*_header(request), *sweep.table(found)])
    return EXIT_DONE if found.points else EXIT_BAD_INPUT


def _request(options: argparse.Namespace) -> PlanRequest:
    from trainer.cli.planning import request_for_preset
    from trainer.memory.planner.request import request_of_job

    if options.chart is not None and not options.sweep:
        sentence = "Could not draw a chart: --chart shows the configurations of --sweep, which is not given."
        raise JobError("plan.question", sentence, "Add --sweep, or remove --chart.")
    if (options.job is None) == (options.family is None):
        sentence = "Could not plan: give either a JOB or a --family."
        raise JobError("plan.question", sentence, "Name one of the two; see `python -m trainer plan --help`.")
    if options.job is not None:
        if options.recipe:
            sentence = "Could not plan: --recipe is only for plans without a job, which has a recipe of its own."
            raise JobError("plan.question", sentence, "Remove --recipe, or change single keys with --set.")
        return request_of_job(options.job, options.set, options.gpu)
    return request_for_preset(options.family, options.recipe, options.gpu, options.set)


def _batch(request: PlanRequest) -> int:
    return request.workload.recipe.effective_batch


def _header(request: PlanRequest) -> Iterator[str]:
    """Yield lines that say what is planned, and for which GPU."""
    yield _headline(request)
    yield from _gpu_lines(request.device_state)
    yield ""


def _answer(request: PlanRequest, planned: PlanResult) -> Iterator[str]:
    """Yield the lines after the pick: alternatives and the peak, or what to do if nothing fits; then the remarks."""
    from trainer.memory.planner.remarks import remarks_of

    device_state = planned.device_state
    if not device_state.on_cpu and planned.pick is None:
        yield plan_text.nothing_fits(planned, request.written)
        yield plan_text.what_would(planned.reduced_recipe, device_state, planned.excess_bytes, _batch(request))
    elif not device_state.on_cpu and planned.pick is not None:
        yield from plan_text.neighbors(planned, _batch(request))
        yield ""
        yield f"Peak: {plan_text.peak(planned.pick.forecast)}."
    yield from map(plan_text.remark, remarks_of(request, planned))
    yield from (
        f"The job cannot start: {sentence_and_remedy(error.sentence, error.remedy)}" for error in request.obstacles
    )
    if device_state.correction.damage and not device_state.on_cpu:
        yield device_state.correction.damage


def _gpu_lines(device_state: DeviceState) -> Iterator[str]:
    if device_state.on_cpu:
        yield "This computer's CPU, because the job says so or no NVIDIA GPU works here"
        yield "(add --gpu 8GB, or another GPU, to compare)."
        return
    free = share(device_state.free_bytes, device_state.gpu.total_bytes)
    kept = f"{words.size(device_state.outside)} for CUDA, {words.size(device_state.margin)} safety margin"
    yield f"{device_state.gpu.name}: {free} free, {words.size(device_state.budget)} of it usable"
    yield f"({kept})."


def _headline(request: PlanRequest) -> str:
    workload, recipe = request.workload, request.workload.recipe
    largest = workload.buckets[0]
    steps = words.counted(recipe.steps or 0, "step", "steps")
    return (
        f"{request.name}: {plan_text.base_name(workload.family)}, {largest.width} × {largest.height}, "
        f"rank {recipe.rank}, {steps} of {words.counted(recipe.effective_batch, 'image', 'images')}."
    )


def _explained(request: PlanRequest, planned: PlanResult, traces: TraceLibrary) -> Iterator[str]:
    """Yield a one-screen timeline, then ways to use less memory; `--json` prints every detail."""
    from trainer.cli.planning import ALTERNATIVES_PATIENCE
    from trainer.memory.forecast.forecast import forecast_fp32_retry
    from trainer.memory.planner.suggestions import suggestions
    from trainer.memory.trace.deadline import Deadline

    plan = planned.pick or planned.smaller
    if plan is None:
        return
    yield ""
    if planned.device_state.on_cpu:
        yield from plan_text.timeline_on_cpu(plan.forecast)
        return
    yield plan_text.margin(planned.device_state)
    yield ""
    yield from plan_text.timeline(plan.forecast)
    again = forecast_fp32_retry(replace(request.workload, fit=plan.fit), request.device_state, traces)
    if again is not None:
        yield from plan_text.encoded_again(again, plan.forecast)
    yield ""
    deadline = Deadline(ALTERNATIVES_PATIENCE)  # each suggestion may need a trace, which takes seconds
    found = suggestions(request.workload, plan.fit, request.device_state, traces, deadline)
    yield from plan_text.suggestions(found, deadline)
    yield ""
    yield from plan_text.optimizers(_optimizers(request, planned, traces))
    if saved := _padding_saved(request, planned, traces):
        yield ""
        yield from plan_text.padding(saved)


def _known_peaks(request: PlanRequest, planned: PlanResult, traces: TraceLibrary) -> Sequence[KnownPeak]:
    """Return the peaks A to I of the plan; none on the CPU, for which a forecast has no timeline."""
    from trainer.memory.forecast.known_peaks import known_peaks
    from trainer.memory.forecast.schedule import RunSchedule

    plan = planned.pick or planned.smaller
    if plan is None or planned.device_state.on_cpu:
        return ()
    workload = replace(request.workload, fit=plan.fit)
    return known_peaks(RunSchedule(workload, traces, request.counts, planned.device_state.rate))


def _optimizers(request: PlanRequest, planned: PlanResult, traces: TraceLibrary) -> Sequence[OptimizerRow]:
    """Return what each optimizer would need; empty on the CPU, for which a forecast has no peak of training."""
    from trainer.memory.planner.optimizers import optimizer_rows

    plan = planned.pick or planned.smaller
    if plan is None or planned.device_state.on_cpu:
        return ()
    return [*optimizer_rows(replace(request.workload, fit=plan.fit), planned.device_state, traces)]


def _padding_saved(request: PlanRequest, planned: PlanResult, traces: TraceLibrary) -> PaddingSaved | None:
    """Return what padding each caption to its own length saves; None on the CPU or if all have one length."""
    from trainer.memory.planner.suggestions import padding_saved

    plan = planned.pick or planned.smaller
    if plan is None or planned.device_state.on_cpu:
        return None
    return padding_saved(replace(request.workload, fit=plan.fit), request.counts, planned.device_state, traces)
