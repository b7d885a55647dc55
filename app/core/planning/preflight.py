"""Everything that stands in the way of a job, or that somebody should think over before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.core.planning.answer import Answer, Obstacle
from app.core.words import QT_TRANSLATE_NOOP, sentence_of
from trainer.errors import ImpastoError

if TYPE_CHECKING:
    from app.core.jobs.draft import Draft

_ORDER: Mapping[str, int] = {"error": 0, "warning": 1, "info": 2}
_SET_RIGHT = QT_TRANSLATE_NOOP("Preflight", "Set this right before you start.")
_CHOOSE_BASE = QT_TRANSLATE_NOOP("Preflight", "Choose a base: the model that the LoRA will change.")
_ADD_PICTURES = QT_TRANSLATE_NOOP("Preflight", "Add the pictures to learn from.")
_TO_CHOOSE: Mapping[str, tuple[str, str]] = {
    "base": ("base.model", _CHOOSE_BASE),
    "base.model": ("base.model", _CHOOSE_BASE),
    "dataset": ("dataset.folders", _ADD_PICTURES),
    "dataset.folders": ("dataset.folders", _ADD_PICTURES),
}
"""What a new job lacks is no fault of the user's: it is asked for."""
_STILL_TO_COME = QT_TRANSLATE_NOOP(
    "Preflight",
    "What the base is will be known once it is downloaded. Choose a recipe for its family to see what it needs.",
)
_CHOOSE_ANOTHER = QT_TRANSLATE_NOOP("Preflight", "Choose another base.")
_IN_THE_APP: Mapping[str, tuple[str, str]] = {
    "run.folder": ("output.runs", QT_TRANSLATE_NOOP("Preflight", "Choose a folder that you may write to.")),
    "run.room": (
        "output.runs",
        QT_TRANSLATE_NOOP("Preflight", "Make room on that disk, or choose a folder on another one."),
    ),
    "gpu.none": ("", QT_TRANSLATE_NOOP("Preflight", "Choose another GPU above to plan for.")),
    "job.invalid": ("", _SET_RIGHT),
    "job.toml": ("", _SET_RIGHT),
    "job.unreadable": ("", QT_TRANSLATE_NOOP("Preflight", "Choose another job on the left, or make a new one.")),
}
"""Errors by their codes whose remedies speak of commands and keys: the setting concerned, and what to do here."""
_THINK_OVER = QT_TRANSLATE_NOOP("Preflight", "It works, but hardly anybody wants it so.")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing, with what to do about it."""

    severity: Literal["error", "warning", "info"]
    """error: the run would not start or not fit."""
    sentence: str
    """Empty where the remedy says it all."""
    remedy: str = ""
    """Marked for translation in the context "Preflight", or the engine's own words."""
    key: str = ""
    """The setting concerned, if it is one."""


def preflight(draft: Draft, answer: Answer | None, error: ImpastoError | None) -> tuple[Check, ...]:
    """Return all checks that have something to say, the worst first."""
    failed = [_of_error(draft, error)] if error else []
    found = [*_of_draft(draft), *failed, *(_of_answer(answer) if answer else ())]
    return tuple(sorted(dict.fromkeys(found), key=lambda check: _ORDER[check.severity]))


def _of_draft(draft: Draft) -> Iterator[Check]:
    for key, reason in draft.problems:
        if reason.startswith("is missing") and key in _TO_CHOOSE:
            setting, wish = _TO_CHOOSE[key]
            yield Check("error", "", wish, setting)
        else:
            yield Check("error", sentence_of(reason), _SET_RIGHT, key)
    for key, reason in draft.doubts.items():
        yield Check("warning", sentence_of(reason), _THINK_OVER, key)


def _of_error(draft: Draft, error: ImpastoError) -> Check:
    if error.code == "plan.family":
        if Path(draft.base).is_absolute():
            return Check("error", error.sentence, _CHOOSE_ANOTHER, "base.model")
        return Check("warning", "", _STILL_TO_COME, "base.family")  # a Hub id or a link: no fault of the job's
    return _told(error)


def _told(error: ImpastoError | Obstacle) -> Check:
    key, remedy = _IN_THE_APP.get(error.code, ("", error.remedy))
    return Check("error", error.sentence, remedy, key)


def _of_answer(answer: Answer) -> Iterator[Check]:
    for obstacle in answer.obstacles:
        yield _told(obstacle)
    for remark in answer.remarks:
        yield Check("info", remark)
    for finding in answer.findings:
        yield Check(finding.severity, finding.sentence, finding.remedy)
