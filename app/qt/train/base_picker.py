"""Chooses the base of a job: one found on this PC, one used before, a file, a link, or a Hub id."""

from __future__ import annotations

from PySide6.QtCore import QTimer, Signal
from PySide6.QtGui import QHideEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QLineEdit, QPushButton, QVBoxLayout, QWidget
from shiboken6 import isValid

from app.core.models.verdict import Told, Verdict, cleaned
from app.core.session import Session
from app.qt.parts import plain_label, say
from app.qt.train.base_dialog import BaseDialog
from app.qt.train.base_words import family_of, verdict_words

_PAUSE = 250
"""Milliseconds without a key after which what was typed is looked at."""


class BasePicker(QWidget):
    """A field with what it means below; what is wrong is said while one types."""

    chosen = Signal(str)
    """A text for `base.model` that the user settled on: chosen, finished with Enter or Tab, or typed and good."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._models = session.models
        self._settled = ""
        self._asked = ""
        self._by_user = False
        self.verdict = Verdict("", "nowhere", Told())
        """What the field's text meant when it was looked at last."""
        self.field, self.badge, self.state = QLineEdit(), QLabel(), plain_label()
        self.button = QPushButton(self.tr("Choose…"))
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(_PAUSE)
        self._build()
        self._timer.timeout.connect(lambda: self._ask())
        self.field.textEdited.connect(lambda _: self._timer.start())
        self.field.editingFinished.connect(lambda: self._settle(cleaned(self.field.text())))
        self.button.clicked.connect(lambda: self.choose())
        self._show(self.verdict)

    def set_base(self, text: str) -> None:
        """Show this base; `chosen` stays silent."""
        self._settled = text
        self._by_user = False
        self._write(text)

    def choose(self) -> None:
        """Let the user choose from all bases on this PC."""
        dialog = BaseDialog(self._models, self)
        dialog.accepted.connect(lambda: self._pick(dialog.text))
        dialog.finished.connect(dialog.deleteLater)
        dialog.open()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Settle what is half typed."""
        if self._timer.isActive():
            self._timer.stop()
            self._settle(cleaned(self.field.text()))
        super().hideEvent(event)

    def _build(self) -> None:
        self.field.setAccessibleName(self.tr("Base"))
        self.field.setPlaceholderText(self.tr("A .safetensors file, an https link, or a Hugging Face id"))
        self.badge.setProperty("role", "badge")
        self.badge.setAccessibleName(self.tr("Family of the base"))
        self.button.setAccessibleName(self.tr("Choose a base on this PC"))
        self.button.setAutoDefault(False)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.field, 1)
        row.addWidget(self.badge)
        row.addWidget(self.button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(5)
        column.addLayout(row)
        column.addWidget(self.state)
        self.setFocusProxy(self.field)

    def _pick(self, text: str) -> None:
        self._write(text)
        self._settle(text)

    def _write(self, text: str) -> None:
        self._timer.stop()
        self.field.setText(text)
        self._ask()

    def _settle(self, text: str) -> None:
        """Take a text as what the user wants."""
        self._timer.stop()
        self._by_user = True
        if text != self._settled:
            self._settled = text
            self.chosen.emit(text)
        if text == self.verdict.text:
            self._remember()
        elif text != self._asked:
            self._ask()

    def _ask(self) -> None:
        """Look at what stands in the field now."""
        self._asked = cleaned(self.field.text())
        self._models.judge(self._asked, self._learn)

    def _learn(self, verdict: Verdict) -> None:
        """Show an answer, unless the field says something else by now."""
        if not isValid(self) or verdict.text != self._asked:
            return
        self.verdict = verdict
        self._show(verdict)
        if verdict.text == self._settled:
            self._remember()
        elif _is_whole(verdict) and not verdict.told.problem:
            self._settle(verdict.text)

    def _remember(self) -> None:
        if self._by_user and self.verdict.place != "nowhere" and not self.verdict.told.problem:
            self._models.used(self.verdict.text)

    def _show(self, verdict: Verdict) -> None:
        self.badge.setText(family_of(verdict.told))
        self.badge.setVisible(bool(verdict.told.family))
        words = verdict_words(verdict)
        say(self.state, words, "bad" if verdict.told.problem else "muted")
        self.field.setAccessibleDescription(words)


def _is_whole(verdict: Verdict) -> bool:
    """Tell whether a good text is all that the user wants to write; an id, and most links, may go on."""
    return verdict.place == "here" or (verdict.place == "link" and verdict.text.lower().endswith(".safetensors"))
