"""One setting in the form: what it is called, what it does, its value, and what is to be said of it."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import QFrame, QGridLayout, QHBoxLayout, QLabel, QToolButton, QWidget

from app.core.jobs.draft import Draft
from app.core.jobs.settings import Setting
from app.core.words import sentence_of
from app.qt.parts import keep_room, say
from app.qt.theme import set_icon
from app.qt.tips import plain_tip
from app.qt.train.form.editors import TickEditor, editor_for, shown

WIDTH = 190
"""Of what is typed into, in Qt's pixels."""


class SettingRow(QWidget):
    """Title and help on the left, the value on the right; a bar at the edge marks what differs from the preset."""

    edited = Signal(str, object, bool)
    """Key, value (None: the default) and whether more letters may follow."""
    left = Signal()
    reverted = Signal(str)

    def __init__(self, setting: Setting, key: str | None = None) -> None:
        """`key` is that of one item where the setting belongs to the items of a list."""
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
        """Show what the draft says of this key."""
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
            self._say(*state[1:4])
            self._show_difference(*state[4:])

    def matches(self, wanted: list[str]) -> bool:
        """Tell whether every one of these words, in small letters, is in the name, the key or the help."""
        text = f"{self.setting.title} {self.key} {self.setting.doc} {self.setting.kind}".lower()
        return all(word in text for word in wanted)

    def _say(self, problem: str | None, without_effect: str | None, doubt: str | None) -> None:
        """The worst that is to be said stands where the help stood."""
        off = bool(without_effect) and not problem
        text, role = self.setting.doc, "muted"
        if problem:
            text, role = sentence_of(problem), "bad"
        elif without_effect:
            text = self.tr("Without effect here: {reason}.").format(reason=without_effect)
        elif doubt:
            text, role = sentence_of(doubt), "warning"
        say(self.hint, text, role)
        self.editor.setAccessibleDescription(text)
        self.editor.setEnabled(not off)
        self.title.setEnabled(not off)

    def _show_difference(self, differs: bool, expected: object, of_preset: bool) -> None:
        self.mark.setVisible(differs)
        self.back.setVisible(differs)
        what = shown(expected) or self.setting.otherwise or self.tr("not set")
        words = self.tr("Back to the preset's value: {value}") if of_preset else self.tr("Back to the default: {value}")
        self.back.setToolTip(plain_tip(words.format(value=what)))
        self.back.setAccessibleName(f"{self.title.text()}: {words.format(value=what)}")

    def _build(self) -> None:
        tip = f"{self.key}\n" + self.tr("May be {values}.").format(values=self.setting.values)
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
        keep_room(self.mark)
        keep_room(self.back)
        self.back.setIconSize(QSize(16, 16))
        set_icon(self.back, "undo", "muted")
        if not isinstance(self.editor, TickEditor):
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
