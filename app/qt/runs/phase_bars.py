"""The phases of a run beside one another, each with its name, how far it is, and a bar."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QLocale, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QWidget

from app.core.runs.run import Run
from app.qt.durations import duration
from app.qt.theme import colours
from app.qt.words import QT_TRANSLATE_NOOP as _NOOP
from trainer.protocol.events import Phase
from trainer.protocol.progress import PhaseState

_NAMES: dict[Phase, str] = {
    "download": _NOOP("Phases", "Download"),
    "load": _NOOP("Phases", "Load"),
    "check": _NOOP("Phases", "Check"),
    "cache_pictures": _NOOP("Phases", "Pictures"),
    "cache_texts": _NOOP("Phases", "Captions"),
    "train": _NOOP("Phases", "Train"),
    "validate": _NOOP("Phases", "Measure"),
    "preview": _NOOP("Phases", "Preview"),
    "save": _NOOP("Phases", "Save"),
}
"""In the order in which they are shown, which is that of a run."""
_BAR = 6
_TRAIN_WEIGHT = 3
_UNKNOWN = 0.33
"""How much of a bar is filled while nobody knows how much there is to do."""


class PhaseBar(QWidget):
    """One phase."""

    def __init__(self, phase: Phase, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.name = QCoreApplication.translate("Phases", _NAMES[phase])
        self.amount = ""
        self.part: float | None = 0.0
        """How much is done, from 0 to 1; None while nobody knows."""
        self.current = False
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_state(self, amount: str, part: float | None, *, current: bool) -> None:
        """Show how far it is."""
        if (amount, part, current) != (self.amount, self.part, self.current):
            self.amount, self.part, self.current = amount, part, current
            percent = "" if part is None else QLocale().toString(round(100 * part)) + QLocale().percent()
            self.setAccessibleName(" ".join(filter(None, (self.name, percent, amount))))
            self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the room for its name."""
        metrics = self.fontMetrics()
        return QSize(metrics.horizontalAdvance(self.name) + 12, metrics.height() + _BAR + 4)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the least room: its name is cut where there is no more."""
        return QSize(24, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint name and amount above the bar."""
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        metrics = self.fontMetrics()
        line = QRect(0, 0, self.width(), metrics.height())
        painter.setPen(QColor(colours().text if self.current else colours().muted))
        painter.drawText(line, int(Qt.AlignmentFlag.AlignLeft), self._cut(self.name, line.width()))
        left = line.width() - metrics.horizontalAdvance(self.name) - 8
        if metrics.horizontalAdvance(self.amount) <= left:
            painter.setPen(QColor(colours().muted))
            painter.drawText(line, int(Qt.AlignmentFlag.AlignRight), self.amount)
        room = QRectF(0.5, line.bottom() + 3.5, self.width() - 1, _BAR - 1)
        self._paint_bar(painter, room)
        painter.end()

    def _paint_bar(self, painter: QPainter, room: QRectF) -> None:
        painter.setPen(QColor(colours().edge))
        painter.setBrush(QColor(colours().base))
        painter.drawRoundedRect(room, _BAR / 2, _BAR / 2)
        part = _UNKNOWN if self.part is None else self.part
        if part > 0:
            painter.setBrush(QColor(colours().focus if self.current else colours().edge))
            painter.setPen(Qt.PenStyle.NoPen)
            filled = QRectF(room.left(), room.top(), max(room.height(), room.width() * part), room.height())
            painter.drawRoundedRect(filled, _BAR / 2, _BAR / 2)

    def _cut(self, text: str, width: int) -> str:
        return self.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, width)


class PhaseBars(QWidget):
    """The phases that there were in the latest attempt."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.bars: dict[Phase, PhaseBar] = {}
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(12)
        for phase in _NAMES:
            bar = self.bars[phase] = PhaseBar(phase)
            row.addWidget(bar, _TRAIN_WEIGHT if phase == "train" else 1)
            bar.hide()

    def show_run(self, run: Run | None) -> None:
        """Show how far a run is."""
        phases = run.phases if run else {}
        for phase, bar in self.bars.items():
            state = phases.get(phase)
            bar.setVisible(state is not None)
            if run and state:
                current = run.alive and run.story.current == phase
                bar.show_state(_amount(phase, state, run.now() if current else None), _part(state), current=current)
        self.setVisible(bool(phases))


def _part(state: PhaseState) -> float | None:
    if state.total:
        return min(1.0, state.done / state.total)
    return None if state.started is not None else 1.0


def _amount(phase: Phase, state: PhaseState, now: float | None) -> str:
    """Return how much is done while it goes on, and for steps always; else how long it took."""
    if phase != "train" and now is None:
        return duration(state.seconds)
    if state.total is None or state.total <= 1:
        return duration(state.elapsed(now or 0.0)) if now else ""
    return f"{_units(phase, state.done)} / {_units(phase, state.total)}"


def _units(phase: Phase, number: int) -> str:
    if phase == "download":
        return QLocale().formattedDataSize(number, 1, QLocale.DataSizeFormat.DataSizeSIFormat)
    return QLocale().toString(number)
