"""CLIP token counts of captions, computed in the background and cached by text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from app.core.events import Emitter
from app.core.tags.splitting import one_line
from app.core.tasks import Tasks, iterate_yielding

if TYPE_CHECKING:
    from trainer.files.tokens import ClipTokens

# Captions counted at once: about 40 ms of work.
_BATCH = 500


class TokenCounts:
    """Token counts of captions, counted as in training. Use them only on the thread that owns the library."""

    def __init__(self, tasks: Tasks) -> None:
        self.counted: Emitter[int] = Emitter()
        """Emitted when more captions have been counted, with the number still pending."""
        self._tasks = tasks
        self._known: dict[str, int] = {"": 0}
        self._waiting: dict[str, None] = {}
        self._counting = False

    def count(self, caption: str | None) -> int | None:
        """Return the token count of a caption; None if it is not counted yet."""
        return self._known.get(caption or "")

    def request(self, captions: Iterable[str | None]) -> None:
        """Count these captions on a worker; drop captions that were requested earlier but not counted yet."""
        known = self._known
        self._waiting = {text: None for text in captions if text and text not in known}
        self._start_next()

    @property
    def pending(self) -> int:
        """Return the number of different captions still to be counted."""
        return len(self._waiting)

    def _start_next(self) -> None:
        if self._counting or not self._waiting:
            return
        self._counting = True
        texts = list(islice(self._waiting, _BATCH))
        self._tasks.run(lambda: count_tokens(texts), self._on_counted, self._on_failed, kept=False)

    def _on_counted(self, counts: dict[str, int]) -> None:
        self._counting = False
        self._known |= counts
        for text in counts:
            self._waiting.pop(text, None)
        self._start_next()
        self.counted.emit(len(self._waiting))

    def _on_failed(self, fault: BaseException) -> None:
        """Drop all requests, which keeps callers from waiting forever, and reraise the error."""
        self._counting = False
        self._waiting.clear()
        self.counted.emit(0)
        raise fault


def count_tokens(texts: Iterable[str]) -> dict[str, int]:
    """Return the number of CLIP tokens by caption, without start and end tokens.

    Call it on a worker: each caption takes 0.1 ms.
    """
    return {text: _count(one_line(text)) for text in iterate_yielding(texts)}


def load() -> None:
    """Load the vocabulary ahead of time. Call it on a worker."""
    _clip()


@lru_cache(maxsize=131_072)
def _count(line: str) -> int:
    """Return the token count of a line; cached, since the health checks and the filter count the same captions."""
    return _clip().count(line)


@cache
def _clip() -> ClipTokens:
    """Return the tokenizer. The first call, on a worker, takes a third of a second to load it."""
    from trainer.files.tokens import ClipTokens

    return ClipTokens()
