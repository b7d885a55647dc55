"""The line at the bottom: what trains, what is saved, how much is shown and selected."""

from __future__ import annotations

from PySide6.QtCore import QLocale
from PySide6.QtWidgets import QLabel, QStatusBar, QWidget

from app.core.disk.datasets import Progress
from app.core.edits.save_state import SaveState
from app.core.session import Session
from app.core.words import in_words
from app.qt.tips import plain_tip
from app.qt.training import TrainingLine

_SHOWN_MS = 6000


class StatusLine(QStatusBar):
    """Words each state of the session that matters everywhere."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.setSizeGripEnabled(False)
        self.saving, self.reading, self.counts = QLabel(), QLabel(), QLabel()
        self.saving.setContentsMargins(10, 0, 10, 0)
        self.counts.setContentsMargins(10, 0, 10, 0)
        self.reading.setProperty("role", "muted")
        self.addWidget(self.reading)
        self.training = TrainingLine(session.training)
        self.addPermanentWidget(self.training)
        self.addPermanentWidget(self.saving)  # what is said for some seconds must not hide whether all is saved
        self.addPermanentWidget(self.counts)
        session.saver.state.connect(self._show_saving)
        session.datasets.progress.connect(self._show_reading)
        for event in (session.view.shown, session.view.selection):
            event.connect(lambda _: self._show_counts())
        self._show_saving(session.saver.now)
        self._show_counts()

    def say(self, text: str) -> None:
        """Say something for some seconds."""
        self.showMessage(text, _SHOWN_MS)

    def _show_saving(self, state: SaveState) -> None:
        problem = bool(state.problems or state.conflicts)
        self.saving.setText(self._saving_words(state))
        problems = map(in_words, state.problems)
        self.saving.setToolTip(plain_tip("\n".join(problems)))
        self.saving.setProperty("role", "warning" if problem else "muted")
        self.saving.style().polish(self.saving)  # a look by property is looked up again only when asked

    def _saving_words(self, state: SaveState) -> str:
        if state.problems:
            return self.tr("Kept, but not saved: %n change(s)", "", sum(p.waiting for p in state.problems))
        if state.conflicts:
            return self.tr("Waiting for your choice: %n change(s)", "", len(state.conflicts))
        if state.pending:
            return self.tr("Saving %n change(s)…", "", state.pending)
        if not state.saved:
            return ""
        saved = self.tr("All changes saved, originals backed up.")
        return saved if state.backed_up else self.tr("All changes saved.")

    def _show_reading(self, progress: Progress) -> None:
        done, total = QLocale().toString(progress.done), QLocale().toString(progress.total)
        words = self.tr("Reading {folder}: {done} of {total}")
        going_on = progress.done < progress.total
        self.reading.setText(words.format(folder=progress.folder.name, done=done, total=total) if going_on else "")

    def _show_counts(self) -> None:
        view = self._session.view
        words = [self.tr("%n picture(s)", "", len(view.ids))] if view.ids or self._session.library.pictures else []
        if view.selected:
            words.append(self.tr("%n selected", "", len(view.selected)))
        self.counts.setText(", ".join(words))
