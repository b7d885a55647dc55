"""The folders opened last, as a menu and as a short list; one that is gone is grey and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QCoreApplication, Qt, Signal
from PySide6.QtGui import QAction, QFontMetrics
from PySide6.QtWidgets import QLabel, QMenu, QPushButton, QVBoxLayout, QWidget

from app.core.events import Event
from app.core.settings.recent import Absence, RecentFolders
from app.qt.parts import until_destroyed
from app.qt.words import QT_TRANSLATE_NOOP

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


def _follow(widget: QWidget, happened: Event[None], act: Callable[[], None]) -> None:
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
