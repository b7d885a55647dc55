"""Code shared by the lists of runs and queue entries: a base class for their models, painting, and status texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from PySide6.QtCore import (
    QAbstractListModel,
    QCoreApplication,
    QLocale,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    QRectF,
    Qt,
)
from PySide6.QtGui import QColor, QFont, QPainter
from PySide6.QtWidgets import (
    QStyle,
    QStyleOptionViewItem,
)

from app.core.runs.summary import Missing, RunSummary, State
from app.core.runs.training import Training
from app.qt.theme import colors
from app.qt.widgets import QT_TRANSLATE_NOOP, format_duration, format_past
from trainer.protocol.commands import EndingName
from trainer.protocol.events import Phase

Index = QModelIndex | QPersistentModelIndex
DOT = 8
"""Diameter of a row's status dot, in logical pixels."""
_Row = TypeVar("_Row")
_STATES: dict[State, tuple[str, str]] = {
    "new": (QT_TRANSLATE_NOOP("RunState", "Not started"), "muted"),
    "running": (QT_TRANSLATE_NOOP("RunState", "Running"), "good"),
    "paused": (QT_TRANSLATE_NOOP("RunState", "Paused"), "warning"),
    "stopped": (QT_TRANSLATE_NOOP("RunState", "Stopped"), "muted"),
    "done": (QT_TRANSLATE_NOOP("RunState", "Done"), "muted"),
    "failed": (QT_TRANSLATE_NOOP("RunState", "Failed"), "bad"),
    "interrupted": (QT_TRANSLATE_NOOP("RunState", "Interrupted"), "bad"),
    "unknown": (QT_TRANSLATE_NOOP("RunState", "Cannot be read"), "bad"),
}
_MISSING: dict[Missing, str] = {
    "gone": QT_TRANSLATE_NOOP("RunState", "Folder deleted or moved"),
    "unreachable": QT_TRANSLATE_NOOP("RunState", "Drive not connected"),
}
_ENDINGS: dict[EndingName, str] = {
    "pause": QT_TRANSLATE_NOOP("RunState", "Pausing…"),
    "stop": QT_TRANSLATE_NOOP("RunState", "Stopping…"),
}
_PHASES: dict[Phase, str] = {
    "download": QT_TRANSLATE_NOOP("RunState", "Downloading the base"),
    "load": QT_TRANSLATE_NOOP("RunState", "Loading the base"),
    "check": QT_TRANSLATE_NOOP("RunState", "Checking"),
    "cache_pictures": QT_TRANSLATE_NOOP("RunState", "Encoding images"),
    "cache_texts": QT_TRANSLATE_NOOP("RunState", "Encoding captions"),
    "train": QT_TRANSLATE_NOOP("RunState", "Training"),
    "preview": QT_TRANSLATE_NOOP("RunState", "Generating previews"),
    "validate": QT_TRANSLATE_NOOP("RunState", "Measuring validation loss"),
    "save": QT_TRANSLATE_NOOP("RunState", "Saving"),
}


class StatusModel(QAbstractListModel, Generic[_Row]):
    """List model whose rows have status texts; `key` returns a value that identifies a row."""

    def __init__(self, key: Callable[[_Row], object], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._key = key
        self.rows: Sequence[_Row] = ()
        self.words: Sequence[str] = ()
        """Status text of each row."""

    def update_rows(self, rows: Sequence[_Row], words: Sequence[str]) -> bool:
        """Replace the rows; return whether their keys changed. If not, the view keeps its scroll position."""
        others = [*map(self._key, rows)] != [*map(self._key, self.rows)]
        before = list(zip(self.rows, self.words, strict=True))
        if others:
            self.beginResetModel()
        self.rows, self.words = tuple(rows), tuple(words)
        if others:
            self.endResetModel()
            return True
        for place, (old, new) in enumerate(zip(before, zip(rows, words, strict=True), strict=True)):
            if old != new:
                self.dataChanged.emit(self.index(place), self.index(place))
        return False

    def index_of(self, key: object) -> QModelIndex:
        """Return the index of the row with this key; invalid if there is none."""
        place = next((place for place, row in enumerate(self.rows) if self._key(row) == key), -1)
        return self.index(place) if place >= 0 else QModelIndex()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: N802, B008 (Qt's signature)
        """Return the number of rows."""
        return 0 if parent.isValid() else len(self.rows)


def paint_background(painter: QPainter, option: QStyleOptionViewItem) -> bool:
    """Paint a row's background; return whether the row is selected."""
    scheme = colors()
    chosen = bool(option.state & QStyle.StateFlag.State_Selected)
    hovered = bool(option.state & QStyle.StateFlag.State_MouseOver)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.fillRect(option.rect, QColor(scheme.accent if chosen else scheme.hover if hovered else scheme.base))
    return chosen


def paint_dot(painter: QPainter, line: QRect, color: str) -> None:
    """Paint a row's status dot at the left end of a line."""
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(color))
    painter.drawEllipse(QRectF(line.left(), line.top() + (line.height() - DOT) / 2, DOT, DOT))


def paint_words(painter: QPainter, place: QRect, text: str, color: str, font: QFont) -> None:
    """Paint one line of text, elided if it is too long."""
    painter.setFont(font)
    painter.setPen(QColor(color))
    cut = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, place.width())
    painter.drawText(place, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), cut)


def paint_focus(painter: QPainter, option: QStyleOptionViewItem, chosen: bool) -> None:
    """Paint the focus ring around a row that has the focus."""
    if option.state & QStyle.StateFlag.State_HasFocus:
        painter.setPen(QColor(colors().on_accent if chosen else colors().focus))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawRoundedRect(QRectF(option.rect).adjusted(1.5, 1.5, -1.5, -1.5), 3, 3)


def state_word(state: State) -> str:
    """Return the translated name of a state."""
    return _tr(_STATES[state][0])


def run_word(run: RunSummary) -> str:
    """Return the translated name of a run's state or, if its folder is missing, why it is missing."""
    return _tr(_MISSING[run.missing]) if run.missing else state_word(run.state)


def ending_word(name: EndingName) -> str:
    """Return the translated status of a run that is pausing or stopping."""
    return _tr(_ENDINGS[name])


def starting_word() -> str:
    """Return the translated status of a run whose engine is starting."""
    return _tr("Starting…")


def state_color(state: State) -> str:
    """Return the color role (a field of `Colors`) for a state."""
    return _STATES[state][1]


def run_status(run: RunSummary, left: float | None, *, starting: bool = False) -> str:
    """Return the status text below a run's name.

    `left` is the time left in seconds, or None if unknown; `starting` is whether the run's engine is starting.
    """
    number = QLocale().toString
    if run.state == "running":
        doing = _tr(_PHASES[run.phase]) if run.phase and run.phase != "train" else ""
        if run.ending:
            doing, left = ending_word(run.ending.name), None
        time_left = _tr("{duration} left").format(duration=format_duration(left)) if left is not None else ""
        steps = _tr("{step} of {steps}").format(step=number(run.step), steps=number(run.steps)) if run.steps else ""
        return " · ".join(filter(None, (doing or _tr("Running"), steps, time_left)))
    parts = [starting_word() if starting else run_word(run)]
    if run.steps and run.state == "done":
        parts.append(_tr("{steps} steps").format(steps=number(run.step)))
    elif run.steps:
        parts.append(_tr("{step} of {steps}").format(step=number(run.step), steps=number(run.steps)))
    if run.started and not starting:
        parts.append(format_past(run.started, time.time()))
    return " · ".join(parts)


def _tr(text: str) -> str:
    return QCoreApplication.translate("RunState", text)


_LONGEST_NAME = 40


def training_words(training: Training) -> str:
    """Return one line with the name, step and time left of a run that is training."""
    status = run_status(training.summary, training.left, starting=training.is_starting)
    words = f"{short_name(training.summary.name)} · {status}"
    return words + (f" (+{training.others})" if training.others else "")


def short_name(name: str) -> str:
    """Return a name, shortened with an ellipsis if it is too long."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
