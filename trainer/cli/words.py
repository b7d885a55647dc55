"""The words of the terminal: events, times, sizes and rates as people read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.protocol import events
from trainer.protocol.progress import Story
from trainer.protocol.text import about as about  # among the words of the terminal, as the next
from trainer.protocol.text import printable
from trainer.protocol.text import size as size

PHASES: dict[events.Phase, str] = {
    "download": "Download the base",
    "load": "Load the base",
    "check": "Check the pictures",
    "cache_pictures": "Encode pictures",
    "cache_texts": "Encode captions",
    "train": "Train",
    "preview": "Draw previews",
    "validate": "Measure",
    "save": "Save",
}

OUTCOMES: dict[events.Outcome, str] = {
    "done": "Done",
    "paused": "Paused",
    "stopped": "Stopped",
    "failed": "Failed",
}

STAGES = {"decode": "decoding", "encode": "encoding", "write": "writing"}


def duration(seconds: float) -> str:
    """Return a time that is running, beside a bar: 0:42, 12:05 or 3:12:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def counted(number: int, one: str, many: str) -> str:
    """Return "1 picture" or "3 pictures"."""
    return f"{number:,} {one if number == 1 else many}"


def amount(phase: events.Phase, number: int) -> str:
    """Return a phase's units: bytes of a download as a size, others as a number."""
    return size(number) if phase == "download" else f"{number:,}"


def whole(phase: events.Phase, total: int | None) -> str:
    """Return ": 40", of how many units a phase is; nothing for loading, which counts now bytes, now weights."""
    return f": {amount(phase, total)}" if total and phase != "load" else ""


def progress(phase: events.Phase, done: int, total: int | None) -> str:
    """Return "12/40", "30 %" of what is loaded, or "12" when nobody knows of how many."""
    if phase == "load":
        return f"{100 * done // total} %" if total else ""
    return amount(phase, done) + (f"/{amount(phase, total)}" if total is not None else "")


def figures(story: Story) -> str:
    """Return the latest step's figures in one line; empty before the first step."""
    step = story.step
    if step is None:
        return ""
    rates = ", ".join(f"{rate:.3g} {part}" for part, rate in step.learning_rates.items())
    told = [
        f"epoch {step.epoch + 1}",
        f"loss {_number(story.loss)} (now {_number(step.loss)})",
        f"learning rate {rates}" if rates else "",
        f"{story.pictures_per_second:.3g} pictures/s" if story.pictures_per_second is not None else "",
        size(step.memory) if step.memory is not None else "",
        f"loss scale {step.loss_scale:g}" if step.loss_scale is not None else "",
        counted(story.skipped, "step skipped", "steps skipped") if story.skipped else "",
    ]
    return " · ".join(part for part in told if part)


def sentence(event: events.Event) -> str | None:
    """Return what an event has to say in a line of its own; None for progress, which has other places."""
    match event:
        case events.AttemptStarted():
            again = f" (attempt {event.attempt})" if event.attempt > 1 else ""
            return f"Started on {event.device}{again}."
        case events.CachingSpeed():
            return encoded(event)
        case events.Validation():
            where = "held-out pictures" if event.held_out else "training pictures"
            return f"Step {event.step:,}: loss {_number(event.loss)} at fixed noise on {where}."
        case events.Preview():
            return f"Step {event.step:,}: drew {event.file} in {event.seconds:.1f} s."
        case events.Saved():
            return f"Step {event.step:,}: wrote {event.file}."
        case events.CommandEvent():
            return f"{event.name}: {event.outcome}{', ' if event.detail else ''}{event.detail}."
        case events.Notice():
            return event.sentence
        case events.MemoryExhausted():
            return f"Memory ran out: {shortage(event)}."
        case events.SteppedDown():
            return f"Going on from step {event.step + 1:,} with {settings(event.changes)}; {cost(event)}."
        case events.Slow():
            usual = f"{event.seconds:.1f} s where {event.median:.1f} s were usual"
            return f"Step {event.step:,} took {usual}: {slowness(event)}."
        case events.ErrorEvent():
            return f"Error: {event.sentence}\nWhat to do: {event.remedy}"
        case events.Finished():
            return finish(event)
        case _:
            return None


def encoded(event: events.CachingSpeed) -> str:
    """Return how fast pictures or captions were encoded, and what each stage could have done by itself."""
    names = ("picture", "pictures") if event.phase == "cache_pictures" else ("caption", "captions")
    limits = [f"{STAGES[name]} {rate(limit)}" for name, limit in event.limits.items()]
    return (
        f"Encoded {counted(event.count, *names)} in {duration(event.seconds)}, {rate(event.rate)} a second"
        f"{'; each stage by itself: ' if limits else ''}{', '.join(limits)}."
    )


def rate(number: float) -> str:
    """Return so many a second as three digits, and no decimals of hundreds."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def shortage(event: events.MemoryExhausted) -> str:
    """Return what was going on when memory ran out, and how that stood to the forecast."""
    told = [
        f"{event.phase.replace('_', ' ')}{f', {event.stage}' if event.stage else ''}",
        f"in {event.module}" if event.module else "",
        f"{size(event.requested)} more were asked for" if event.requested else "",
        f"{size(event.reserved)} were taken" if event.reserved is not None else "",
        f"{size(event.forecast)} forecast" if event.forecast is not None else "",
    ]
    return ", ".join(part for part in told if part)


def settings(changes: Mapping[str, object]) -> str:
    """Return keys of a fit with their values as in a job file: "fit.micro_batch = 2"."""
    return ", ".join(f"fit.{key} = {json.dumps(value)}" for key, value in changes.items())


def cost(event: events.SteppedDown) -> str:
    """Return what a step down does to the result."""
    if "quantise" in event.changes:
        return "a base in fewer bits costs some fidelity"
    if "vae_encode_tiling" in event.changes:
        return "latents of images encoded in tiles differ by about 5 %"
    return "the result stays the same" if event.exact else "the result differs by rounding"


def slowness(event: events.Slow) -> str:
    """Return why steps are slow, in words."""
    reasons = {
        "spilled": "the card is full, and its driver may use main memory instead",
        "others": "other programs use the card",
        "hot": "the card is hot and slows itself down",
    }
    told = reasons.get(event.reason, "no reason is known; look for other programs and for power saving")
    return f"{told} ({event.detail})" if event.detail else told


def finish(event: events.Finished) -> str:
    """Return how a run ended and what to do next."""
    wrote = f" The LoRA is {event.file}." if event.file else ""
    if event.outcome == "done":
        return f"Done after {counted(event.step, 'step', 'steps')}.{wrote}"
    resumed = f"`python -m trainer resume {quoted(event.run)}` goes on" if event.run else "It can be resumed"
    again = f" {resumed} from there." if event.outcome != "failed" else ""
    return f"{OUTCOMES[event.outcome]} at step {event.step:,}.{wrote}{again}"


def quoted(word: str | Path) -> str:
    """Return a path or name as it is typed in a command of any shell."""
    return f'"{word}"' if " " in str(word) else str(word)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; each cell is made printable first, because an escape is wider."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
