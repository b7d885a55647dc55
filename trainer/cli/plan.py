"""The command that says before anything is trained what fits on a card, how long it takes, and where the peak is."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import plan_words, words
from trainer.cli.arguments import Commands, add_command
from trainer.cli.outcome import say
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, JobError

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.memory.levers import Lever
    from trainer.memory.planner import Plan, Planned
    from trainer.memory.questions import Question
    from trainer.memory.traces import Traces
    from trainer.protocol.forecast import Peak, PhaseForecast

# After so many seconds nothing new is traced for a better answer.
PATIENCE = 15.0
_NAME_WIDTH = 26
_TOO_SMALL = 1 << 20


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
    if options.serve:
        return _serve()
    question = _question(options)
    traces = traces_of_user(quiet=options.json)
    planned = planned_for(question, traces)
    if options.json:
        print(json.dumps(as_json(question, planned), ensure_ascii=False, indent=1))
    else:
        print("\n".join(_answer(question, planned)))
        if options.explain:
            print("\n".join(_explained(question, planned, traces)))
    return EXIT_DONE if planned.pick else EXIT_BAD_INPUT


def as_json(question: Question, planned: Planned) -> dict[str, Any]:
    """Return a plan as plain data; bytes and seconds everywhere."""
    situation = planned.situation

    def told(plan: Plan | None) -> dict[str, Any] | None:
        if plan is None:
            return None
        fit = plan.fit.model_dump(mode="json", exclude_none=True)
        return {"fit": fit, "quality": plan.quality, "forecast": asdict(plan.forecast)}

    lighter = planned.lighter
    return {
        "name": question.name,
        "card": {
            "name": situation.card.name,
            "total": situation.card.total_bytes,
            "free": situation.free_bytes,
            "budget": situation.budget,
        },
        "pick": told(planned.pick),
        "quicker": told(planned.quicker),
        "missing": planned.missing,
        "room": plan_words.room(planned.missing, situation.uses) if planned.missing else None,
        "smaller": told(planned.smaller),
        "quantised": told(planned.quantised),
        "lighter": lighter and {"changes": dict(lighter.change.keys), **(told(lighter.plan) or {})},
        "ladder": [rung.model_dump(mode="json", exclude_none=True) for rung in planned.ladder],
        "complete": planned.complete,
        "remarks": list(question.remarks),
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
    return _ahead(options.family, options.recipe, options.gpu)


def _ahead(family: Family, recipe: str | None, gpu: str | None) -> Question:
    from trainer.cli.jobs import preset_recipe
    from trainer.memory.questions import question_ahead

    return question_ahead(family, preset_recipe(recipe, family) if recipe else None, gpu, recipe or "")


def traces_of_user(*, quiet: bool = False) -> Traces:
    """Return the tapes that are known here; that new ones have to be made is said once, unless `quiet`."""
    from trainer.memory.store import TapeStore
    from trainer.memory.traces import Traces

    return Traces(TapeStore.of_user(), _once(lambda: _say_tracing(as_json=quiet)))


def planned_for(question: Question, traces: Traces) -> Planned:
    """Return the best plan that is found within the time that people wait for one."""
    from trainer.memory.planner import plan

    until = time.monotonic() + PATIENCE
    return plan(question.subject, question.written, question.situation, traces, question.occasions, until=until)


def _once(action: Callable[[], None]) -> Callable[[], None]:
    """Return a function that acts the first time only."""
    waiting = [action]
    return lambda: waiting.pop()() if waiting else None


def _say_tracing(*, as_json: bool) -> None:
    if not as_json:
        say("Tracing what is not known yet; this takes seconds, and is remembered.")


def _answer(question: Question, planned: Planned) -> Iterator[str]:
    """Yield the short answer: the card, a table of plans, where the peak is."""
    situation, batch = planned.situation, question.subject.recipe.effective_batch
    yield _headline(question)
    yield (
        f"{situation.card.name}: {words.size(situation.free_bytes)} of {words.size(situation.card.total_bytes)} free; "
        f"{words.size(situation.budget)} for PyTorch, {words.size(situation.outside)} beside it, "
        f"{words.size(situation.margin)} kept free."
    )
    yield ""
    if planned.pick is None:
        yield plan_words.nothing_fits(planned)
        yield plan_words.what_would(planned.lighter, situation, planned.missing, batch)
    else:
        yield words.columns([("", "MEMORY", "TIME", "HOW"), *_rows(planned, planned.pick, batch)])
        yield ""
        yield f"The peak is {_peak_words(planned.pick)}."
    if not planned.complete:
        yield "Not every fit was looked at for want of time; asked again, more is known."
    yield from question.remarks
    if situation.correction.damage:
        yield situation.correction.damage


def _headline(question: Question) -> str:
    subject, recipe = question.subject, question.subject.recipe
    largest = subject.buckets[0]
    steps = words.counted(recipe.steps or 0, "step", "steps")
    return (
        f"{question.name}: {plan_words.base_name(subject.family)}, {largest.width} × {largest.height}, "
        f"rank {recipe.rank}, {steps} of {words.counted(recipe.effective_batch, 'picture', 'pictures')}."
    )


def _rows(planned: Planned, pick: Plan, batch: int) -> Iterator[tuple[str, str, str, str]]:
    yield _row("Pick", pick, batch, _cost(pick))
    if planned.quicker:
        room = plan_words.room(planned.missing, planned.situation.uses)
        yield _row("Quicker", planned.quicker, batch, f"; lacks {words.size(planned.missing)}: {room}")
    if planned.smaller:
        yield _row("Smaller", planned.smaller, batch, _cost(planned.smaller))
    if planned.quantised:
        yield _row("Quantised", planned.quantised, batch, _cost(planned.quantised))


def _row(name: str, plan: Plan, batch: int, note: str) -> tuple[str, str, str, str]:
    found = plan.forecast
    memory = f"{words.size(plan_words.taken(found))} of {words.size(found.budget)}"
    return name, memory, words.duration(found.seconds), plan_words.fit(plan.fit, batch) + note


def _cost(plan: Plan) -> str:
    if plan.quality == "exact":
        return ""
    return f"; weights rounded by {plan_words.ROUNDING[plan.quality]} on average"


def _peak_words(plan: Plan) -> str:
    phase = plan_words.decisive(plan.forecast)
    name = plan_words.PHASES[phase.phase].lower()
    if not phase.peaks:
        return f"in this phase: {name}"
    return f"in this phase: {name}, at {max(phase.peaks, key=lambda peak: peak.allocated).name}"


def _explained(question: Question, planned: Planned, traces: Traces) -> Iterator[str]:
    """Yield the timeline: each phase with its bar, its peaks and what lives there; then what would need less."""
    plan = planned.pick or planned.smaller
    if plan is None:
        return
    highest = plan.forecast.reserved
    yield f"\nWhat lives on the card over the run; a full bar is {words.size(highest)}."
    for phase in plan.forecast.phases:
        yield ""
        yield _phase_line(phase, highest)
        for peak in phase.peaks:
            yield from _peak_lines(peak)
    yield "\nWhat would need less"
    rows = [_lever_row(lever) for lever in _levers(question, plan, traces)]
    yield words.columns(rows) if rows else "  nothing that is known"


def _phase_line(phase: PhaseForecast, highest: int) -> str:
    bar = plan_words.timeline(phase, highest)
    name = plan_words.PHASES[phase.phase]
    figures = f"{words.size(phase.allocated)} in use, {words.size(phase.reserved)} taken"
    return f"{name:{_NAME_WIDTH}} {bar} {figures}, {words.duration(phase.seconds)}"


def _peak_lines(peak: Peak) -> Iterator[str]:
    kinds = ", ".join(f"{kind} {words.size(size)}" for kind, size in peak.by_kind.items() if size >= _TOO_SMALL)
    parts = ", ".join(f"{plan_words.part(part)} {words.size(size)}" for part, size in peak.largest[:3])
    yield f"  {words.size(peak.allocated):>9}  {peak.name}"
    yield f"             {kinds or 'nothing large'}; most of it: {parts}"


def _levers(question: Question, plan: Plan, traces: Traces) -> Iterator[Lever]:
    from trainer.memory.levers import levers

    return levers(question.subject, plan.fit, question.situation, traces)


def _lever_row(lever: Lever) -> tuple[str, str, str]:
    value = f'"{lever.value}"' if isinstance(lever.value, str) else str(lever.value)
    percent = round(100 * (lever.slower - 1))
    time_ = f"{percent} % slower" if percent > 0 else f"{-percent} % quicker" if percent < 0 else "as quick"
    rounding = plan_words.ROUNDING.get(str(lever.value)) if lever.key == "fit.quantise" else None
    cost = f"{time_}, weights rounded by {rounding}" if rounding else time_
    return f"  {lever.key} = {value}", f"{words.size(lever.saved)} less", cost


def _serve() -> int:
    """Answer requests until the input ends; tapes once read stay in memory."""
    from trainer.memory.serve import Server
    from trainer.memory.store import TapeStore
    from trainer.memory.traces import Traces

    traces = Traces(TapeStore.of_user())

    def answer(request: Mapping[str, Any], before_tracing: Callable[[], None]) -> dict[str, Any]:
        traces.before_tracing = before_tracing
        question = _requested(request)
        return as_json(question, planned_for(question, traces))

    Server(answer, sys.stdout).run(sys.stdin)
    return EXIT_DONE


def _requested(request: Mapping[str, Any]) -> Question:
    from trainer.memory.questions import question_of_job

    if "job" in request:
        return question_of_job(Path(request["job"]), request.get("set", ()), request.get("gpu"))
    family = request["family"]
    if family not in ("sd15", "sdxl"):
        raise JobError("plan.family", f'There is no family "{family[:40]}".', 'Ask for "sd15" or "sdxl".')
    return _ahead(family, request.get("recipe"), request.get("gpu"))
