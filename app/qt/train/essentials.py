"""The essentials of a job: base, images, recipe, trigger word, length, previews and output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFileDialog, QGridLayout, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.jobs import essentials
from app.core.jobs.draft import Draft
from app.core.jobs.settings import setting
from app.core.runs.log import without_home
from app.core.session import Session
from app.core.words import sentence_of
from app.qt.train.base_picker import BasePicker
from app.qt.train.cards import RecipeCards
from app.qt.train.folders import FolderRows
from app.qt.train.form import DraftEditor, Line, to_text, translated
from app.qt.train.prompts import PromptRows
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, plain_label, set_message
from trainer.config.job import OutputConfig
from trainer.config.paths import absolute
from trainer.config.presets.library import PresetEntry
from trainer.config.presets.preset import Preset
from trainer.config.resolve import resolve_length

_MEASURES = {
    "images_seen": QT_TRANSLATE_NOOP("Train", "images seen"),
    "epochs": QT_TRANSLATE_NOOP("Train", "epochs"),
    "steps": QT_TRANSLATE_NOOP("Train", "steps"),
}
_KEY = "output.runs"
_LABELS = 108
"""Width of the labels on the left, in logical pixels."""
_MISSING = "is missing"
"""Start of messages about missing values; they are not shown, because the fields are visibly empty."""


class LengthRow(QWidget):
    """Editor for the training length in one of three units; once images are counted, it also shows the other two."""

    left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft: Draft | None = None
        self.samples: int | None = None
        """Number of samples per epoch, or None if unknown."""
        self.number, self.measure, self.words = Line(), ComboBox(), QLabel()
        for key, title in _MEASURES.items():
            self.measure.addItem(translated(title), key)
        self.number.setAccessibleName(self.tr("Length"))
        self.number.setPlaceholderText(self.tr("automatic"))
        self.number.setFixedWidth(110)
        self.measure.setAccessibleName(self.tr("Unit of training length"))
        self.words.setProperty("role", "muted")
        self.words.setWordWrap(True)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self.number)
        row.addWidget(self.measure)
        row.addWidget(self.words, 1)
        self.number.textEdited.connect(self._on_text_edited)
        self.number.editingFinished.connect(self.left)
        self.measure.activated.connect(lambda _: self._on_measure_activated())

    def show_draft(self, draft: Draft | None, samples: int | None) -> None:
        """Show this job's length; `samples` is the number of samples per epoch, or None if unknown."""
        self._draft, self.samples = draft, samples
        key, value = essentials.stated_length(draft.values) if draft is not None else ("images_seen", None)
        if value is not None:
            self.measure.setCurrentIndex(max(0, self.measure.findData(key)))
        if self._typed(self.number.text()) != value:
            self.number.show_text(to_text(value))
        self.number.setToolTip(f"recipe.{self.measure.currentData()}")
        sound = draft.valid_part if draft is not None else None
        self.words.setText(str(resolve_length(sound.recipe, samples)) if sound and samples else "")

    def _typed(self, text: str) -> object:
        return setting(f"recipe.{self.measure.currentData()}").typed(text) if text.strip() else None

    def _on_text_edited(self, text: str) -> None:
        if self._draft is not None:
            self._draft.set(f"recipe.{self.measure.currentData()}", self._typed(text), typing=True)

    def _on_measure_activated(self) -> None:
        if self._draft is not None:
            essentials.change_length_unit(self._draft, self.measure.currentData(), self.samples)
            self.show_draft(self._draft, self.samples)


class OutputRow(QWidget):
    """Field and button for the folder for runs; an empty field means the default folder next to the job."""

    left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft: Draft | None = None
        self.field, self.button, self.words = Line(), QPushButton(self.tr("Choose…")), QLabel()
        self.field.setAccessibleName(self.tr("Output"))
        self.field.setToolTip(
            f"{_KEY}\n"
            + self.tr("The folder for this job's runs: an absolute path, or a path relative to the job's folder.")
        )
        self.button.setAutoDefault(False)
        self.button.setAccessibleName(self.tr("Choose the folder for the runs"))
        self.words.setProperty("role", "muted")
        self.words.setWordWrap(True)
        self.words.setText(self.tr("Each run gets its own folder there, with its LoRA."))
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(8)
        grid.setVerticalSpacing(4)
        grid.addWidget(self.field, 0, 0)
        grid.addWidget(self.button, 0, 1)
        grid.addWidget(self.words, 1, 0, 1, 2)
        self.field.textEdited.connect(lambda text: self._put(text.strip(), typing=True))
        self.field.editingFinished.connect(self.left)
        self.button.clicked.connect(lambda: self._choose())

    def show_draft(self, draft: Draft) -> None:
        """Show this job's output folder."""
        self._draft = draft
        stated = draft.get(_KEY)
        text = stated if isinstance(stated, str) else ""
        if self.field.text().strip() != text:
            self.field.show_text(text)
        default_folder = absolute(OutputConfig().runs, draft.path.parent)
        self.field.setPlaceholderText(without_home(default_folder, Path.home()))

    def _put(self, text: str, *, typing: bool = False) -> None:
        if self._draft is not None:
            self._draft.set(_KEY, text or None, typing=typing)

    def _choose(self) -> None:
        if self._draft is None:
            return
        now = absolute(self.field.text().strip() or OutputConfig().runs, self._draft.path.parent)
        title = self.tr("Choose the folder for this job's runs")
        chosen = QFileDialog.getExistingDirectory(self, title, now)
        if chosen:
            self._put(str(Path(chosen)))


class Essentials(DraftEditor):
    """Grid of the essential settings, with labels on the left and editors on the right."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._presets: Sequence[PresetEntry] = ()
        self.base = BasePicker(session)
        self.images = FolderRows(session)
        self.cards = RecipeCards()
        self.trigger = Line()
        self.length = LengthRow()
        self.prompts = PromptRows()
        self.output = OutputRow()
        self._faults: dict[str, QLabel] = {}
        self._base_shown: str | None = None
        self._base_written: str | None = None
        """Base as the user entered it, which the field shows unchanged; None once the job has another base."""
        self._build()
        self.base.chosen.connect(self._on_base_chosen)
        self.cards.chosen.connect(self._on_recipe_chosen)
        self.trigger.textEdited.connect(self._on_trigger_edited)
        for part in (self.trigger.editingFinished, self.length.left, self.output.left):
            part.connect(self._on_left)

    def show_recipes(self, presets: Sequence[PresetEntry]) -> None:
        """Show cards for these recipes, if they suit the job's base."""
        self._presets = presets
        self._update_comparison()
        self.refresh()

    def show_draft(self, draft: Draft | None) -> None:
        """Show this job's essential settings."""
        self._draft = draft
        self._base_shown = self._base_written = None
        self._update_comparison()
        self.refresh()

    def refresh(self) -> None:
        """Show the job's current values."""
        draft = self._draft
        if draft is None:
            return
        self._show_base(draft)
        found = essentials.open_images(self._session.library, self._session.datasets.folders)
        self.images.show_draft(draft, found)
        if draft.origin.preset != (preset := essentials.preset_of(draft, self._presets)):
            draft.compare_with(preset)  # undo or redo changed the recipe
        self.cards.show_recipes(self._presets, draft.family)
        self.cards.mark(draft.origin.preset)
        word = essentials.trigger(draft.values) or ""
        if self.trigger.text().strip() != word:
            self.trigger.show_text(word)
        self.length.show_draft(draft, essentials.samples(draft, found))
        self.prompts.show_draft(draft)
        self.output.show_draft(draft)
        self._show_faults(draft)

    def _update_comparison(self) -> None:
        if self._draft is not None and self._presets:
            self._draft.compare_with(essentials.preset_of(self._draft, self._presets))

    def _show_base(self, draft: Draft) -> None:
        if (draft.get("base.model") or "") == self._base_written:
            return
        self._base_written = None
        if draft.base != self._base_shown:
            self._base_shown = draft.base
            self.base.set_base(draft.base)

    def _on_base_chosen(self, text: str) -> None:
        if self._draft is None:
            return
        self._base_shown, self._base_written = None, text
        self._draft.set("base.model", text or None)

    def _on_recipe_chosen(self, preset: Preset) -> None:
        if self._draft is not None:
            essentials.choose_recipe(self._draft, preset)

    def _on_trigger_edited(self, text: str) -> None:
        if self._draft is not None:
            essentials.set_trigger(self._draft, text.strip(), typing=True)

    def _show_faults(self, draft: Draft) -> None:
        """Show each row's problems below the row, except missing values, whose fields are visibly empty."""
        for prefix, label in self._faults.items():
            words = [
                f"{key.removeprefix(prefix).lstrip('.')} {reason}".strip()
                for key, reason in draft.problems
                if f"{key}.".startswith(prefix) and not reason.startswith(_MISSING)
            ]
            set_message(label, "\n".join(map(sentence_of, words)))

    def _build(self) -> None:
        self.trigger.setPlaceholderText(self.tr("A rare word that activates the LoRA, for example “ohwx”"))
        self.trigger.setToolTip(
            "dataset.folders.trigger\n" + self.tr("Added at the start of each caption that does not contain it.")
        )
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(18)
        grid.setVerticalSpacing(18)
        grid.setColumnMinimumWidth(0, _LABELS)
        grid.setColumnStretch(1, 1)
        parts = (
            (self.tr("Base"), self.base, "base.model"),
            (self.tr("Images"), self.images, "dataset.folders"),
            (self.tr("Recipe"), self.cards, "preset"),
            (self.tr("Trigger word"), self.trigger, ""),
            (self.tr("Length"), self.length, "recipe.steps recipe.epochs recipe.images_seen"),
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
