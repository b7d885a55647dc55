"""Recently opened folders, as a menu and a short list; unavailable ones are disabled and say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QEvent, QObject, Qt, Signal
from PySide6.QtGui import QAction, QFontMetrics, QPalette
from PySide6.QtWidgets import QLabel, QMenu, QPushButton, QVBoxLayout, QWidget

from app.core.events import Emitter
from app.core.session import Session
from app.core.settings.recent import OpenFailure, RecentFolders
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, center, icon_label, until_destroyed

_REASONS: dict[OpenFailure, str] = {
    "gone": QT_TRANSLATE_NOOP("Recent", "not found"),
    "file": QT_TRANSLATE_NOOP("Recent", "no longer a folder"),
    "refused": QT_TRANSLATE_NOOP("Recent", "cannot be read"),
}
_MENU_WIDTH, _BUTTON_WIDTH = 420, 180
"""Maximum widths of a folder's name in the menu and the list, in px; the list must fit a narrow window."""
_LIST_SIZE = 4
"""Number of folders in the short list."""


def _label(name: str, absence: OpenFailure | None, metrics: QFontMetrics, width: int) -> str:
    """Return a folder's label, elided to about `width` px, with the reason if the folder cannot be opened."""
    why = f" \u2013 {QCoreApplication.translate('Recent', _REASONS[absence])}" if absence else ""
    room = max(width - metrics.horizontalAdvance(why), width // 4)
    return metrics.elidedText(name, Qt.TextElideMode.ElideMiddle, room).replace("&", "&&") + why


def _call_on(widget: QWidget, happened: Emitter[None], act: Callable[[], None]) -> None:
    """Call `act` whenever `happened` is emitted, until the widget is destroyed."""
    until_destroyed(widget, happened.connect(lambda _: act()))


class RecentMenu(QMenu):
    """The menu File > Recent folders."""

    def __init__(self, recent: RecentFolders, choose: Callable[[Path], None], parent: QWidget) -> None:
        super().__init__(parent)
        self._recent, self._choose = recent, choose
        self._rows: dict[Path, QAction] = {}
        self.setTitle(self.tr("Recent folders"))
        self.setToolTipsVisible(True)
        _call_on(self, recent.changed, self._fill)
        _call_on(self, recent.checked, self._update_rows)
        self._fill()

    def _fill(self) -> None:
        self.clear()
        self._rows = {folder: self._row(folder) for folder in self._recent.folders}
        self.addSeparator()
        clear = self.addAction(self.tr("Clear"))
        clear.setToolTip(self.tr("Remove all folders from this list; no files are changed"))
        clear.triggered.connect(lambda: self._recent.clear())
        self.menuAction().setEnabled(bool(self._rows))
        self._update_rows()

    def _row(self, folder: Path) -> QAction:
        row = self.addAction("")
        row.setToolTip(str(folder))
        row.triggered.connect(lambda: self._choose(folder))
        return row

    def _update_rows(self) -> None:
        """Update the folders' texts, and enable those that can be opened; an open menu keeps its layout."""
        for number, (folder, row) in enumerate(self._rows.items(), 1):
            absence = self._recent.absent.get(folder)
            row.setText(f"&{number % 10} {_label(str(folder), absence, self.fontMetrics(), _MENU_WIDTH)}")
            row.setEnabled(absence is None)


class RecentList(QWidget):
    """Buttons for the most recent folders, shown in a window without images; hidden if there are no such folders."""

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
        _call_on(self, recent.changed, self._fill)
        _call_on(self, recent.checked, self._update_rows)
        self._fill()

    def _fill(self) -> None:
        for button in self._buttons.values():
            button.hide()
            button.deleteLater()
        self._buttons = {folder: self._button(folder) for folder in self._recent.folders[:_LIST_SIZE]}
        self.setVisible(bool(self._buttons))
        self._update_rows()

    def _button(self, folder: Path) -> QPushButton:
        button = QPushButton()
        button.setToolTip(str(folder))
        button.clicked.connect(lambda: self.chosen.emit(folder))
        self._column.addWidget(button)
        return button

    def _update_rows(self) -> None:
        for folder, button in self._buttons.items():
            absence = self._recent.absent.get(folder)
            button.setText(_label(folder.name or str(folder), absence, button.fontMetrics(), _BUTTON_WIDTH))
            button.setAccessibleDescription(str(folder))
            button.setEnabled(absence is None)


class EmptyState(QWidget):
    """Empty state that covers a widget while the library has no images; that widget still accepts drops."""

    def __init__(self, session: Session, covered: QWidget) -> None:
        super().__init__(covered)
        self._session = session
        self._covered = covered
        self.title, self.words = QLabel(), QLabel()
        self.button = QPushButton(self.tr("Open folder…"))
        self.recent = RecentList(session.recent)
        self._build()
        covered.installEventFilter(self)
        for event in (session.library.altered, session.datasets.opened, session.datasets.closed):
            until_destroyed(self, event.connect(lambda _: self._call_on()))
        self._call_on()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Resize along with the covered widget."""
        if event.type() == QEvent.Type.Resize:
            self.resize(self._covered.size())
        return super().eventFilter(watched, event)

    def _call_on(self) -> None:
        empty = not self._session.library.images
        if empty:
            self._update_text()
            self.raise_()
        elif self.button.hasFocus():
            self._covered.setFocus()  # the grid, which now shows images
        self.setVisible(empty)

    def _update_text(self) -> None:
        folders = self._session.datasets.folders
        if not folders:
            self.title.setText(self.tr("Drop a folder of images here"))
            self.words.setText(self.tr("Images stay where they are: nothing is copied or moved."))
            return
        name = folders[-1].name or str(folders[-1])
        self.title.setText(self.tr("No images in {folder}").format(folder=name))
        self.words.setText(self.tr("Add images to this folder and they appear here, or open another folder."))

    def _build(self) -> None:
        self.setAutoFillBackground(True)
        self.setBackgroundRole(QPalette.ColorRole.Base)
        folder = icon_label(24)
        set_icon(folder, "folder-add", "muted")
        self.title.setProperty("role", "title")
        self.words.setProperty("role", "muted")
        center(self, folder, self.title, self.words, 8, self.button, 14, self.recent)
