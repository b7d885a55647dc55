"""What stands where the pictures will be while there are none: what to do, and a button that does it."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QLabel, QPushButton, QWidget

from app.core.session import Session
from app.qt.parts import centre, sign, until_destroyed
from app.qt.recent import RecentList
from app.qt.theme import set_icon


class Invitation(QWidget):
    """Covers a widget as long as the library is empty; what is dropped on it falls through to what lies behind."""

    def __init__(self, session: Session, behind: QWidget) -> None:
        super().__init__(behind)
        self._session = session
        self._behind = behind
        self.title, self.words = QLabel(), QLabel()
        self.button = QPushButton(self.tr("Open folder…"))
        self.recent = RecentList(session.recent)
        self._build()
        behind.installEventFilter(self)
        for event in (session.library.altered, session.datasets.opened, session.datasets.closed):
            until_destroyed(self, event.connect(lambda _: self._follow()))
        self._follow()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Stay as large as what lies behind."""
        if event.type() == QEvent.Type.Resize:
            self.resize(self._behind.size())
        return super().eventFilter(watched, event)

    def _follow(self) -> None:
        empty = not self._session.library.pictures
        if empty:
            self._tell()
            self.raise_()
        elif self.button.hasFocus():
            self._behind.setFocus()  # the pictures that have come
        self.setVisible(empty)

    def _tell(self) -> None:
        folders = self._session.datasets.folders
        if not folders:
            self.title.setText(self.tr("Drop a folder of pictures here"))
            self.words.setText(self.tr("They are shown and captioned where they lie: nothing is copied or moved."))
            return
        name = folders[-1].name or str(folders[-1])
        self.title.setText(self.tr("No pictures in {folder}").format(folder=name))
        self.words.setText(self.tr("Put pictures into it and they appear here by themselves, or open another folder."))

    def _build(self) -> None:
        self.setAutoFillBackground(True)
        self.setBackgroundRole(QPalette.ColorRole.Base)
        folder = sign(24)
        set_icon(folder, "folder-add", "muted")
        self.title.setProperty("role", "title")
        self.words.setProperty("role", "muted")
        centre(self, folder, self.title, self.words, 8, self.button, 14, self.recent)
