"""The table of recipe.blocks in the form: ranks, alphas and learning rates of some layers, one entry per row."""

from __future__ import annotations

from functools import partial
from typing import Any

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QToolButton, QVBoxLayout, QWidget

from app.core.jobs import essentials
from app.core.jobs.draft import Draft
from app.core.jobs.job_file import Values, drop, put, value_at
from app.core.jobs.settings import Setting, is_found_by, setting
from app.core.words import sentence_of
from app.qt.theme import set_icon
from app.qt.train.form import LineEditor, TableEditor
from app.qt.widgets import plain_tip, retain_size, set_message
from trainer.config.field_names import has_name

BLOCKS = "recipe.blocks"
_NUMBERS = ("rank", "alpha", "rate_factor")
_NUMBER_WIDTH = 92
_DEFAULT_RANK = 16
_FIRST_MATCH = "unet.*"


class BlockRows(TableEditor):
    """Table of the entries, with a button that adds one; later entries take precedence."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[BlockRow] = []
        self.header = _header()
        self.add = QPushButton(self.tr("Add layers"))
        self.add.setAutoDefault(False)
        set_icon(self.add, "add")
        self.add.clicked.connect(lambda: self._add())
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(13, 5, 0, 5)
        self._column.setSpacing(4)
        self._column.addWidget(self.header)
        self._column.addWidget(self.add, 0, Qt.AlignmentFlag.AlignLeft)
        self.header.hide()

    def show_draft(self, draft: Draft) -> None:
        """Show this job's entries."""
        self._draft = draft
        listed = draft.get(BLOCKS)
        count = len(listed) if isinstance(listed, list) else 0
        while len(self.rows) > count:
            row = self.rows.pop()
            row.hide()
            row.deleteLater()
        while len(self.rows) < count:
            row = BlockRow(len(self.rows))
            row.edited.connect(self._on_edited)
            row.left.connect(self._on_left)
            row.removed.connect(self._on_removed)
            self._column.insertWidget(1 + len(self.rows), row)
            self.rows.append(row)
        self.header.setVisible(bool(self.rows))
        for row in self.rows:
            row.show_draft(draft)

    def matches(self, wanted: list[str]) -> bool:
        """Return whether a search for these lowercase words finds one of the columns, or the table itself."""
        return is_found_by(wanted, [_column(name) for name in ("match", *_NUMBERS)]) or has_name(
            BLOCKS, " ".join(wanted)
        )

    def _add(self) -> None:
        """Add an entry that changes nothing yet: the recipe's rank for all layers of the UNet."""
        if self._draft is None:
            return
        rank = self._draft.get("recipe.rank")

        def work(values: Values) -> None:
            entry = {"match": _FIRST_MATCH, "rank": rank if isinstance(rank, int) else _DEFAULT_RANK}
            listed = value_at(values, BLOCKS)
            put(values, BLOCKS, [*(listed if isinstance(listed, list) else []), entry])

        self._draft.edit(essentials.BLOCK_ADDED, work)
        self.rows[-1].editors["match"].setFocus()

    def _on_removed(self, place: int) -> None:
        if self._draft is not None:
            self._draft.edit(essentials.BLOCK_REMOVED, lambda values: drop(values, f"{BLOCKS}.{place}"))


class BlockRow(QWidget):
    """Row of one entry: the names of its layers, its numbers, and a button that removes it."""

    edited = Signal(str, object, bool)
    """Key, value (None for the default) and whether the user is still typing."""
    left = Signal()
    removed = Signal(int)

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place
        self.editors = {name: LineEditor(_column(name)) for name in ("match", *_NUMBERS)}
        self.problem, self.remove = QLabel(), QToolButton()
        self._build()
        for name, editor in self.editors.items():
            editor.edited.connect(partial(self.edited.emit, self._key(name)))
            editor.left.connect(self.left)
        self.remove.clicked.connect(lambda: self.removed.emit(self._place))

    def show_draft(self, draft: Draft) -> None:
        """Show the entry of this row, and what is wrong with it."""
        for name, editor in self.editors.items():
            editor.show_value(draft.get(self._key(name)))
        here = f"{BLOCKS}.{self._place}"
        found = [reason for key, reason in draft.problems if key == here or key.startswith(f"{here}.")]
        self.problem.setVisible(bool(found))
        set_message(self.problem, sentence_of(found[0]) if found else "", "bad")

    def _key(self, name: str) -> str:
        return f"{BLOCKS}.{self._place}.{name}"

    def _build(self) -> None:
        number = self._place + 1
        line = QHBoxLayout()
        line.setSpacing(4)
        for name, editor in self.editors.items():
            found = _column(name)
            editor.setAccessibleName(self.tr("{title} of entry {number}").format(title=found.title, number=number))
            editor.setToolTip(plain_tip(f"{self._key(name)}\n{found.doc}"))
            if name == "match":
                editor.setPlaceholderText(_FIRST_MATCH)
            else:
                editor.setPlaceholderText(self.tr("unchanged"))
                editor.setFixedWidth(_NUMBER_WIDTH)
            line.addWidget(editor, int(name == "match"))
        self.remove.setToolTip(self.tr("Remove this entry"))
        self.remove.setAccessibleName(self.tr("Remove entry {number}").format(number=number))
        self.remove.setIconSize(QSize(16, 16))
        set_icon(self.remove, "close", "muted")
        line.addWidget(self.remove)
        self.problem.setTextFormat(Qt.TextFormat.PlainText)
        self.problem.setWordWrap(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(line)
        column.addWidget(self.problem)


def _column(name: str) -> Setting:
    return setting(f"{BLOCKS}.*.{name}")


def _header() -> QWidget:
    """Return the titles of the columns, as wide as the editors below them."""
    header, line = QWidget(), QHBoxLayout()
    line.setContentsMargins(0, 0, 0, 0)
    line.setSpacing(4)
    for name in ("match", *_NUMBERS):
        label: Any = QLabel(_column(name).title)
        label.setProperty("role", "muted")
        label.setWordWrap(True)
        if name != "match":
            label.setFixedWidth(_NUMBER_WIDTH)
        line.addWidget(label, int(name == "match"))
    space = QToolButton()
    space.setIconSize(QSize(16, 16))
    retain_size(space)
    space.hide()
    line.addWidget(space)
    header.setLayout(line)
    return header
