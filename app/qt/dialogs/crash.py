"""Shows what is known of a crash, for the user to pass on."""

from __future__ import annotations

from PySide6.QtGui import QFontDatabase, QGuiApplication
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QLabel, QPlainTextEdit, QVBoxLayout, QWidget

from app.qt.dialogs.parts import close_row


class CrashDialog(QDialog):
    """The text, and a button that copies it."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("What went wrong"))
        self.resize(720, 460)
        words = QLabel(self.tr("Captions are safe: every edit was kept as it was made. To report this, copy the text."))
        words.setWordWrap(True)
        self.text = QPlainTextEdit(text)
        self.text.setReadOnly(True)
        self.text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.text.setAccessibleName(self.windowTitle())
        buttons = close_row(self)
        self.copy = buttons.addButton(self.tr("Copy"), QDialogButtonBox.ButtonRole.ActionRole)
        self.copy.setAutoDefault(False)
        self.copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(text))
        column = QVBoxLayout(self)
        for widget in (words, self.text, buttons):
            column.addWidget(widget)
