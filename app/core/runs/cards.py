"""How busy and how warm the card of a run is while it is watched: the driver tells only of this moment."""

from __future__ import annotations

import time
from collections.abc import Sequence

from app.core.events import Event
from app.core.runs.run import Run
from app.core.runs.series import Track
from app.core.tasks import Single, Tasks
from trainer.errors import ImpastoError
from trainer.gpu import Card, cards


class CardWatch:
    """Load and temperature of one run's card since it is watched, by seconds. Belongs to the thread that made it."""

    def __init__(self, tasks: Tasks) -> None:
        self.load = Track()
        """Per cent."""
        self.temperature = Track()
        """Degrees Celsius."""
        self.name = ""
        """Of the card; nothing until it is known."""
        self.changed: Event[None] = Event()
        self._looking = Single(tasks)
        self._run: Run | None = None
        self._began = time.monotonic()

    def watch(self, run: Run | None) -> None:
        """Watch the card of another run, or none."""
        if run is not self._run:
            self._run, self._began, self.name = run, time.monotonic(), ""
            self.load, self.temperature = Track(), Track()

    def look(self) -> None:
        """Ask the driver, where the run is alive and trains on a card."""
        run = self._run
        if run is not None and run.alive and run.story.device.startswith("cuda"):
            self._looking.run(_cards, lambda found: self._take(run, found))

    def take(self, card: Card) -> None:
        """Take in how a card is now."""
        self.name = card.name
        seconds = time.monotonic() - self._began
        self.load.add(seconds, card.load)
        self.temperature.add(seconds, card.temperature)
        self.changed.emit(None)

    def _take(self, run: Run, found: Sequence[Card]) -> None:
        card = card_of(run, found)
        if run is self._run and card is not None:
            self.take(card)


def card_of(run: Run, found: Sequence[Card]) -> Card | None:
    """Return the card that a run trains on: where its process is seen, else that of its forecast, else the only one."""
    pid = run.story.pid
    by_process = (card for card in found if any(use.pid == pid for use in card.uses))
    by_name = (card for card in found if run.forecast and card.name == run.forecast.card)
    only = found[0] if len(found) == 1 else None
    return next(by_process, None) or next(by_name, None) or only


def _cards() -> list[Card]:
    try:
        return cards()
    except ImpastoError:
        return []  # a driver that broke since is told of where a training is set up
