"""The model card, to be read, changed, copied and saved."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFileDialog, QLabel, QPlainTextEdit, QVBoxLayout, QWidget

from app.core.session import Session
from app.core.tasks import only
from app.qt.dialogs.parts import close_row
from trainer.errors import LoraFileError
from trainer.protocol import files
from trainer.protocol.places import write_remedy


class CardDialog(QDialog):
    """Markdown, as Civitai, Hugging Face and GitHub show it."""

    said = Signal(str)
    failed = Signal(object)

    def __init__(self, session: Session, text: str, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._file_name = session, f"{name}.md"
        self.text = QPlainTextEdit(text)
        self.setWindowTitle(self.tr("Model card"))
        self.resize(720, 620)
        words = QLabel(self.tr("A page that tells others what this is and how to use it. Change it as you like."))
        words.setProperty("role", "muted")
        words.setWordWrap(True)
        self.text.setAccessibleName(self.tr("Model card"))
        self.text.setTabChangesFocus(True)
        buttons = close_row(self)
        self.copy_button = buttons.addButton(self.tr("Copy"), QDialogButtonBox.ButtonRole.ActionRole)
        self.save_button = buttons.addButton(self.tr("Save…"), QDialogButtonBox.ButtonRole.ActionRole)
        self.copy_button.clicked.connect(self.copy)
        self.save_button.clicked.connect(self._ask)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addWidget(words)
        column.addWidget(self.text, 1)
        column.addWidget(buttons)

    def copy(self) -> None:
        """Put it on the clipboard."""
        QGuiApplication.clipboard().setText(self.text.toPlainText())
        self.said.emit(self.tr("The model card is on the clipboard."))

    def save(self, file: Path) -> None:
        """Write it."""
        text = self.text.toPlainText()
        self._session.tasks.run(
            lambda: files.write_text(file, text),
            lambda _: self.said.emit(self.tr("Saved {name}.").format(name=file.name)),
            only(OSError, lambda fault: self._tell(file, fault)),
        )

    def _ask(self) -> None:
        found, _ = QFileDialog.getSaveFileName(self, self.tr("Save the model card"), self._file_name, "Markdown (*.md)")
        if found:
            self.save(Path(found))

    def _tell(self, file: Path, fault: OSError) -> None:
        sentence = f"{file} cannot be written: {fault.strerror or fault}."
        self.failed.emit(LoraFileError("card.file", sentence, write_remedy(fault)))
