"""What the dialogs share that go through some pictures, one after the other, with tools above them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QDialog, QLabel, QToolButton, QWidget

from app.core.library import Picture
from app.core.session import Session
from app.qt.theme import set_icon


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
