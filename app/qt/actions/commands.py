"""Qt actions for the declared commands, with their shortcuts and state."""

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

Menu = Literal["file", "edit", "view", "images", "captions", "find", "train", "runs", "presets", "help"]
_PORTABLE = QKeySequence.SequenceFormat.PortableText
MENUS: dict[Menu, str] = {
    "file": QT_TRANSLATE_NOOP("Menu", "&File"),
    "edit": QT_TRANSLATE_NOOP("Menu", "&Edit"),
    "view": QT_TRANSLATE_NOOP("Menu", "&View"),
    "images": QT_TRANSLATE_NOOP("Menu", "I&mages"),
    "captions": QT_TRANSLATE_NOOP("Menu", "&Captions"),
    "find": QT_TRANSLATE_NOOP("Menu", "F&ind"),
    "train": QT_TRANSLATE_NOOP("Menu", "&Train"),
    "runs": QT_TRANSLATE_NOOP("Menu", "&Runs"),
    "presets": QT_TRANSLATE_NOOP("Menu", "Pre&sets"),
    "help": QT_TRANSLATE_NOOP("Menu", "&Help"),
}


@dataclass(frozen=True, slots=True)
class Action:
    """Declaration of one command."""

    id: str
    """Stable name, `page.verb`."""
    title: str
    """English title, marked with QT_TRANSLATE_NOOP("Action", ...)."""
    menu: Menu
    """Menu that contains the command; also its group in the palette and the shortcut list."""
    run: str
    """Name of the owner's method that runs the command; it takes the new state if `checked` is given."""
    keys: tuple[str, ...] = ()
    """Default shortcuts in Qt's portable format: "Ctrl+K", "Right". The first one is shown."""
    enabled: str | None = None
    """Name of the owner's method or property that says whether the command is enabled; None for always."""
    checked: str | None = None
    """Name of the owner's method or property that says whether the command is checked; None if it is not checkable."""
    icon: str | None = None
    """Icon name in app/qt/icons."""
    tip: str = ""
    """Tooltip, marked for translation like the title; if empty, the tooltip shows the title."""


Keys = Mapping[str, tuple[str, ...]]
"""Shortcuts by command id, in Qt's portable format."""


def effective_shortcuts(actions: Iterable[Action], own: Keys) -> dict[str, tuple[str, ...]]:
    """Return each command's effective shortcuts by command id, in Qt's portable format.

    A shortcut that the user has assigned to one command is removed from all others: Qt runs neither of two commands
    with the same shortcut, and a new version of the app may add a conflicting default. Pages that are never visible
    together may have the same defaults.
    """
    effective: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for action in sorted(actions, key=lambda action: action.id not in own):
        wanted = map(portable, own.get(action.id, action.keys))
        effective[action.id] = tuple(key for key in wanted if key not in taken)
        if action.id in own:
            taken.update(effective[action.id])
    return effective


def portable(keys: str) -> str:
    """Return a shortcut in Qt's portable format, the same on every system."""
    return QKeySequence(keys, _PORTABLE).toString(_PORTABLE)


class CommandAction(QAction):
    """QAction for one command, bound to the widget that runs it."""

    def __init__(self, action: Action, owner: QWidget, keys: tuple[str, ...]) -> None:
        super().__init__(owner)
        self.action = action
        self.owner = owner
        self._run: Callable[..., None] = getattr(owner, action.run)
        self.setObjectName(action.id)
        self.setText(self.title)
        self.setCheckable(action.checked is not None)
        self.setEnabled(False)  # until refresh: a hidden page must not take the shortcut
        self.set_keys(keys)
        self._drawn = not action.icon
        self.triggered.connect(self._on_triggered)
        owner.addAction(self)

    @property
    def group(self) -> str:
        """Return the translated title of the command's menu."""
        return QCoreApplication.translate("Menu", MENUS[self.action.menu]).replace("&", "")

    @property
    def title(self) -> str:
        """Return the translated title, without the name of an edit that `text()` includes for Undo and Redo."""
        return QCoreApplication.translate("Action", self.action.title)

    def keys(self) -> list[str]:
        """Return the shortcuts in the system's notation."""
        return [key.toString(QKeySequence.SequenceFormat.NativeText) for key in self.shortcuts()]

    def set_keys(self, keys: Iterable[str]) -> None:
        """Set the shortcuts; the tooltip shows the first one."""
        self.setShortcuts([QKeySequence(key, _PORTABLE) for key in keys])
        tip = QCoreApplication.translate("Action", self.action.tip or self.action.title)
        self.setToolTip(" ".join([tip, *(f"({key})" for key in self.keys()[:1])]))

    def with_icon(self) -> CommandAction:
        """Return this action after setting its icon; icons are drawn on first use, as most are never shown."""
        if not self._drawn and self.action.icon:
            self._drawn = True
            set_icon(self, self.action.icon)
        return self

    def refresh(self) -> None:
        """Update the enabled and checked state from the owner."""
        self.setEnabled(self.owner.isVisible() and self._requested(self.action.enabled, True))
        if self.action.checked:
            self.setChecked(self._requested(self.action.checked, False))

    def _requested(self, name: str | None, otherwise: bool) -> bool:
        answer = getattr(self.owner, name) if name else otherwise
        return bool(answer() if callable(answer) else answer)

    def _on_triggered(self, checked: bool) -> None:
        if self.isCheckable():
            self._run(checked)
        else:
            self._run()


class Commands(QObject):
    """All commands by id, in the order in which they were added."""

    _requested = Signal()

    def __init__(self, parent: QObject | None = None, own: Keys | None = None) -> None:
        super().__init__(parent)
        self._commands: dict[str, CommandAction] = {}
        self._menus: dict[Menu, QMenu] = {}
        self._own = own or {}
        self._scheduled = False
        """Whether a refresh is scheduled.

        A queued signal runs it, since a timer would be delayed while pages are built in the background.
        """
        self._requested.connect(self._refresh, Qt.ConnectionType.QueuedConnection)

    def add(self, actions: Iterable[Action], owner: QWidget) -> None:
        """Bind actions to the widget that runs them and add them to their menus.

        If a page is built again after a failure, its new actions replace the old ones.
        """
        made = []
        for action in actions:
            former = self._commands.get(action.id)
            rebuilt = former and former.owner is not owner and type(former.owner) is type(owner)
            assert former is None or rebuilt, f"two actions are named {action.id}"
            if former:
                former.deleteLater()
            command = CommandAction(action, owner, action.keys)
            self._commands[action.id] = command
            made.append(command)
            self._add_to_menu(command)
        if self._own:
            self.rebind(self._own)
        owner.destroyed.connect(lambda _=None: self._remove(made))
        self.refresh()

    def __getitem__(self, name: str) -> CommandAction:
        return self._commands[name].with_icon()

    def __iter__(self) -> Iterator[CommandAction]:
        return (command.with_icon() for command in self._commands.values())

    def rebind(self, own: Keys) -> None:
        """Apply the user's shortcuts; commands that are not in `own` get their defaults."""
        self._own = own
        keys = effective_shortcuts((command.action for command in self._commands.values()), own)
        for name, command in self._commands.items():
            command.set_keys(keys[name])

    def refresh(self) -> None:
        """Schedule an update of all actions, to run after the current event."""
        if not self._scheduled:
            self._scheduled = True
            self._requested.emit()

    @Slot()
    def _refresh(self) -> None:
        self._scheduled = False
        self.refresh_now()

    def refresh_now(self) -> None:
        """Update all actions immediately."""
        for command in self._commands.values():
            command.refresh()

    def fill(self, bar: QMenuBar) -> None:
        """Create the menus in a menu bar; commands added later go into them, and empty menus stay hidden."""
        for name, title in MENUS.items():
            menu = self._menus[name] = bar.addMenu(QCoreApplication.translate("Menu", title))
            menu.menuAction().setVisible(False)
            menu.aboutToShow.connect(self.refresh_now)
            menu.aboutToShow.connect(partial(self._draw_icons, name))
        for command in self._commands.values():
            self._add_to_menu(command)

    def menu(self, name: Menu) -> QMenu:
        """Return a menu from the menu bar; call `fill` first."""
        return self._menus[name]

    def button(self, name: str, style: Qt.ToolButtonStyle = Qt.ToolButtonStyle.ToolButtonIconOnly) -> QToolButton:
        """Return a tool button for a command; Tab can focus it."""
        button = QToolButton()
        button.setDefaultAction(self[name])
        button.setToolButtonStyle(style)
        button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        button.setAccessibleName(self[name].text())
        return button

    def _draw_icons(self, menu: Menu) -> None:
        for command in self._commands.values():
            if command.action.menu == menu:
                command.with_icon()

    def _remove(self, made: Iterable[CommandAction]) -> None:
        """Remove the commands of a destroyed widget, except those that a rebuilt widget has replaced."""
        for command in made:
            if self._commands.get(command.action.id) is command:
                del self._commands[command.action.id]

    def _add_to_menu(self, command: CommandAction) -> None:
        menu = self._menus.get(command.action.menu)
        if menu is not None:
            menu.addAction(command)
            menu.menuAction().setVisible(True)
