"""The sheet of keys: every shortcut there is, by menu, on one page."""

from __future__ import annotations

from itertools import groupby

from PySide6.QtWidgets import QDialog, QGridLayout, QHBoxLayout, QLabel, QScrollArea, QVBoxLayout, QWidget

from app.qt.actions.commands import MENUS, Command, Commands
from app.qt.dialogs.parts import close_row


class KeySheet(QDialog):
    """Shows what each key does now."""

    def __init__(self, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Keyboard shortcuts"))
        self.resize(560, 620)
        order = list(MENUS)
        bound = sorted((c for c in commands if c.shortcuts()), key=lambda c: order.index(c.action.menu))
        page = QWidget()
        grid = QGridLayout(page)
        grid.setColumnStretch(1, 1)
        grid.setHorizontalSpacing(16)
        for group, members in groupby(bound, key=lambda command: command.group):
            self._add_group(grid, group, list(members))
        grid.setRowStretch(grid.rowCount(), 1)
        area = QScrollArea()
        area.setWidget(page)
        area.setWidgetResizable(True)
        area.setAccessibleName(self.windowTitle())
        buttons = close_row(self)
        column = QVBoxLayout(self)
        column.addWidget(area)
        column.addWidget(buttons)

    def _add_group(self, grid: QGridLayout, title: str, members: list[Command]) -> None:
        heading = QLabel(title)
        heading.setProperty("role", "heading")
        heading.setContentsMargins(0, 10 if grid.count() else 0, 0, 2)
        grid.addWidget(heading, grid.rowCount(), 0, 1, 2)
        for command in members:
            row, texts = grid.rowCount(), command.keys()
            keys = QHBoxLayout()
            keys.setSpacing(5)
            for key in texts:
                cap = QLabel(key)
                cap.setProperty("role", "keys")
                keys.addWidget(cap)
            keys.addStretch()
            grid.addLayout(keys, row, 0)
            grid.addWidget(QLabel(command.title), row, 1)
