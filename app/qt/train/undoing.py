"""The undo of a job, as the window names it."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.jobs.draft import Draft
from app.core.jobs.settings import setting
from app.core.jobs.undo import Step
from app.qt.train.form.editors import words


@dataclass(frozen=True, slots=True)
class Named:
    """A step in the user's words."""

    name: str


class DraftUndo:
    """Takes back what was done to the job that is open."""

    def __init__(self) -> None:
        self.draft: Draft | None = None

    @property
    def undo_name(self) -> str | None:
        """What would be taken back."""
        return _words(self.draft.undo_name) if self.draft else None

    @property
    def redo_name(self) -> str | None:
        """What would be done again."""
        return _words(self.draft.redo_name) if self.draft else None

    def undo(self) -> Named | None:
        """Take the last change of the job back."""
        return _named(self.draft.undo() if self.draft else None)

    def redo(self) -> Named | None:
        """Do it again."""
        return _named(self.draft.redo() if self.draft else None)


def _named(step: Step | None) -> Named | None:
    return Named(_words(step.name) or "") if step else None


def _words(name: str | None) -> str | None:
    """A key by its title, all else translated."""
    if name is None:
        return None
    try:
        return setting(name).title
    except KeyError:
        return words(name)
