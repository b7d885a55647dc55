"""Asks for what holds for all pictures of a folder."""

from __future__ import annotations

from PySide6.QtWidgets import QCheckBox, QDialog, QDialogButtonBox, QFormLayout, QLabel, QLineEdit, QWidget

from app.core.library import Folder
from app.qt.inputs import SpinBox

_MOST = 10_000
"""As many repeats as impasto.jsonl allows."""


class FolderDialog(QDialog):
    """Repeats, regularisation and trigger of one folder; they go into its impasto.jsonl."""

    def __init__(self, folder: Folder, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Folder {name}").format(name=folder.path.name))
        self.repeats, self.regularisation, self.trigger = SpinBox(), QCheckBox(), QLineEdit()
        self.repeats.setRange(0, _MOST)
        self.repeats.setSpecialValueText(self.tr("once"))
        self.repeats.setValue(folder.repeats or 0)
        self.repeats.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt passes over the style sheet's padding here
        self.regularisation.setText(self.tr("Pictures of the class"))
        self.regularisation.setChecked(folder.regularisation)
        self.regularisation.setToolTip(self.tr("They hold the base in place while the others are learned."))
        self.trigger.setText(folder.trigger or "")
        self.trigger.setPlaceholderText(self.tr("put first in each caption"))
        words = QLabel(str(folder.path))
        words.setProperty("role", "muted")
        words.setWordWrap(True)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Ok | QDialogButtonBox.StandardButton.Cancel)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        form = QFormLayout(self)
        form.addRow(words)
        form.addRow(self.tr("Times in each epoch"), self.repeats)
        form.addRow(self.tr("Regularisation"), self.regularisation)
        form.addRow(self.tr("Trigger word"), self.trigger)
        form.addRow(buttons)
        self.setMinimumWidth(460)
        self.repeats.setFocus()

    def facts(self) -> dict[str, str | int | bool | None]:
        """Return what was chosen, as the library keeps it."""
        return {
            "repeats": self.repeats.value() or None,
            "regularisation": self.regularisation.isChecked(),
            "trigger": self.trigger.text().strip() or None,
        }
