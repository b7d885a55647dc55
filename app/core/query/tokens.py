"""Counts the CLIP tokens of captions behind, and remembers them by their text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from app.core.events import Emitter
from app.core.tags.splitting import one_line
from app.core.tasks import Tasks, in_turns

if TYPE_CHECKING:
    from trainer.files.tokens import ClipTokens

# Captions counted at once: about 40 ms of a worker.
_SLICE = 500


class TokenCounts:
    """How many tokens each caption has, as training reads it; asked on the thread that owns the library."""

    def __init__(self, tasks: Tasks) -> None:
        self.counted: Emitter[int] = Emitter()
        """Some more captions are counted; so many are still to come."""
        self._tasks = tasks
        self._known: dict[str, int] = {"": 0}
        self._waiting: dict[str, None] = {}
        self._counting = False

    def of(self, caption: str | None) -> int | None:
        """Return the count, or None while it is not known."""
        return self._known.get(caption or "")

    def want(self, captions: Iterable[str | None]) -> None:
        """Count these as soon as a worker is free; those wanted before and not counted yet are dropped."""
        known = self._known
        self._waiting = {text: None for text in captions if text and text not in known}
        self._go_on()

    @property
    def pending(self) -> int:
        """How many different captions are still to be counted."""
        return len(self._waiting)

    def _go_on(self) -> None:
        if self._counting or not self._waiting:
            return
        self._counting = True
        texts = list(islice(self._waiting, _SLICE))
        self._tasks.run(lambda: count_tokens(texts), self._have, self._failed, kept=False)

    def _have(self, counts: dict[str, int]) -> None:
        self._counting = False
        self._known |= counts
        for text in counts:
            self._waiting.pop(text, None)
        self._go_on()
        self.counted.emit(len(self._waiting))

    def _failed(self, fault: BaseException) -> None:
        """End the counting, so that nobody waits for it for ever, and let the fault be seen."""
        self._counting = False
        self._waiting.clear()
        self.counted.emit(0)
        raise fault


def count_tokens(texts: Iterable[str]) -> dict[str, int]:
    """Return the number of CLIP tokens by caption, start and end not counted; for a worker: 0.1 ms each."""
    return {text: _count(one_line(text)) for text in in_turns(texts)}


def load() -> None:
    """Load the vocabulary now, so that nobody waits for it later; for a worker."""
    _clip()


@lru_cache(maxsize=131_072)
def _count(line: str) -> int:
    """Count a line once, whoever asks: health and the filter both do, of the same captions."""
    return _clip().count(line)


@cache
def _clip() -> ClipTokens:
    """Load the vocabulary on first use: a third of a second, in the worker."""
    from trainer.files.tokens import ClipTokens

    return ClipTokens()
