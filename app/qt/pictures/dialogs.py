"""Asks for what holds for all pictures of a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QCheckBox, QDialog, QDialogButtonBox, QFormLayout, QLabel, QLineEdit, QToolButton, QWidget

from app.core.library import Folder, Picture
from app.core.session import Session
from app.qt.theme import set_icon
from app.qt.widgets import SpinBox

_MOST = 10_000
"""As many repeats as impasto.jsonl allows."""


class FolderDialog(QDialog):
    """Repeats, regularisation and trigger of one folder; they go into its impasto.jsonl."""

    def __init__(self, folder: Folder, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Folder {name}").format(name=folder.path.name))
        self.repeats, self.regularisation, self.trigger = SpinBox(), QCheckBox(), QLineEdit()
        self.repeats.setRange(0, _MOST)
        self.repeats.setSpecialValueText(self.tr("once"))
        self.repeats.setValue(folder.repeats or 0)
        self.repeats.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt passes over the style sheet's padding here
        self.regularisation.setText(self.tr("Pictures of the class"))
        self.regularisation.setChecked(folder.regularisation)
        self.regularisation.setToolTip(self.tr("They hold the base in place while the others are learned."))
        self.trigger.setText(folder.trigger or "")
        self.trigger.setPlaceholderText(self.tr("put first in each caption"))
        words = QLabel(str(folder.path))
        words.setProperty("role", "muted")
        words.setWordWrap(True)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Ok | QDialogButtonBox.StandardButton.Cancel)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        form = QFormLayout(self)
        form.addRow(words)
        form.addRow(self.tr("Times in each epoch"), self.repeats)
        form.addRow(self.tr("Regularisation"), self.regularisation)
        form.addRow(self.tr("Trigger word"), self.trigger)
        form.addRow(buttons)
        self.setMinimumWidth(460)
        self.repeats.setFocus()

    def facts(self) -> dict[str, str | int | bool | None]:
        """Return what was chosen, as the library keeps it."""
        return {
            "repeats": self.repeats.value() or None,
            "regularisation": self.regularisation.isChecked(),
            "trigger": self.trigger.text().strip() or None,
        }


class OneByOne(QDialog):
    """It shows the pictures with these ids, `start` first; its actions "previous" and "next" go through them."""

    def __init__(self, session: Session, ids: Sequence[int], start: int | None, parent: QWidget | None) -> None:
        super().__init__(parent)
        self._session, self._ids = session, list(ids)
        self._place = self._ids.index(start) if start in self._ids else 0
        self.name = QLabel()
        self.actions_by_name: dict[str, QAction] = {}

    @property
    def picture(self) -> Picture | None:
        """The picture that is seen."""
        return self._session.library.pictures.get(self._ids[self._place]) if self._ids else None

    def _place_after(self, by: int) -> int:
        return min(max(self._place + by, 0), len(self._ids) - 1)

    def _tell_place(self) -> None:
        picture = self.picture
        place = self.tr("{place} of {all}").format(place=self._place + 1, all=len(self._ids))
        self.name.setText(f"{picture.name}   ·   {place}" if picture else "")
        self.actions_by_name["previous"].setEnabled(self._place > 0)
        self.actions_by_name["next"].setEnabled(self._place < len(self._ids) - 1)

    def _action(self, name: str, icon: str, text: str, key: str, run: Callable[..., None]) -> QAction:
        action = QAction(text, self)
        set_icon(action, icon)
        action.setShortcut(QKeySequence(key))
        action.setToolTip(f"{text} ({action.shortcut().toString(QKeySequence.SequenceFormat.NativeText)})")
        action.triggered.connect(lambda _=False: run())
        self.addAction(action)
        self.actions_by_name[name] = action
        return action

    def _button(self, action: QAction) -> QToolButton:
        button = QToolButton()
        button.setDefaultAction(action)
        button.setAccessibleName(action.text())
        button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        return button
