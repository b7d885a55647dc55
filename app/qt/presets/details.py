"""All of one preset: what it is for, what it costs, what it sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtGui import QPixmap
from PySide6.QtWidgets import QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.core.jobs.settings import full_title
from app.core.planning.forecaster import GIGABYTES, HERE
from app.core.presets.outlooks import Outlooks
from app.qt.inputs import ComboBox
from app.qt.presets.cards import by, choices_of, doc_of, in_full, origin_words
from app.qt.tables import Row, Table
from app.qt.widgets import FlowLayout, plain_label, say, until_destroyed
from trainer.config.presets.library import Shelved, changed_keys
from trainer.config.presets.preset import Preset
from trainer.config.resolve import flat
from trainer.config.toml_file import toml_value
from trainer.files.architecture import NAMES

PICTURE = 168
"""Pixels of the longest side of the picture."""


class OutlookLine(QWidget):
    """Says how one preset would be fitted; the choice of the card counts for all presets."""

    def __init__(self, outlooks: Outlooks, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._outlooks = outlooks
        self._shown: tuple[Path, Preset] | None = None
        self.cards, self.words = ComboBox(), plain_label()
        self.cards.addItem(self.tr("This PC"), HERE)
        for size in GIGABYTES:
            self.cards.addItem(self.tr("A card with {size} GB").format(size=size), f"{size}GB")
        self.cards.setCurrentIndex(max(self.cards.findData(outlooks.card), 0))
        self.cards.setAccessibleName(self.tr("Graphics card"))
        self.cards.activated.connect(lambda _: outlooks.choose(self.cards.currentData()))
        head = QHBoxLayout()
        title = QLabel(self.tr("What it costs on"))
        title.setProperty("role", "heading")
        head.addWidget(title)
        head.addWidget(self.cards)
        head.addStretch()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addLayout(head)
        column.addWidget(self.words, 0, Qt.AlignmentFlag.AlignTop)
        until_destroyed(self, outlooks.changed.connect(lambda _: self._renew()))

    def show_preset(self, path: Path, preset: Preset) -> None:
        """Say it of this one, which lies in that file."""
        self._shown = path, preset
        self.setVisible(preset.recipe is not None)
        self._renew()

    def _renew(self) -> None:
        self.cards.setCurrentIndex(max(self.cards.findData(self._outlooks.card), 0))
        if self._shown is not None:
            outlook = self._outlooks.of(*self._shown)
            answer = outlook.answer if outlook else None
            doubtful = outlook is not None and (answer is None or answer.pick is None)
            say(self.words, in_full(outlook, self._outlooks.card), "warning" if doubtful else "")


class About(QWidget):
    """Picture, name, who made it, what it is for."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.picture = QLabel()
        self.picture.setAccessibleName(self.tr("Picture"))
        self.name, self.maker, self.notes, self.more = (plain_label(role) for role in ("title", "muted", "", "muted"))
        told, row = QVBoxLayout(), QHBoxLayout(self)
        told.setSpacing(6)
        for label in (self.name, self.maker, self.notes, self.more):
            told.addWidget(label)
        told.addStretch()
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(16)
        row.addWidget(self.picture, 0, Qt.AlignmentFlag.AlignTop)
        row.addLayout(told, 1)

    def show_preset(self, preset: Preset, origin: str, picture: QPixmap | None) -> None:
        """Show this one."""
        say(self.name, preset.name)
        parts = [NAMES[preset.base.family], by(preset), origin]
        say(self.maker, " · ".join(part for part in parts if part))
        say(self.notes, preset.notes)
        words = [
            self.tr("Trigger words: {words}").format(words=", ".join(preset.trigger_words))
            if preset.trigger_words
            else "",
            self.tr("Made for {base}").format(base=preset.base.name) if preset.base.name else "",
            self.tr("Made for a card with {size:g} GB").format(size=preset.card.gigabytes) if preset.card else "",
            self.tr("%n example prompt(s)", "", len(preset.examples)) if preset.examples else "",
        ]
        say(self.more, "\n".join(word for word in words if word))
        self.picture.setVisible(picture is not None)
        if picture is not None:
            self.picture.setPixmap(picture)


class Details(QWidget):
    """The chosen preset; `buttons` is where the page puts what can be done with it."""

    def __init__(self, outlooks: Outlooks, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.about = About()
        self.outlook = OutlookLine(outlooks)
        self.table = Table(
            (self.tr("Setting"), self.tr("As usual"), self.tr("With this preset")), self.tr("What it sets")
        )
        self.heading = QLabel()
        self.heading.setProperty("role", "heading")
        self.buttons = FlowLayout(6)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 18, 20, 12)
        column.setSpacing(14)
        column.addWidget(self.about)
        column.addLayout(self.buttons)
        column.addWidget(self.outlook)
        column.addWidget(self.heading)
        column.addWidget(self.table, 1)

    def show_preset(self, shelved: Shelved, picture: QPixmap | None) -> None:
        """Show this one."""
        preset = shelved.preset
        self.about.show_preset(preset, origin_words(shelved.origin), picture)
        self.outlook.show_preset(shelved.path, preset)
        say(
            self.heading,
            self.tr("What it sets otherwise than a new job") if preset.recipe else self.tr("How it saves memory"),
        )
        self.table.show_rows(rows_of(changed_keys(None, preset) if preset.recipe else _fit_keys(preset)))


def rows_of(changes: Sequence[tuple[str, str, str]]) -> list[Row]:
    """Return a line for each key that is another, with what it means as its tip."""
    return [_row(*change) for change in changes]


def _row(key: str, before: str, after: str) -> Row:
    """Show a choice as the Train page does; a text that somebody wrote has the quotes that it has in a file."""
    names = {f'"{choice}"': str(choice) for choice in choices_of(key) if isinstance(choice, str)}
    texts = (full_title(key), names.get(before, before), names.get(after, after))
    return Row(texts, tip=f"{key}\n{doc_of(key)}".strip())


def _fit_keys(preset: Preset) -> list[tuple[str, str, str]]:
    assert preset.fit is not None
    stated = preset.fit.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    planned = QCoreApplication.translate("Presets", "planned")
    return [(key, planned, toml_value(value)) for key, value in flat(stated, "")]
