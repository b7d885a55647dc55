"""Format plans as text for the terminal: fits, sentences, tables, remarks and the timeline."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trainer.cli import words
from trainer.protocol.forecast import ROUNDING, SEARCHED_FIT_KEYS
from trainer.protocol.text import caption_lengths_text, share

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.planner.optimizers import OptimizerRow
    from trainer.memory.planner.planner import Plan, PlanResult, ReducedRecipe
    from trainer.memory.planner.suggestions import PaddingSaved, RecipeChange, Suggestion
    from trainer.memory.trace.deadline import Deadline
    from trainer.protocol.forecast import Forecast, Peak, PhaseForecast
    from trainer.protocol.plan import AdviceCode, MemoryAdvice, PlanEstimate, Remark


PHASES: Mapping[str, str] = {
    "cache_pictures": "Encode images",
    "cache_texts": "Encode captions",
    "load": "Load the base",
    "quantise": "Load and quantize the base",
    "first_step": "First step",
    "train": "Train",
    "validate": "Validate",
    "preview": "Render previews",
    "checkpoint": "Write a checkpoint",
    "save": "Save the LoRA",
}
BITS: Mapping[str, str] = {
    "none": "",
    "int8": ", 8-bit (int8)",
    "int8_products": ", 8-bit with int8 products (int8_products)",
    "nf4": ", 4-bit (nf4)",
}

REMARKS: Mapping[str, str] = {
    "search.incomplete": "There was no time to try every fit, so a better one may exist. Run again to search further.",
    "alternatives.incomplete": "Some alternatives are not computed yet; run again to see them.",
    "fit.experiment": "{key} is experimental: the forecast ignores it, so memory and time may differ.",
    "base.assumed": "The base is not on this PC, so {family} as published is assumed.",
    "dataset.unreadable": "The images could not be read, so {images} square images are assumed.",
    "dataset.empty": "The dataset has no image to train on, so {images} square images are assumed.",
    "dataset.assumed": "Assumed: {images} square images and {prompts} preview prompts.",
    "smaller.phase": ('No plan at this precision needs much less memory: "{phase}" takes {bytes} in each plan.'),
    "smaller.none": "No plan needs much less memory than this one.",
    "captions.lengths": "Captions are padded to the length that each needs: {lengths}.",
    "text_encoders.stop": (
        "After step {step}, when text encoders stop, training needs {bytes} less, and the run takes {duration} less."
    ),
    "cache.shards": (
        "The cache holds {epochs} ({limit}). {encoded} for later epochs are encoded as needed: {rounds}, {offloaded}."
    ),
    "cache.parts": (
        "The cache holds part of an epoch ({limit}). {encoded} are encoded as needed: {rounds}, {offloaded}."
    ),
    "estimate.cpu": "This is an estimate, which may be off by {error}.",
    "estimate.int8_products": (
        "This estimate assumes int8 products in all linear layers; the run uses them only where they are faster."
    ),
}
"""Sentence for each remark code in trainer.protocol.plan.REMARKS."""
ADVICE: Mapping[AdviceCode, str] = {
    "close": "close {programs} ({bytes})",
    "close_some": "free {bytes}, for example by closing {programs}",
    "free": "free {bytes}, or use a GPU with more memory",
    "larger_gpu": "use a GPU with more memory",
}
_LIMITS: Mapping[str, str] = {"disk": "fit.cache_gigabytes", "listing": "the limit for planning ahead"}
_LARGER_GPU = "use a GPU with more memory"

_BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 80
_BAR_WIDTH = 16
_NO_BREAK = "\u00a0"
_MOST_PEAKS = 5
# Kinds of memory below this share of a peak are left out of its line.
_TOO_SMALL = 0.05


def fit(chosen: FitConfig, effective_batch: int) -> str:
    """Return a fit as a phrase, such as "bf16 base, 4 images as 2 × 2, all blocks checkpointed"."""
    parts = [
        f"{chosen.dtype} base{BITS[chosen.quantize or 'none']}{_streamed(chosen)}",
        batches(chosen, effective_batch),
    ]
    parts.append(checkpointed(chosen))
    if chosen.preview_offload:
        parts.append("UNet offloaded while previews are decoded")
    return ", ".join(parts)


def _streamed(chosen: FitConfig) -> str:
    if not chosen.is_streamed:
        return ""
    return " streamed from main memory" if chosen.stream == "full" else f" with {chosen.stream} streamed blocks"


def batches(chosen: FitConfig, effective_batch: int) -> str:
    """Return in words how an effective batch is split into micro-batches."""
    size = chosen.micro_batch or 1
    if size >= effective_batch:
        several = "both" if effective_batch == 2 else f"all {effective_batch}"
        return f"{several} images at once" if effective_batch > 1 else "one image per step"
    if size == 1:
        return f"{effective_batch} images one by one"
    parts = -(-effective_batch // size)
    if effective_batch % size:
        return f"{effective_batch} images in {parts} parts of at most {size}"
    return f"{effective_batch} images as {parts} × {size}"


def checkpointed(chosen: FitConfig) -> str:
    """Return in words which blocks use gradient checkpointing."""
    if chosen.gradient_checkpointing in (None, "none"):
        return "no checkpointing"
    if chosen.gradient_checkpointing == "full":
        return "all blocks checkpointed"
    return f"{words.counted(len(chosen.gradient_checkpointing or ()), 'block', 'blocks')} checkpointed"


def reserved_bytes(found: Forecast) -> int:
    """Return a run's peak reserved bytes; a run that fits releases unused blocks to stay within its budget."""
    return within(found.reserved, found)


def within(reserved: int, found: Forecast) -> int:
    """Return the peak reserved bytes under the memory limit: at most the budget if the run fits.

    `reserved` is what an allocator without a limit would reserve.
    """
    return min(reserved, found.budget) if found.fits else reserved


def peak_phase(forecast: Forecast) -> PhaseForecast:
    """Return the phase that needs the most memory."""
    return forecast.decisive


def sentence(plan: Plan, effective_batch: int) -> str:
    """Return a plan in one sentence."""
    found = plan.forecast
    if found.on_cpu:
        return f"{fit(plan.fit, effective_batch)}. {on_cpu(found)}"
    peak = peak_phase(found)
    return (
        f"{fit(plan.fit, effective_batch)}: {share(reserved_bytes(found), found.budget)} at most "
        f"({PHASES[peak.phase].lower()}), about {words.duration_text(found.seconds)}."
    )


def estimate(found: PlanEstimate) -> str:
    """Return a sentence for an estimate that precedes a plan."""
    likely = {True: "likely to fit", False: "unlikely to fit", None: "too close to say whether it fits"}[found.fits]
    return (
        f"Estimate, judged by a similar recipe: about {share(found.reserved, found.budget)} ({likely}), about "
        f"{words.duration_text(found.seconds)}."
    )


def first_plan(planned: PlanResult, effective_batch: int) -> str:
    """Return a sentence for the first plan that was found to work, while better ones are searched."""
    assert planned.pick is not None
    return f"This fits: {sentence(planned.pick, effective_batch)} Looking for a better plan…"


def on_cpu(found: Forecast) -> str:
    """Return a CPU forecast in sentences."""
    from trainer.memory.planner.remarks import estimate_of

    took = (
        f"On the CPU: about {words.duration_text(found.seconds)}, and {words.size(found.host)} of main memory at most."
    )
    return " ".join([took, *map(remark, estimate_of(found))])


def remark(found: Remark) -> str:
    """Return the sentence for a remark."""
    return REMARKS[found.code].format(**{name: _value(name, value) for name, value in found.values.items()})


def _value(name: str, value: Any) -> str:
    """Format one value of a remark."""
    match name:
        case "bytes":
            return words.size(value)
        case "duration":
            return words.duration_text(value)
        case "error":
            return f"{value:.0%}"
        case "epochs":
            return words.counted(value, "epoch", "epochs")
        case "lengths":
            return caption_lengths_text(value)
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
            return "with the model offloaded" if value else "with the model still loaded"
    return str(value)


def advice(given: MemoryAdvice) -> str:
    """Return how to get the missing GPU memory, as part of a sentence."""
    return ADVICE[given.code].format(programs=", ".join(given.programs), bytes=words.size(given.bytes))


def margin(device_state: DeviceState) -> str:
    """Return a sentence with a GPU's safety margin and the reason for its size."""
    kept, found = device_state.kept_free, device_state.correction
    match kept.reason:
        case "no_runs":
            why = "no run has finished here yet"
        case "runs":
            why = f"{words.counted(found.runs, 'run', 'runs')} finished here within their forecasts"
        case "excess":
            why = f"a finished run took {words.size(found.worst.bytes)} more than forecast"
        case "limit":
            why = f"a finished run took {words.size(found.worst.bytes)} more than forecast; 15% is the limit"
        case "shortage":
            why = f"a run ran out of memory, {words.size(found.shortage.bytes)} above its forecast"
    return f"Margin: {words.size(kept.bytes)} stays free because forecasts can be off ({why})."


def change(changed: RecipeChange) -> str:
    """Return a recipe change as assignments, as they would be written in a job file."""
    from trainer.config.toml_file import toml_value

    return ", ".join(f"recipe.{key} = {toml_value(value)}" for key, value in changed.keys.items())


def nothing_fits(planned: PlanResult, written: FitConfig) -> str:
    """Return a sentence saying by how much a job is too large for a GPU; `written` has the job's own fit settings."""
    # A stated 16-bit dtype limits nothing, because both 16-bit dtypes take the same memory.
    stated = written.dtype == "fp32" or any(getattr(written, key) is not None for key in SEARCHED_FIT_KEYS)
    device_state = planned.device_state
    how = "with the fit settings of the job" if stated else "with any fit"
    return (
        f"It does not fit on {device_state.gpu.name} {how}: it is {words.size(planned.excess_bytes)} too large for the "
        f"{words.size(device_state.budget)} that can be used there."
    )


def what_would(found: ReducedRecipe | None, device_state: DeviceState, missing: int, effective_batch: int) -> str:
    """Return a sentence saying what to do if nothing fits: the recipe change that helps, or how to get more memory."""
    from trainer.memory.planner.remarks import memory_advice

    if found is None:
        way = advice(memory_advice(missing, device_state))
        way = way if _LARGER_GPU in way else f"{_LARGER_GPU}, or {way}"
        return f"{way[:1].upper()}{way[1:]}."
    return f"With {change(found.change)} it fits: {sentence(found.plan, effective_batch)}"


def bars(phase: PhaseForecast, highest: int, width: int) -> str:
    """Draw the bytes allocated during a phase as a row of at most `width` bars, on a scale up to `highest`."""
    samples = [allocated for allocated, _ in phase.timeline]
    if not samples or not highest:
        return ""
    count = min(width, len(samples))
    edges = [index * len(samples) // count for index in range(count + 1)]
    tops = [max(samples[start:end]) for start, end in pairwise(edges)]
    return "".join(_BARS[-(-top * (len(_BARS) - 1) // highest)] for top in tops)


def base_name(family: Family) -> str:
    """Return a family's display name."""
    from trainer.files.architecture import NAMES

    return NAMES[family]


def pick_rows(planned: PlanResult, effective_batch: int) -> Iterator[str]:
    """Yield the table's header and the pick's row: memory, time and fit."""
    assert planned.pick is not None
    yield from _row("", "MEMORY", "TIME", "HOW")
    yield from _row(*_figures("Pick", planned.pick), _how(planned.pick, effective_batch))


def timeline_on_cpu(forecast: Forecast) -> Iterator[str]:
    """Yield a header and a row for each phase of a run on the CPU."""
    rows = [
        (PHASES[phase.phase], words.size(phase.host), words.duration_text(phase.seconds)) for phase in forecast.phases
    ]
    yield from aligned([("PHASE", "MAIN MEMORY", "TIME"), *rows], "<>>")


def neighbors(planned: PlanResult, effective_batch: int) -> Iterator[str]:
    """Yield a row for each alternative to the pick."""
    from trainer.memory.planner.remarks import memory_advice

    way = advice(memory_advice(planned.excess_bytes, planned.device_state))
    found: list[tuple[str, Plan | None, str]] = [
        ("Faster", planned.faster, f"; {words.size(planned.excess_bytes)} too large: {way}"),
        ("Smaller", planned.smaller, ""),
        ("Quantized", planned.quantized, ""),
        ("Not quantized", planned.streamed, ""),
    ]
    for name, plan, note in found:
        if plan is not None:
            yield from _row(*_figures(name, plan), _how(plan, effective_batch) + note)


def peak(forecast: Forecast) -> str:
    """Return where memory peaks, such as "Train, backward through the last up block (highest layer)"."""
    phase = peak_phase(forecast)
    name = PHASES[phase.phase]
    return f"{name}, {max(phase.peaks, key=lambda one: one.allocated).name}" if phase.peaks else name


def timeline(forecast: Forecast) -> Iterator[str]:
    """Yield a row for each phase, then where memory peaks in training and in the phase that needs the most memory."""
    most = peak_phase(forecast)
    header = ("PHASE", "IN USE", "RESERVED", "TIME", "")
    rows = [_phase_row(phase, forecast, is_peak=phase is most) for phase in forecast.phases]
    yield from aligned([header, *rows], "<>>><")
    yield from _paragraph(
        "IN USE: allocated to tensors. RESERVED: reserved on the GPU by PyTorch. The longest bar is "
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
    """Yield lines that say how much memory encoding the images takes if it has to be repeated in fp32."""
    excess = "" if again.reserved <= forecast.budget else ", which does not fit"
    yield ""
    yield from _paragraph(
        "If the VAE produces non-finite values in bf16, as damaged ones do, it encodes again in fp32: "
        f'"{PHASES[again.phase]}" then takes {words.size(again.reserved)}{excess}.'
    )


def suggestions(found: Iterable[Suggestion], deadline: Deadline) -> Iterator[str]:
    """Yield a table of changes that save memory, with what each saves and costs; then those left out."""
    rows = [_suggestion_row(suggestion) for suggestion in found]
    if rows:
        yield from aligned([("TO USE LESS MEMORY", "SAVES", "COSTS"), *rows], "<><")
    else:
        yield "No single change is known to use less memory."
    if deadline.left_out:
        keys = ", ".join(map(str, deadline.left_out))
        yield from _paragraph(
            f"Time ran out before changes to {keys} were computed. Run the command again to see them."
        )


def padding(found: PaddingSaved) -> Iterator[str]:
    """Yield a sentence with what padding each caption to its own length saves."""
    change = found.step_seconds / found.padded_step_seconds - 1
    yield from _paragraph(
        f"Padding each caption to its own length instead of all to {found.tokens} tokens takes "
        f"{words.size(found.saved)} less at the peak of training and {abs(change):.1%} "
        f"{'more' if change > 0 else 'less'} time per step."
    )


MOST_OPTIMIZERS = 7
"""Rows of the table of optimizers."""


def optimizers(rows: Iterable[OptimizerRow]) -> Iterator[str]:
    """Yield a table of what optimizers would need in training, and how long their steps would take.

    It has the job's own and those with the smallest state; the JSON has all of them.
    """
    own, *others = rows
    smallest = sorted(others, key=lambda row: row.state)[: MOST_OPTIMIZERS - 1]
    found = [own, *(row for row in others if row in smallest)]
    cells = [
        (
            f"{row.name}{' (this job)' if row.chosen else ''}",
            _unless_exact(words.size(row.state), row),
            _unless_exact(words.size(row.peak), row),
            _unless_exact(f"{row.step_seconds:.3g} s", row),
        )
        for row in found
    ]
    yield from aligned([("OPTIMIZER", "STATE", "IN USE", "STEP"), *cells], "<>>>")
    yield from _paragraph("IN USE: the peak of training with this optimizer and everything else as planned.")
    if not all(row.exact for row in found):
        yield from _paragraph("Figures with ~ are computed from the sizes of the weights, not traced.")
    if len(others) > len(smallest):
        yield from _paragraph(
            f"{len(others) - len(smallest)} more optimizers keep at least as much state; --json lists them."
        )


def _unless_exact(text: str, row: OptimizerRow) -> str:
    return text if row.exact else f"~{text}"


def _figures(name: str, plan: Plan) -> tuple[str, str, str]:
    found = plan.forecast
    if found.on_cpu:
        return name, words.size(found.host), words.duration_text(found.seconds)
    return name, share(reserved_bytes(found), found.budget), words.duration_text(found.seconds)


def _how(plan: Plan, effective_batch: int) -> str:
    how = fit(plan.fit, effective_batch)
    if plan.quality == "exact":
        return how
    return f"{how}; weights rounded by {ROUNDING[plan.quality]} on average"


def _row(name: str, memory: str, time: str, how: str) -> Iterator[str]:
    """Yield a row with fixed column widths, because later rows are not known yet; wrap the last column."""
    head = f"{name:9}  {memory:18}  {time:>11}  "
    first, *more = textwrap.wrap(how, WIDTH - len(head)) or [""]
    yield f"{head}{first}"
    yield from (" " * len(head) + line for line in more)


def _phase_row(phase: PhaseForecast, forecast: Forecast, *, is_peak: bool) -> tuple[str, ...]:
    bar = bars(phase, max(one.allocated for one in forecast.phases), _BAR_WIDTH)
    return (
        PHASES[phase.phase],
        words.size(phase.allocated),
        words.size(within(phase.reserved, forecast)),
        words.duration_text(phase.seconds),
        f"{bar:{_BAR_WIDTH}}{' peak' if is_peak else ''}",
    )


def _highest(peaks: Sequence[Peak], most: int) -> Sequence[Peak]:
    """Return the `most` highest peaks in chronological order."""
    kept = sorted(range(len(peaks)), key=lambda place: -peaks[place].allocated)[:most]
    return [peaks[place] for place in sorted(kept)]


def _peak_lines(high: Peak) -> Iterator[str]:
    kinds = sorted(high.by_kind.items(), key=lambda item: -item[1])
    parts = [f"{kind} {words.size(size)}" for kind, size in kinds if size > _TOO_SMALL * high.allocated]
    yield f"{words.size(high.allocated):>11}  {high.name}"
    whole = ", ".join(part.replace(" ", _NO_BREAK) for part in parts)
    yield from (line.replace(_NO_BREAK, " ") for line in _paragraph(whole, " " * 13))


def _suggestion_row(suggestion: Suggestion) -> tuple[str, str, str]:
    from trainer.config.toml_file import toml_value

    value = toml_value(suggestion.value)
    percent = round(100 * (suggestion.slower - 1))
    time = f"{percent}% slower" if percent > 0 else f"{-percent}% faster" if percent < 0 else "same speed"
    rounding = ROUNDING.get(str(suggestion.value)) if suggestion.key == "fit.quantize" else None
    cost = f"{time}, rounds by {rounding}" if rounding else time
    if suggestion.key.startswith("recipe."):
        cost += "; different result"
    return f"{suggestion.key} = {value}", words.size(suggestion.saved), cost


def aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Yield rows with their columns aligned to the left (<) or right (>)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, sides, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, width, side in cells).rstrip()


def _paragraph(text: str, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
