"""The undo of a job, as the window names it."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.jobs.draft import Draft, Step
from app.core.jobs.settings import full_title, setting
from app.qt.train.form.editors import words
from app.qt.words import QT_TRANSLATE_NOOP

_ESSENTIALS = {
    "base.model": QT_TRANSLATE_NOOP("Train", "Base"),
    "dataset.folders": QT_TRANSLATE_NOOP("Train", "Pictures"),
    "output.runs": QT_TRANSLATE_NOOP("Train", "Output"),
}


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
    """A key as the page calls it, all else translated."""
    if name is None:
        return None
    if name in _ESSENTIALS:
        return words(_ESSENTIALS[name])
    try:
        title = setting(name).title
    except KeyError:
        return words(name)
    return title if any(part.isdigit() for part in name.split(".")) else full_title(name)
