"""The command that says before anything is trained what fits on a card, how long it takes, and where the peak is."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import plan_text, words
from trainer.cli.common import Commands, add_command, echo_json, echo_lines
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, JobError, joined
from trainer.protocol.text import share

if TYPE_CHECKING:
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.planner.planner import Plan, Planned
    from trainer.memory.planner.request import PlanRequest
    from trainer.memory.planner.suggestions import Suggestion
    from trainer.memory.trace.library import TraceLibrary

# Plans make millions of objects that live on: looking for garbage among them as often as Python does costs a tenth.
OBJECTS_BETWEEN_LOOKS = 200_000


def add_commands(commands: Commands) -> None:
    """Define the words of the command."""
    what = "say what fits on a card, how much memory and time it takes, and where the peak is"
    plan = add_command(commands, "plan", what, run_plan)
    plan.add_argument("job", metavar="JOB", nargs="?", type=Path, help="the job.toml")
    plan.add_argument("--family", choices=("sd15", "sdxl"), help="without a job: for which kind of base")
    plan.add_argument("--recipe", metavar="PRESET", help="without a job: with which preset's recipe")
    plan.add_argument(
        "--gpu", metavar="CARD", help='a card\'s name or memory, "RTX 3060" or 8GB (default: the one here)'
    )
    plan.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the job, such as recipe.rank=32; repeatable",
    )
    plan.add_argument("--explain", action="store_true", help="show each phase, its peaks, and what would need less")
    plan.add_argument("--json", action="store_true", help="print everything as JSON, for programs")
    plan.add_argument("--serve", action="store_true", help="answer requests as JSON lines until the input ends")


def run_plan(options: argparse.Namespace) -> int:
    """Answer one question, or many; the exit code is 2 when nothing fits."""
    from trainer.cli.planning import serve, traces_of_user  # all that a plan needs, so that no request waits for it

    gc.set_threshold(OBJECTS_BETWEEN_LOOKS)
    if options.serve:
        return serve()
    question = _question(options)
    with traces_of_user(quiet=options.json) as traces:
        return _answered(question, traces, options)


def _answered(question: PlanRequest, traces: TraceLibrary, options: argparse.Namespace) -> int:
    """Print the plan as it becomes known; the exit code."""
    from trainer.cli.planning import as_json, planned_for

    if options.json:
        planned = planned_for(question, traces)
        echo_json(as_json(question, planned), indent=1)
        return EXIT_DONE if planned.pick else EXIT_BAD_INPUT
    echo_lines(_asked(question))
    planned = planned_for(question, traces, lambda found: echo_lines(plan_text.picked(found, _batch(question))))
    echo_lines(_answer(question, planned))
    if options.explain:
        echo_lines(_explained(question, planned, traces))
    return EXIT_DONE if planned.pick else EXIT_BAD_INPUT


def _question(options: argparse.Namespace) -> PlanRequest:
    from trainer.cli.planning import question_ahead_of
    from trainer.memory.planner.request import question_of_job

    if (options.job is None) == (options.family is None):
        sentence = "A plan is for a JOB, or for a --family with the --recipe of a preset."
        raise JobError("plan.question", sentence, "Name one of the two; `python -m trainer plan --help` shows how.")
    if options.job is not None:
        if options.recipe:
            sentence = "--recipe is for a plan without a job; a job has its own."
            raise JobError("plan.question", sentence, "Leave it out, or change single keys with --set.")
        return question_of_job(options.job, options.set, options.gpu)
    if options.set:
        raise JobError(
            "plan.question", "--set changes keys of a job, and there is none.", "Name a JOB, or leave it out."
        )
    return question_ahead_of(options.family, options.recipe, options.gpu)


def _batch(question: PlanRequest) -> int:
    return question.subject.recipe.effective_batch


def _asked(question: PlanRequest) -> Iterator[str]:
    """Yield what is planned, and the card."""
    yield _headline(question)
    yield from _card_lines(question.situation)
    yield ""


def _answer(question: PlanRequest, planned: Planned) -> Iterator[str]:
    """Yield what follows the pick: alternatives and the peak, or what to do where nothing fits; then the remarks."""
    from trainer.memory.planner.remarks import remarks_of

    situation = planned.situation
    if not situation.on_cpu and planned.pick is None:
        yield plan_text.nothing_fits(planned, question.written)
        yield plan_text.what_would(planned.lighter, situation, planned.missing, _batch(question))
    elif not situation.on_cpu and planned.pick is not None:
        yield from plan_text.neighbours(planned, _batch(question))
        yield ""
        yield f"Peak: {plan_text.peak(planned.pick.forecast)}."
    yield from map(plan_text.remark, remarks_of(question, planned))
    yield from (f"The job cannot start: {joined(error.sentence, error.remedy)}" for error in question.obstacles)
    if situation.correction.damage and not situation.on_cpu:
        yield situation.correction.damage


def _card_lines(situation: DeviceState) -> Iterator[str]:
    if situation.on_cpu:
        yield "This computer's CPU, because the job says so or no NVIDIA GPU works here"
        yield "(add --gpu 8GB, or another GPU, to compare)."
        return
    free = share(situation.free_bytes, situation.card.total_bytes)
    kept = f"{words.size(situation.outside)} go to CUDA, {words.size(situation.margin)} stay free as forecasts err"
    yield f"{situation.card.name}: {free} free, {words.size(situation.budget)} of it can be used"
    yield f"({kept})."


def _headline(question: PlanRequest) -> str:
    subject, recipe = question.subject, question.subject.recipe
    largest = subject.buckets[0]
    steps = words.counted(recipe.steps or 0, "step", "steps")
    return (
        f"{question.name}: {plan_text.base_name(subject.family)}, {largest.width} × {largest.height}, "
        f"rank {recipe.rank}, {steps} of {words.counted(recipe.effective_batch, 'picture', 'pictures')}."
    )


def _explained(question: PlanRequest, planned: Planned, traces: TraceLibrary) -> Iterator[str]:
    """Yield the timeline on one screen, then what would need less; `--json` holds every detail."""
    from trainer.memory.forecast.forecast import encoding_again

    plan = planned.pick or planned.smaller
    if plan is None:
        return
    yield ""
    if planned.situation.on_cpu:
        yield from plan_text.timeline_on_cpu(plan.forecast)
        return
    yield plan_text.margin(planned.situation)
    yield ""
    yield from plan_text.timeline(plan.forecast)
    again = encoding_again(replace(question.subject, fit=plan.fit), question.situation, traces)
    if again is not None:
        yield from plan_text.encoded_again(again, plan.forecast)
    yield ""
    yield from plan_text.levers(_levers(question, plan, traces))


def _levers(question: PlanRequest, plan: Plan, traces: TraceLibrary) -> Iterator[Suggestion]:
    """The levers that are found within the time that people wait for them."""
    from trainer.cli.planning import PATIENCE_BESIDE
    from trainer.memory.planner.suggestions import levers

    until = time.monotonic() + PATIENCE_BESIDE
    for lever in levers(question.subject, plan.fit, question.situation, traces):
        yield lever
        if time.monotonic() > until:
            return
