"""How a run stands, in words and in a colour."""

from __future__ import annotations

import time

from PySide6.QtCore import QCoreApplication, QLocale

from app.core.runs.summary import Missing, RunSummary, State
from app.qt.durations import duration, moment
from app.qt.words import QT_TRANSLATE_NOOP
from trainer.protocol.commands import EndingName
from trainer.protocol.events import Phase

_STATES: dict[State, tuple[str, str]] = {
    "new": (QT_TRANSLATE_NOOP("RunState", "Never began"), "muted"),
    "running": (QT_TRANSLATE_NOOP("RunState", "Running"), "good"),
    "paused": (QT_TRANSLATE_NOOP("RunState", "Paused"), "warning"),
    "stopped": (QT_TRANSLATE_NOOP("RunState", "Stopped"), "muted"),
    "done": (QT_TRANSLATE_NOOP("RunState", "Done"), "muted"),
    "failed": (QT_TRANSLATE_NOOP("RunState", "Failed"), "bad"),
    "interrupted": (QT_TRANSLATE_NOOP("RunState", "Interrupted"), "bad"),
    "unknown": (QT_TRANSLATE_NOOP("RunState", "Cannot be read"), "bad"),
}
_MISSING: dict[Missing, str] = {
    "gone": QT_TRANSLATE_NOOP("RunState", "Not there any more"),
    "unreachable": QT_TRANSLATE_NOOP("RunState", "Cannot be reached"),
}
_ENDINGS: dict[EndingName, str] = {
    "pause": QT_TRANSLATE_NOOP("RunState", "Pausing…"),
    "stop": QT_TRANSLATE_NOOP("RunState", "Stopping…"),
}
_PHASES: dict[Phase, str] = {
    "download": QT_TRANSLATE_NOOP("RunState", "Downloading the base"),
    "load": QT_TRANSLATE_NOOP("RunState", "Loading the base"),
    "check": QT_TRANSLATE_NOOP("RunState", "Checking"),
    "cache_pictures": QT_TRANSLATE_NOOP("RunState", "Encoding pictures"),
    "cache_texts": QT_TRANSLATE_NOOP("RunState", "Encoding captions"),
    "train": QT_TRANSLATE_NOOP("RunState", "Training"),
    "preview": QT_TRANSLATE_NOOP("RunState", "Drawing previews"),
    "validate": QT_TRANSLATE_NOOP("RunState", "Measuring the loss"),
    "save": QT_TRANSLATE_NOOP("RunState", "Saving"),
}


def state_word(state: State) -> str:
    """Return one word for a state."""
    return _tr(_STATES[state][0])


def word_of(run: RunSummary) -> str:
    """Return one word for how a run stands."""
    return _tr(_MISSING[run.missing]) if run.missing else state_word(run.state)


def ending_word(name: EndingName) -> str:
    """Return the word for a run that is pausing or stopping."""
    return _tr(_ENDINGS[name])


def starting_word() -> str:
    """Return what is said of a run whose engine is on its way."""
    return _tr("Starting…")


def state_colour(state: State) -> str:
    """Return the role of `Colours` that a state has."""
    return _STATES[state][1]


def standing(run: RunSummary, left: float | None, *, begins: bool = False) -> str:
    """Return what the list says below a run's name.

    `left` are the seconds that it still needs, where known; a run that `begins` has an engine on its way.
    """
    number = QLocale().toString
    if run.state == "running":
        doing = _tr(_PHASES[run.phase]) if run.phase and run.phase != "train" else ""
        if run.ending:
            doing, left = ending_word(run.ending.name), None
        time_left = _tr("{duration} left").format(duration=duration(left)) if left is not None else ""
        steps = _tr("{step} of {steps}").format(step=number(run.step), steps=number(run.steps)) if run.steps else ""
        return " · ".join(filter(None, (doing or _tr("Running"), steps, time_left)))
    parts = [starting_word() if begins else word_of(run)]
    if run.steps and run.state == "done":
        parts.append(_tr("{steps} steps").format(steps=number(run.step)))
    elif run.steps:
        parts.append(_tr("{step} of {steps}").format(step=number(run.step), steps=number(run.steps)))
    if run.started and not begins:
        parts.append(moment(run.started, time.time()))
    return " · ".join(parts)


def _tr(text: str) -> str:
    return QCoreApplication.translate("RunState", text)
