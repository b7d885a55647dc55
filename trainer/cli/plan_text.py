"""The words of a plan: a fit in a phrase, a plan in a sentence, what would make room, the timeline drawn in text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trainer.cli import words
from trainer.protocol.forecast import ROUNDING, SEARCHED
from trainer.protocol.text import share

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.planner.planner import Plan, Planned, ReducedRecipe
    from trainer.memory.planner.suggestions import RecipeChange, Suggestion
    from trainer.protocol.forecast import Forecast, Peak, PhaseForecast
    from trainer.protocol.plan import AdviceCode, MemoryAdvice, Remark


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

REMARKS: Mapping[str, str] = {
    "search.incomplete": "There was no time to try every fit, so a better one may exist. Run again to search further.",
    "alternatives.incomplete": "Some alternatives are not computed yet; run again to see them.",
    "fit.experiment": "{key} is experimental: the forecast leaves it out, so memory and time may differ.",
    "base.assumed": "The base is not on this PC, so {family} as published is assumed.",
    "dataset.unreadable": "The images could not be read, so {images} square images are assumed.",
    "dataset.empty": "The dataset has no image to train on, so {images} square images are assumed.",
    "dataset.assumed": "Assumed: {images} square images and {prompts} preview prompts.",
    "smaller.phase": 'No plan at this precision needs much less: "{phase}" takes {bytes} in each.',
    "smaller.none": "No plan needs much less memory.",
    "cache.shards": (
        "The cache holds {epochs} ({limit}). {encoded} are encoded between epochs too: {rounds}, {offloaded}."
    ),
    "estimate.cpu": "This is an estimate, which may be off by {error}.",
    "estimate.int8_products": (
        "An estimate: int8 products are assumed in all linear layers; the run measures where they help."
    ),
}
"""The sentence of each code of trainer.protocol.plan.REMARKS."""
ADVICE: Mapping[AdviceCode, str] = {
    "close": "close {programs} ({bytes})",
    "close_some": "free {bytes}, for example by closing {programs}",
    "free": "free {bytes}, or use a GPU with more memory",
    "larger_gpu": "use a GPU with more memory",
}
_LIMITS: Mapping[str, str] = {"disk": "fit.cache_gigabytes", "listing": "the most that is planned ahead"}
_LARGER_GPU = "use a GPU with more memory"

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
    from trainer.memory.planner.remarks import estimate_of

    took = f"On the CPU: about {words.about(found.seconds)}, and {words.size(found.host)} of main memory at most."
    return " ".join([took, *map(remark, estimate_of(found))])


def remark(found: Remark) -> str:
    """Return the sentence of a remark."""
    return REMARKS[found.code].format(**{name: _value(name, value) for name, value in found.values.items()})


def _value(name: str, value: Any) -> str:
    """Return a value of a remark in words."""
    match name:
        case "bytes":
            return words.size(value)
        case "error":
            return f"{value:.0%}"
        case "epochs":
            return words.counted(value, "epoch", "epochs")
        case "rounds":
            return words.counted(value, "time", "times")
        case "family":
            return base_name(value)
        case "phase":
            return PHASES[value]
        case "limit":
            return _LIMITS[value]
        case "encoded":
            return " and ".join(value).capitalize()
        case "offloaded":
            return "with the model offloaded" if value else "beside the model"
    return str(value)


def advice(given: MemoryAdvice) -> str:
    """Return how to get the GPU memory that is missing, as part of a sentence."""
    return ADVICE[given.code].format(programs=", ".join(given.programs), bytes=words.size(given.bytes))


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


def what_would(found: ReducedRecipe | None, situation: DeviceState, missing: int, effective_batch: int) -> str:
    """Return what to do where nothing fits."""
    from trainer.memory.planner.remarks import memory_advice

    if found is None:
        way = advice(memory_advice(missing, situation))
        way = way if _LARGER_GPU in way else f"{_LARGER_GPU}, or {way}"
        return f"{way[:1].upper()}{way[1:]}."
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
    from trainer.memory.planner.remarks import memory_advice

    way = advice(memory_advice(planned.missing, planned.situation))
    found: list[tuple[str, Plan | None, str]] = [
        ("Quicker", planned.quicker, f"; {words.size(planned.missing)} too large: {way}"),
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
