"""One widget for each kind of setting: a tick, a list of choices, or a line that takes what is typed."""

from __future__ import annotations

import json
from typing import Any

from PySide6.QtCore import QCoreApplication, Signal
from PySide6.QtWidgets import QCheckBox, QCompleter

from app.core.jobs.settings import Setting
from app.qt.inputs import ComboBox
from app.qt.train.line import Line
from app.qt.words import QT_TRANSLATE_NOOP

_YES_NO = {True: QT_TRANSLATE_NOOP("Train", "yes"), False: QT_TRANSLATE_NOOP("Train", "no")}
_AUTOMATIC = QT_TRANSLATE_NOOP("Train", "automatic")
_NOTHING = QT_TRANSLATE_NOOP("Train", "none")


def words(text: str) -> str:
    """Return a text of the Train page's tables in the user's language."""
    return QCoreApplication.translate("Train", text) if text else ""


def shown(value: Any) -> str:
    """Return a value as it is typed into a line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return "" if value is None else json.dumps(value, default=str)


class TickEditor(QCheckBox):
    """On or off."""

    edited = Signal(object, bool)
    """The value, and whether more letters may follow."""
    left = Signal()

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting
        self.clicked.connect(lambda on: self.edited.emit(on, False))

    def show_value(self, value: Any) -> None:
        """Show what the job states; None is the default."""
        self.setChecked(bool(self._setting.default if value is None else value))


class ChoiceEditor(ComboBox):
    """One of a few values; the first stands for what holds unless one is chosen, where that is none of them."""

    edited = Signal(object, bool)
    left = Signal()

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting
        if setting.default is None:
            self.addItem(words(_AUTOMATIC), None)
        for choice in setting.choices:
            self.addItem(words(_YES_NO[choice]) if isinstance(choice, bool) else str(choice), choice)
        self._known = self.count()
        self.activated.connect(lambda index: self.edited.emit(self.itemData(index), False))

    def show_value(self, value: Any) -> None:
        """Show what the job states; a word that is none of the choices is shown as it is."""
        while self.count() > self._known:
            self.removeItem(self._known)
        value = self._setting.default if value is None else value
        place = next((n for n in range(self.count()) if _same(self.itemData(n), value)), None)
        if place is None:
            self.addItem(shown(value), value)
            place = self.count() - 1
        self.setCurrentIndex(place)


class LineEditor(Line):
    """A number, a text, or a list with commas; empty means the default, which is shown pale."""

    edited = Signal(object, bool)
    left = Signal()

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting
        open_ = words(_NOTHING) if setting.default == "" else setting.otherwise or words(_AUTOMATIC)
        self.setPlaceholderText(shown(setting.default) or open_)
        if setting.words:
            self.setCompleter(QCompleter(list(setting.words), self))
            self.completer().activated.connect(lambda text: self._tell(text, False))
        self.textEdited.connect(lambda text: self._tell(text, True))
        self.editingFinished.connect(self.left)

    def show_value(self, value: Any) -> None:
        """Show what the job states; what is typed already stays as it is typed."""
        text = self.text()
        if (self._setting.typed(text) if text.strip() else None) != value:
            self.show_text(shown(value))

    def _tell(self, text: str, typing: bool) -> None:
        self.edited.emit(self._setting.typed(text) if text.strip() else None, typing)


Editor = TickEditor | ChoiceEditor | LineEditor


def editor_for(setting: Setting) -> Editor:
    """Return the widget for a setting, without a value yet."""
    if setting.choices == (True, False) and setting.default is not None:
        return TickEditor(setting)
    return ChoiceEditor(setting) if setting.choices else LineEditor(setting)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one: 1 is not true."""
    return type(one) is type(other) and bool(one == other)
