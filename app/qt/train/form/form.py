"""All settings of a job under one search field, made from the schema: a new key in it shows up here by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QLabel, QVBoxLayout, QWidget

from app.core.jobs.draft import Draft
from app.core.jobs.settings import Setting, settings, tables, title_of
from app.qt.train.form.row import SettingRow

_ESSENTIAL = ("name", "base.model")
"""What the page asks for above the form."""
_AT_ONCE = 8
"""Rows made in one go, some 15 ms."""


class SettingsForm(QWidget):
    """A group for each table of the job; rows are made some at a time while the window goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str], SettingRow] = {}
        """By key and, for arguments of an optimizer, its name."""
        self.nothing = QLabel()
        self._groups: list[_Group] = []
        self._draft: Draft | None = None
        self._waiting = _portions()
        self._words: list[str] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(0)
        self.nothing.setProperty("role", "muted")
        self.nothing.setWordWrap(True)
        self.nothing.hide()
        self._column.addWidget(self.nothing)

    def show_draft(self, draft: Draft | None) -> None:
        """Show this job's values; what is not made yet shows them when it is."""
        self._draft = draft
        for row in self.rows.values():
            if draft is not None:
                row.show_draft(draft)
        self._sift()

    def search(self, text: str) -> None:
        """Show only settings whose name, key or help holds every word."""
        self._words = text.lower().split()
        self.nothing.setText(self.tr("No setting is called or explained like “{text}”.").format(text=text.strip()))
        self._sift()

    def begin(self) -> None:
        """Make what is not made yet, some rows at a time."""
        portion = next(self._waiting, None)
        if portion is not None:
            self._add(*portion)
            QTimer.singleShot(0, self, self.begin)

    def finish(self) -> None:
        """Make the rest now."""
        for portion in self._waiting:
            self._add(*portion)

    def _add(self, table: str, members: Sequence[Setting]) -> None:
        if not self._groups or self._groups[-1].table != table:
            self._groups.append(_Group(table))
            self._column.addWidget(self._groups[-1])
        for row in self._groups[-1].add(members):
            self.rows[row.key, row.setting.kind] = row
            row.edited.connect(self._change)
            row.left.connect(self._seal)
            row.reverted.connect(self._revert)
            if self._draft is not None:
                row.show_draft(self._draft)
        self._sift()

    def _change(self, key: str, value: object, typing: bool) -> None:
        if self._draft is not None:
            self._draft.set(key, value, typing=typing)

    def _seal(self) -> None:
        if self._draft is not None:
            self._draft.seal()

    def _revert(self, key: str) -> None:
        if self._draft is not None:
            self._draft.revert(key)

    def _sift(self) -> None:
        kind = self._draft.get("recipe.optimizer.name") if self._draft else None
        found = [group.sift(self._words, kind if isinstance(kind, str) else "adamw") for group in self._groups]
        self.nothing.setVisible(bool(self._groups) and not any(found))


class _Group(QWidget):
    """The settings of one table below its name."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self.table = table
        self.rows: list[SettingRow] = []
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

    def add(self, members: Sequence[Setting]) -> list[SettingRow]:
        """Put rows for these below the others; return them."""
        rows = [SettingRow(member) for member in members]
        for row in rows:
            row.hide()  # until it is sifted
            self._column.addWidget(row)
        self.rows += rows
        return rows

    def sift(self, wanted: list[str], kind: str) -> bool:
        """Show the rows that answer; return whether there are any."""
        fitting = [row.setting.kind in ("", kind) and row.matches(wanted) for row in self.rows]
        for row, fits in zip(self.rows, fitting, strict=True):
            row.setVisible(fits)
        self.setVisible(any(fitting))
        return any(fitting)


def _portions() -> Iterator[tuple[str, list[Setting]]]:
    """Every table with some of its settings at a time; what is said above the form in most jobs comes last."""
    shown = [each for each in settings() if each.key not in _ESSENTIAL and "*" not in each.key]
    last = ("dataset", "base")
    shown.sort(key=lambda each: (each.table in last, list(tables()).index(each.table)))
    for table, members in groupby(shown, key=lambda each: each.table):
        waiting = list(members)
        for start in range(0, len(waiting), _AT_ONCE):
            yield table, waiting[start : start + _AT_ONCE]
