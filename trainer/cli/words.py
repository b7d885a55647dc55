"""The words of the terminal: events, times, sizes and rates as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.cli.story import Story
from trainer.protocol import events

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


def duration(seconds: float) -> str:
    """Return a time as 0:42, 12:05 or 3:12:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def size(number: float) -> str:
    """Return bytes as "512 B", "3.4 MiB" or "7.1 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def counted(number: int, one: str, many: str) -> str:
    """Return "1 picture" or "3 pictures"."""
    return f"{number:,} {one if number == 1 else many}"


def amount(phase: events.Phase, number: int) -> str:
    """Return a phase's units: bytes of a download as a size, others as a number."""
    return size(number) if phase == "download" else f"{number:,}"


def progress(phase: events.Phase, done: int, total: int | None) -> str:
    """Return "12/40", or "12" when nobody knows of how many."""
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
        case events.ErrorEvent():
            return f"Error: {event.sentence}\nWhat to do: {event.remedy}"
        case events.Finished():
            return finish(event)
        case _:
            return None


def finish(event: events.Finished) -> str:
    """Return how a run ended and what to do next."""
    wrote = f" The LoRA is {event.file}." if event.file else ""
    if event.outcome == "done":
        return f"Done after {counted(event.step, 'step', 'steps')}.{wrote}"
    again = " `python -m trainer resume RUN` goes on from there." if event.outcome != "failed" else ""
    return f"{OUTCOMES[event.outcome]} at step {event.step:,}.{wrote}{again}"


def quoted(word: str | Path) -> str:
    """Return a path or name as it is typed in a command of any shell."""
    return f'"{word}"' if " " in str(word) else str(word)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with their columns lined up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
