"""The samples of a run: a row for each prompt, a column for each step that pictures were drawn at."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from app.core.pictures import Folder, Picture
from app.core.runs.series import lowest
from trainer.protocol import events

_NUMBERS = count(-1, -1)
"""Samples are painted by what paints a dataset's pictures, whose numbers are positive."""


class Spot(NamedTuple):
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
        self.pictures: dict[int, Picture] = {}
        """By number."""
        self.saved: dict[int, Path] = {}
        """The LoRA of a step, where one was saved; it may have been removed since."""
        self._folder = Folder(folder, folder)
        self._spots: dict[Spot, int] = {}
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

    def at(self, spot: Spot) -> Picture | None:
        """Return the picture of a prompt at a step, where there is one."""
        number = self._spots.get(spot)
        return self.pictures[number] if number is not None else None

    @property
    def best(self) -> int | None:
        """The step of the lowest loss on held-out pictures, the first of them if there are several."""
        return lowest(self._losses)

    def _draw(self, event: events.Preview) -> None:
        spot = Spot(event.step, event.index)
        if (former := self._spots.get(spot)) is not None:
            del self.pictures[former]
        elif event.step not in self.steps:
            insort(self.steps, event.step)
        number = self._spots[spot] = next(_NUMBERS)
        # What a file looked like when it was drawn is known by that moment: nobody has to look at the disk for it.
        self.pictures[number] = Picture(number, self._folder, event.file, changed_ns=round(event.time * 1e9))
        self.prompts += [""] * (event.index + 1 - len(self.prompts))
