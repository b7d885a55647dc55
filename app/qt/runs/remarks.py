"""Remarks about a run, shown as sentences with icons, the latest first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from PySide6.QtCore import QCoreApplication, QLocale, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QLabel, QScrollArea, QSizePolicy, QWidget

from app.core.runs.run import Kind, RunRemark
from app.core.words import full_message
from app.qt.theme import icon
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import format_memory
from trainer.protocol import events

_ICONS: dict[Kind, tuple[str, str]] = {
    "info": ("info", "muted"),
    "warning": ("warning", "warning"),
    "error": ("error", "bad"),
}
_MAX_REMARKS = 40
_ICON_SIZE = 16
_MAX_HEIGHT = 168
_BORDER = 1
_REASONS = {
    "loss": _NOOP("Remarks", "the loss was not finite"),
    "gradient": _NOOP("Remarks", "the gradient was not finite"),
    "scale": _NOOP("Remarks", "the loss scale was too high for fp16, and was lowered"),
}
_SLOW_REASONS = {
    "spilled": _NOOP("Remarks", "GPU memory is full, and the driver may be using main memory instead"),
    "others": _NOOP("Remarks", "other programs are using the GPU"),
    "hot": _NOOP("Remarks", "the GPU is hot and has lowered its clock"),
    "unknown": _NOOP("Remarks", "cause unknown; check other programs and power saving"),
}
_PHASE_WORDS = {
    "load": _NOOP("Remarks", "loading"),
    "quantise": _NOOP("Remarks", "quantizing the base"),
    "cache_pictures": _NOOP("Remarks", "encoding images"),
    "cache_texts": _NOOP("Remarks", "encoding captions"),
    "first_step": _NOOP("Remarks", "the first step"),
    "train": _NOOP("Remarks", "training"),
    "validate": _NOOP("Remarks", "validation"),
    "preview": _NOOP("Remarks", "generating previews"),
    "checkpoint": _NOOP("Remarks", "writing a checkpoint"),
    "save": _NOOP("Remarks", "saving"),
}
_GROWING = {
    "weights": _NOOP("Remarks", "base weights"),
    "adapter": _NOOP("Remarks", "LoRA weights"),
    "gradients": _NOOP("Remarks", "gradients"),
    "optimizer": _NOOP("Remarks", "optimizer state"),
    "other": _NOOP("Remarks", "memory that belongs to no tensor in Python, such as saved activations"),
}
_STAGES = {
    "decode": _NOOP("Remarks", "decoding {rate}"),
    "encode": _NOOP("Remarks", "encoding {rate}"),
    "write": _NOOP("Remarks", "writing {rate}"),
}


class RemarkText(NamedTuple):
    """One remark, ready to show."""

    kind: Kind
    sentence: str
    when: str = ""


class RemarkPanel(QScrollArea):
    """Scrollable list of remarks, as tall as its text up to a limit, and hidden if it is empty."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.texts: list[RemarkText] = []
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Remarks"))
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Maximum)
        self.hide()

    def show_remarks(self, remarks: Sequence[RemarkText]) -> None:
        """Show these remarks, the first on top."""
        if list(remarks) == self.texts:
            return
        self.texts = list(remarks)
        page = QWidget()
        grid = QGridLayout(page)
        grid.setContentsMargins(12, 8, 12, 8)
        grid.setHorizontalSpacing(8)
        grid.setVerticalSpacing(4)
        grid.setColumnStretch(1, 1)
        for row, one in enumerate(self.texts[:_MAX_REMARKS]):
            grid.addWidget(_RemarkIcon(one.kind), row, 0, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(_words(one.sentence, "text"), row, 1, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(_words(one.when, "muted"), row, 2, Qt.AlignmentFlag.AlignTop)
        grid.setRowStretch(grid.rowCount(), 1)
        self.setWidget(page)
        self.setVisible(bool(remarks))
        self.updateGeometry()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Update the height, because the text wraps differently at a new width."""
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():  # not the height, which this update may change itself
            self.updateGeometry()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return a size that fits all remarks, up to the maximum height."""
        page = self.widget()
        layout = page.layout() if page else None
        if layout is None:
            return QSize(0, 0)
        width = max(200, self.viewport().width())
        return QSize(width, min(_MAX_HEIGHT, layout.totalHeightForWidth(width) + 2 * _BORDER))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return a size that fits about two lines; the default minimum of a scroll area is larger."""
        return QSize(100, min(self.sizeHint().height(), 2 * self.fontMetrics().height()))


class _RemarkIcon(QWidget):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._name, self._role = _ICONS[kind]
        self.setFixedSize(_ICON_SIZE, max(_ICON_SIZE, self.fontMetrics().height()))

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the icon in the current theme's colors."""
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


def sentence(remark: RunRemark) -> str:
    """Return a remark as one or more translated sentences."""
    match remark.event:
        case events.ErrorEvent() as event:
            return full_message(event)
        case events.Notice() as event:
            return event.sentence
        case events.CachingSpeed() as event:
            return _caching_speed(event)
        case events.Skipped() as event:
            return _skipped(event, remark)
        case events.MemoryExhausted() as event:
            return _exhausted(event)
        case events.SteppedDown() as event:
            return _stepped_down(event)
        case events.Slow() as event:
            return _slow(event)
        case events.DataWait() as event:
            return _data_wait(event)
        case events.MemoryLeak() as event:
            return leak(event)
        case events.CommandEvent() as event:
            return translate("Remarks", "The command “{name}” was not carried out: {detail}").format(
                name=event.name, detail=event.detail or event.outcome
            )
    raise AssertionError(remark)


def _caching_speed(event: events.CachingSpeed) -> str:
    if event.phase == "cache_pictures":
        words = translate("Remarks", "Images encoded: {count} in {seconds} s ({rate}/s).")
    else:
        words = translate("Remarks", "Captions encoded: {count} in {seconds} s ({rate}/s).")
    seconds = QLocale().toString(event.seconds, "f", 1)
    total = words.format(count=_number(event.count), seconds=seconds, rate=_rate(event.rate))
    stages = [translate("Remarks", _STAGES[name]).format(rate=_rate(limit)) for name, limit in event.limits.items()]
    if not stages:
        return total
    per_stage = translate("Remarks", "Throughput of each stage, per second: {stages}.")
    return f"{total} {per_stage.format(stages=', '.join(stages))}"


def _skipped(event: events.Skipped, remark: RunRemark) -> str:
    reason = translate("Remarks", _REASONS.get(event.reason, event.reason))
    last = remark.last
    if isinstance(last, events.Skipped):
        words = translate("Remarks", "{count} steps between {first} and {last} were skipped: {reason}.")
        return words.format(
            count=_number(remark.times), first=_number(event.step), last=_number(last.step), reason=reason
        )
    return translate("Remarks", "Step {step} was skipped: {reason}.").format(step=_number(event.step), reason=reason)


def _exhausted(event: events.MemoryExhausted) -> str:
    place = [translate("Remarks", _PHASE_WORDS.get(event.phase, event.phase)), event.stage, event.module]
    words = translate("Remarks", "GPU memory ran out after step {step} ({where}).")
    parts = [words.format(step=_number(event.step), where=", ".join(part for part in place if part))]
    if event.requested:
        parts.append(translate("Remarks", "{size} more was needed.").format(size=format_memory(event.requested)))
    if event.reserved is not None and event.forecast is not None:
        words = translate("Remarks", "{taken} was in use; the forecast was {forecast}.")
        parts.append(words.format(taken=format_memory(event.reserved), forecast=format_memory(event.forecast)))
    return " ".join(parts)


def _stepped_down(event: events.SteppedDown) -> str:
    keys = ", ".join(f"fit.{key} = {json.dumps(value)}" for key, value in event.changes.items())
    if "quantize" in event.changes:
        cost = translate("Remarks", "A base with fewer bits loses some quality.")
    elif "vae_encode_tiling" in event.changes:
        cost = translate("Remarks", "Latents of images encoded in tiles differ by about 5%.")
    else:
        cost = (
            translate("Remarks", "The result stays the same.")
            if event.exact
            else translate("Remarks", "The result differs only by rounding.")
        )
    words = translate("Remarks", "Training continues from step {step} with settings that use less memory: {keys}.")
    return f"{words.format(step=_number(event.step + 1), keys=keys)} {cost}"


def _slow(event: events.Slow) -> str:
    words = translate(
        "Remarks", "Training slowed down at step {step} ({now} s per step instead of {usual} s): {reason}."
    )
    reason = translate("Remarks", _SLOW_REASONS.get(event.reason, _SLOW_REASONS["unknown"]))
    now, usual = QLocale().toString(event.seconds, "f", 1), QLocale().toString(event.median, "f", 1)
    cause = f"{reason} ({event.detail})" if event.detail else reason
    return words.format(step=_number(event.step), now=now, usual=usual, reason=cause)


def _data_wait(event: events.DataWait) -> str:
    share = QLocale().toString(100 * event.share, "f", 1)
    parts = [translate("Remarks", "Training waits for data {share}% of the time.").format(share=share)]
    if event.fixed:
        keys = ", ".join(f"fit.{key}" for key in event.fixed)
        parts.append(translate("Remarks", "Reset {keys}, so that loading adapts to this PC.").format(keys=keys))
    parts.append(translate("Remarks", "Move the cache to a faster disk, or close programs that use this one."))
    return " ".join(parts)


def leak(event: events.MemoryLeak) -> str:
    """Return a leak as sentences: which memory grows, how fast, since when, and what it is that grows."""
    if event.memory == "gpu":
        words = translate(
            "Remarks", "GPU memory keeps growing: {rate}% per 100 steps since step {since}, {grown} so far."
        )
    else:
        words = translate(
            "Remarks", "Main memory keeps growing: {rate}% per 100 steps since step {since}, {grown} so far."
        )
    rate = QLocale().toString(100 * event.rate, "f", 1)
    grown = words.format(rate=rate, since=_number(event.since), grown=format_memory(event.grown))
    tensors = translate("Remarks", "tensors of {type}")
    words_of = {name: translate("Remarks", known) for name, known in _GROWING.items()}
    names = [
        f"{words_of.get(name) or tensors.format(type=name)} {format_memory(size)}" for name, size in event.grew.items()
    ]
    latest = translate("Remarks", "In the latest steps, this grew: {names}. Please report this leak.")
    return f"{grown} {latest.format(names=', '.join(names))}" if names else grown


def _rate(number: float) -> str:
    """Format a rate with three significant digits, or without decimals if it is 100 or more."""
    return QLocale().toString(number, "f", 0) if number >= 100 else QLocale().toString(number, "g", 3)


def _number(number: int) -> str:
    return QLocale().toString(number)
