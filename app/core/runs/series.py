"""The numbers of a run by step, as they grow. No numpy: its arrays are made when a chart is drawn."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import isfinite, nan
from pathlib import Path
from typing import Literal, NamedTuple

from app.core.library import Folder, LibraryImage
from trainer.protocol import events

MarkKind = Literal["saved", "preview", "stepped_down", "out_of_memory", "resumed"]
_NUMBERS = count(-1, -1)
"""Samples are painted by what paints a dataset's pictures, whose numbers are positive."""


class Track:
    """One line of a chart: float64 values by rising float64 steps. A value that is not known is NaN."""

    def __init__(self) -> None:
        self.steps = array("d")
        self.values = array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: float, value: float | None) -> None:
        """Put a value at the end; what stood at this step or after it is of an earlier attempt, and goes."""
        if self.steps and step <= self.steps[-1]:
            self.cut(step)
        self.steps.append(step)
        self.values.append(nan if value is None else value)

    def cut(self, step: float) -> None:
        """Drop everything from a step on."""
        place = bisect_left(self.steps, step)
        del self.steps[place:], self.values[place:]


def lowest(losses: Mapping[int, float | None]) -> int | None:
    """Return the step with the lowest loss, the first of several; what is no finite number counts for nothing."""
    known = {step: loss for step, loss in losses.items() if loss is not None and isfinite(loss)}
    return min(sorted(known), key=lambda step: known[step], default=None)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a run that charts point out."""

    kind: MarkKind
    step: int
    """Steps done by then."""
    text: str = ""
    """What is told beside its kind: a file, a module."""


@dataclass
class Series:
    """All numbers of one run; an attempt that goes on from a checkpoint replaces what came after it."""

    loss: Track = field(default_factory=Track)
    held_out: Track = field(default_factory=Track)
    """Loss at fixed noise on pictures that are not trained on."""
    validation: Track = field(default_factory=Track)
    """The same on pictures that are, where none were held out."""
    grad_norm: Track = field(default_factory=Track)
    rates: dict[str, Track] = field(default_factory=dict)
    """Learning rates by part: unet, text_encoder, text_encoder_2."""
    memory: Track = field(default_factory=Track)
    """Bytes on the training device at the peak of each step."""
    seconds: Track = field(default_factory=Track)
    """Of each step."""
    speed: Track = field(default_factory=Track)
    """Pictures a second."""
    marks: list[Mark] = field(default_factory=list)

    def tell(self, event: events.Event) -> None:
        """Take in the next event."""
        match event:
            case events.StepEvent():
                self._take_step(event)
            case events.Validation():
                (self.held_out if event.held_out else self.validation).add(event.step, event.loss)
            case events.AttemptStarted() if event.attempt > 1 and self.loss:
                self.marks.append(Mark("resumed", int(self.loss.steps[-1])))
            case events.Saved():
                self.marks.append(Mark("saved", event.step, event.file))
            case events.Preview() if not event.index:
                self.marks.append(Mark("preview", event.step))
            case events.SteppedDown():
                self.marks.append(Mark("stepped_down", event.step, ", ".join(event.changes)))
            case events.MemoryExhausted():
                self.marks.append(Mark("out_of_memory", event.step, event.module))

    def best_step(self) -> int | None:
        """Return the step with the lowest held-out loss, as the engine finds it: the untrained start is none."""
        measured = zip(self.held_out.steps, self.held_out.values, strict=True)
        return lowest({int(step): loss for step, loss in measured if step > 0})

    def _take_step(self, event: events.StepEvent) -> None:
        step = event.step
        self.loss.add(step, None if event.skipped else event.loss)
        self.grad_norm.add(step, event.grad_norm)
        self.seconds.add(step, event.seconds)
        self.speed.add(step, event.pictures / event.seconds if event.seconds > 0 else None)
        if event.memory is not None:
            self.memory.add(step, event.memory)
        for part, rate in event.learning_rates.items():
            self.rates.setdefault(part, Track()).add(step, rate)


class CellIndex(NamedTuple):
    """A place in the matrix."""

    step: int
    prompt: int
    """Its number, from 0."""


class Samples:
    """What a run has drawn and saved so far, as far as its events tell; of what was drawn again, the latest."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run's."""
        self.prompts: list[str] = []
        """Empty where a picture's prompt is not known."""
        self.steps: list[int] = []
        """In order."""
        self.images: dict[int, LibraryImage] = {}
        """By number."""
        self.saved: dict[int, Path] = {}
        """The LoRA of a step, where one was saved; it may have been removed since."""
        self._folder = Folder(folder, folder)
        self._spots: dict[CellIndex, int] = {}
        self._losses: dict[int, float | None] = {}

    def name_prompts(self, prompts: Sequence[str]) -> None:
        """Learn the prompts of the job, where it is read after its events or was written anew."""
        self.prompts[: len(prompts)] = prompts

    def take(self, news: Iterable[events.Event]) -> bool:
        """Take in a run's events, the earlier ones first; tell whether any of them counts here."""
        counted = False
        for event in news:
            match event:
                case events.Preview():
                    self._draw(event)
                case events.Saved():
                    self.saved[event.step] = self._folder.path / event.file
                case events.Validation(held_out=True) if event.step > 0:
                    self._losses[event.step] = event.loss
                case _:
                    continue
            counted = True
        return counted

    def at(self, spot: CellIndex) -> LibraryImage | None:
        """Return the picture of a prompt at a step, where there is one."""
        number = self._spots.get(spot)
        return self.images[number] if number is not None else None

    @property
    def best(self) -> int | None:
        """The step of the lowest loss on held-out pictures, the first of them if there are several."""
        return lowest(self._losses)

    def _draw(self, event: events.Preview) -> None:
        spot = CellIndex(event.step, event.index)
        if (former := self._spots.get(spot)) is not None:
            del self.images[former]
        elif event.step not in self.steps:
            insort(self.steps, event.step)
        number = self._spots[spot] = next(_NUMBERS)
        # What a file looked like when it was drawn is known by that moment: nobody has to look at the disk for it.
        self.images[number] = LibraryImage(number, self._folder, event.file, changed_ns=round(event.time * 1e9))
        self.prompts += [""] * (event.index + 1 - len(self.prompts))
