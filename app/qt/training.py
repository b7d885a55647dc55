"""Show what trains on every page: in the status bar, on the sidebar's Runs icon, in the window's title."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QHBoxLayout, QToolButton, QWidget

from app.core.runs.training import NowTraining, Training
from app.qt.runs.rows import run_status
from app.qt.theme import colours, set_icon
from app.qt.widgets import until_destroyed

_RING = 15
"""Diameter of the ring, in Qt's pixels."""
_PEN = 2.5
_LONGEST_NAME = 40


def training_words(training: Training) -> str:
    """Return name, step and time left in one line."""
    words = f"{_short(training.summary.name)} · {run_status(training.summary, training.left, begins=training.begins)}"
    return words + (f" (+{training.others})" if training.others else "")


def title_of(training: Training | None) -> str:
    """Return the window's title."""
    if training is None:
        return "Impasto"
    share = f"{training.share:.0%} · " if training.share is not None else ""
    return f"{share}{_short(training.summary.name)} – Impasto"


class TrainingLine(QWidget):
    """The part of the status bar about training; hidden while nothing trains."""

    opened = Signal()
    """The run is to be shown."""

    def __init__(self, training: NowTraining, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._training = training
        self.words, self.button = QToolButton(), QToolButton()
        self.words.setToolTip(self.tr("Show this run"))
        self.words.clicked.connect(self.opened)
        self.button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.button.clicked.connect(self._act)
        row = QHBoxLayout(self)
        row.setContentsMargins(6, 0, 6, 0)
        row.setSpacing(2)
        row.addWidget(self.words)
        row.addWidget(self.button)
        until_destroyed(self, training.changed.connect(lambda _: self._show()))
        self._show()

    def _act(self) -> None:
        now = self._training.now
        if now and now.ending:
            self._training.keep_training()
        else:
            self._training.pause()

    def _show(self) -> None:
        now = self._training.now
        self.setVisible(now is not None)
        if now is None:
            return
        self.words.setText(training_words(now))
        ends = now.ending is not None
        self.button.setText(self.tr("Keep training") if ends else self.tr("Pause"))
        self.button.setEnabled(now.ending is None or not now.ending.accepted)
        set_icon(self.button, "undo" if ends else "pause")


class TrainingRing(QWidget):
    """A ring over a button's icon that fills as the training proceeds; the mouse reaches the button through it."""

    def __init__(self, button: QToolButton) -> None:
        super().__init__(button)
        self.share: float | None = None
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.resize(_RING, _RING)
        self._button = button
        self.hide()

    def show_training(self, training: Training | None) -> None:
        """Show how far it is; an empty ring while that is not known, none where nothing trains."""
        share = training.share if training else None
        if training is not None:
            self.move(self._button.width() // 2 + 8, 4)
        if share != self.share:
            self.share = share
            self.update()
        self.setVisible(training is not None)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw the whole ring, and over it the share that is done."""
        scheme = colours()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        place = QRectF(self.rect()).adjusted(_PEN, _PEN, -_PEN, -_PEN)
        painter.setBrush(QColor(scheme.rail))
        for colour, share in ((scheme.edge, 1.0), (scheme.focus, self.share or 0.0)):
            painter.setPen(QPen(QColor(colour), _PEN))
            painter.drawArc(place, 90 * 16, -round(share * 360 * 16))


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
