"""The folders opened last, as a menu and as a short list; one that is gone is grey and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QEvent, QObject, Qt, Signal
from PySide6.QtGui import QAction, QFontMetrics, QPalette
from PySide6.QtWidgets import QLabel, QMenu, QPushButton, QVBoxLayout, QWidget

from app.core.events import Emitter
from app.core.session import Session
from app.core.settings.recent import Absence, RecentFolders
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, centre, sign, until_destroyed

_REASONS: dict[Absence, str] = {
    "gone": QT_TRANSLATE_NOOP("Recent", "not there now"),
    "file": QT_TRANSLATE_NOOP("Recent", "is no folder any more"),
    "refused": QT_TRANSLATE_NOOP("Recent", "cannot be read now"),
}
_ROW, _BUTTON = 420, 180
"""Pixels that a folder may take in the menu, and in the list, which has to fit a narrow window."""
_FEW = 4
"""Folders in the short list."""


def _named(name: str, absence: Absence | None, metrics: QFontMetrics, width: int) -> str:
    """Return a name for a menu or a button, at most so many pixels wide with the reason why it cannot be opened."""
    why = f" \u2013 {QCoreApplication.translate('Recent', _REASONS[absence])}" if absence else ""
    room = max(width - metrics.horizontalAdvance(why), width // 4)
    return metrics.elidedText(name, Qt.TextElideMode.ElideMiddle, room).replace("&", "&&") + why


def _follow(widget: QWidget, happened: Emitter[None], act: Callable[[], None]) -> None:
    """Call `act` whenever that happens, as long as there is the widget."""
    until_destroyed(widget, happened.connect(lambda _: act()))


class RecentMenu(QMenu):
    """File > Recent folders."""

    def __init__(self, recent: RecentFolders, choose: Callable[[Path], None], parent: QWidget) -> None:
        super().__init__(parent)
        self._recent, self._choose = recent, choose
        self._rows: dict[Path, QAction] = {}
        self.setTitle(self.tr("Recent folders"))
        self.setToolTipsVisible(True)
        _follow(self, recent.changed, self._fill)
        _follow(self, recent.looked, self._mark)
        self._fill()

    def _fill(self) -> None:
        self.clear()
        self._rows = {folder: self._row(folder) for folder in self._recent.folders}
        self.addSeparator()
        clear = self.addAction(self.tr("Clear"))
        clear.setToolTip(self.tr("Forget these folders; their files stay as they are"))
        clear.triggered.connect(lambda: self._recent.clear())
        self.menuAction().setEnabled(bool(self._rows))
        self._mark()

    def _row(self, folder: Path) -> QAction:
        row = self.addAction("")
        row.setToolTip(str(folder))
        row.triggered.connect(lambda: self._choose(folder))
        return row

    def _mark(self) -> None:
        """Tell which can be opened; only the words change, so that an open menu stays as it is."""
        for number, (folder, row) in enumerate(self._rows.items(), 1):
            absence = self._recent.absent.get(folder)
            row.setText(f"&{number % 10} {_named(str(folder), absence, self.fontMetrics(), _ROW)}")
            row.setEnabled(absence is None)


class RecentList(QWidget):
    """The newest few as buttons, for a window that has nothing else to show; not there while there are none."""

    chosen = Signal(Path)

    def __init__(self, recent: RecentFolders) -> None:
        super().__init__()
        self._recent = recent
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(4)
        title = QLabel(self.tr("Recent folders"))
        title.setProperty("role", "muted")
        self._column.addWidget(title, 0, Qt.AlignmentFlag.AlignHCenter)
        self._buttons: dict[Path, QPushButton] = {}
        _follow(self, recent.changed, self._fill)
        _follow(self, recent.looked, self._mark)
        self._fill()

    def _fill(self) -> None:
        for button in self._buttons.values():
            button.hide()
            button.deleteLater()
        self._buttons = {folder: self._button(folder) for folder in self._recent.folders[:_FEW]}
        self.setVisible(bool(self._buttons))
        self._mark()

    def _button(self, folder: Path) -> QPushButton:
        button = QPushButton()
        button.setToolTip(str(folder))
        button.clicked.connect(lambda: self.chosen.emit(folder))
        self._column.addWidget(button)
        return button

    def _mark(self) -> None:
        for folder, button in self._buttons.items():
            absence = self._recent.absent.get(folder)
            button.setText(_named(folder.name or str(folder), absence, button.fontMetrics(), _BUTTON))
            button.setAccessibleDescription(str(folder))
            button.setEnabled(absence is None)


class EmptyState(QWidget):
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
