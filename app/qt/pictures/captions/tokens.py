"""Measures captions in CLIP tokens: where each row of the text encoder ends, and where training cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from PySide6.QtCore import QObject, Signal

from app.core.tags.splitting import Lines
from app.core.tasks import Tasks, raise_again

CHUNK = 75
Limit = Literal[75, 150, 225]
LIMITS: tuple[Limit, ...] = (75, 150, 225)
_MOST = 20_000
"""Characters that are measured, in some 10 ms: ten times what training reads at most."""

_Ends = Callable[[str], list[int]]
_Holds = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Measured:
    """One caption, or one line of it where each line is an alternative; places count characters of the whole text."""

    start: int
    end: int
    tokens: int
    """With the trigger word, where training puts it first."""
    marks: tuple[int, ...]
    """Where each row of the encoder ends, if more follows."""
    cut: int | None
    """Where training stops to read; None: it reads all."""
    trigger: bool = False
    """Whether the trigger word is counted."""


class Ruler(QObject):
    """Loads CLIP's vocabulary on a worker when it is first asked; until `ready` nothing is measured."""

    ready = Signal()

    def __init__(self, tasks: Tasks, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._tasks = tasks
        self._asked = False
        self._ends: _Ends | None = None
        self._holds: _Holds | None = None

    def measure(self, text: str, lines: Lines, limit: Limit, trigger: str = "") -> list[Measured] | None:
        """Return the measures of a caption, of each line that is an alternative; None: not loaded yet."""
        if self._ends is None:
            self._load()
            return None
        parts = _parts(text[:_MOST], lines)
        return [self._measure(part, start, limit, trigger) for start, part in parts]

    def _measure(self, text: str, start: int, limit: Limit, trigger: str) -> Measured:
        assert self._ends
        assert self._holds
        first = f"{trigger}, " if trigger and text.strip() and not self._holds(text, trigger) else ""
        ends = self._ends(first + text)
        # A row ends behind its last token. Where that is in the trigger word, the text is cut from its beginning.
        marks = [start + max(0, ends[place - 1] - len(first)) for place in range(CHUNK, len(ends), CHUNK)]
        cut = marks[limit // CHUNK - 1] if len(ends) > limit else None
        return Measured(start, start + len(text), len(ends), tuple(marks), cut, bool(first))

    def _load(self) -> None:
        if not self._asked:
            self._asked = True
            self._tasks.run(_loaded, self._have, raise_again)

    def _have(self, loaded: tuple[_Ends, _Holds]) -> None:
        self._ends, self._holds = loaded
        self.ready.emit()


def _loaded() -> tuple[_Ends, _Holds]:
    from trainer.dataset.sampling import holds_trigger
    from trainer.files.tokens import ClipTokens

    return ClipTokens().ends, holds_trigger


def _parts(text: str, lines: Lines) -> list[tuple[int, str]]:
    if lines == "caption":
        return [(0, text)]
    found, start = [], 0
    for row in text.splitlines(keepends=True):
        if row.strip():
            found.append((start, row.rstrip("\n")))
        start += len(row)
    return found or [(0, "")]
