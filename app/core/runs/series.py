"""Metrics of a run by step. This module does not use numpy; arrays are only built when a chart is drawn."""

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
from trainer.protocol.forecast import ForecastPhase

MarkKind = Literal["saved", "preview", "stepped_down", "out_of_memory", "resumed"]
_NUMBERS = count(-1, -1)
"""Ids of samples, which are negative because they share a painter with dataset images, whose ids are positive."""


class Track:
    """One line of a chart: float64 values at increasing float64 steps. Unknown values are NaN."""

    def __init__(self) -> None:
        self.steps = array("d")
        self.values = array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: float, value: float | None) -> None:
        """Append a value, and drop values at or after this step, which are from an earlier attempt."""
        if self.steps and step <= self.steps[-1]:
            self.cut(step)
        self.steps.append(step)
        self.values.append(nan if value is None else value)

    def cut(self, step: float) -> None:
        """Drop all values at or after a step."""
        place = bisect_left(self.steps, step)
        del self.steps[place:], self.values[place:]


class MemoryTrack:
    """Measured GPU memory of one phase: peaks by step while training, in other phases by number of measurement."""

    def __init__(self) -> None:
        self.allocated = Track()
        """Bytes allocated by PyTorch."""
        self.reserved = Track()
        """Bytes reserved from the driver."""
        self.peak_allocated = 0
        self.peak_reserved = 0

    def add(self, step: int, allocated: int, reserved: int | None) -> None:
        """Append a measurement; the peaks include those that a later attempt replaces."""
        self.allocated.add(step, allocated)
        self.reserved.add(step, reserved)
        self.peak_allocated = max(self.peak_allocated, allocated)
        self.peak_reserved = max(self.peak_reserved, reserved or 0)


def lowest(losses: Mapping[int, float | None]) -> int | None:
    """Return the first step with the lowest loss, ignoring non-finite losses; None if there is none."""
    known = {step: loss for step, loss in losses.items() if loss is not None and isfinite(loss)}
    return min(sorted(known), key=lambda step: known[step], default=None)


@dataclass(frozen=True, slots=True)
class Mark:
    """A step to mark in the charts of a run."""

    kind: MarkKind
    step: int
    """Number of completed steps."""
    text: str = ""
    """Saved file, changed fit settings, or the module that ran out of memory."""


@dataclass
class Series:
    """All metrics of one run; values of a resumed attempt replace those after its checkpoint."""

    loss: Track = field(default_factory=Track)
    held_out: Track = field(default_factory=Track)
    """Validation loss at fixed noise on held-out images."""
    validation: Track = field(default_factory=Track)
    """Loss at fixed noise on training images, if none were held out."""
    grad_norm: Track = field(default_factory=Track)
    rates: dict[str, Track] = field(default_factory=dict)
    """Learning rates by part: unet, text_encoder, text_encoder_2."""
    memory: Track = field(default_factory=Track)
    """Peak bytes of memory used on the training device in each step."""
    phase_memory: dict[ForecastPhase, MemoryTrack] = field(default_factory=dict)
    """Measured GPU memory by phase; empty on the CPU."""
    seconds: Track = field(default_factory=Track)
    """Duration of each step in seconds."""
    speed: Track = field(default_factory=Track)
    """Images per second."""
    marks: list[Mark] = field(default_factory=list)
    _is_first: bool = True
    """Whether the next step is the first of its attempt, which is a phase of its own."""

    def add_event(self, event: events.Event) -> None:
        """Process the next event."""
        match event:
            case events.StepEvent():
                self._take_step(event)
            case events.Validation():
                (self.held_out if event.held_out else self.validation).add(event.step, event.loss)
            case events.AttemptStarted():
                self._is_first = True
                if event.attempt > 1 and self.loss:
                    self.marks.append(Mark("resumed", int(self.loss.steps[-1])))
            case events.MemorySample():
                self._add_sample(event.phase, event.allocated, event.reserved)
            case events.PhaseMemory() if event.phase not in ("first_step", "train", *self.phase_memory):
                if event.allocated is not None:  # versions without samples wrote only this
                    self._add_sample(event.phase, event.allocated, event.reserved)
            case events.Saved() if not event.ema:
                self.marks.append(Mark("saved", event.step, event.file))
            case events.Preview() if not event.index:
                self.marks.append(Mark("preview", event.step))
            case events.SteppedDown():
                self.marks.append(Mark("stepped_down", event.step, ", ".join(event.changes)))
            case events.MemoryExhausted():
                self.marks.append(Mark("out_of_memory", event.step, event.module))

    def best_step(self) -> int | None:
        """Return the step with the lowest validation loss or, if none was held out, loss on training images, or None.

        Like the engine, ignore step 0, which is measured before training.
        """
        track = self.held_out or self.validation
        measured = zip(track.steps, track.values, strict=True)
        return lowest({int(step): loss for step, loss in measured if step > 0})

    def _add_sample(self, phase: ForecastPhase, allocated: int, reserved: int | None) -> None:
        track = self.phase_memory.setdefault(phase, MemoryTrack())
        track.add(len(track.allocated), allocated, reserved)

    def _take_step(self, event: events.StepEvent) -> None:
        step = event.step
        self.loss.add(step, None if event.skipped else event.loss)
        self.grad_norm.add(step, event.grad_norm)
        self.seconds.add(step, event.seconds)
        self.speed.add(step, event.images / event.seconds if event.seconds > 0 else None)
        if event.memory is not None:
            self.memory.add(step, event.memory)
            phase: ForecastPhase = "first_step" if self._is_first else "train"
            self.phase_memory.setdefault(phase, MemoryTrack()).add(step, event.memory, event.reserved)
        self._is_first = False
        for part, rate in event.learning_rates.items():
            self.rates.setdefault(part, Track()).add(step, rate)


class CellIndex(NamedTuple):
    """A cell of the sample matrix."""

    step: int
    prompt: int
    """Prompt index, from 0."""


class Samples:
    """Samples and LoRAs of a run so far, from its events; a repeated sample replaces the previous one."""

    def __init__(self, folder: Path) -> None:
        """Create an empty collection for the run in `folder`."""
        self.prompts: list[str] = []
        """Prompts by index; empty if unknown."""
        self.steps: list[int] = []
        """Steps with samples, in order."""
        self.images: dict[int, LibraryImage] = {}
        """Samples by id."""
        self.saved: dict[int, Path] = {}
        """Saved LoRAs by step; they may have been removed since."""
        self.averaged: set[int] = set()
        """Steps whose samples are of the moving average."""
        self._folder = Folder(folder, folder)
        self._spots: dict[CellIndex, int] = {}
        self._losses: dict[bool, dict[int, float | None]] = {True: {}, False: {}}

    def name_prompts(self, prompts: Sequence[str]) -> None:
        """Set the job's prompts, which may be read later than the events and may change."""
        self.prompts[: len(prompts)] = prompts

    def take(self, new_events: Iterable[events.Event]) -> bool:
        """Process events in order; return whether any was a sample, a saved LoRA or a validation loss."""
        is_changed = False
        for event in new_events:
            match event:
                case events.Preview():
                    self._draw(event)
                case events.Saved():
                    self.saved[event.step] = self._folder.path / event.file
                case events.Validation() if event.step > 0:
                    self._losses[event.held_out][event.step] = event.loss
                case _:
                    continue
            is_changed = True
        return is_changed

    def at(self, spot: CellIndex) -> LibraryImage | None:
        """Return the sample of a prompt at a step, or None."""
        number = self._spots.get(spot)
        return self.images[number] if number is not None else None

    @property
    def best(self) -> int | None:
        """Return the first step with the lowest validation loss or, without any, loss on training images, or None."""
        return lowest(self._losses[self.has_held_out])

    @property
    def has_held_out(self) -> bool:
        """Return whether losses were measured on images held out of training."""
        return bool(self._losses[True])

    def _draw(self, event: events.Preview) -> None:
        spot = CellIndex(event.step, event.index)
        if event.ema:
            self.averaged.add(event.step)
        if (previous := self._spots.get(spot)) is not None:
            del self.images[previous]
        elif event.step not in self.steps:
            insort(self.steps, event.step)
        number = self._spots[spot] = next(_NUMBERS)
        # The event's time identifies the version of the file, which saves a stat call.
        self.images[number] = LibraryImage(number, self._folder, event.file, changed_ns=round(event.time * 1e9))
        self.prompts += [""] * (event.index + 1 - len(self.prompts))
