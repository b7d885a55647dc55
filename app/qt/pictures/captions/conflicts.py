"""The dialog for values that the user and another program changed both: which of them stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from PySide6.QtCore import QSize, QTimer
from PySide6.QtGui import QColor, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QListWidget,
    QListWidgetItem,
    QPlainTextEdit,
    QPushButton,
    QTextEdit,
    QVBoxLayout,
    QWidget,
)

from app.core.edits.bulk import Span, Words, add_tags, differences
from app.core.edits.save_state import Conflict, SaveState
from app.core.library import Value
from app.core.session import Session
from app.core.tags.splitting import split_tags
from app.qt.pictures.captions.text import qt_place
from app.qt.pictures.captions.value_words import value_words
from app.qt.theme import colours

Keep = Literal["mine", "theirs", "both"]


class ConflictsDialog(QDialog):
    """Shows both versions side by side; closes when nothing is left to choose."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._conflicts: tuple[Conflict, ...] = ()
        self.setWindowTitle(self.tr("Choose between two versions"))
        self.resize(860, 460)
        self.list = QListWidget()
        self.mine, self.theirs = QPlainTextEdit(), QPlainTextEdit()
        self.keep_mine = QPushButton(self.tr("Keep mine"))
        self.keep_theirs = QPushButton(self.tr("Keep theirs"))
        self.keep_both = QPushButton(self.tr("Keep both"))
        self.all, self.close_button = QCheckBox(), QPushButton(self.tr("Decide later"))
        self._build()
        self.list.currentRowChanged.connect(self._look)
        for button, keep in ((self.keep_mine, "mine"), (self.keep_theirs, "theirs"), (self.keep_both, "both")):
            button.clicked.connect(lambda _, keep=keep: self._keep(keep))
        self.close_button.clicked.connect(self.reject)
        end = session.saver.state.connect(self._show)
        self.finished.connect(lambda _: end())
        self._show(session.saver.now)
        if not self._conflicts:  # the last one ended by itself before this was opened
            QTimer.singleShot(0, self, self.accept)

    def _build(self) -> None:
        words = self.tr("Another program changed these while you did. Nothing was overwritten.")
        told = QLabel(words + " " + self.tr("A copy of what is on disk is kept whatever you choose."))
        told.setWordWrap(True)
        self.list.setAccessibleName(self.tr("What was changed twice"))
        self.list.setFixedWidth(220)
        grid = QGridLayout()
        sides = ((self.mine, self.tr("Yours")), (self.theirs, self.tr("On disk, by another program")))
        for column, (text, title) in enumerate(sides):
            heading = QLabel(title)
            heading.setProperty("role", "heading")
            text.setReadOnly(True)
            text.setTabChangesFocus(True)
            text.setAccessibleName(title)
            grid.addWidget(heading, 0, column)
            grid.addWidget(text, 1, column)
        self.keep_both.setToolTip(self.tr("Theirs, plus your missing tags"))
        row = QHBoxLayout()
        row.addWidget(self.list)
        row.addLayout(grid, 1)
        buttons = QHBoxLayout()
        buttons.addWidget(self.all)
        buttons.addStretch(1)
        for button in (self.keep_mine, self.keep_theirs, self.keep_both, self.close_button):
            button.setAutoDefault(False)
            buttons.addWidget(button)
        column_ = QVBoxLayout(self)
        column_.setContentsMargins(14, 14, 14, 12)
        column_.setSpacing(12)
        column_.addWidget(told)
        column_.addLayout(row, 1)
        column_.addLayout(buttons)

    def _show(self, state: SaveState) -> None:
        if state.conflicts == self._conflicts:
            return
        row = max(0, self.list.currentRow())
        self._conflicts = state.conflicts
        if not state.conflicts:
            self.accept()
            return
        self.list.clear()
        for conflict in state.conflicts:
            item = QListWidgetItem(conflict.path.name, self.list)
            item.setToolTip(str(conflict.path))
            item.setSizeHint(QSize(0, self.fontMetrics().height() + 14))
        self.all.setText(self.tr("For all %n of them", "", len(state.conflicts)))
        self.all.setVisible(len(state.conflicts) > 1)
        self.list.setCurrentRow(min(row, len(state.conflicts) - 1))

    def _look(self, row: int) -> None:
        if not 0 <= row < len(self._conflicts):
            return
        conflict = self._conflicts[row]
        mine, theirs = (value_words(conflict.field, value) for value in (conflict.mine, conflict.theirs))
        found = differences(mine or "", theirs or "")
        self._fill(self.mine, mine, found.gone)
        self._fill(self.theirs, theirs, found.new)
        self.keep_both.setEnabled(self._can_merge(conflict))

    def _fill(self, field: QPlainTextEdit, text: str | None, marked: Sequence[Span]) -> None:
        field.setPlainText(text or "")
        field.setPlaceholderText(self.tr("Nothing is there.") if text is None else self.tr("It is empty."))
        look = QTextCharFormat()
        look.setForeground(QColor(colours().good))
        look.setFontUnderline(True)
        selections = []
        for span in marked:
            selection = QTextEdit.ExtraSelection()
            cursor = QTextCursor(field.document())
            cursor.setPosition(qt_place(text or "", span.start))
            cursor.setPosition(qt_place(text or "", span.end), QTextCursor.MoveMode.KeepAnchor)
            selection.cursor, selection.format = cursor, look
            selections.append(selection)
        field.setExtraSelections(selections)

    def _can_merge(self, conflict: Conflict) -> bool:
        return conflict.field == "caption" and self._session.library.at(conflict.path) is not None

    def _keep(self, keep: Keep) -> None:
        row = self.list.currentRow()
        chosen = self._conflicts if self.all.isChecked() else self._conflicts[row : row + 1]
        choices = [(one, _value(one, keep)) for one in chosen if keep != "both" or self._can_merge(one)]
        if choices:
            self._session.history.resolve(choices, _named(choices, keep))


def _named(choices: Sequence[tuple[Conflict, Value]], keep: Keep) -> str:
    kind = "caption" if all(conflict.field == "caption" for conflict, _ in choices) else "value"
    count = f"{len(choices):,} {kind}" + "s" * (len(choices) != 1)
    version = {"mine": "my version", "theirs": "the other version", "both": "both versions"}[keep]
    return f"Keep {version} of {count}"


def _value(conflict: Conflict, keep: Keep) -> Value:
    if keep == "both":
        return _merged(conflict)
    return conflict.mine if keep == "mine" else conflict.theirs


def _merged(conflict: Conflict) -> str:
    """Return the other version, plus the user's tags that are missing from it."""
    theirs = Words(0, str(conflict.theirs or ""))
    edit = add_tags([theirs], split_tags(str(conflict.mine or "")))
    return str(edit.changes[0].after) if edit else theirs.caption or ""
