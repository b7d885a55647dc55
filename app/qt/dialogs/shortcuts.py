"""Lets the user choose the keys of every command, and says at once which other command a key belongs to."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import (
    QHBoxLayout,
    QHeaderView,
    QKeySequenceEdit,
    QLabel,
    QLineEdit,
    QPushButton,
    QTreeWidget,
    QTreeWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app.qt.actions.commands import Command, Commands, in_force, portable

_PORTABLE = QKeySequence.SequenceFormat.PortableText
_ROW = 26
_ID = Qt.ItemDataRole.UserRole
_STEPS = ("Left", "Right", "Up", "Down", "Home", "End", "PgUp", "PgDown")
_CHOICES = ("Return", "Enter", "Esc", "Tab", "Backtab", "Space", "+", "-", "=")
_VIEWS = frozenset(
    [shift + key for key in (*_STEPS, *_CHOICES) for shift in ("", "Shift+")]
    + [control + key for key in _STEPS for control in ("Ctrl+", "Ctrl+Shift+")]
)


def used_by_views(keys: QKeySequence) -> bool:
    """Tell whether pictures, lists and fields use these keys themselves, of which no command knows."""
    return keys.toString(_PORTABLE) in _VIEWS


class ShortcutEditor(QWidget):
    """A table of commands and their keys; below it the field that listens for other keys."""

    changed = Signal()

    def __init__(self, commands: Commands, own: dict[str, tuple[str, ...]]) -> None:
        super().__init__()
        self._commands = commands
        self.own = dict(own)
        """What differs from the table, by command."""
        self._keys: dict[str, tuple[str, ...]] = {}
        self.search = QLineEdit()
        self.search.setPlaceholderText(self.tr("Search by name or key"))
        self.search.setAccessibleName(self.tr("Search for a command"))
        self.list = QTreeWidget()
        self.keys = QKeySequenceEdit()
        self.told = QLabel()
        self._set = QPushButton(self.tr("Use these keys"))
        self._clear = QPushButton(self.tr("No keys"))
        self._default = QPushButton(self.tr("As delivered"))
        self._build()
        self._renew()
        self._fill()

    def keys_of(self, command: Command) -> tuple[str, ...]:
        """Return the keys that a command will have."""
        return self._keys.get(command.action.id, command.action.keys)  # of a room that came later, those delivered

    def owners(self, keys: QKeySequence) -> list[Command]:
        """Return the commands that will have these keys, without the one that is being edited."""
        wanted, chosen = keys.toString(_PORTABLE), self._chosen()
        return [one for one in self._commands if one is not chosen and wanted in self.keys_of(one)]

    def _build(self) -> None:
        self.list.setAccessibleName(self.tr("Commands and their keys"))
        self.list.setHeaderLabels([self.tr("Command"), self.tr("Menu"), self.tr("Keys")])
        self.list.setRootIsDecorated(False)
        self.list.setUniformRowHeights(True)
        self.list.header().setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        self.keys.setAccessibleName(self.tr("New keys for the command"))
        self.keys.setMaximumSequenceLength(1)
        self.told.setProperty("role", "warning")
        self.told.setWordWrap(True)
        row = QHBoxLayout()
        for widget in (self.keys, self._set, self._clear, self._default):
            row.addWidget(widget)
        column = QVBoxLayout(self)
        column.addWidget(self.search)
        column.addWidget(self.list, 1)
        column.addLayout(row)
        column.addWidget(self.told)
        self.search.textChanged.connect(self._fill)
        self.list.currentItemChanged.connect(self._tell)
        self.keys.keySequenceChanged.connect(self._tell)
        self._set.clicked.connect(lambda: self._give((self.keys.keySequence().toString(_PORTABLE),)))
        self._clear.clicked.connect(lambda: self._give(()))
        self._default.clicked.connect(lambda: self._give(None))

    def _chosen(self) -> Command | None:
        item = self.list.currentItem()
        return self._commands[item.data(0, _ID)] if item else None

    def _fill(self) -> None:
        chosen = self._chosen()
        wanted = self.search.text().casefold()
        self.list.clear()
        for command in self._commands:
            keys = (QKeySequence(key, _PORTABLE).toString(QKeySequence.SequenceFormat.NativeText)
                    for key in self.keys_of(command))  # fmt: skip
            texts = [command.title, command.group, ", ".join(keys)]
            if wanted in " ".join(texts).casefold():
                item = QTreeWidgetItem(self.list, texts)
                item.setData(0, _ID, command.action.id)
                item.setSizeHint(0, QSize(0, _ROW))
                if command is chosen:
                    self.list.setCurrentItem(item)
        self._tell()

    def _tell(self) -> None:
        """Say what the keys in the field do now, and which buttons can be used."""
        chosen, keys = self._chosen(), self.keys.keySequence()
        others = self.owners(keys) if not keys.isEmpty() else []
        names, words = ", ".join(command.title for command in others), ""
        if others:
            words = self.tr("These keys belong to “{name}” and will be taken from it.").format(name=names)
        elif used_by_views(keys):
            words = self.tr(
                "Pictures and lists need these keys to move and choose; beside this command they may not work."
            )
        self.told.setText(words)
        self.told.setVisible(bool(words))
        self._set.setEnabled(chosen is not None and not keys.isEmpty())
        self._clear.setEnabled(chosen is not None and bool(self.keys_of(chosen)))
        self._default.setEnabled(chosen is not None and chosen.action.id in self.own)

    def _give(self, keys: tuple[str, ...] | None) -> None:
        """Give the chosen command other keys, or those of the table (None), and take them from whoever has them."""
        chosen = self._chosen()
        assert chosen is not None
        delivered = keys is None
        given = chosen.action.keys if keys is None else keys
        losers = [name for key in given for name in self._take(key, only_own=delivered)]
        self._put(chosen, given)
        self.keys.clear()
        self._fill()
        if losers and delivered:  # of which nothing could be said before
            self.told.setText(self.tr("Its keys were taken from “{name}”.").format(name=", ".join(losers)))
            self.told.show()
        self.changed.emit()

    def _take(self, key: str, *, only_own: bool = False) -> list[str]:
        """Take a key from whoever has it, or whom the user gave it; return their titles."""
        losers = self.owners(QKeySequence(key, _PORTABLE))
        losers = [one for one in losers if not only_own or one.action.id in self.own]
        for command in losers:
            self._put(command, tuple(one for one in self.keys_of(command) if one != portable(key)))
        return [command.title for command in losers]

    def _put(self, command: Command, keys: tuple[str, ...]) -> None:
        if tuple(map(portable, keys)) == tuple(map(portable, command.action.keys)):
            self.own.pop(command.action.id, None)
        else:
            self.own[command.action.id] = keys
        self._renew()

    def _renew(self) -> None:
        self._keys = in_force((command.action for command in self._commands), self.own)
