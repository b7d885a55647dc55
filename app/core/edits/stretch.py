"""The steps of the history that one dialog made: within it, only they are taken back and done again."""

from __future__ import annotations

from app.core.edits.edit import Edit, History


class Stretch:
    """It begins when it is made; what lies before it in the history is out of reach."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._done, self._undone = history.depths

    @property
    def can_undo(self) -> bool:
        """Tell whether there is a step of this stretch to take back."""
        return self._history.depths[0] > self._done

    @property
    def can_redo(self) -> bool:
        """Tell whether one was taken back within it."""
        return self._history.depths[1] > self._undone

    def do(self, edit: Edit) -> None:
        """Make an edit."""
        self._history.do(edit)
        self._undone = min(self._undone, self._history.depths[1])  # it ended what could be done again

    def undo(self) -> None:
        """Take the last step back, if it is one of this stretch."""
        self._history.undo(above=self._done)

    def redo(self) -> None:
        """Make it again."""
        self._history.redo(above=self._undone)
