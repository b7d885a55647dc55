"""The settings of one item of a list, such as a prompt or a folder, which a button in the item's row shows."""

from __future__ import annotations

from collections.abc import Container

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core.jobs.draft import Draft
from app.core.jobs.settings import settings
from app.qt.train.form import SettingRow


class ItemSettings(QWidget):
    """The further settings of one item of a list; their rows are created when they are first shown.

    A row's key contains the item's index, so the rows are removed before the widget shows another item.
    """

    edited = Signal(str, object, bool)
    """Key in the job, new value (None for the default), and whether the user is still typing."""
    left = Signal()

    def __init__(self, items: str, shown_elsewhere: Container[str], indent: int = 0) -> None:
        """Create it for the list at the dotted key `items`, without the settings `shown_elsewhere`."""
        super().__init__()
        self._items = items
        self._shown_elsewhere = shown_elsewhere
        self._draft: Draft | None = None
        self.rows: list[SettingRow] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(indent, 0, 0, 0)
        self._column.setSpacing(0)
        self.hide()

    def open(self, place: int) -> None:
        """Show the settings of the item at an index."""
        if not self.rows:
            for each in settings():
                name = each.key.removeprefix(f"{self._items}.*.")
                if name != each.key and name not in self._shown_elsewhere:
                    self._add(SettingRow(each, each.key.replace("*", str(place))))
        self.show()

    def show_draft(self, draft: Draft) -> None:
        """Show the settings in this job, if they are open."""
        self._draft = draft
        for row in self.rows:
            row.show_draft(draft)

    def clear(self) -> None:
        """Hide and remove the rows."""
        self.hide()
        for row in self.rows:
            row.hide()
            row.deleteLater()
        self.rows.clear()

    def _add(self, row: SettingRow) -> None:
        row.edited.connect(self.edited)
        row.left.connect(self.left)
        if self._draft is not None:
            row.show_draft(self._draft)
        self.rows.append(row)
        self._column.addWidget(row)
