"""The words of a plan: a fit in a phrase, a plan in a sentence, what would make room, the timeline drawn in text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from trainer.cli import words
from trainer.protocol.forecast import ROUNDING, SEARCHED
from trainer.protocol.text import share

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.forecast.cache_shards import LaterShards
    from trainer.memory.planner.planner import Plan, Planned, ReducedRecipe
    from trainer.memory.planner.request import PlanRequest
    from trainer.memory.planner.suggestions import RecipeChange, Suggestion
    from trainer.protocol.forecast import Forecast, Peak, PhaseForecast


PHASES: Mapping[str, str] = {
    "cache_pictures": "Encode pictures",
    "cache_texts": "Encode captions",
    "load": "Load the base",
    "quantise": "Load and quantise the base",
    "first_step": "First step",
    "train": "Train",
    "validate": "Measure",
    "preview": "Draw previews",
    "checkpoint": "Write a checkpoint",
    "save": "Save the LoRA",
}
BITS: Mapping[str, str] = {
    "none": "",
    "int8": " in 8 bits (int8)",
    "int8_products": " and products in 8 bits (int8_products)",
    "nf4": " in 4 bits (nf4)",
}

_LARGER_CARD = "take a card with more memory"

_BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 80
_BAR_WIDTH = 16
_NO_BREAK = "\u00a0"
_MOST_PEAKS = 5
# A kind that holds less than this share of a peak is left out of its line.
_TOO_SMALL = 0.05


def fit(chosen: FitConfig, effective_batch: int) -> str:
    """Return a fit in a phrase: "bf16 base, micro-batches of 2, all blocks checkpointed"."""
    told = [f"{chosen.dtype} base{BITS[chosen.quantise or 'none']}", batches(chosen, effective_batch)]
    told.append(checkpointed(chosen))
    if chosen.preview_offload:
        told.append("UNet waits in main memory while previews are decoded")
    return ", ".join(told)


def batches(chosen: FitConfig, effective_batch: int) -> str:
    """Return how an effective batch is computed."""
    size = chosen.micro_batch or 1
    if size >= effective_batch:
        several = "both" if effective_batch == 2 else f"all {effective_batch}"
        return f"{several} pictures at once" if effective_batch > 1 else "one picture a step"
    if size == 1:
        return f"{effective_batch} pictures one by one"
    parts = -(-effective_batch // size)
    if effective_batch % size:
        return f"{effective_batch} pictures in {parts} parts of at most {size}"
    return f"{effective_batch} pictures as {parts} × {size}"


def checkpointed(chosen: FitConfig) -> str:
    """Return what is computed twice."""
    if chosen.checkpointing in (None, "none"):
        return "no checkpointing"
    if chosen.checkpointing == "full":
        return "all blocks checkpointed"
    return f"{words.counted(len(chosen.checkpointing or ()), 'block', 'blocks')} checkpointed"


def taken(found: Forecast) -> int:
    """Return what a run takes from the driver at most; where it fits only by giving back what is free, the budget."""
    return within(found.reserved, found)


def within(reserved: int, found: Forecast) -> int:
    """Return bytes taken when nothing limits them as they are in the run: one that fits gives back what is free."""
    return min(reserved, found.budget) if found.fits else reserved


def decisive(forecast: Forecast) -> PhaseForecast:
    """Return the phase that needs most."""
    return forecast.decisive


def sentence(plan: Plan, effective_batch: int) -> str:
    """Return a plan in one sentence."""
    found = plan.forecast
    if found.on_cpu:
        return f"{fit(plan.fit, effective_batch)}. {on_cpu(found)}"
    peak = decisive(found)
    return (
        f"{fit(plan.fit, effective_batch)}: {share(taken(found), found.budget)} at most "
        f"({PHASES[peak.phase].lower()}), about {words.about(found.seconds)}."
    )


def on_cpu(found: Forecast) -> str:
    """Return a forecast for the CPU in a sentence or two."""
    told = f"On the CPU: about {words.about(found.seconds)}, and {words.size(found.host)} of main memory at most."
    return f"{told} {estimated(found)}".strip()


def estimated(found: Forecast) -> str:
    """Return that a forecast is an estimate, and of what; empty where it is none."""
    if found.exact:
        return ""
    if found.on_cpu:
        return f"This is an estimate, which may be off by {found.error:.0%}."
    return "This is an estimate, as if all linear layers multiplied in int8: which do is measured when the run starts."


def room(missing: int, situation: DeviceState) -> str:
    """Return what would make so much more of a card usable, by who uses it: the fewest programs that suffice."""
    uses, missing = situation.uses, situation.to_free(missing)
    if missing > situation.card.total_bytes - situation.free_bytes:
        return _LARGER_CARD
    told = sorted((use for use in uses if use.bytes), key=lambda use: -(use.bytes or 0))
    alone = [use for use in told if (use.bytes or 0) >= missing]
    if alone:
        return f"close {alone[-1].name}: {words.size(alone[-1].bytes or 0)}"
    gained, chosen = 0, []
    for use in told:
        gained += use.bytes or 0
        chosen.append(use.name)
        if gained >= missing:
            return f"close {', '.join(chosen)}: {words.size(gained)}"
    if uses and not told:  # Windows does not tell how much each holds
        names = ", ".join(dict.fromkeys(use.name for use in uses[:3]))
        return f"free {words.size(missing)}, by closing {names} perhaps"
    return f"free {words.size(missing)}, or {_LARGER_CARD}"


def margin(situation: DeviceState) -> str:
    """Return how much of a GPU is kept free beside a plan, and why so much."""
    kept, found = situation.kept_free, situation.correction
    match kept.reason:
        case "no_runs":
            why = "no run has finished here yet"
        case "runs":
            why = f"{words.counted(found.runs, 'run', 'runs')} finished here within their forecasts"
        case "excess":
            why = f"a finished run took {words.size(found.worst.bytes)} more than forecast"
        case "limit":
            why = f"a finished run took {words.size(found.worst.bytes)} more than forecast; 15 % is the limit"
        case "shortage":
            why = f"a run ran out of memory, {words.size(found.shortage.bytes)} above its forecast"
    return f"Margin: {words.size(kept.bytes)} stay free because forecasts can be off ({why})."


def change(changed: RecipeChange) -> str:
    """Return a change of a recipe as it is written in a job."""
    from trainer.config.toml_file import toml_value

    return ", ".join(f"recipe.{key} = {toml_value(value)}" for key, value in changed.keys.items())


def nothing_fits(planned: Planned, written: FitConfig) -> str:
    """Return by how much a job is too large for a card, with what is `written` of its fit."""
    # All fits of a stated dtype were looked at, and both of 16 bits take the same.
    stated = written.dtype == "fp32" or any(getattr(written, key) is not None for key in SEARCHED)
    situation = planned.situation
    how = "with the fit that is stated" if stated else "however it is fitted"
    return (
        f"It does not fit on {situation.card.name}, {how}: it lacks {words.size(planned.missing)} "
        f"beside the {words.size(situation.budget)} that can be used there."
    )


def remarks(question: PlanRequest, planned: Planned, *, whole: bool = True) -> list[str]:
    """Return what else is to be known of a plan: what was assumed, what it lacks, what it does late.

    What time was too short for is known only once it is `whole`.
    """
    found = [_cut_short(planned) if whole else "", *question.remarks, _no_smaller(planned)]
    if planned.pick is not None:
        found.append(_encoded_late(question.occasions.later, planned.pick.forecast))
        found.append(estimated(planned.pick.forecast))
    return [remark for remark in found if remark]


def _cut_short(planned: Planned) -> str:
    again = "ask again, then more is known."
    if not planned.complete:
        return f"There was no time to look at every fit, so a better one may exist: {again}"
    return "" if planned.complete_beside else f"There was no time to look at every plan beside the pick: {again}"


def _encoded_late(later: LaterShards, found: Forecast) -> str:
    """Return how a cache is filled that is larger than its limit; empty where it is filled before the first step."""
    if not later.pictures and not later.texts:
        return ""
    what = " and ".join(name for name, some in (("pictures", later.pictures), ("captions", later.texts)) if some)
    how = "with the models put aside for want of room" if found.encodes_alone else "beside the model"
    held, often = words.counted(later.together, "epoch", "epochs"), words.counted(later.portions, "time", "times")
    limit = "as fit.cache_gigabytes allows" if later.limited == "disk" else "as many showings as are listed together"
    late = f"{what} of later ones are encoded between epochs, {often}, {how}"
    return f"The cache holds {held} at a time, {limit}: {late}."


def _no_smaller(planned: Planned) -> str:
    """Return why there is no smaller plan beside a pick; empty where there is one, or none was looked for."""
    if planned.floor is not None:
        phase = planned.floor
        return (
            f'No plan with as fine a base needs much less: "{PHASES[phase.phase]}" takes {words.size(phase.reserved)} '
            "in all of them."
        )
    return "No plan was found that needs much less." if planned.smallest else ""


def what_would(found: ReducedRecipe | None, situation: DeviceState, missing: int, effective_batch: int) -> str:
    """Return what to do where nothing fits."""
    if found is None:
        way = room(missing, situation)
        told = way if _LARGER_CARD in way else f"{_LARGER_CARD}, or {way}"
        return f"{told[:1].upper()}{told[1:]}."
    return f"With {change(found.change)} it fits: {sentence(found.plan, effective_batch)}"


def bars(phase: PhaseForecast, highest: int, width: int) -> str:
    """Return the bytes handed out over a phase as a row of bars, on the scale of the whole run."""
    samples = [allocated for allocated, _ in phase.timeline]
    if not samples or not highest:
        return ""
    count = min(width, len(samples))
    edges = [index * len(samples) // count for index in range(count + 1)]
    tops = [max(samples[start:end]) for start, end in pairwise(edges)]
    return "".join(_BARS[-(-top * (len(_BARS) - 1) // highest)] for top in tops)


def base_name(family: Family) -> str:
    """Return a family as people call it."""
    from trainer.files.architecture import NAMES

    return NAMES[family]


def picked(planned: Planned, effective_batch: int) -> Iterator[str]:
    """Yield the head of the table and the pick: what it takes, how long it takes, and how it is done."""
    assert planned.pick is not None
    yield from _row("", "MEMORY", "TIME", "HOW")
    yield from _row(*_figures("Pick", planned.pick), _how(planned.pick, effective_batch))


def timeline_on_cpu(forecast: Forecast) -> Iterator[str]:
    """Yield a row for each phase of a run on the CPU."""
    rows = [(PHASES[phase.phase], words.size(phase.host), words.about(phase.seconds)) for phase in forecast.phases]
    yield from _aligned([("PHASE", "MAIN MEMORY", "TIME"), *rows], "<>>")


def neighbours(planned: Planned, effective_batch: int) -> Iterator[str]:
    """Yield the plans beside a pick."""
    space = room(planned.missing, planned.situation)
    found: list[tuple[str, Plan | None, str]] = [
        ("Quicker", planned.quicker, f"; lacks {words.size(planned.missing)}: {space}"),
        ("Smaller", planned.smaller, ""),
        ("Quantised", planned.quantised, ""),
    ]
    for name, plan, note in found:
        if plan is not None:
            yield from _row(*_figures(name, plan), _how(plan, effective_batch) + note)


def peak(forecast: Forecast) -> str:
    """Return where most memory is taken: "Train, backward through the last up block (highest layer)"."""
    phase = decisive(forecast)
    name = PHASES[phase.phase]
    return f"{name}, {max(phase.peaks, key=lambda one: one.allocated).name}" if phase.peaks else name


def timeline(forecast: Forecast) -> Iterator[str]:
    """Yield a row for each phase, then the named peaks of training and of the phase that decides."""
    most = decisive(forecast)
    header = ("PHASE", "IN USE", "TAKEN", "TIME", "")
    rows = [_phase_row(phase, forecast, decides=phase is most) for phase in forecast.phases]
    yield from _aligned([header, *rows], "<>>><")
    yield from _paragraph(
        "In use is what the run holds, taken what PyTorch has from the card for it; the longest bar is "
        f"{words.size(max(phase.allocated for phase in forecast.phases))} in use."
    )
    steps = [phase for phase in forecast.phases if phase.phase in ("first_step", "train")]
    training = max(steps, key=lambda phase: phase.allocated, default=None)
    for phase in forecast.phases:
        if phase.peaks and (phase is most or phase is training):
            yield ""
            yield f"Peaks of this phase: {PHASES[phase.phase]}"
            for high in _highest(phase.peaks, _MOST_PEAKS if phase is training else 1):
                yield from _peak_lines(high)


def encoded_again(again: PhaseForecast, forecast: Forecast) -> Iterator[str]:
    """Yield what encoding the pictures takes where it has to be done again in fp32."""
    lacking = "" if again.reserved <= forecast.budget else ", for which there is no room"
    yield ""
    yield from _paragraph(
        "Only if the VAE gives numbers that are not finite in bf16, as damaged ones do: it encodes again in fp32, and "
        f'"{PHASES[again.phase]}" takes {words.size(again.reserved)}{lacking}.'
    )


def levers(found: Iterable[Suggestion]) -> Iterator[str]:
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
    return name, share(taken(found), found.budget), words.about(found.seconds)


def _how(plan: Plan, effective_batch: int) -> str:
    how = fit(plan.fit, effective_batch)
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
    bar = bars(phase, max(one.allocated for one in forecast.phases), _BAR_WIDTH)
    return (
        PHASES[phase.phase],
        words.size(phase.allocated),
        words.size(within(phase.reserved, forecast)),
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


def _lever_row(lever: Suggestion) -> tuple[str, str, str]:
    from trainer.config.toml_file import toml_value

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
