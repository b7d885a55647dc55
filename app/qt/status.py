"""The status bar, plus the progress ring and the window title that show the current training."""

from __future__ import annotations

from PySide6.QtCore import QLocale, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import (
    QHBoxLayout,
    QLabel,
    QStatusBar,
    QToolButton,
    QWidget,
)

from app.core.disk.datasets import ReadingProgress
from app.core.edits.save_state import SaveState
from app.core.runs.training import NowTraining, Training
from app.core.session import Session
from app.core.words import full_message
from app.qt.runs.rows import short_name, training_words
from app.qt.theme import colors, set_icon
from app.qt.widgets import plain_tip, until_destroyed

_RING = 15
"""Diameter of the progress ring, in logical px."""
_PEN = 2.5
_SHOWN_MS = 6000


def title_of(training: Training | None) -> str:
    """Return the window title, with the progress and the name of the run that is training, if any."""
    if training is None:
        return "Impasto"
    share = f"{training.share:.0%} · " if training.share is not None else ""
    return f"{share}{short_name(training.summary.name)} – Impasto"


class TrainingStatus(QWidget):
    """Status bar widget for the run that is training; hidden if there is none."""

    opened = Signal()
    """Emitted when the user wants to see the run."""

    def __init__(self, training: NowTraining, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._training = training
        self.words, self.button = QToolButton(), QToolButton()
        self.words.setToolTip(self.tr("Show this run"))
        self.words.clicked.connect(self.opened)
        self.button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.button.clicked.connect(self._on_button_clicked)
        row = QHBoxLayout(self)
        row.setContentsMargins(6, 0, 6, 0)
        row.setSpacing(2)
        row.addWidget(self.words)
        row.addWidget(self.button)
        until_destroyed(self, training.changed.connect(lambda _: self._show()))
        self._show()

    def _on_button_clicked(self) -> None:
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
    """Progress ring over a button's icon; mouse events pass through it to the button."""

    def __init__(self, button: QToolButton) -> None:
        super().__init__(button)
        self.share: float | None = None
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.resize(_RING, _RING)
        self._button = button
        self.hide()

    def show_training(self, training: Training | None) -> None:
        """Show the training's progress: an empty ring if it is unknown, no ring if nothing is training."""
        share = training.share if training else None
        if training is not None:
            self.move(self._button.width() // 2 + 8, 4)
        if share != self.share:
            self.share = share
            self.update()
        self.setVisible(training is not None)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw the full ring, then the completed part over it."""
        scheme = colors()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        place = QRectF(self.rect()).adjusted(_PEN, _PEN, -_PEN, -_PEN)
        painter.setBrush(QColor(scheme.rail))
        for color, share in ((scheme.edge, 1.0), (scheme.focus, self.share or 0.0)):
            painter.setPen(QPen(QColor(color), _PEN))
            painter.drawArc(place, 90 * 16, -round(share * 360 * 16))


class StatusBar(QStatusBar):
    """Status bar that shows the image counts and the progress of reading folders, training, and saving changes."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.setSizeGripEnabled(False)
        self.saving, self.reading, self.counts = QLabel(), QLabel(), QLabel()
        self.saving.setContentsMargins(10, 0, 10, 0)
        self.counts.setContentsMargins(10, 0, 10, 0)
        self.reading.setProperty("role", "muted")
        self.addWidget(self.reading)
        self.training = TrainingStatus(session.training)
        self.addPermanentWidget(self.training)
        self.addPermanentWidget(self.saving)  # permanent: a temporary message must not hide it
        self.addPermanentWidget(self.counts)
        session.saver.state.connect(self._show_saving)
        session.datasets.progress.connect(self._show_reading)
        for event in (session.view.shown, session.view.selection):
            event.connect(lambda _: self._show_counts())
        self._show_saving(session.saver.now)
        self._show_counts()

    def say(self, text: str) -> None:
        """Show a message for a few seconds."""
        self.showMessage(text, _SHOWN_MS)

    def _show_saving(self, state: SaveState) -> None:
        problem = bool(state.problems or state.conflicts)
        self.saving.setText(self._saving_words(state))
        problems = map(full_message, state.problems)
        self.saving.setToolTip(plain_tip("\n".join(problems)))
        self.saving.setProperty("role", "warning" if problem else "muted")
        self.saving.style().polish(self.saving)  # Qt does not restyle on property changes

    def _saving_words(self, state: SaveState) -> str:
        if state.problems:
            return self.tr("Not saved yet: %n change(s)", "", sum(p.waiting for p in state.problems))
        if state.conflicts:
            return self.tr("Waiting for your choice: %n change(s)", "", len(state.conflicts))
        if state.pending:
            return self.tr("Saving %n change(s)…", "", state.pending)
        if not state.saved:
            return ""
        saved = self.tr("All changes saved; originals are backed up.")
        return saved if state.backed_up else self.tr("All changes saved.")

    def _show_reading(self, progress: ReadingProgress) -> None:
        done, total = QLocale().toString(progress.done), QLocale().toString(progress.total)
        words = self.tr("Reading {folder}: {done} of {total}")
        reading = progress.done < progress.total
        self.reading.setText(words.format(folder=progress.folder.name, done=done, total=total) if reading else "")

    def _show_counts(self) -> None:
        view = self._session.view
        words = [self.tr("%n image(s)", "", len(view.ids))] if view.ids or self._session.library.images else []
        if view.selected:
            words.append(self.tr("%n selected", "", len(view.selected)))
        self.counts.setText(", ".join(words))
