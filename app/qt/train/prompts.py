"""The preview prompts, one per row; a button in each row shows the prompt's other settings below it."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QToolButton, QVBoxLayout, QWidget

from app.core.jobs import essentials
from app.core.jobs.draft import Draft
from app.core.jobs.essentials import PROMPTS
from app.core.jobs.job_file import Values, drop, put, value_at
from app.qt.theme import set_icon
from app.qt.train.form import DraftEditor, Line
from app.qt.train.item_settings import ItemSettings


class PromptRows(DraftEditor):
    """List of the preview prompts, with a button that adds one."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows: list[PromptRow] = []
        self.add = QPushButton(self.tr("Add prompt"))
        self.add.setAutoDefault(False)
        set_icon(self.add, "add")
        self.add.clicked.connect(lambda: self._add())
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(6)
        self._column.addWidget(self.add, 0, Qt.AlignmentFlag.AlignLeft)

    def show_draft(self, draft: Draft | None) -> None:
        """Show this job's prompts."""
        self._draft = draft
        count = len(_listed(draft))
        while len(self.rows) > count:
            row = self.rows.pop()
            row.hide()
            row.deleteLater()
        while len(self.rows) < count:
            row = PromptRow(len(self.rows))
            row.typed.connect(self._on_typed)
            row.edited.connect(self._on_edited)
            row.left.connect(self._on_left)
            row.removed.connect(self._on_removed)
            self._column.insertWidget(len(self.rows), row)
            self.rows.append(row)
        for row in self.rows:
            assert draft is not None
            row.show_draft(draft)

    def _add(self) -> None:
        if self._draft is None:
            return
        word = essentials.trigger(self._draft.values) or ""

        def work(values: Values) -> None:
            put(values, PROMPTS, [*(value_at(values, PROMPTS) or []), {"prompt": word}])

        self._draft.edit(essentials.PROMPT_ADDED, work)
        self.rows[-1].field.setFocus()

    def _on_typed(self, place: int, text: str) -> None:
        if self._draft is not None:
            self._draft.set(f"{PROMPTS}.{place}.prompt", text, typing=True)

    def _on_removed(self, place: int) -> None:
        if self._draft is not None:
            self._draft.edit(essentials.PROMPT_REMOVED, lambda values: drop(values, f"{PROMPTS}.{place}"))


class PromptRow(QWidget):
    """Row for one prompt, with a button that shows the prompt's other settings, such as size, seed and steps."""

    typed = Signal(int, str)
    edited = Signal(str, object, bool)
    left = Signal()
    removed = Signal(int)

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place
        self.field, self.more, self.remove = Line(), QToolButton(), QToolButton()
        self._settings = ItemSettings(PROMPTS, ("prompt",))
        self.details = self._settings.rows
        """Rows of the prompt's other settings, if they have been opened."""
        self._build()
        self.field.textEdited.connect(lambda text: self.typed.emit(self._place, text))
        self.field.editingFinished.connect(self.left)
        self._settings.edited.connect(self.edited)
        self._settings.left.connect(self.left)
        self.more.toggled.connect(self._on_more_toggled)
        self.remove.clicked.connect(lambda: self.removed.emit(self._place))

    def show_draft(self, draft: Draft) -> None:
        """Show the job's prompt for this row."""
        prompt = draft.get(f"{PROMPTS}.{self._place}.prompt")
        self.field.show_text(prompt if isinstance(prompt, str) else "")
        self._settings.show_draft(draft)

    def _on_more_toggled(self, on: bool) -> None:
        if on:
            self._settings.open(self._place)
        else:
            self._settings.hide()

    def _build(self) -> None:
        number = self._place + 1
        self.field.setAccessibleName(self.tr("Prompt {number}").format(number=number))
        self.field.setPlaceholderText(self.tr("Preview prompt"))
        self.field.setToolTip(f"{PROMPTS}.{self._place}.prompt")
        self.more.setCheckable(True)
        self.more.setToolTip(self.tr("Size, seed and other settings for this preview"))
        self.more.setAccessibleName(self.tr("More settings for prompt {number}").format(number=number))
        self.remove.setToolTip(self.tr("Remove this prompt"))
        self.remove.setAccessibleName(self.tr("Remove prompt {number}").format(number=number))
        for button, drawing in ((self.more, "more"), (self.remove, "close")):
            button.setIconSize(QSize(16, 16))
            set_icon(button, drawing, "muted")
        line = QHBoxLayout()
        line.setSpacing(4)
        line.addWidget(self.field, 1)
        line.addWidget(self.more)
        line.addWidget(self.remove)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(line)
        column.addWidget(self._settings)


def _listed(draft: Draft | None) -> list[Any]:
    listed = draft.get(PROMPTS) if draft is not None else None
    return listed if isinstance(listed, list) else []
