"""The command palette: type a few letters of what you want, Enter does it."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QIcon, QKeyEvent, QPixmap
from PySide6.QtWidgets import QDialog, QHeaderView, QLineEdit, QTreeWidget, QTreeWidgetItem, QVBoxLayout, QWidget

from app.core.fuzzy import score
from app.qt.actions.commands import Command, Commands

_MOVES = (Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown)


class CommandPalette(QDialog):
    """Lists the commands that answer what is typed, the best first; those that cannot be done now are pale and last."""

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
        self.field.returnPressed.connect(self._do)
        self.field.installEventFilter(self)
        self.list.itemActivated.connect(self._do)
        commands.refresh_now()
        self._search("")

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Let the arrow keys move in the list while the field keeps the focus."""
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
        found = [(command, value) for command in self._commands if (value := _value(typed, command)) is not None]
        found.sort(key=lambda pair: (not pair[0].isEnabled(), -pair[1]))
        self.list.clear()
        items = [_item(command) for command, _ in found]
        self.list.addTopLevelItems(items)
        if items:
            self.list.setCurrentItem(items[0])

    def _do(self) -> None:
        item = self.list.currentItem()
        command = self._commands[item.data(0, Qt.ItemDataRole.UserRole)] if item else None
        if command is None or not command.isEnabled():
            return
        # First the window is the active one again: commands look at what is shown and selected there.
        self.accept()
        command.trigger()


def _value(typed: str, command: Command) -> int | None:
    """The words of the command count twice; its menu helps to find it."""
    title = score(typed, command.text())
    return title * 2 if title is not None else score(typed, f"{command.group} {command.text()}")


def _blank() -> QIcon:
    """An icon of nothing, so that all titles begin at the same place."""
    room = QPixmap(16, 16)
    room.fill(Qt.GlobalColor.transparent)
    return QIcon(room)


def _item(command: Command) -> QTreeWidgetItem:
    item = QTreeWidgetItem([command.text(), command.group, "  ".join(command.keys())])
    item.setIcon(0, command.icon() if not command.icon().isNull() else _blank())
    item.setData(0, Qt.ItemDataRole.UserRole, command.action.id)
    if not command.isEnabled():
        item.setFlags(item.flags() & ~Qt.ItemFlag.ItemIsEnabled)
    return item
