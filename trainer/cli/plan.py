"""The command that says before anything is trained what fits on a card, how long it takes, and where the peak is."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import plan_table, plan_words, words
from trainer.cli.arguments import Commands, add_command
from trainer.cli.output import echo_json, echo_lines, note
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, JobError, joined
from trainer.protocol.fields import to_record
from trainer.protocol.sizes import share

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.memory.levers import Lever
    from trainer.memory.planner import Plan, Planned
    from trainer.memory.questions import Question
    from trainer.memory.situation import Situation
    from trainer.memory.traces import Traces

# After so many seconds nothing new is traced for a better pick, whoever asks: nobody waits longer for one.
PATIENCE = 22.0
# Nor for what stands beside it, which are hints.
PATIENCE_BESIDE = 12.0
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
    gc.set_threshold(OBJECTS_BETWEEN_LOOKS)
    if options.serve:
        from trainer.cli.plan_serve import serve  # all that a plan needs, so that no request waits for it

        return serve()
    question = _question(options)
    with traces_of_user(quiet=options.json) as traces:
        return _answered(question, traces, options)


def _answered(question: Question, traces: Traces, options: argparse.Namespace) -> int:
    """Print the plan as it becomes known; the exit code."""
    if options.json:
        planned = planned_for(question, traces)
        echo_json(as_json(question, planned), indent=1)
        return EXIT_DONE if planned.pick else EXIT_BAD_INPUT
    echo_lines(_asked(question))
    planned = planned_for(question, traces, lambda found: echo_lines(plan_table.picked(found, _batch(question))))
    echo_lines(_answer(question, planned))
    if options.explain:
        echo_lines(_explained(question, planned, traces))
    return EXIT_DONE if planned.pick else EXIT_BAD_INPUT


def as_json(question: Question, planned: Planned, *, whole: bool = True) -> dict[str, Any]:
    """Return a plan as plain data, whole or on its way; bytes and seconds everywhere."""
    situation = planned.situation

    def told(plan: Plan | None) -> dict[str, Any] | None:
        if plan is None:
            return None
        fit = plan.fit.model_dump(mode="json", exclude_none=True)
        return {"fit": fit, "quality": plan.quality, "forecast": to_record(plan.forecast)}

    lighter = planned.lighter
    return {
        "name": question.name,
        "card": {
            "name": situation.card.name,
            "total": situation.card.total_bytes,
            "free": situation.free_bytes,
            "budget": situation.budget,
            "outside": situation.outside,
            "margin": {"bytes": situation.margin, "reason": situation.kept_free.reason},
            "uses": [{"name": use.name, "bytes": use.bytes} for use in situation.uses],
        },
        "family": question.subject.family,
        "effective_batch": question.subject.recipe.effective_batch,
        "pick": told(planned.pick),
        "quicker": told(planned.quicker),
        "missing": planned.missing,
        "room": plan_words.room(planned.missing, situation) if planned.missing else None,
        "smaller": told(planned.smaller),
        "quantised": told(planned.quantised),
        "lighter": lighter and {"changes": dict(lighter.change.keys), **(told(lighter.plan) or {})},
        "ladder": [rung.model_dump(mode="json", exclude_none=True) for rung in planned.ladder],
        "complete": planned.complete,
        "complete_beside": planned.complete_beside,
        "remarks": plan_words.remarks(question, planned, whole=whole),
        "obstacles": [
            {"code": error.code, "sentence": error.sentence, "remedy": error.remedy} for error in question.obstacles
        ],
        "findings": [
            {"severity": found.severity, "sentence": found.sentence, "remedy": found.remedy}
            for found in question.findings
        ],
    }


def _question(options: argparse.Namespace) -> Question:
    from trainer.memory.questions import question_of_job

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


def question_ahead_of(family: Family, recipe: str | None, gpu: str | None) -> Question:
    """Return the question for a preset's recipe on a card, or for an open one."""
    from trainer.cli.jobs import preset_with_recipe
    from trainer.memory.questions import question_ahead

    preset = preset_with_recipe(recipe, family) if recipe else None
    return question_ahead(family, preset.recipe if preset else None, gpu, preset.name if preset else "")


@contextmanager
def traces_of_user(*, quiet: bool = False) -> Iterator[Traces]:
    """Return the tapes that are known here; that new ones have to be made is said once, unless `quiet`."""
    from trainer.memory.store import TapeStore
    from trainer.memory.traces import Traces

    traces = Traces(TapeStore.of_user(), once(lambda: _say_tracing(as_json=quiet)))
    with traces.helped():
        yield traces


def planned_for(question: Question, traces: Traces, on_pick: Callable[[Planned], None] = lambda _: None) -> Planned:
    """Return the best plan that is found within the time that people wait for one; `on_pick` hears of it first."""
    from trainer.memory.on_cpu import plan_on_cpu
    from trainer.memory.planner import plan

    if question.situation.on_cpu:
        assert question.resolved is not None
        planned = plan_on_cpu(question.resolved, question.subject, question.occasions, traces)
        on_pick(planned)
        return planned
    now = time.monotonic()
    return plan(
        question.subject,
        question.written,
        question.situation,
        traces,
        question.occasions,
        until=now + PATIENCE,
        until_beside=now + PATIENCE_BESIDE,
        on_pick=on_pick,
    )


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return a function that acts the first time only."""
    waiting = [action]
    return lambda: waiting.pop()() if waiting else None


def _say_tracing(*, as_json: bool) -> None:
    if not as_json:
        note("Tracing what is not known yet; this takes seconds, and is remembered.")


def _batch(question: Question) -> int:
    return question.subject.recipe.effective_batch


def _asked(question: Question) -> Iterator[str]:
    """Yield what is planned, and the card."""
    yield _headline(question)
    yield from _card_lines(question.situation)
    yield ""


def _answer(question: Question, planned: Planned) -> Iterator[str]:
    """Yield what comes after the pick: the other plans, where the peak is; or what to do where nothing fits."""
    situation = planned.situation
    if situation.on_cpu:
        yield from plan_words.remarks(question, planned)
        yield from (f"In the way: {joined(error.sentence, error.remedy)}" for error in question.obstacles)
        return
    if planned.pick is None:
        yield plan_words.nothing_fits(planned, question.written)
        yield plan_words.what_would(planned.lighter, situation, planned.missing, _batch(question))
    else:
        yield from plan_table.neighbours(planned, _batch(question))
        yield ""
        yield f"Peak: {plan_table.peak(planned.pick.forecast)}."
    yield from plan_words.remarks(question, planned)
    yield from (f"In the way: {joined(error.sentence, error.remedy)}" for error in question.obstacles)
    if situation.correction.damage:
        yield situation.correction.damage


def _card_lines(situation: Situation) -> Iterator[str]:
    if situation.on_cpu:
        yield "This computer's CPU, because the job says so or no NVIDIA GPU works here"
        yield "(add --gpu 8GB, or another GPU, to compare)."
        return
    free = share(situation.free_bytes, situation.card.total_bytes)
    kept = f"{words.size(situation.outside)} go to CUDA, {words.size(situation.margin)} stay free as forecasts err"
    yield f"{situation.card.name}: {free} free, {words.size(situation.budget)} of it can be used"
    yield f"({kept})."


def _headline(question: Question) -> str:
    subject, recipe = question.subject, question.subject.recipe
    largest = subject.buckets[0]
    steps = words.counted(recipe.steps or 0, "step", "steps")
    return (
        f"{question.name}: {plan_words.base_name(subject.family)}, {largest.width} × {largest.height}, "
        f"rank {recipe.rank}, {steps} of {words.counted(recipe.effective_batch, 'picture', 'pictures')}."
    )


def _explained(question: Question, planned: Planned, traces: Traces) -> Iterator[str]:
    """Yield the timeline on one screen, then what would need less; `--json` holds every detail."""
    from trainer.memory.forecast import encoding_again

    plan = planned.pick or planned.smaller
    if plan is None:
        return
    yield ""
    if planned.situation.on_cpu:
        yield from plan_table.timeline_on_cpu(plan.forecast)
        return
    yield plan_words.margin(planned.situation)
    yield ""
    yield from plan_table.timeline(plan.forecast)
    again = encoding_again(replace(question.subject, fit=plan.fit), question.situation, traces)
    if again is not None:
        yield from plan_table.encoded_again(again, plan.forecast)
    yield ""
    yield from plan_table.levers(_levers(question, plan, traces))


def _levers(question: Question, plan: Plan, traces: Traces) -> Iterator[Lever]:
    """The levers that are found within the time that people wait for them."""
    from trainer.memory.levers import levers

    until = time.monotonic() + PATIENCE_BESIDE
    for lever in levers(question.subject, plan.fit, question.situation, traces):
        yield lever
        if time.monotonic() > until:
            return
