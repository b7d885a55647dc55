"""Changes what a preset says of itself: its name, its maker, its licence, what it is for, its picture."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFileDialog,
    QFormLayout,
    QHBoxLayout,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.core.session import Session
from app.core.words import in_words
from app.qt.parts import plain_label, say, while_there
from trainer.config.presets.library import Shelved
from trainer.errors import ImpastoError


class EditDialog(QDialog):
    """What it was stays as an earlier version; `changed` tells where it lies."""

    changed = Signal(object)

    def __init__(self, session: Session, shelved: Shelved, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._shelved = session, shelved
        self._picture: Path | None = None
        self._without = False
        preset = shelved.preset
        self.setWindowTitle(self.tr("Edit preset"))
        self.setModal(True)
        self.resize(560, 420)
        self.name, self.author, self.licence = (
            QLineEdit(text) for text in (preset.name, preset.author, preset.licence)
        )
        self.words = QLineEdit(", ".join(preset.trigger_words))
        self.notes = QPlainTextEdit(preset.notes)
        self.notes.setTabChangesFocus(True)
        self.pictured, self.fault = plain_label("muted"), plain_label("bad")
        self.choose = QPushButton(self.tr("Choose a picture…"))
        self.remove = QPushButton(self.tr("Remove it"))
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Save | QDialogButtonBox.StandardButton.Cancel)
        self._lay_out()
        self._tell_picture()
        say(self.fault, "")
        self.choose.clicked.connect(self._choose)
        self.remove.clicked.connect(lambda: self.show_picture(None))
        self.buttons.accepted.connect(self._save)
        self.buttons.rejected.connect(self.reject)

    def show_picture(self, path: Path | None) -> None:
        """Give it another picture, or none."""
        self._picture, self._without = path, path is None
        self._tell_picture()

    def _lay_out(self) -> None:
        form, picture, column = QFormLayout(), QHBoxLayout(), QVBoxLayout(self)
        rows = (
            (self.tr("&Name"), self.name),
            (self.tr("&Author"), self.author),
            (self.tr("&Licence"), self.licence),
            (self.tr("&Trigger words"), self.words),
            (self.tr("What it is &for"), self.notes),
        )
        for title, widget in rows:
            form.addRow(title, widget)
            widget.setAccessibleName(title.replace("&", ""))
        self.licence.setPlaceholderText(self.tr("Such as CC0-1.0 or CC-BY-4.0"))
        self.words.setPlaceholderText(self.tr("Divided by commas"))
        picture.addWidget(self.pictured, 1)
        picture.addWidget(self.choose)
        picture.addWidget(self.remove)
        form.addRow(self.tr("Picture"), picture)
        column.setContentsMargins(18, 18, 18, 12)
        column.setSpacing(12)
        column.addLayout(form, 1)
        column.addWidget(self.fault)
        column.addWidget(self.buttons)

    def _choose(self) -> None:
        kinds = self.tr("Pictures (*.png *.jpg *.jpeg *.webp)")
        chosen = QFileDialog.getOpenFileName(self, self.tr("A picture that shows the result"), "", kinds)[0]
        if chosen:
            self.show_picture(Path(chosen))

    def _tell_picture(self) -> None:
        has = self._picture is not None or (self._shelved.preset.preview is not None and not self._without)
        self.pictured.setText(
            self._picture.name if self._picture else self.tr("The one it has") if has else self.tr("None")
        )
        self.remove.setEnabled(has)

    def _save(self) -> None:
        words = tuple(word.strip() for word in self.words.text().split(",") if word.strip())
        details: dict[str, object] = {
            "name": self.name.text().strip(),
            "author": self.author.text().strip(),
            "licence": self.licence.text().strip(),
            "notes": self.notes.toPlainText().strip(),
            "trigger_words": words,
        }
        if self._picture is not None or self._without:
            details["picture"] = self._picture
        preset = self._shelved.preset
        stated = {key: value for key, value in details.items() if key == "picture" or value != getattr(preset, key)}
        if not stated:
            self.accept()
            return
        self.buttons.setEnabled(False)
        self._session.presets.revise(
            self._shelved, stated, while_there(self, self._done), while_there(self, self._refuse)
        )

    def _done(self, path: Path) -> None:
        self.accept()
        self.changed.emit(path)

    def _refuse(self, error: ImpastoError) -> None:
        self.buttons.setEnabled(True)
        say(self.fault, in_words(error))
