"""The strip on the left: one button a page, from top to bottom."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QButtonGroup, QFrame, QToolButton, QVBoxLayout, QWidget

from app.qt.actions.commands import Command
from app.qt.theme import set_icon


class Rail(QFrame):
    """Its buttons do the commands that they are made of; exactly one is on."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("rail")
        self.buttons = QButtonGroup(self)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(6, 8, 6, 8)
        self._column.setSpacing(4)
        self._column.addStretch()

    def add(self, command: Command) -> QToolButton:
        """Put one more page's button below the others."""
        button = QToolButton()
        button.setText(command.text())
        button.setToolTip(command.toolTip())
        button.setCheckable(True)
        button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextUnderIcon)
        button.setIconSize(QSize(24, 24))
        button.setFixedWidth(72)
        button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        set_icon(button, command.action.icon or "more")
        button.clicked.connect(lambda: command.trigger())
        self.buttons.addButton(button, len(self.buttons.buttons()))
        self._column.insertWidget(self._column.count() - 1, button)
        return button

    def mark(self, index: int) -> None:
        """Show which page is open."""
        self.buttons.button(index).setChecked(True)
