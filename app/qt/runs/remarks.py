"""Sentences about a run, the most telling first, each with its sign."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from PySide6.QtCore import QCoreApplication, QLocale, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QLabel, QScrollArea, QSizePolicy, QWidget

from app.core.runs.run import Kind, Remark
from app.core.words import in_words
from app.qt.theme import icon
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from trainer.protocol import events

_SIGNS: dict[Kind, tuple[str, str]] = {
    "info": ("info", "muted"),
    "warning": ("warning", "warning"),
    "error": ("error", "bad"),
}
_MOST = 40
_SIGN = 16
_HIGHEST = 168
_BORDER = 1
_REASONS = {
    "loss": _NOOP("Remarks", "the loss was no finite number"),
    "gradient": _NOOP("Remarks", "the gradient was no finite number"),
    "scale": _NOOP("Remarks", "the loss scale was too high for fp16, and was lowered"),
}
_SLOWNESS = {
    "spilled": _NOOP("Remarks", "the card is full, and its driver may use main memory instead"),
    "others": _NOOP("Remarks", "other programs use the card"),
    "hot": _NOOP("Remarks", "the card is hot and slows itself down"),
    "unknown": _NOOP("Remarks", "no reason is known; look for other programs and for power saving"),
}
_WORKS = {
    "load": _NOOP("Remarks", "loading"),
    "quantise": _NOOP("Remarks", "quantising the base"),
    "cache_pictures": _NOOP("Remarks", "encoding pictures"),
    "cache_texts": _NOOP("Remarks", "encoding captions"),
    "first_step": _NOOP("Remarks", "the first step"),
    "train": _NOOP("Remarks", "training"),
    "validate": _NOOP("Remarks", "measuring"),
    "preview": _NOOP("Remarks", "drawing previews"),
    "checkpoint": _NOOP("Remarks", "writing a checkpoint"),
    "save": _NOOP("Remarks", "saving"),
}
_STAGES = {
    "decode": _NOOP("Remarks", "decoding {rate}"),
    "encode": _NOOP("Remarks", "encoding {rate}"),
    "write": _NOOP("Remarks", "writing {rate}"),
}


class RemarkText(NamedTuple):
    """One of them."""

    kind: Kind
    sentence: str
    when: str = ""


class RemarkPanel(QScrollArea):
    """As high as its sentences need, up to a third of a small window; not there where there are none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.told: list[RemarkText] = []
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Remarks"))
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Maximum)
        self.hide()

    def show_told(self, told: Sequence[RemarkText]) -> None:
        """Show these, the first on top."""
        if list(told) == self.told:
            return
        self.told = list(told)
        page = QWidget()
        grid = QGridLayout(page)
        grid.setContentsMargins(12, 8, 12, 8)
        grid.setHorizontalSpacing(8)
        grid.setVerticalSpacing(4)
        grid.setColumnStretch(1, 1)
        for row, one in enumerate(self.told[:_MOST]):
            grid.addWidget(_Sign(one.kind), row, 0, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(_words(one.sentence, "text"), row, 1, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(_words(one.when, "muted"), row, 2, Qt.AlignmentFlag.AlignTop)
        grid.setRowStretch(grid.rowCount(), 1)
        self.setWidget(page)
        self.setVisible(bool(told))
        self.updateGeometry()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Ask for another height: sentences break elsewhere."""
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self.updateGeometry()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the room that all sentences need, or as much as they may have."""
        page = self.widget()
        layout = page.layout() if page else None
        if layout is None:
            return QSize(0, 0)
        width = max(200, self.viewport().width())
        return QSize(width, min(_HIGHEST, layout.totalHeightForWidth(width) + 2 * _BORDER))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return room for a line: a scroll area asks for more by itself."""
        return QSize(100, min(self.sizeHint().height(), 2 * self.fontMetrics().height()))


class _Sign(QWidget):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._name, self._role = _SIGNS[kind]
        self.setFixedSize(_SIGN, max(_SIGN, self.fontMetrics().height()))

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the sign in the colours of now."""
        painter = QPainter(self)
        icon(self._name, self._role).paint(painter, self.rect())
        painter.end()


def _words(text: str, role: str) -> QLabel:
    label = QLabel(text)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setProperty("role", role)
    label.setWordWrap(role == "text")
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


translate = QCoreApplication.translate


def sentence(remark: Remark) -> str:
    """Return a remark as a sentence or two."""
    match remark.event:
        case events.ErrorEvent() as event:
            return in_words(event)
        case events.Notice() as event:
            return event.sentence
        case events.CachingSpeed() as event:
            return _cached(event)
        case events.Skipped() as event:
            return _skipped(event, remark)
        case events.MemoryExhausted() as event:
            return _exhausted(event)
        case events.SteppedDown() as event:
            return _stepped_down(event)
        case events.Slow() as event:
            return _slow(event)
        case events.CommandEvent() as event:
            return translate("Remarks", "“{name}” was not done: {detail}").format(
                name=event.name, detail=event.detail or event.outcome
            )
    raise AssertionError(remark)


def _cached(event: events.CachingSpeed) -> str:
    if event.phase == "cache_pictures":
        words = translate("Remarks", "Pictures encoded: {count} in {seconds} s, {rate} a second.")
    else:
        words = translate("Remarks", "Captions encoded: {count} in {seconds} s, {rate} a second.")
    seconds = QLocale().toString(event.seconds, "f", 1)
    told = words.format(count=_number(event.count), seconds=seconds, rate=_rate(event.rate))
    stages = [translate("Remarks", _STAGES[name]).format(rate=_rate(limit)) for name, limit in event.limits.items()]
    if not stages:
        return told
    alone = translate("Remarks", "So many a second each stage would do by itself: {stages}.")
    return f"{told} {alone.format(stages=', '.join(stages))}"


def _skipped(event: events.Skipped, remark: Remark) -> str:
    reason = translate("Remarks", _REASONS.get(event.reason, event.reason))
    last = remark.last
    if isinstance(last, events.Skipped):
        words = translate("Remarks", "{count} steps from {first} to {last} changed nothing: {reason}.")
        return words.format(
            count=_number(remark.times), first=_number(event.step), last=_number(last.step), reason=reason
        )
    return translate("Remarks", "Step {step} changed nothing: {reason}.").format(
        step=_number(event.step), reason=reason
    )


def _exhausted(event: events.MemoryExhausted) -> str:
    told = [translate("Remarks", _WORKS.get(event.phase, event.phase)), event.stage, event.module]
    words = translate("Remarks", "Memory ran out after step {step} ({where}).")
    parts = [words.format(step=_number(event.step), where=", ".join(part for part in told if part))]
    if event.requested:
        parts.append(translate("Remarks", "{size} more were needed.").format(size=_size(event.requested)))
    if event.reserved is not None and event.forecast is not None:
        words = translate("Remarks", "{taken} were taken, {forecast} forecast.")
        parts.append(words.format(taken=_size(event.reserved), forecast=_size(event.forecast)))
    return " ".join(parts)


def _stepped_down(event: events.SteppedDown) -> str:
    keys = ", ".join(f"fit.{key} = {json.dumps(value)}" for key, value in event.changes.items())
    if "quantise" in event.changes:
        cost = translate("Remarks", "A base in fewer bits costs some fidelity.")
    elif "vae_encode_tiling" in event.changes:
        cost = translate("Remarks", "Latents of images encoded in tiles differ by about 5 %.")
    else:
        cost = (
            translate("Remarks", "The result stays the same.")
            if event.exact
            else translate("Remarks", "The result differs by rounding.")
        )
    words = translate("Remarks", "It goes on from step {step} in a way that needs less memory: {keys}.")
    return f"{words.format(step=_number(event.step + 1), keys=keys)} {cost}"


def _slow(event: events.Slow) -> str:
    words = translate("Remarks", "Steps became slow at step {step} ({now} s instead of {usual} s): {reason}.")
    reason = translate("Remarks", _SLOWNESS.get(event.reason, _SLOWNESS["unknown"]))
    now, usual = QLocale().toString(event.seconds, "f", 1), QLocale().toString(event.median, "f", 1)
    told = f"{reason} ({event.detail})" if event.detail else reason
    return words.format(step=_number(event.step), now=now, usual=usual, reason=told)


def _size(number: int) -> str:
    return QLocale().formattedDataSize(number, 1, QLocale.DataSizeFormat.DataSizeTraditionalFormat)


def _rate(number: float) -> str:
    """Three digits, and no decimals of hundreds."""
    return QLocale().toString(number, "f", 0) if number >= 100 else QLocale().toString(number, "g", 3)


def _number(number: int) -> str:
    return QLocale().toString(number)
