"""Says, above everything else of a run, that it ended in a way that nobody wanted, or cannot be read."""

from __future__ import annotations

from PySide6.QtCore import QLocale, Qt, Signal
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QPlainTextEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.core.runs.run import Run
from app.core.words import in_words
from app.qt.parts import plain_label, sign
from app.qt.theme import set_icon

_LINES = 5
_AROUND = 34  # frame, padding and margin of the field, and the bar below lines that are longer than it


class Trouble(QFrame):
    """A sentence and the last words of the engine; hidden where there is nothing to say."""

    unwanted = Signal()
    """A run that is not there any more is to leave the list."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("notice")
        self.sign, self.sentence = sign(20), plain_label()
        set_icon(self.sign, "error", "bad")
        self.last_words = QPlainTextEdit()
        self.last_words.setReadOnly(True)
        self.last_words.setTabChangesFocus(True)
        self.last_words.setAccessibleName(self.tr("The last that the engine printed"))
        self.last_words.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.last_words.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.leave = QPushButton(self.tr("Take it out of the list"))
        self.leave.clicked.connect(self.unwanted)
        self._lay_out()
        self.hide()

    def show_run(self, run: Run | None, failure: str = "") -> None:
        """Speak of a run as it stands now; `failure` says why it ended, where only the queue could be told."""
        sentence = self._words(run, failure) if run else ""
        self.setVisible(bool(sentence))
        if not run or not sentence:
            return
        self.sentence.setText(sentence)
        self.leave.setVisible(run.summary.missing is not None)
        self.last_words.setVisible(bool(run.last_words) and run.summary.state == "interrupted" and not failure)
        lines = run.last_words.splitlines()[-_LINES:]  # the log has the rest
        if self.last_words.toPlainText() != "\n".join(lines):
            self.last_words.setPlainText("\n".join(lines))
            self.last_words.setFixedHeight(len(lines) * self.last_words.fontMetrics().lineSpacing() + _AROUND)

    def _words(self, run: Run, failure: str) -> str:
        if run.problem:
            return run.problem
        if run.summary.state == "interrupted":
            if failure:
                return failure
            killed = self.tr("This run stopped unexpectedly: it was killed, or the computer went down.")
            ended = run.summary.status_fault or killed
            resume = self._resume_words(run)
            said = self.tr("The last that it printed:") if run.last_words else ""
            return " ".join(filter(None, (ended, resume, said)))
        if run.summary.state in ("failed", "paused") and run.error:  # a full disk pauses it
            return in_words(run.error)
        return ""

    def _resume_words(self, run: Run) -> str:
        """Say from where it goes on, and which steps it makes anew."""
        kept, step = run.summary.kept, run.summary.step
        if kept is None:
            return self.tr("It had written no checkpoint yet: “Resume” begins with the first step.")
        number = QLocale().toString
        goes_on = self.tr("“Resume” goes on from its last checkpoint, of step {step}.").format(step=number(kept))
        lost = self.tr("%n step(s) after it will be made anew.", "", step - kept) if step > kept else ""
        return " ".join(filter(None, (goes_on, lost)))

    def _lay_out(self) -> None:
        row, column = QHBoxLayout(self), QVBoxLayout()
        row.setContentsMargins(12, 8, 12, 8)
        row.setSpacing(10)
        column.addWidget(self.sentence)
        column.addWidget(self.last_words)
        row.addWidget(self.sign, 0, Qt.AlignmentFlag.AlignTop)
        row.addLayout(column, 1)
        row.addWidget(self.leave, 0, Qt.AlignmentFlag.AlignTop)
