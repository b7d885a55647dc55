"""Dialog for a folder's settings, and the base class for dialogs that step through images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QCheckBox, QDialog, QDialogButtonBox, QFormLayout, QLabel, QLineEdit, QToolButton, QWidget

from app.core.library import Folder, LibraryImage
from app.core.session import Session
from app.qt.theme import set_icon
from app.qt.widgets import SpinBox

_MAX_REPEATS = 10_000
"""Maximum number of repeats that impasto.jsonl allows."""


class FolderDialog(QDialog):
    """Dialog for a folder's repeats, regularization and trigger word, as stored in the folder's impasto.jsonl."""

    def __init__(self, folder: Folder, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Folder {name}").format(name=folder.path.name))
        self.repeats, self.regularization, self.trigger = SpinBox(), QCheckBox(), QLineEdit()
        self.repeats.setRange(0, _MAX_REPEATS)
        self.repeats.setSpecialValueText(self.tr("not set"))
        self.repeats.setValue(folder.repeats or 0)
        self.repeats.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt ignores the style sheet's padding here
        self.regularization.setText(self.tr("These are regularization images"))
        self.regularization.setChecked(folder.regularization)
        self.regularization.setToolTip(
            self.tr("Images of the general class, which keep the base from forgetting it (kohya: reg images)")
        )
        self.trigger.setText(folder.trigger or "")
        self.trigger.setPlaceholderText(self.tr("added at the start of each caption"))
        words = QLabel(str(folder.path))
        words.setProperty("role", "muted")
        words.setWordWrap(True)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Ok | QDialogButtonBox.StandardButton.Cancel)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        form = QFormLayout(self)
        form.addRow(words)
        form.addRow(self.tr("Repeats per epoch"), self.repeats)
        form.addRow(self.tr("Regularization"), self.regularization)
        form.addRow(self.tr("Trigger word"), self.trigger)
        form.addRow(buttons)
        self.setMinimumWidth(460)
        self.repeats.setFocus()

    def settings(self) -> dict[str, str | int | bool | None]:
        """Return the chosen settings, keyed by their names in the library."""
        return {
            "repeats": self.repeats.value() or None,
            "regularization": self.regularization.isChecked(),
            "trigger": self.trigger.text().strip() or None,
        }


class ImageStepDialog(QDialog):
    """Base class for dialogs that show one image at a time, starting with `start`.

    The actions named "previous" and "next" change the image.
    """

    def __init__(self, session: Session, ids: Sequence[int], start: int | None, parent: QWidget | None) -> None:
        super().__init__(parent)
        self._session, self._ids = session, list(ids)
        self._index = self._ids.index(start) if start in self._ids else 0
        self.name = QLabel()
        self.actions_by_name: dict[str, QAction] = {}

    @property
    def image(self) -> LibraryImage | None:
        """Return the current image; None if there is none or it is no longer in the library."""
        return self._session.library.images.get(self._ids[self._index]) if self._ids else None

    def _index_after(self, by: int) -> int:
        return min(max(self._index + by, 0), len(self._ids) - 1)

    def _update_position(self) -> None:
        image = self.image
        place = self.tr("{place} of {all}").format(place=self._index + 1, all=len(self._ids))
        self.name.setText(f"{image.name}   ·   {place}" if image else "")
        self.actions_by_name["previous"].setEnabled(self._index > 0)
        self.actions_by_name["next"].setEnabled(self._index < len(self._ids) - 1)

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
