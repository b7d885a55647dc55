"""How long a job trains: a number and its measure."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QWidget

from app.core.jobs import essentials
from app.core.jobs.draft import Draft
from app.core.jobs.settings import setting
from app.qt.inputs import ComboBox
from app.qt.train.form.editors import shown, words
from app.qt.train.line import Line
from app.qt.words import QT_TRANSLATE_NOOP
from trainer.config.resolve import resolve_length

_MEASURES = {
    "pictures_seen": QT_TRANSLATE_NOOP("Train", "pictures shown"),
    "epochs": QT_TRANSLATE_NOOP("Train", "epochs"),
    "steps": QT_TRANSLATE_NOOP("Train", "steps"),
}


class LengthRow(QWidget):
    """One of the three measures, with what it comes to in the others where the pictures are counted."""

    left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft: Draft | None = None
        self._showings: int | None = None
        self.number, self.measure, self.words = Line(), ComboBox(), QLabel()
        for key, title in _MEASURES.items():
            self.measure.addItem(words(title), key)
        self.number.setAccessibleName(self.tr("Length"))
        self.number.setPlaceholderText(self.tr("automatic"))
        self.number.setFixedWidth(110)
        self.measure.setAccessibleName(self.tr("Measure of the length"))
        self.words.setProperty("role", "muted")
        self.words.setWordWrap(True)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self.number)
        row.addWidget(self.measure)
        row.addWidget(self.words, 1)
        self.number.textEdited.connect(self._type)
        self.number.editingFinished.connect(self.left)
        self.measure.activated.connect(lambda _: self._remeasure())

    def show_draft(self, draft: Draft | None, showings: int | None) -> None:
        """Show this job's length; `showings` are those of one epoch, None where nobody has counted."""
        self._draft, self._showings = draft, showings
        key, value = essentials.measure(draft.values) if draft is not None else ("pictures_seen", None)
        if value is not None:
            self.measure.setCurrentIndex(max(0, self.measure.findData(key)))
        if self._typed(self.number.text()) != value:
            self.number.show_text(shown(value))
        self.number.setToolTip(f"recipe.{self.measure.currentData()}")
        sound = draft.sound if draft is not None else None
        self.words.setText(str(resolve_length(sound.recipe, showings)) if sound and showings else "")

    def _typed(self, text: str) -> object:
        return setting(f"recipe.{self.measure.currentData()}").typed(text) if text.strip() else None

    def _type(self, text: str) -> None:
        if self._draft is not None:
            self._draft.set(f"recipe.{self.measure.currentData()}", self._typed(text), typing=True)

    def _remeasure(self) -> None:
        if self._draft is not None:
            essentials.change_measure(self._draft, self.measure.currentData(), self._showings)
            self.show_draft(self._draft, self._showings)
