"""The essentials of a job on one page: base, pictures, recipe, trigger word, length, previews, output."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QGridLayout, QLabel, QVBoxLayout, QWidget

from app.core.jobs import essentials
from app.core.jobs.draft import Draft
from app.core.session import Session
from app.core.words import sentence_of
from app.qt.parts import plain_label, say
from app.qt.train.base_picker import BasePicker
from app.qt.train.cards import RecipeCards
from app.qt.train.folders import FolderRows
from app.qt.train.length import LengthRow
from app.qt.train.line import Line
from app.qt.train.output import OutputRow
from app.qt.train.prompts import PromptRows
from trainer.config.presets.library import Shelved
from trainer.config.presets.preset import Preset

_LABELS = 108
"""Width of the names on the left, in Qt's pixels."""
_MISSING = "is missing"
"""What the check says of a key that is not there yet; the page says so by its empty field."""


class Essentials(QWidget):
    """Names on the left, what is chosen on the right."""

    looked = Signal()
    """The number of pictures may be another."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._draft: Draft | None = None
        self._shelf: Sequence[Shelved] = ()
        self.base = BasePicker(session)
        self.pictures = FolderRows(session)
        self.cards = RecipeCards()
        self.trigger = Line()
        self.length = LengthRow()
        self.prompts = PromptRows()
        self.output = OutputRow()
        self._faults: dict[str, QLabel] = {}
        self._base_shown: str | None = None
        self._base_written: str | None = None
        """What the user chose or wrote himself: that stays in the field as he wrote it."""
        self._build()
        self.base.chosen.connect(self._choose_base)
        self.cards.chosen.connect(self._choose_recipe)
        self.trigger.textEdited.connect(self._type_trigger)
        for part in (self.trigger.editingFinished, self.length.left, self.output.left):
            part.connect(self._seal)

    def show_recipes(self, shelf: Sequence[Shelved]) -> None:
        """Offer these recipes."""
        self._shelf = shelf
        self._compare()
        self.refresh()

    def show_draft(self, draft: Draft | None) -> None:
        """Show this job."""
        self._draft = draft
        self._base_shown = self._base_written = None
        self._compare()
        self.refresh()

    def refresh(self) -> None:
        """Show what the job holds now."""
        draft = self._draft
        if draft is None:
            return
        self._show_base(draft)
        found = essentials.open_pictures(self._session.library, self._session.datasets.folders)
        self.pictures.show_draft(draft, found)
        if draft.origin.preset != (preset := essentials.preset_of(draft, self._shelf)):
            draft.compare_with(preset)  # undo went over the choice of a recipe
        self.cards.show_recipes(self._shelf, draft.family)
        self.cards.mark(draft.origin.preset)
        word = essentials.trigger(draft.values) or ""
        if self.trigger.text().strip() != word:
            self.trigger.show_text(word)
        self.length.show_draft(draft, essentials.samples(draft, found))
        self.prompts.show_draft(draft)
        self.output.show_draft(draft)
        self._tell_faults(draft)

    def _compare(self) -> None:
        if self._draft is not None and self._shelf:
            self._draft.compare_with(essentials.preset_of(self._draft, self._shelf))

    def _show_base(self, draft: Draft) -> None:
        if (draft.get("base.model") or "") == self._base_written:
            return
        self._base_written = None
        if draft.base != self._base_shown:
            self._base_shown = draft.base
            self.base.set_base(draft.base)

    def _choose_base(self, text: str) -> None:
        if self._draft is None:
            return
        self._base_shown, self._base_written = None, text
        self._draft.set("base.model", text or None)

    def _choose_recipe(self, preset: Preset) -> None:
        if self._draft is not None:
            essentials.choose_recipe(self._draft, preset)

    def _type_trigger(self, text: str) -> None:
        if self._draft is not None:
            essentials.set_trigger(self._draft, text.strip(), typing=True)

    def _seal(self) -> None:
        if self._draft is not None:
            self._draft.seal()

    def _tell_faults(self, draft: Draft) -> None:
        """Say below a part what is wrong in it; that something is still to be chosen, its empty field says."""
        for prefix, label in self._faults.items():
            words = [
                f"{key.removeprefix(prefix).lstrip('.')} {reason}".strip()
                for key, reason in draft.problems
                if f"{key}.".startswith(prefix) and not reason.startswith(_MISSING)
            ]
            say(label, "\n".join(map(sentence_of, words)))

    def _build(self) -> None:
        self.trigger.setPlaceholderText(self.tr("A rare word that calls up what is learned, such as “ohwx”"))
        self.trigger.setToolTip("dataset.folders.trigger\n" + self.tr("Put first in each caption unless it is in it."))
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(18)
        grid.setVerticalSpacing(18)
        grid.setColumnMinimumWidth(0, _LABELS)
        grid.setColumnStretch(1, 1)
        parts = (
            (self.tr("Base"), self.base, "base.model"),
            (self.tr("Pictures"), self.pictures, "dataset.folders"),
            (self.tr("Recipe"), self.cards, "preset"),
            (self.tr("Trigger word"), self.trigger, ""),
            (self.tr("Length"), self.length, "recipe.steps recipe.epochs recipe.pictures_seen"),
            (self.tr("Previews"), self.prompts, "report.previews.prompts"),
            (self.tr("Output"), self.output, "output.runs"),
        )
        for number, (title, part, keys) in enumerate(parts):
            label = QLabel(title)
            label.setBuddy(part)
            label.setContentsMargins(0, 6, 0, 0)
            cell = QVBoxLayout()
            cell.setSpacing(4)
            cell.addWidget(part)
            for key in keys.split():
                cell.addWidget(self._fault(key))
            grid.addWidget(label, number, 0, Qt.AlignmentFlag.AlignTop)
            grid.addLayout(cell, number, 1)
        self.trigger.setAccessibleName(self.tr("Trigger word"))

    def _fault(self, key: str) -> QLabel:
        label = self._faults[key] = plain_label("bad")
        label.hide()
        return label
