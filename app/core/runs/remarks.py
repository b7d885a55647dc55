"""What a run had to remark: its errors, notices, skipped steps and lack of memory, those of one kind together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from trainer.protocol import events

Kind = Literal["info", "warning", "error"]
_MOST = 200
_DOUBTS = ("doubtful", "checkpoint.damaged", "calibration", "cache.untrimmed")
"""Codes of notices that tell of something amiss."""


@dataclass(slots=True)
class Remark:
    """One thing, which may have happened several times in a row."""

    event: events.Event
    """The first of them."""
    kind: Kind
    times: int = 1
    last: events.Event | None = None
    """The last of them, where there are several."""


class Remarks:
    """The latest remarks of a run, the earliest first."""

    def __init__(self) -> None:
        self.all: deque[Remark] = deque(maxlen=_MOST)

    def tell(self, event: events.Event) -> None:
        """Take in the next event."""
        kind = _kind(event)
        if kind is None:
            return
        former = self._former(event)
        if former:
            former.times, former.last = former.times + 1, event
        else:
            self.all.append(Remark(event, kind))

    def _former(self, event: events.Event) -> Remark | None:
        """Return the remark that this one repeats: each attempt says the same of base and settings again."""
        if isinstance(event, events.Notice):
            same = (one for one in self.all if isinstance(one.event, events.Notice))
            return next((one for one in same if one.event.sentence == event.sentence), None)  # type: ignore[attr-defined]
        latest = self.all[-1] if self.all else None
        if isinstance(event, events.Skipped) and latest and isinstance(latest.event, events.Skipped):
            return latest if latest.event.reason == event.reason else None
        return None


def _kind(event: events.Event) -> Kind | None:
    match event:
        case events.ErrorEvent():
            return "error"
        case events.MemoryExhausted() | events.SteppedDown() | events.Slow() | events.Skipped():
            return "warning"
        case events.CommandEvent():
            return None if event.outcome == "done" else "warning"
        case events.Notice():
            return "warning" if event.code in _DOUBTS else "info"
        case events.Cached():
            return "info"
        case _:
            return None
