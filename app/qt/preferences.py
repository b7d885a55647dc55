"""The preferences dialog: one tab per section in the schema and one for shortcuts. Changes apply at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QCoreApplication, QLocale, QSize, Qt, Signal
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QFormLayout,
    QHBoxLayout,
    QHeaderView,
    QKeySequenceEdit,
    QLabel,
    QLineEdit,
    QPushButton,
    QTabWidget,
    QTreeWidget,
    QTreeWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app.core.settings.preferences import PreferenceGroup, Preferences, Settings
from app.core.words import QT_TRANSLATE_NOOP
from app.qt.actions.commands import CommandAction, Commands, effective_shortcuts, portable
from app.qt.widgets import ComboBox, SpinBox, close_row, languages

_Editor = tuple[QWidget, Callable[[], Any]]
"""Editor widget, and the function that reads its value."""
_PORTABLE = QKeySequence.SequenceFormat.PortableText
_ROW = 26
_ID = Qt.ItemDataRole.UserRole
_STEPS = ("Left", "Right", "Up", "Down", "Home", "End", "PgUp", "PgDown")
_CHOICES = ("Return", "Enter", "Esc", "Tab", "Backtab", "Space", "+", "-", "=")


def translate(text: str | None) -> str:
    """Return the translation of a text in the schema; an empty string for None."""
    return QCoreApplication.translate("Preferences", text) if text else ""


class SectionForm(QWidget):
    """Form with one row per preference in a section.

    `choices` maps a preference's name to the labels of its allowed values, which override those in the schema.
    """

    changed = Signal()

    def __init__(self, section: PreferenceGroup, choices: dict[str, dict[str, str]] | None = None) -> None:
        super().__init__()
        self._section = section
        self._read: dict[str, Callable[[], Any]] = {}
        layout = QFormLayout(self)
        layout.setContentsMargins(16, 18, 16, 16)
        layout.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.FieldsStayAtSizeHint)
        layout.setHorizontalSpacing(20)
        layout.setVerticalSpacing(14)
        for name, schema in type(section).model_json_schema()["properties"].items():
            self._add_row(layout, name, {**schema, "labels": (choices or {}).get(name) or _labels(schema)})

    def section(self) -> PreferenceGroup:
        """Return the section with the form's values; raise pydantic's ValidationError if one is invalid."""
        return type(self._section)(**{name: read() for name, read in self._read.items()})

    def _add_row(self, layout: QFormLayout, name: str, schema: dict[str, Any]) -> None:
        editor, self._read[name] = self._editor(getattr(self._section, name), schema)
        title = QLabel(translate(schema["title"]))
        title.setBuddy(editor)
        editor.setAccessibleName(title.text())
        hint = QLabel(translate(schema.get("description")))
        hint.setProperty("role", "muted")
        editor.setAccessibleDescription(hint.text())
        cell = QWidget()
        column = QVBoxLayout(cell)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(3)
        column.addWidget(editor)
        column.addWidget(hint)
        layout.addRow(title, cell)

    def _editor(self, value: Any, schema: dict[str, Any]) -> _Editor:
        if schema["labels"]:
            return self._choice(value, schema["labels"])
        if isinstance(value, bool):
            tick = QCheckBox()
            tick.setChecked(value)
            tick.toggled.connect(self.changed)
            return tick, tick.isChecked
        if isinstance(value, int):
            return self._number(value, schema)
        line = QLineEdit(str(value))
        line.setMinimumWidth(260)
        line.editingFinished.connect(self.changed)
        return line, line.text

    def _choice(self, value: str, labels: dict[str, str]) -> _Editor:
        box = ComboBox()
        for key, label in labels.items():
            box.addItem(translate(label), key)
        box.setCurrentIndex(max(box.findData(value), 0))
        box.currentIndexChanged.connect(self.changed)
        return box, box.currentData

    def _number(self, value: int, schema: dict[str, Any]) -> _Editor:
        box = SpinBox()
        box.setRange(schema["minimum"], schema["maximum"])
        box.setSingleStep(schema.get("multipleOf", 1))
        box.setSuffix(f" {schema['unit']}" if "unit" in schema else "")
        box.setValue(value)
        box.setMaximumWidth(110)
        box.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt ignores the style sheet's padding here
        box.editingFinished.connect(self.changed)
        return box, box.value


def _labels(schema: dict[str, Any]) -> dict[str, str]:
    """Return the label of each allowed value; a value without a label in the schema is its own label."""
    labels: dict[str, str] = schema.get("labels", {})
    return {value: labels.get(value, value) for value in schema.get("enum", ())}


_VIEWS = frozenset(
    [shift + key for key in (*_STEPS, *_CHOICES) for shift in ("", "Shift+")]
    + [control + key for key in _STEPS for control in ("Ctrl+", "Ctrl+Shift+")]
)


def is_view_key(keys: QKeySequence) -> bool:
    """Return whether image grids, lists and fields handle these keys before a shortcut could."""
    return keys.toString(_PORTABLE) in _VIEWS


class ShortcutEditor(QWidget):
    """Table of commands and their shortcuts, with a field below it that records new keys."""

    changed = Signal()

    def __init__(self, commands: Commands, own: dict[str, tuple[str, ...]]) -> None:
        super().__init__()
        self._commands = commands
        self.own = dict(own)
        """Shortcuts that differ from the defaults, by command id."""
        self._keys: dict[str, tuple[str, ...]] = {}
        self.search = QLineEdit()
        self.search.setPlaceholderText(self.tr("Search by name or key"))
        self.search.setAccessibleName(self.tr("Search for a command"))
        self.list = QTreeWidget()
        self.keys = QKeySequenceEdit()
        self.message = QLabel()
        self._set = QPushButton(self.tr("Use these keys"))
        self._clear = QPushButton(self.tr("Remove shortcut"))
        self._default = QPushButton(self.tr("Reset to default"))
        self._build()
        self._update_keys()
        self._fill()

    def keys_of(self, command: CommandAction) -> tuple[str, ...]:
        """Return a command's keys, including the changes made here."""
        return self._keys.get(command.action.id, command.action.keys)  # a page that was built later has its defaults

    def owners(self, keys: QKeySequence) -> list[CommandAction]:
        """Return the commands that use these keys, except the one being edited."""
        wanted, chosen = keys.toString(_PORTABLE), self._chosen()
        return [one for one in self._commands if one is not chosen and wanted in self.keys_of(one)]

    def _build(self) -> None:
        self.list.setAccessibleName(self.tr("Commands and their shortcuts"))
        self.list.setHeaderLabels([self.tr("Command"), self.tr("Menu"), self.tr("Shortcut")])
        self.list.setRootIsDecorated(False)
        self.list.setUniformRowHeights(True)
        self.list.header().setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        self.keys.setAccessibleName(self.tr("New shortcut for the command"))
        self.keys.setMaximumSequenceLength(1)
        self.message.setProperty("role", "warning")
        self.message.setWordWrap(True)
        row = QHBoxLayout()
        for widget in (self.keys, self._set, self._clear, self._default):
            row.addWidget(widget)
        column = QVBoxLayout(self)
        column.addWidget(self.search)
        column.addWidget(self.list, 1)
        column.addLayout(row)
        column.addWidget(self.message)
        self.search.textChanged.connect(self._fill)
        self.list.currentItemChanged.connect(self._update_state)
        self.keys.keySequenceChanged.connect(self._update_state)
        self._set.clicked.connect(lambda: self._assign((self.keys.keySequence().toString(_PORTABLE),)))
        self._clear.clicked.connect(lambda: self._assign(()))
        self._default.clicked.connect(lambda: self._assign(None))

    def _chosen(self) -> CommandAction | None:
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
        self._update_state()

    def _update_state(self) -> None:
        """Show which other command uses the entered keys, and enable the buttons that apply."""
        chosen, keys = self._chosen(), self.keys.keySequence()
        others = self.owners(keys) if not keys.isEmpty() else []
        names, words = ", ".join(command.title for command in others), ""
        if others:
            words = self.tr("“{name}” uses these keys and will lose them.").format(name=names)
        elif is_view_key(keys):
            words = self.tr("Images and lists use these keys to move and select; this shortcut may not work there.")
        self.message.setText(words)
        self.message.setVisible(bool(words))
        self._set.setEnabled(chosen is not None and not keys.isEmpty())
        self._clear.setEnabled(chosen is not None and bool(self.keys_of(chosen)))
        self._default.setEnabled(chosen is not None and chosen.action.id in self.own)

    def _assign(self, keys: tuple[str, ...] | None) -> None:
        """Set the selected command's keys, or its defaults for None, and remove those keys from other commands."""
        chosen = self._chosen()
        assert chosen is not None
        to_default = keys is None
        new_keys = chosen.action.keys if keys is None else keys
        previous_owners = [name for key in new_keys for name in self._unassign(key, only_own=to_default)]
        self._set_keys(chosen, new_keys)
        self.keys.clear()
        self._fill()
        if previous_owners and to_default:  # the user could not be warned before
            self.message.setText(self.tr("“{name}” lost these keys.").format(name=", ".join(previous_owners)))
            self.message.show()
        self.changed.emit()

    def _unassign(self, key: str, *, only_own: bool = False) -> list[str]:
        """Remove a key from all other commands that use it and return their titles.

        With `only_own`, remove it only from commands whose shortcuts the user has changed.
        """
        previous_owners = self.owners(QKeySequence(key, _PORTABLE))
        previous_owners = [one for one in previous_owners if not only_own or one.action.id in self.own]
        for command in previous_owners:
            self._set_keys(command, tuple(one for one in self.keys_of(command) if one != portable(key)))
        return [command.title for command in previous_owners]

    def _set_keys(self, command: CommandAction, keys: tuple[str, ...]) -> None:
        if tuple(map(portable, keys)) == tuple(map(portable, command.action.keys)):
            self.own.pop(command.action.id, None)
        else:
            self.own[command.action.id] = keys
        self._update_keys()

    def _update_keys(self) -> None:
        self._keys = effective_shortcuts((command.action for command in self._commands), self.own)


class PreferencesDialog(QDialog):
    """Preferences dialog, built from the schema. Every change is applied and saved at once.

    If the preferences file cannot be written, the window shows a notice.
    """

    def __init__(self, settings: Settings, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self._forms: dict[str, SectionForm] = {}
        self.setWindowTitle(self.tr("Preferences"))
        self.resize(640, 520)
        self.tabs = QTabWidget()
        self.tabs.setAccessibleName(self.windowTitle())
        self.tabs.setDocumentMode(True)
        self.fault = QLabel()
        self.fault.setProperty("role", "bad")
        self.fault.setWordWrap(True)
        self.fault.hide()
        for name, field in Preferences.model_fields.items():
            section = getattr(settings.preferences, name)
            if isinstance(section, PreferenceGroup) and field.title:
                self._add_section(name, translate(field.title), section)
        self.shortcuts = ShortcutEditor(commands, settings.preferences.shortcuts)
        self.shortcuts.changed.connect(self._save)
        self.tabs.addTab(self.shortcuts, self.tr("Shortcuts"))
        buttons = close_row(self)
        column = QVBoxLayout(self)
        column.addWidget(self.tabs)
        column.addWidget(self.fault)
        column.addWidget(buttons)

    def _add_section(self, name: str, title: str, section: PreferenceGroup) -> None:
        form = self._forms[name] = SectionForm(section, {"language": _language_names()})
        form.changed.connect(self._save)
        self.tabs.addTab(form, title)

    def _save(self) -> None:
        try:
            sections = {name: form.section() for name, form in self._forms.items()}
            self._settings.change(
                self._settings.preferences.model_copy(update={**sections, "shortcuts": self.shortcuts.own.copy()})
            )
        except ValueError as error:  # pydantic's ValidationError is one
            self.fault.setText(self.tr("Could not save this change: {error}").format(error=error))
            self.fault.show()
        else:
            self.fault.hide()


def _language_names() -> dict[str, str]:
    """Return the name of each language by code, in the language itself so that its speakers recognize it."""
    names = {code: QLocale(code).nativeLanguageName().capitalize() or code for code in languages()}
    return {"system": QT_TRANSLATE_NOOP("Preferences", "System"), **names}
