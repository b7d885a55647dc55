"""Chooses the base of a job: one found on this PC, one used before, a file, a link, or a Hub id."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands


class BasePicker(QWidget):
    """One line; `chosen` tells each text for `base.model` that the user settles on."""

    chosen = Signal(str)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands
        self.field = QLineEdit()
        self.field.setAccessibleName(self.tr("Base"))
        self.field.setPlaceholderText(self.tr("A .safetensors file, a link, or a Hugging Face id"))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.field, 1)
        self.field.editingFinished.connect(lambda: self.chosen.emit(self.field.text().strip()))
        self.setFocusProxy(self.field)

    def set_base(self, text: str) -> None:
        """Show this base; `chosen` stays silent."""
        self.field.setText(text)
