"""Lays out a plan for people, 80 columns wide: the short table, and the timeline that explains it on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from trainer.cli import plan_words, words
from trainer.protocol.forecast import ROUNDING
from trainer.protocol.units import share

if TYPE_CHECKING:
    from trainer.memory.planner.planner import Plan, Planned
    from trainer.memory.planner.suggestions import Lever
    from trainer.protocol.forecast import Forecast, Peak, PhaseForecast

WIDTH = 80
_BAR_WIDTH = 16
_NO_BREAK = "\u00a0"
_MOST_PEAKS = 5
# A kind that holds less than this share of a peak is left out of its line.
_TOO_SMALL = 0.05


def picked(planned: Planned, effective_batch: int) -> Iterator[str]:
    """Yield the head of the table and the pick: what it takes, how long it takes, and how it is done."""
    assert planned.pick is not None
    yield from _row("", "MEMORY", "TIME", "HOW")
    yield from _row(*_figures("Pick", planned.pick), _how(planned.pick, effective_batch))


def timeline_on_cpu(forecast: Forecast) -> Iterator[str]:
    """Yield a row for each phase of a run on the CPU."""
    rows = [
        (plan_words.PHASES[phase.phase], words.size(phase.host), words.about(phase.seconds))
        for phase in forecast.phases
    ]
    yield from _aligned([("PHASE", "MAIN MEMORY", "TIME"), *rows], "<>>")


def neighbours(planned: Planned, effective_batch: int) -> Iterator[str]:
    """Yield the plans beside a pick."""
    room = plan_words.room(planned.missing, planned.situation)
    found: list[tuple[str, Plan | None, str]] = [
        ("Quicker", planned.quicker, f"; lacks {words.size(planned.missing)}: {room}"),
        ("Smaller", planned.smaller, ""),
        ("Quantised", planned.quantised, ""),
    ]
    for name, plan, note in found:
        if plan is not None:
            yield from _row(*_figures(name, plan), _how(plan, effective_batch) + note)


def peak(forecast: Forecast) -> str:
    """Return where most memory is taken: "Train, backward through the last up block (highest layer)"."""
    phase = plan_words.decisive(forecast)
    name = plan_words.PHASES[phase.phase]
    return f"{name}, {max(phase.peaks, key=lambda one: one.allocated).name}" if phase.peaks else name


def timeline(forecast: Forecast) -> Iterator[str]:
    """Yield a row for each phase, then the named peaks of training and of the phase that decides."""
    decisive = plan_words.decisive(forecast)
    header = ("PHASE", "IN USE", "TAKEN", "TIME", "")
    rows = [_phase_row(phase, forecast, decides=phase is decisive) for phase in forecast.phases]
    yield from _aligned([header, *rows], "<>>><")
    yield from _paragraph(
        "In use is what the run holds, taken what PyTorch has from the card for it; the longest bar is "
        f"{words.size(max(phase.allocated for phase in forecast.phases))} in use."
    )
    steps = [phase for phase in forecast.phases if phase.phase in ("first_step", "train")]
    training = max(steps, key=lambda phase: phase.allocated, default=None)
    for phase in forecast.phases:
        if phase.peaks and (phase is decisive or phase is training):
            yield ""
            yield f"Peaks of this phase: {plan_words.PHASES[phase.phase]}"
            for high in _highest(phase.peaks, _MOST_PEAKS if phase is training else 1):
                yield from _peak_lines(high)


def encoded_again(again: PhaseForecast, forecast: Forecast) -> Iterator[str]:
    """Yield what encoding the pictures takes where it has to be done again in fp32."""
    lacking = "" if again.reserved <= forecast.budget else ", for which there is no room"
    yield ""
    yield from _paragraph(
        "Only if the VAE gives numbers that are not finite in bf16, as damaged ones do: it encodes again in fp32, and "
        f'"{plan_words.PHASES[again.phase]}" takes {words.size(again.reserved)}{lacking}.'
    )


def levers(found: Iterable[Lever]) -> Iterator[str]:
    """Yield what to change, what that saves, and what it costs."""
    rows = [_lever_row(lever) for lever in found]
    if rows:
        yield from _aligned([("TO NEED LESS", "SAVES", "COSTS"), *rows], "<><")
    else:
        yield "Nothing is known that would need less."


def _figures(name: str, plan: Plan) -> tuple[str, str, str]:
    found = plan.forecast
    if found.on_cpu:
        return name, words.size(found.host), words.about(found.seconds)
    return name, share(plan_words.taken(found), found.budget), words.about(found.seconds)


def _how(plan: Plan, effective_batch: int) -> str:
    how = plan_words.fit(plan.fit, effective_batch)
    if plan.quality == "exact":
        return how
    return f"{how}; weights rounded by {ROUNDING[plan.quality]} on average"


def _row(name: str, memory: str, time: str, how: str) -> Iterator[str]:
    """A row in columns as wide as ever needed, for the next is not known yet; the last goes on beneath itself."""
    head = f"{name:9}  {memory:18}  {time:>11}  "
    first, *more = textwrap.wrap(how, WIDTH - len(head)) or [""]
    yield f"{head}{first}"
    yield from (" " * len(head) + line for line in more)


def _phase_row(phase: PhaseForecast, forecast: Forecast, *, decides: bool) -> tuple[str, ...]:
    bar = plan_words.timeline(phase, max(one.allocated for one in forecast.phases), _BAR_WIDTH)
    return (
        plan_words.PHASES[phase.phase],
        words.size(phase.allocated),
        words.size(plan_words.within(phase.reserved, forecast)),
        words.about(phase.seconds),
        f"{bar:{_BAR_WIDTH}}{' decides' if decides else ''}",
    )


def _highest(peaks: Sequence[Peak], most: int) -> Sequence[Peak]:
    """So many of the highest, in the order of time."""
    kept = sorted(range(len(peaks)), key=lambda place: -peaks[place].allocated)[:most]
    return [peaks[place] for place in sorted(kept)]


def _peak_lines(high: Peak) -> Iterator[str]:
    kinds = sorted(high.by_kind.items(), key=lambda item: -item[1])
    told = [f"{kind} {words.size(size)}" for kind, size in kinds if size > _TOO_SMALL * high.allocated]
    yield f"{words.size(high.allocated):>11}  {high.name}"
    whole = ", ".join(part.replace(" ", _NO_BREAK) for part in told)
    yield from (line.replace(_NO_BREAK, " ") for line in _paragraph(whole, " " * 13))


def _lever_row(lever: Lever) -> tuple[str, str, str]:
    from trainer.config.write import toml_value

    value = toml_value(lever.value)
    percent = round(100 * (lever.slower - 1))
    time = f"{percent} % slower" if percent > 0 else f"{-percent} % quicker" if percent < 0 else "as quick"
    rounding = ROUNDING.get(str(lever.value)) if lever.key == "fit.quantise" else None
    cost = f"{time}, rounds by {rounding}" if rounding else time
    if lever.key.startswith("recipe."):
        cost += "; learns otherwise"
    return f"{lever.key} = {value}", words.size(lever.saved), cost


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Rows with their columns lined up, each to the left (<) or right (>)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, sides, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, width, side in cells).rstrip()


def _paragraph(text: str, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
