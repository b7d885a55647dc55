"""Makes Qt's actions of the table, and keeps their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from PySide6.QtCore import QCoreApplication, QObject, QTimer
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QMenuBar, QWidget

from app.core.events import Event
from app.qt.actions.table import Action, Menu
from app.qt.theme import set_icon
from app.qt.words import QT_TRANSLATE_NOOP

MENUS: dict[Menu, str] = {
    "file": QT_TRANSLATE_NOOP("Menu", "&File"),
    "edit": QT_TRANSLATE_NOOP("Menu", "&Edit"),
    "view": QT_TRANSLATE_NOOP("Menu", "&View"),
    "pictures": QT_TRANSLATE_NOOP("Menu", "&Pictures"),
    "captions": QT_TRANSLATE_NOOP("Menu", "&Captions"),
    "find": QT_TRANSLATE_NOOP("Menu", "F&ind"),
    "help": QT_TRANSLATE_NOOP("Menu", "&Help"),
}


class Command(QAction):
    """One action of the table, bound to the widget that does it."""

    def __init__(self, action: Action, owner: QWidget) -> None:
        super().__init__(owner)
        self.action = action
        self._owner = owner
        self._run: Callable[..., None] = getattr(owner, action.run)
        self.setObjectName(action.id)
        self.setText(QCoreApplication.translate("Action", action.title))
        self.setToolTip(QCoreApplication.translate("Action", action.tip or action.title))
        self.setCheckable(action.checked is not None)
        if action.icon:
            set_icon(self, action.icon)
        self.triggered.connect(self._do)
        owner.addAction(self)

    def refresh(self) -> None:
        """Ask the owner whether this can be done now, and whether it is on."""
        self.setEnabled(self._owner.isVisible() and self._asked(self.action.enabled, True))
        if self.action.checked:
            self.setChecked(self._asked(self.action.checked, False))

    def _asked(self, name: str | None, otherwise: bool) -> bool:
        answer = getattr(self._owner, name) if name else otherwise
        return bool(answer() if callable(answer) else answer)

    def _do(self, checked: bool) -> None:
        if self.isCheckable():
            self._run(checked)
        else:
            self._run()


class Commands(QObject):
    """All commands by id, in the order in which rooms added them."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.added: Event[Command] = Event()
        self._commands: dict[str, Command] = {}
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.timeout.connect(self.refresh_now)

    def add(self, actions: Iterable[Action], owner: QWidget) -> None:
        """Bind a room's actions to the widget that does them."""
        for action in actions:
            assert action.id not in self._commands, f"two actions are named {action.id}"
            command = self._commands[action.id] = Command(action, owner)
            command.setShortcuts([QKeySequence(key, QKeySequence.SequenceFormat.PortableText) for key in action.keys])
            self.added.emit(command)
        self.refresh()

    def __getitem__(self, name: str) -> Command:
        return self._commands[name]

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def refresh(self) -> None:
        """Ask all owners for the state of their actions, once the event that runs now is over."""
        self._soon.start()

    def refresh_now(self) -> None:
        """Ask at once."""
        for command in self:
            command.refresh()

    def fill(self, bar: QMenuBar) -> None:
        """Put every command that has been added into its menu."""
        for name, title in MENUS.items():
            commands = [command for command in self if command.action.menu == name]
            if commands:
                menu = bar.addMenu(QCoreApplication.translate("Menu", title))
                menu.addActions(commands)
                menu.aboutToShow.connect(self.refresh_now)
