"""The words of a plan: a fit in a phrase, a plan in a sentence, what would make room, the timeline drawn in text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from trainer.cli import words
from trainer.protocol.forecast import SEARCHED
from trainer.protocol.units import share

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.memory.device.device_state import Situation
    from trainer.memory.forecast.cache_shards import Later
    from trainer.memory.planner.planner import Lighter, Plan, Planned
    from trainer.memory.planner.request import Question
    from trainer.memory.planner.suggestions import Change
    from trainer.protocol.forecast import Forecast, PhaseForecast

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


def room(missing: int, situation: Situation) -> str:
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


def margin(situation: Situation) -> str:
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


def change(changed: Change) -> str:
    """Return a change of a recipe as it is written in a job."""
    from trainer.config.write import toml_value

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


def remarks(question: Question, planned: Planned, *, whole: bool = True) -> list[str]:
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


def _encoded_late(later: Later, found: Forecast) -> str:
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


def what_would(found: Lighter | None, situation: Situation, missing: int, effective_batch: int) -> str:
    """Return what to do where nothing fits."""
    if found is None:
        way = room(missing, situation)
        told = way if _LARGER_CARD in way else f"{_LARGER_CARD}, or {way}"
        return f"{told[:1].upper()}{told[1:]}."
    return f"With {change(found.change)} it fits: {sentence(found.plan, effective_batch)}"


def timeline(phase: PhaseForecast, highest: int, width: int) -> str:
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
