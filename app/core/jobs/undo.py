"""What can be taken back of a job's changes, and made again."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from app.core.jobs.values import Values


@dataclass(frozen=True, slots=True)
class Step:
    """The values before and after one change, and what it changed."""

    name: str
    """A key, or what was done in words."""
    before: Values
    after: Values


class Undo:
    """Steps done and taken back; letters typed into one field are one step until `seal`."""

    def __init__(self) -> None:
        self._done: list[Step] = []
        self._undone: list[Step] = []
        self._open = False

    @property
    def undo_name(self) -> str | None:
        """What would be taken back."""
        return self._done[-1].name if self._done else None

    @property
    def redo_name(self) -> str | None:
        """What would be made again."""
        return self._undone[-1].name if self._undone else None

    def add(self, name: str, before: Values, after: Values, *, typing: bool = False) -> None:
        """Enter a change; `typing` joins it with the one before, if that is of the same name and not sealed."""
        self._undone.clear()
        if typing and self._open and self._done and self._done[-1].name == name:
            before = self._done.pop().before
        if before != after:
            self._done.append(Step(name, before, copy.deepcopy(after)))
        self._open = typing

    def seal(self) -> None:
        """Let the next change be a step of its own."""
        self._open = False

    def undo(self) -> Step | None:
        """Take the last step back; its `before` holds now."""
        self._open = False
        if not self._done:
            return None
        self._undone.append(self._done.pop())
        return self._undone[-1]

    def redo(self) -> Step | None:
        """Make the step that was taken back again; its `after` holds now."""
        self._open = False
        if not self._undone:
            return None
        self._done.append(self._undone.pop())
        return self._done[-1]
