"""Format events, times, sizes and rates as text for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.protocol import events
from trainer.protocol.progress import RunProgress
from trainer.protocol.text import duration_text as duration_text  # re-exported with the other texts, like `size`
from trainer.protocol.text import printable
from trainer.protocol.text import size as size

PHASES: dict[events.Phase, str] = {
    "download": "Download the base",
    "load": "Load the base",
    "check": "Check the images",
    "cache_pictures": "Encode images",
    "cache_texts": "Encode captions",
    "train": "Train",
    "preview": "Render previews",
    "validate": "Validate",
    "save": "Save",
}

OUTCOMES: dict[events.Outcome, str] = {
    "done": "Done",
    "paused": "Paused",
    "stopped": "Stopped",
    "failed": "Failed",
}

GROWING = {
    "weights": "base weights",
    "adapter": "LoRA weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "other": "memory that belongs to no tensor in Python, such as saved activations",
}
"""What grows in a memory leak, by its name in the event; other names are dtypes and shapes of tensors."""
STAGES = {"decode": "decoding", "encode": "encoding", "write": "writing"}


def duration(seconds: float) -> str:
    """Format an elapsed or remaining time for a progress bar: 0:42, 12:05 or 3:12:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def counted(number: int, one: str, many: str) -> str:
    """Return a count with its noun: "1 image" or "3 images"."""
    return f"{number:,} {one if number == 1 else many}"


def amount(phase: events.Phase, number: int) -> str:
    """Format an amount in a phase's unit: bytes for a download, otherwise a count."""
    return size(number) if phase == "download" else f"{number:,}"


def whole(phase: events.Phase, total: int | None) -> str:
    """Return a phase's total, such as ": 40"; "" if it is unknown.

    Also returns "" for loading, whose total is in bytes or weights depending on what is loaded.
    """
    return f": {amount(phase, total)}" if total and phase != "load" else ""


def progress(phase: events.Phase, done: int, total: int | None) -> str:
    """Return progress as "12/40", or for loading as "30%"; without a known total, as "12", or for loading ""."""
    if phase == "load":
        return f"{100 * done // total}%" if total else ""
    return amount(phase, done) + (f"/{amount(phase, total)}" if total is not None else "")


def figures(story: RunProgress) -> str:
    """Return the latest step's numbers in one line; "" before the first step."""
    step = story.step
    if step is None:
        return ""
    rates = ", ".join(f"{rate:.3g} {part}" for part, rate in step.learning_rates.items())
    parts = [
        f"epoch {step.epoch + 1}",
        f"loss {_number(story.loss)} (now {_number(step.loss)})",
        f"learning rate {rates}" if rates else "",
        f"{story.images_per_second:.3g} images/s" if story.images_per_second is not None else "",
        f"data wait {story.data_share:.1%}" if story.data_share is not None else "",
        size(step.memory) if step.memory is not None else "",
        f"loss scale {step.loss_scale:g}" if step.loss_scale is not None else "",
        counted(story.skipped, "step skipped", "steps skipped") if story.skipped else "",
    ]
    return " · ".join(part for part in parts if part)


def sentence(event: events.Event) -> str | None:
    """Return the text to print for an event; None for progress, which is shown elsewhere."""
    match event:
        case events.AttemptStarted():
            again = f" (attempt {event.attempt})" if event.attempt > 1 else ""
            return f"Started on {event.device}{again}."
        case events.CachingSpeed():
            return encoded(event)
        case events.Validation():
            where = "validation images" if event.held_out else "training images (no images held out)"
            return f"Step {event.step:,}: loss {_number(event.loss)} with fixed noise on {where}."
        case events.Preview():
            weights = " from the EMA weights" if event.ema else ""
            return f"Step {event.step:,}: rendered {event.file}{weights} in {event.seconds:.1f} s."
        case events.Saved():
            return f"Step {event.step:,}: wrote {event.file}."
        case events.CommandEvent():
            return f"{event.name}: {event.outcome}{', ' if event.detail else ''}{event.detail}."
        case events.Notice():
            return event.sentence
        case events.MemoryExhausted():
            return f"Out of memory: {shortage(event)}."
        case events.SteppedDown():
            return f"Continuing from step {event.step + 1:,} with {settings(event.changes)}; {cost(event)}."
        case events.Slow():
            usual = f"{event.seconds:.1f} s instead of the usual {event.median:.1f} s"
            return f"Step {event.step:,} took {usual}: {slowness(event)}."
        case events.DataWait():
            return f"Training waits for data {event.share:.1%} of the time. {data_advice(event)}"
        case events.MemoryLeak():
            return leak(event)
        case events.ErrorEvent():
            return f"Error: {event.sentence}\nWhat to do: {event.remedy}"
        case events.Finished():
            return finish(event)
        case _:
            return None


def encoded(event: events.CachingSpeed) -> str:
    """Return a sentence saying how fast images or captions were encoded, with the throughput of each stage alone."""
    names = ("image", "images") if event.phase == "cache_pictures" else ("caption", "captions")
    limits = [f"{STAGES[name]} {rate(limit)}" for name, limit in event.limits.items()]
    return (
        f"Encoded {counted(event.count, *names)} in {duration(event.seconds)}, {rate(event.rate)} per second"
        f"{'; throughput per stage: ' if limits else ''}{', '.join(limits)}."
    )


def rate(number: float) -> str:
    """Format a rate with three significant digits, or as a whole number if it is 100 or more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def leak(event: events.MemoryLeak) -> str:
    """Return a sentence saying which memory grows, how fast, since when, and what it is that grows."""
    memory = "GPU memory" if event.memory == "gpu" else "Main memory"
    names = [f"{GROWING.get(name, f'tensors of {name}')} ({size(grown)})" for name, grown in event.grew.items()]
    return (
        f"{memory} keeps growing: {100 * event.rate:.1f}% per 100 steps since step {event.since:,}, "
        f"{size(event.grown)} so far. In the latest steps, this grew: {', '.join(names) or GROWING['other']}. "
        "Please report this leak."
    )


def shortage(event: events.MemoryExhausted) -> str:
    """Return in words where memory ran out, and how much was reserved and forecast."""
    parts = [
        f"{event.phase.replace('_', ' ')}{f', {event.stage}' if event.stage else ''}",
        f"in {event.module}" if event.module else "",
        f"{size(event.requested)} more requested" if event.requested else "",
        f"{size(event.reserved)} reserved" if event.reserved is not None else "",
        f"{size(event.forecast)} forecast" if event.forecast is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def settings(changes: Mapping[str, object]) -> str:
    """Format fit keys and their values as in a job file: "fit.micro_batch = 2"."""
    return ", ".join(f"fit.{key} = {json.dumps(value)}" for key, value in changes.items())


def cost(event: events.SteppedDown) -> str:
    """Return in words how a fallback step changes the result."""
    if "quantize" in event.changes:
        return "a base with fewer bits costs some fidelity"
    if "vae_encode_tiling" in event.changes:
        return "latents of images encoded in tiles differ by about 5%"
    return "the result stays the same" if event.exact else "the result differs only by rounding"


def data_advice(event: events.DataWait) -> str:
    """Return what to do about training that waits for data."""
    disk = "move the cache to a faster disk, or close programs that use this one"
    if not event.fixed:
        return f"{disk[0].upper()}{disk[1:]}."
    keys = " and ".join(f"fit.{key}" for key in event.fixed)
    return f"Remove {keys} from the job, so that loading adapts to this PC; or {disk}."


def slowness(event: events.Slow) -> str:
    """Return in words why steps are slow."""
    reasons = {
        "spilled": "the GPU is full, and its driver may use main memory instead",
        "others": "other programs are using the GPU",
        "hot": "the GPU is hot and slows itself down",
    }
    reason = reasons.get(event.reason, "the reason is unknown; check other programs and power saving")
    return f"{reason} ({event.detail})" if event.detail else reason


def finish(event: events.Finished) -> str:
    """Return sentences that say how a run ended and how to resume it."""
    wrote = f" The LoRA is {event.file}." if event.file else ""
    if event.outcome == "done":
        return f"Done after {counted(event.step, 'step', 'steps')}.{wrote}"
    resumed = f"Continue with `python -m trainer resume {quoted(event.run)}`" if event.run else "It can be resumed"
    again = f" {resumed}." if event.outcome != "failed" else ""
    return f"{OUTCOMES[event.outcome]} at step {event.step:,}.{wrote}{again}"


def quoted(word: str | Path) -> str:
    """Quote a path or name, if it needs quotes, for a command in any shell."""
    return f'"{word}"' if " " in str(word) else str(word)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; make cells printable first, because escaping widens them."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
