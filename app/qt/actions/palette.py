"""The command palette (type a few letters, Enter runs the command) and the list of shortcuts."""

from __future__ import annotations

from itertools import groupby

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QIcon, QKeyEvent, QPixmap
from PySide6.QtWidgets import (
    QDialog,
    QGridLayout,
    QHBoxLayout,
    QHeaderView,
    QLabel,
    QLineEdit,
    QScrollArea,
    QTreeWidget,
    QTreeWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app.qt.actions.commands import MENUS, CommandAction, Commands
from app.qt.widgets import close_row

_MOVES = (Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown)


_WORD, _RUN, _FIRST = 8, 10, 3
"""Bonuses for a letter that starts a word, directly follows the previous match, or starts the text."""


def score(typed: str, text: str) -> int | None:
    """Return how well a text matches what was typed; None unless it contains all typed letters in order.

    The score is the highest of all possible matches: "sf" matches the initials in "Save filter", not just any f. Each
    letter scores 1 plus its bonuses; spaces in `typed` are ignored. Takes len(typed) * len(text) steps.
    """
    letters = [letter for letter in typed.casefold() if not letter.isspace()]
    folded = text.casefold()
    # best[i]: the best score of the letters so far with the last one at index i; None if there is no match.
    best: list[int | None] = [0] * (len(folded) + 1)
    for number, letter in enumerate(letters):
        following: list[int | None] = [None] * (len(folded) + 1)
        reach: int | None = 0 if number == 0 else None  # the best score that ends before this index
        for place, found in enumerate(folded):
            before = best[place - 1] if place and number else None
            if found == letter and (reach is not None or before is not None):
                chain = -1 if before is None else before + _RUN
                following[place] = max(chain, -1 if reach is None else reach) + 1 + _bonus(folded, place)
            if number:
                reach = max((value for value in (reach, best[place]) if value is not None), default=None)
        best = following
    return max((value for value in best if value is not None), default=None) if letters else 0


def _bonus(text: str, place: int) -> int:
    if place == 0:
        return _WORD + _FIRST
    return _WORD if not text[place - 1].isalnum() and text[place].isalnum() else 0


class CommandPalette(QDialog):
    """Dialog that lists matching commands, best first; disabled commands come last."""

    def __init__(self, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._commands = commands
        self.setWindowTitle(self.tr("Commands"))
        self.resize(560, 420)
        self.field = QLineEdit()
        self.field.setPlaceholderText(self.tr("What do you want to do?"))
        self.field.setAccessibleName(self.tr("Search for a command"))
        self.field.setClearButtonEnabled(True)
        self.list = QTreeWidget()
        self._prepare_list()
        column = QVBoxLayout(self)
        column.addWidget(self.field)
        column.addWidget(self.list)
        self.field.textChanged.connect(self._search)
        self.field.returnPressed.connect(self._run_current)
        self.field.installEventFilter(self)
        self.list.itemActivated.connect(self._run_current)
        commands.refresh_now()
        self._search("")

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Move the list's selection with the arrow keys while the field keeps the focus."""
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress and event.key() in _MOVES:
            self.list.keyPressEvent(event)
            return True
        return super().eventFilter(watched, event)

    def _prepare_list(self) -> None:
        self.list.setAccessibleName(self.tr("Commands"))
        self.list.setColumnCount(3)
        self.list.setHeaderHidden(True)
        self.list.setRootIsDecorated(False)
        self.list.setUniformRowHeights(True)
        self.list.header().setStretchLastSection(False)
        self.list.header().setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        for column in (1, 2):
            self.list.header().setSectionResizeMode(column, QHeaderView.ResizeMode.ResizeToContents)

    def _search(self, typed: str) -> None:
        found = [(command, value) for command in self._commands if (value := _score_of(typed, command)) is not None]
        found.sort(key=lambda pair: (not pair[0].isEnabled(), -pair[1]))
        self.list.clear()
        items = [_item(command) for command, _ in found]
        self.list.addTopLevelItems(items)
        if items:
            self.list.setCurrentItem(items[0])

    def _run_current(self) -> None:
        item = self.list.currentItem()
        command = self._commands[item.data(0, Qt.ItemDataRole.UserRole)] if item else None
        if command is None or not command.isEnabled():
            return
        # Close first, so that the window is active again: commands use what is shown and selected there.
        self.accept()
        command.trigger()


def _score_of(typed: str, command: CommandAction) -> int | None:
    """Return twice the score of the title or, if the title does not match, the score of "menu title".

    Returns None if neither matches.
    """
    title = score(typed, command.text())
    return title * 2 if title is not None else score(typed, f"{command.group} {command.text()}")


def _blank() -> QIcon:
    """Return an empty icon that keeps titles without an icon aligned with the others."""
    room = QPixmap(16, 16)
    room.fill(Qt.GlobalColor.transparent)
    return QIcon(room)


def _item(command: CommandAction) -> QTreeWidgetItem:
    item = QTreeWidgetItem([command.text(), command.group, "  ".join(command.keys())])
    item.setIcon(0, command.icon() if not command.icon().isNull() else _blank())
    item.setData(0, Qt.ItemDataRole.UserRole, command.action.id)
    if not command.isEnabled():
        item.setFlags(item.flags() & ~Qt.ItemFlag.ItemIsEnabled)
    return item


class ShortcutList(QDialog):
    """Dialog that lists all commands with shortcuts, grouped by menu."""

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

    def _add_group(self, grid: QGridLayout, title: str, members: list[CommandAction]) -> None:
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
