"""The two small dialogs of the filter box: a name for a filter, and how filters are written."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFormLayout,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QVBoxLayout,
    QWidget,
)

from app.core.disk.roots import told_apart
from app.core.query.language import help_text
from app.qt.inputs import ComboBox

_Buttons = QDialogButtonBox.StandardButton


class SaveDialog(QDialog):
    """Asks for a filter's name, and whether it is for all datasets or for one of those that are open."""

    def __init__(self, query: str, roots: list[Path], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Save filter"))
        self._name = QLineEdit(query)
        self._name.selectAll()
        self._scope = ComboBox()
        self._scope.addItem(self.tr("All datasets"), None)
        for root in roots:
            self._scope.addItem(self.tr("Only %1").replace("%1", told_apart(root, roots)), root)
        shown = QLabel(query)
        shown.setWordWrap(True)
        self._buttons = QDialogButtonBox(_Buttons.Save | _Buttons.Cancel)
        self._buttons.accepted.connect(self.accept)
        self._buttons.rejected.connect(self.reject)
        self._name.textChanged.connect(self._check)
        form = QFormLayout(self)
        form.addRow(self.tr("Filter"), shown)
        form.addRow(self.tr("&Name"), self._name)
        form.addRow(self.tr("&For"), self._scope)
        form.addRow(self._buttons)
        self._scope.setAccessibleName(self.tr("For"))
        self._check(query)
        self.setMinimumWidth(400)
        self.resize(400, form.totalHeightForWidth(400))  # else room for a query that breaks in the narrowest dialog

    @property
    def name(self) -> str:
        """The name given."""
        return self._name.text().strip()

    @property
    def root(self) -> Path | None:
        """The dataset that the filter is for, None for all."""
        root: Path | None = self._scope.currentData()
        return root

    def _check(self, name: str) -> None:
        self._buttons.button(_Buttons.Save).setEnabled(bool(name.strip()))


class HelpDialog(QDialog):
    """Shows the description of the language, as the parser keeps it."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("How filters are written"))
        text = QPlainTextEdit(help_text())
        text.setReadOnly(True)
        text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        text.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        text.setAccessibleName(self.windowTitle())
        buttons = QDialogButtonBox(_Buttons.Close)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        layout.addWidget(text)
        layout.addWidget(buttons)
        longest = max(text.toPlainText().splitlines(), key=len)
        self.resize(text.fontMetrics().horizontalAdvance(longest) + 80, 640)
