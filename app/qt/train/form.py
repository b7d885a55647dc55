"""The form with all job settings; it is built from the schema, so new keys appear automatically."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QCoreApplication, QEvent, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import (
    QCheckBox,
    QCompleter,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.jobs.draft import Draft
from app.core.jobs.settings import Setting, is_found_by, settings, tables, title_of
from app.core.words import sentence_of
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, plain_tip, retain_size, set_message
from trainer.config.field_names import unsupported
from trainer.config.toml_file import toml_value

if TYPE_CHECKING:
    from app.qt.train.schedule_chart import ScheduleChart

_WINDOW_SHORTCUTS = (QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Redo)
_YES_NO = {True: QT_TRANSLATE_NOOP("Train", "yes"), False: QT_TRANSLATE_NOOP("Train", "no")}
_AUTOMATIC = QT_TRANSLATE_NOOP("Train", "automatic")
_NOTHING = QT_TRANSLATE_NOOP("Train", "none")
_UNSET = {
    "off": QT_TRANSLATE_NOOP("Train", "off"),
    "as in the recipe": QT_TRANSLATE_NOOP("Train", "as in the recipe"),
    "as in the dataset": QT_TRANSLATE_NOOP("Train", "as in the dataset"),
}
"""First item of combo boxes, by the default that the help describes; "automatic" for others."""
EMPTY = '""'
"""What a user types for an empty text where an empty line means the default."""
WIDTH = 190
"""Width of a value's editor, in logical pixels."""
_ESSENTIAL = ("name", "base.model")
"""Keys that the page shows above the form."""
_SCHEDULE = "recipe.schedule"
_BATCH = 8
"""Number of rows created per event loop turn, which takes about 15 ms."""


class Line(QLineEdit):
    """Line edit that leaves undo and redo to the window."""

    def event(self, event: QEvent) -> bool:
        """Ignore Qt's shortcut override for undo and redo, so that the window handles these keys."""
        key = event if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.ShortcutOverride else None
        if key is not None and any(key.matches(sequence) for sequence in _WINDOW_SHORTCUTS):
            event.ignore()
            return True
        return super().event(event)

    def show_text(self, text: str) -> None:
        """Show the text, scrolled to its start unless the line has the focus; do nothing if it is already shown."""
        if text != self.text():
            self.setText(text)
            if not self.hasFocus():
                self.setCursorPosition(0)


def translated(text: str) -> str:
    """Return the translation of a text in the Train page's context."""
    return QCoreApplication.translate("Train", text) if text else ""


def to_text(value: Any) -> str:
    """Return a value as the user would type it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(to_text, value))
    if isinstance(value, dict):
        return toml_value(value)[1:-1]
    return "" if value is None else json.dumps(value, default=str)


class CheckEditor(QCheckBox):
    """Check box for a boolean setting that is on or off by default."""

    edited = Signal(object, bool)
    """The value, and whether the user is still typing."""
    left = Signal()

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting
        self.clicked.connect(lambda on: self.edited.emit(on if on or setting.default is not None else None, False))

    def show_value(self, value: Any) -> None:
        """Show the job's value; None shows the default."""
        self.setChecked(bool(self._setting.default if value is None else value))


class ChoiceEditor(ComboBox):
    """Combo box for a setting with a few values; the first item stands for no value if there is no default."""

    edited = Signal(object, bool)
    left = Signal()

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting
        if setting.default is None:
            self.addItem(translated(_UNSET.get(setting.described_default, _AUTOMATIC)), None)
        for choice in setting.choices:
            self.addItem(translated(_YES_NO[choice]) if isinstance(choice, bool) else str(choice), choice)
        self._known = self.count()
        self.activated.connect(lambda index: self.edited.emit(self.itemData(index), False))

    def show_value(self, value: Any) -> None:
        """Show the job's value, adding it to the choices if it is not one of them."""
        while self.count() > self._known:
            self.removeItem(self._known)
        value = self._setting.default if value is None else value
        place = next((n for n in range(self.count()) if _same(self.itemData(n), value)), None)
        if place is None:
            self.addItem(to_text(value), value)
            place = self.count() - 1
        self.setCurrentIndex(place)


class LineEditor(Line):
    """Line edit for a number, a string or a comma-separated list; if it is empty, a placeholder shows the default."""

    edited = Signal(object, bool)
    left = Signal()

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting
        unset = translated(_NOTHING) if setting.default == "" else setting.described_default or translated(_AUTOMATIC)
        self.setPlaceholderText(to_text(setting.default) or unset)
        if setting.words:
            self.setCompleter(QCompleter(list(setting.words), self))
            self.completer().activated.connect(lambda text: self._emit(text, False))
        self.textEdited.connect(lambda text: self._emit(text, True))
        self.editingFinished.connect(self.left)

    def show_value(self, value: Any) -> None:
        """Show the job's value; if the typed text already means this value, keep it as typed."""
        if self._value_of(self.text()) != value:
            self.show_text(EMPTY if value == "" and self._setting.can_be_empty else to_text(value))

    def _emit(self, text: str, typing: bool) -> None:
        self.edited.emit(self._value_of(text), typing)

    def _value_of(self, text: str) -> Any:
        """Return the value of typed text: None for an empty line, and an empty text for `EMPTY` where it differs."""
        if text.strip() == EMPTY and self._setting.can_be_empty:
            return ""
        return self._setting.typed(text) if text.strip() else None


Editor = CheckEditor | ChoiceEditor | LineEditor


def editor_for(setting: Setting) -> Editor:
    """Return a new editor for a setting; it does not show a value yet."""
    if setting.choices == (True, False) and (setting.default is not None or setting.is_off_by_default):
        return CheckEditor(setting)
    return ChoiceEditor(setting) if setting.choices else LineEditor(setting)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values have the same type and are equal: 1 and True are not the same."""
    return type(one) is type(other) and bool(one == other)


class SettingRow(QWidget):
    """Row with title and help on the left and the value's editor on the right; a bar marks changed values."""

    edited = Signal(str, object, bool)
    """Key, value (None for the default) and whether the user is still typing."""
    left = Signal()
    reverted = Signal(str)

    def __init__(self, setting: Setting, key: str | None = None) -> None:
        """Create the row; for a setting of list items, such as "prompts.*.seed", `key` is its key in one item."""
        super().__init__()
        self.setting = setting
        self.key = key or setting.key
        self.editor = editor_for(setting)
        self.title, self.hint = QLabel(setting.title), QLabel(setting.doc)
        self.mark, self.back = QFrame(), QToolButton()
        self._state: object = None
        self._build()
        self.editor.edited.connect(lambda value, typing: self.edited.emit(self.key, value, typing))
        self.editor.left.connect(self.left)
        self.back.clicked.connect(lambda: self.reverted.emit(self.key))

    def show_draft(self, draft: Draft) -> None:
        """Show this key's value, its problems and how it differs from the recipe."""
        key, value = self.key, draft.get(self.key)
        state = (
            value,
            next((reason for name, reason in draft.problems if name == key or name.startswith(f"{key}.")), None),
            draft.effectless.get(key),
            draft.doubts.get(key),
            key in draft.differences,
            draft.differences.get(key),
            draft.origin.preset is not None and key.startswith("recipe."),
        )
        if state != self._state:
            self._state = state
            self.editor.show_value(value)
            self._show_hint(*state[1:4])
            self._show_difference(*state[4:])

    def matches(self, wanted: list[str]) -> bool:
        """Return whether a search for these lowercase words finds the setting."""
        return is_found_by(wanted, [self.setting])

    def _show_hint(self, problem: str | None, without_effect: str | None, doubt: str | None) -> None:
        """Show the most serious of these messages, or the help if there are none."""
        disabled = bool(without_effect) and not problem
        text, role = self.setting.doc, "muted"
        if problem:
            text, role = sentence_of(problem), "bad"
        elif without_effect:
            text = self.tr("No effect here: {reason}.").format(reason=without_effect)
        elif doubt:
            text, role = sentence_of(doubt), "warning"
        set_message(self.hint, text, role)
        self.editor.setAccessibleDescription(text)
        self.editor.setEnabled(not disabled)
        self.title.setEnabled(not disabled)

    def _show_difference(self, differs: bool, expected: object, of_preset: bool) -> None:
        self.mark.setVisible(differs)
        self.back.setVisible(differs)
        what = to_text(expected) or self.setting.described_default or self.tr("not set")
        words = self.tr("Reset to preset: {value}") if of_preset else self.tr("Reset to default: {value}")
        self.back.setToolTip(plain_tip(words.format(value=what)))
        self.back.setAccessibleName(f"{self.title.text()}: {words.format(value=what)}")

    def _build(self) -> None:
        tip = f"{self.key}\n" + self.tr("Allowed values: {values}.").format(values=self.setting.values)
        if self.setting.can_be_empty:
            tip += "\n" + self.tr("Type {quotes} for an empty text.").format(quotes=EMPTY)
        if self.setting.other_names:
            tip += "\n" + self.tr("In other trainers: {names}.").format(names=", ".join(self.setting.other_names))
        for part in (self.title, self.editor, self.hint):
            part.setToolTip(plain_tip(tip))
        for label in (self.title, self.hint):
            label.setTextFormat(Qt.TextFormat.PlainText)
        self.title.setBuddy(self.editor)
        self.editor.setAccessibleName(self.setting.title)
        self.hint.setWordWrap(True)
        self.hint.setProperty("role", "muted")
        self.mark.setObjectName("difference")
        self.mark.setFixedWidth(3)
        retain_size(self.mark)
        retain_size(self.back)
        self.back.setIconSize(QSize(16, 16))
        set_icon(self.back, "undo", "muted")
        if not isinstance(self.editor, CheckEditor):
            self.editor.setFixedWidth(WIDTH)
        value = QHBoxLayout()
        value.setSpacing(4)
        value.addStretch()
        value.addWidget(self.back)
        value.addWidget(self.editor)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 5, 0, 5)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(1)
        grid.addWidget(self.mark, 0, 0, 2, 1)
        grid.addWidget(self.title, 0, 1)
        grid.addWidget(self.hint, 1, 1)
        grid.addLayout(value, 0, 2, 2, 1, Qt.AlignmentFlag.AlignTop)
        grid.setColumnStretch(1, 1)


class DraftEditor(QWidget):
    """Widget that edits a job: it passes what the user changes to the job's draft."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft: Draft | None = None

    def _on_edited(self, key: str, value: object, typing: bool) -> None:
        if self._draft is not None:
            self._draft.set(key, value, typing=typing)

    def _on_left(self) -> None:
        if self._draft is not None:
            self._draft.seal()


class TableEditor(DraftEditor):
    """Editor of tables of which a job can have several, as a group of the form."""

    def show_draft(self, draft: Draft) -> None:
        """Show this job's tables."""
        raise NotImplementedError

    def matches(self, wanted: list[str]) -> bool:
        """Return whether a search for these lowercase words finds one of the settings."""
        raise NotImplementedError


class SettingsForm(DraftEditor):
    """Form with a group for each table of the job; rows are created in batches so the window stays responsive."""

    def __init__(self, lists: Mapping[str, Callable[[], TableEditor]] | None = None) -> None:
        """Create the form; `lists` makes the editors of tables of which a job can have several, by dotted name."""
        super().__init__()
        self._lists = lists or {}
        self.rows: dict[tuple[str, str], SettingRow] = {}
        """Rows by key and optimizer name; the name is "" for settings that are not optimizer arguments."""
        self.nothing = QLabel()
        self._groups: list[_Group] = []
        self._samples: int | None = None
        self._waiting = _batches(self._lists)
        self._words: list[str] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(0)
        self.nothing.setProperty("role", "muted")
        self.nothing.setWordWrap(True)
        self.nothing.hide()
        self._column.addWidget(self.nothing)

    def show_draft(self, draft: Draft | None, samples: int | None) -> None:
        """Show this job's values, now and in rows that are created later.

        `samples` is the number of samples per epoch, or None if unknown.
        """
        self._draft, self._samples = draft, samples
        if draft is not None:
            for row in self.rows.values():
                row.show_draft(draft)
            for group in self._groups:
                group.show_chart(draft, samples)
                group.show_list(draft)
        self._filter()

    def search(self, text: str) -> None:
        """Show only settings that `text` finds; see `is_found_by`. For a name of another trainer, say what to use."""
        self._words = text.lower().split()
        advice = unsupported("_".join(self._words))
        found = self.tr("No settings match “{text}”.").format(text=text.strip())
        self.nothing.setText(f"{found} {sentence_of(advice)}" if advice else found)
        self._filter()

    def begin(self) -> None:
        """Create the missing rows, one batch per event loop turn."""
        batch = next(self._waiting, None)
        if batch is not None:
            self._add(*batch)
            QTimer.singleShot(0, self, self.begin)

    def finish(self) -> None:
        """Create all missing rows now."""
        for batch in self._waiting:
            self._add(*batch)

    def _add(self, table: str, members: Sequence[Setting]) -> None:
        if not self._groups or self._groups[-1].table != table:
            make = self._lists.get(table)
            self._groups.append(_Group(table, make() if make else None))
            self._column.addWidget(self._groups[-1])
        for row in self._groups[-1].add(members):
            self.rows[row.key, row.setting.kind] = row
            row.edited.connect(self._on_edited)
            row.left.connect(self._on_left)
            row.reverted.connect(self._on_reverted)
            if self._draft is not None:
                row.show_draft(self._draft)
        if self._draft is not None:
            self._groups[-1].show_chart(self._draft, self._samples)
            self._groups[-1].show_list(self._draft)
        self._filter()

    def _on_reverted(self, key: str) -> None:
        if self._draft is not None:
            self._draft.revert(key)

    def _filter(self) -> None:
        kind = self._draft.get("recipe.optimizer.name") if self._draft else None
        found = [group.filter(self._words, kind if isinstance(kind, str) else "adamw") for group in self._groups]
        self.nothing.setVisible(bool(self._groups) and not any(found))


class _Group(QWidget):
    """Group of one table's settings, below the table's title."""

    def __init__(self, table: str, editor: TableEditor | None = None) -> None:
        super().__init__()
        self.table = table
        self.list = editor
        """Editor of all tables of this name, if a job can have several."""
        self.rows: list[SettingRow] = []
        self.chart: ScheduleChart | None = None
        """Chart of the learning rate in the group of its schedule."""
        heading, words = QLabel(title_of(table)), QLabel(tables().get(table, ""))
        heading.setProperty("role", "heading")
        words.setProperty("role", "muted")
        words.setWordWrap(True)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 18, 0, 0)
        self._column.setSpacing(0)
        self._column.addWidget(heading)
        self._column.addWidget(words)
        self._column.addSpacing(4)
        if editor is not None:
            self._column.addWidget(editor)

    def show_list(self, draft: Draft) -> None:
        """Show the job's tables of this name, if it can have several."""
        if self.list is not None:
            self.list.show_draft(draft)

    def add(self, members: Sequence[Setting]) -> list[SettingRow]:
        """Append rows for these settings and return them."""
        rows = [SettingRow(member) for member in members]
        for row in rows:
            row.hide()  # until it is filtered
            self._column.addWidget(row)
        self.rows += rows
        return rows

    def show_chart(self, draft: Draft, samples: int | None) -> None:
        """Draw the learning rate above the settings of its schedule; do nothing in other groups."""
        if self.table != _SCHEDULE:
            return
        if self.chart is None:
            from app.qt.train.schedule_chart import ScheduleChart  # imports numpy

            self.chart = ScheduleChart()
            self._column.insertWidget(self._column.indexOf(self.rows[0]), self.chart)
        self.chart.show_draft(draft, samples)

    def filter(self, wanted: list[str], kind: str) -> bool:
        """Show only rows that match `wanted` and suit the optimizer `kind`; return whether there are any."""
        matching = [row.setting.kind in ("", kind) and row.matches(wanted) for row in self.rows]
        for row, fits in zip(self.rows, matching, strict=True):
            row.setVisible(fits)
        if self.list is not None:
            matching.append(self.list.matches(wanted))
        self.setVisible(any(matching))
        return any(matching)


def _batches(lists: Collection[str]) -> Iterator[tuple[str, list[Setting]]]:
    """Yield batches of settings, each with its table; tables that are mostly edited above the form come last.

    Each of the `lists`, of tables of which a job can have several, is an empty batch after the table that contains it.
    """
    shown = [each for each in settings() if each.key not in _ESSENTIAL and "*" not in each.key]
    last = ("dataset", "base")
    shown.sort(key=lambda each: (each.table in last, list(tables()).index(each.table)))
    for table, members in groupby(shown, key=lambda each: each.table):
        waiting = list(members)
        for start in range(0, len(waiting), _BATCH):
            yield table, waiting[start : start + _BATCH]
        yield from ((name, []) for name in lists if name.rpartition(".")[0] == table)
