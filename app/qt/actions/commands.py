"""Makes Qt's actions of the table, and keeps their keys and their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from PySide6.QtCore import QCoreApplication, QObject, Qt, Signal, Slot
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QMenu, QMenuBar, QToolButton, QWidget

from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP

Menu = Literal["file", "edit", "view", "pictures", "captions", "find", "train", "runs", "presets", "help"]
_PORTABLE = QKeySequence.SequenceFormat.PortableText
MENUS: dict[Menu, str] = {
    "file": QT_TRANSLATE_NOOP("Menu", "&File"),
    "edit": QT_TRANSLATE_NOOP("Menu", "&Edit"),
    "view": QT_TRANSLATE_NOOP("Menu", "&View"),
    "pictures": QT_TRANSLATE_NOOP("Menu", "&Pictures"),
    "captions": QT_TRANSLATE_NOOP("Menu", "&Captions"),
    "find": QT_TRANSLATE_NOOP("Menu", "F&ind"),
    "train": QT_TRANSLATE_NOOP("Menu", "&Train"),
    "runs": QT_TRANSLATE_NOOP("Menu", "&Runs"),
    "presets": QT_TRANSLATE_NOOP("Menu", "Pre&sets"),
    "help": QT_TRANSLATE_NOOP("Menu", "&Help"),
}


@dataclass(frozen=True, slots=True)
class Action:
    """One command, as every place that offers it sees it."""

    id: str
    """Stable name, `room.verb`."""
    title: str
    """What it does, in English and marked with QT_TRANSLATE_NOOP("Action", ...)."""
    menu: Menu
    """The menu it stands in, which is its group in palette and sheet too."""
    run: str
    """The owner's method that does it; it takes the new state where `checked` is given, else nothing."""
    keys: tuple[str, ...] = ()
    """Default shortcuts as Qt writes them portably: "Ctrl+K", "Right". The first one is shown."""
    enabled: str | None = None
    """The owner's method or property that tells whether it can be done now; None: always."""
    checked: str | None = None
    """The owner's method or property that tells whether it is on; None: it is nothing that can be on."""
    icon: str | None = None
    """A name of app/qt/icons."""
    tip: str = ""
    """One more sentence, marked like the title, where the title does not say it all."""


Keys = Mapping[str, tuple[str, ...]]
"""Shortcuts by command, as Qt writes them portably."""


def in_force(actions: Iterable[Action], own: Keys) -> dict[str, tuple[str, ...]]:
    """Return the keys of commands by id, as Qt writes them portably.

    A key of the user's own has one command only, before those delivered, which may be newer: where Qt finds two it
    calls neither. Those delivered may be alike: pages that are never seen together share them.
    """
    given: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for action in sorted(actions, key=lambda action: action.id not in own):
        wanted = map(portable, own.get(action.id, action.keys))
        given[action.id] = tuple(key for key in wanted if key not in taken)
        if action.id in own:
            taken.update(given[action.id])
    return given


def portable(keys: str) -> str:
    """Return a shortcut as Qt writes it on every system."""
    return QKeySequence(keys, _PORTABLE).toString(_PORTABLE)


class CommandAction(QAction):
    """One action of the table, bound to the widget that does it."""

    def __init__(self, action: Action, owner: QWidget, keys: tuple[str, ...]) -> None:
        super().__init__(owner)
        self.action = action
        self.owner = owner
        self._run: Callable[..., None] = getattr(owner, action.run)
        self.setObjectName(action.id)
        self.setText(self.title)
        self.setCheckable(action.checked is not None)
        self.setEnabled(False)  # until its owner was asked: a key of a page that nobody sees would be taken
        self.set_keys(keys)
        self._drawn = not action.icon
        self.triggered.connect(self._do)
        owner.addAction(self)

    @property
    def group(self) -> str:
        """The title of its menu, as the user reads it."""
        return QCoreApplication.translate("Menu", MENUS[self.action.menu]).replace("&", "")

    @property
    def title(self) -> str:
        """What it does, without that which it would undo just now."""
        return QCoreApplication.translate("Action", self.action.title)

    def keys(self) -> list[str]:
        """Return its shortcuts as this system writes them."""
        return [key.toString(QKeySequence.SequenceFormat.NativeText) for key in self.shortcuts()]

    def set_keys(self, keys: Iterable[str]) -> None:
        """Give it other shortcuts; its tip names the first."""
        self.setShortcuts([QKeySequence(key, _PORTABLE) for key in keys])
        tip = QCoreApplication.translate("Action", self.action.tip or self.action.title)
        self.setToolTip(" ".join([tip, *(f"({key})" for key in self.keys()[:1])]))

    def drawn(self) -> CommandAction:
        """Return it with its icon, which is drawn when it is to be seen: most commands never are, but in a menu."""
        if not self._drawn and self.action.icon:
            self._drawn = True
            set_icon(self, self.action.icon)
        return self

    def refresh(self) -> None:
        """Ask the owner whether this can be done now, and whether it is on."""
        self.setEnabled(self.owner.isVisible() and self._asked(self.action.enabled, True))
        if self.action.checked:
            self.setChecked(self._asked(self.action.checked, False))

    def _asked(self, name: str | None, otherwise: bool) -> bool:
        answer = getattr(self.owner, name) if name else otherwise
        return bool(answer() if callable(answer) else answer)

    def _do(self, checked: bool) -> None:
        if self.isCheckable():
            self._run(checked)
        else:
            self._run()


class Commands(QObject):
    """All commands by id, in the order in which rooms added them."""

    _asked = Signal()

    def __init__(self, parent: QObject | None = None, own: Keys | None = None) -> None:
        super().__init__(parent)
        self._commands: dict[str, CommandAction] = {}
        self._menus: dict[Menu, QMenu] = {}
        self._own = own or {}
        self._due = False
        """Whether `_refresh` is on its way. A timer would be put off by each room that is made in the background."""
        self._asked.connect(self._refresh, Qt.ConnectionType.QueuedConnection)

    def add(self, actions: Iterable[Action], owner: QWidget) -> None:
        """Bind a room's actions to the widget that does them; they show up in their menus.

        A room that could not be made and is made once more takes the place of the former.
        """
        made = []
        for action in actions:
            former = self._commands.get(action.id)
            once_more = former and former.owner is not owner and type(former.owner) is type(owner)
            assert former is None or once_more, f"two actions are named {action.id}"
            if former:
                former.deleteLater()
            command = CommandAction(action, owner, action.keys)
            self._commands[action.id] = command
            made.append(command)
            self._enter(command)
        if self._own:
            self.rebind(self._own)
        owner.destroyed.connect(lambda _=None: self._forget(made))
        self.refresh()

    def __getitem__(self, name: str) -> CommandAction:
        return self._commands[name].drawn()

    def __iter__(self) -> Iterator[CommandAction]:
        return (command.drawn() for command in self._commands.values())

    def rebind(self, own: Keys) -> None:
        """Put the user's own shortcuts in force; commands that are not named have those of the table."""
        self._own = own
        keys = in_force((command.action for command in self._commands.values()), own)
        for name, command in self._commands.items():
            command.set_keys(keys[name])

    def refresh(self) -> None:
        """Ask all owners for the state of their actions, once the event that runs now is over."""
        if not self._due:
            self._due = True
            self._asked.emit()

    @Slot()
    def _refresh(self) -> None:
        self._due = False
        self.refresh_now()

    def refresh_now(self) -> None:
        """Ask at once."""
        for command in self._commands.values():
            command.refresh()

    def fill(self, bar: QMenuBar) -> None:
        """Show the menus in a menu bar; commands that come later join them. An empty menu is not shown."""
        for name, title in MENUS.items():
            menu = self._menus[name] = bar.addMenu(QCoreApplication.translate("Menu", title))
            menu.menuAction().setVisible(False)
            menu.aboutToShow.connect(self.refresh_now)
            menu.aboutToShow.connect(partial(self._draw, name))
        for command in self._commands.values():
            self._enter(command)

    def menu(self, name: Menu) -> QMenu:
        """Return a menu of the bar that `fill` filled."""
        return self._menus[name]

    def button(self, name: str, style: Qt.ToolButtonStyle = Qt.ToolButtonStyle.ToolButtonIconOnly) -> QToolButton:
        """Return a button for a command, which the Tab key reaches too."""
        button = QToolButton()
        button.setDefaultAction(self[name])
        button.setToolButtonStyle(style)
        button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        button.setAccessibleName(self[name].text())
        return button

    def _draw(self, menu: Menu) -> None:
        for command in self._commands.values():
            if command.action.menu == menu:
                command.drawn()

    def _forget(self, made: Iterable[CommandAction]) -> None:
        """The widget that did them is gone, and they are about to be, unless others took their place."""
        for command in made:
            if self._commands.get(command.action.id) is command:
                del self._commands[command.action.id]

    def _enter(self, command: CommandAction) -> None:
        menu = self._menus.get(command.action.menu)
        if menu is not None:
            menu.addAction(command)
            menu.menuAction().setVisible(True)
