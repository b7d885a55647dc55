"""The center of the Images page: grid, loupe and comparison, and the commands for culling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QGuiApplication
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QMenu,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.disk.roots import unique_name
from app.core.edits.bulk import exclude, exclude_others, mark_folder, rate
from app.core.edits.history import Edit
from app.core.library import LibraryImage
from app.core.session import Session
from app.qt.actions.commands import Action, Commands
from app.qt.images.arriving import ImageImporter
from app.qt.images.grid import SIDES, Grid
from app.qt.images.loupe import MOST, Compare, Loupe
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import size_slider

if TYPE_CHECKING:  # imports numpy and Pillow, which would delay the first window
    from app.qt.images.deletion import TrashStep

_PERIOD_MS = 2000
_CHOSEN = "has_targets"
ACTIONS = (
    Action("views.grid", _NOOP("Action", "Grid"), "view", "show_grid", ("G",), icon="grid", checked="in_grid"),
    Action("views.loupe", _NOOP("Action", "Loupe"), "view", "show_loupe", ("E",), "has_shown", "in_loupe", "loupe"),
    Action(
        "views.compare",
        _NOOP("Action", "Compare"),
        "view",
        "show_compare",
        ("C",),
        "can_compare",
        "in_compare",
        "compare",
        _NOOP("Action", "Compare two to four selected images side by side"),
    ),
    Action(
        "views.full_size",
        _NOOP("Action", "Zoom to 100%"),
        "view",
        "toggle_full_size",
        ("Z",),
        "has_current",
        icon="zoom",
    ),
    Action(
        "views.alone", _NOOP("Action", "Show image in full screen"), "view", "toggle_alone", ("F",), checked="is_alone"
    ),
    Action("views.lines", _NOOP("Action", "Captions below images"), "view", "show_lines", ("T",), checked="has_lines"),
    Action("views.larger", _NOOP("Action", "Larger thumbnails"), "view", "larger", ("Ctrl+=", "Ctrl++")),
    Action("views.smaller", _NOOP("Action", "Smaller thumbnails"), "view", "smaller", ("Ctrl+-",)),
    Action("images.next", _NOOP("Action", "Next image"), "images", "next", ("Alt+Right",), "has_shown"),
    Action("images.previous", _NOOP("Action", "Previous image"), "images", "previous", ("Alt+Left",), "has_shown"),
    Action("images.select_all", _NOOP("Action", "Select all shown"), "images", "select_all", ("Ctrl+A",), "has_shown"),
    Action("images.rate_1", _NOOP("Action", "Rate 1"), "images", "rate_1", ("1",), _CHOSEN, icon="star"),
    Action("images.rate_2", _NOOP("Action", "Rate 2"), "images", "rate_2", ("2",), _CHOSEN, icon="star"),
    Action("images.rate_3", _NOOP("Action", "Rate 3"), "images", "rate_3", ("3",), _CHOSEN, icon="star"),
    Action("images.rate_4", _NOOP("Action", "Rate 4"), "images", "rate_4", ("4",), _CHOSEN, icon="star"),
    Action("images.rate_5", _NOOP("Action", "Rate 5"), "images", "rate_5", ("5",), _CHOSEN, icon="star"),
    Action("images.unrate", _NOOP("Action", "Remove rating"), "images", "unrate", ("0",), _CHOSEN),
    Action(
        "images.reject",
        _NOOP("Action", "Exclude from training"),
        "images",
        "reject",
        ("X",),
        _CHOSEN,
        icon="reject",
        tip=_NOOP("Action", "Exclude from training; the file stays, and P includes it again"),
    ),
    Action("images.pick", _NOOP("Action", "Include in training"), "images", "pick", ("P",), _CHOSEN, icon="pick"),
    Action(
        "images.only_shown",
        _NOOP("Action", "Train only on the images shown"),
        "images",
        "train_only_shown",
        enabled="has_hidden",
        icon="filter",
        tip=_NOOP("Action", "Exclude every image that the filter hides"),
    ),
    Action("images.folder", _NOOP("Action", "Folder settings…"), "images", "mark_folder", (), "has_current"),
    Action("images.close", _NOOP("Action", "Close dataset"), "file", "close_dataset", ("Ctrl+W",), "has_dataset"),
    Action("images.paste", _NOOP("Action", "Paste images"), "images", "paste", ("Ctrl+Shift+V",)),
    Action("images.delete", _NOOP("Action", "Move to trash"), "images", "delete", ("Delete",), _CHOSEN, icon="trash"),
    Action(
        "images.undelete",
        _NOOP("Action", "Restore from trash"),
        "images",
        "undelete",
        ("Ctrl+Shift+Delete",),
        "has_trashed",
    ),
)


class ImageViews(QWidget):
    """Toolbar above a stack of three widgets that show `session.view`: grid, loupe and comparison.

    Actions apply to the selection in the grid, and to the current image in the loupe and the comparison.
    `message_shown` carries messages for the status bar.
    """

    message_shown = Signal(str)
    full_screen_requested = Signal(bool)
    """Asks the window to show only the images, in full screen (True), or to restore the window (False)."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self.grid, self.loupe, self.compare = Grid(session), Loupe(session), Compare(session)
        self.stack = QStackedWidget()
        self.slider = size_slider(SIDES, self.grid.side, self.tr("Thumbnail size"))
        self.bar = QFrame()
        self.is_alone = False
        self._deletions: list[TrashStep] = []
        self._arriving = ImageImporter(session, self, self.message_shown.emit)
        commands.add(ACTIONS, self)
        for name in _NEED_FOCUS:
            commands[name].setShortcutContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
        self._build()
        self._connect_signals()

    def _build(self) -> None:
        for view in (self.grid, self.loupe, self.compare):
            self.stack.addWidget(view)
        row = QHBoxLayout(self.bar)
        row.setContentsMargins(8, 4, 8, 4)
        for name in ("views.grid", "views.loupe", "views.compare"):
            button = QToolButton()
            button.setDefaultAction(self._commands[name])
            button.setAutoRaise(True)
            button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            button.setAccessibleName(self._commands[name].text())
            row.addWidget(button)
        row.addStretch(1)
        row.addWidget(self.slider)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.bar)
        column.addWidget(self.stack, 1)
        self.setAcceptDrops(True)
        self.setFocusProxy(self.grid)

    def _connect_signals(self) -> None:
        self.slider.valueChanged.connect(self.grid.set_side)
        self.grid.resized.connect(self.slider.setValue)
        self.grid.opened.connect(self.show_loupe)
        self.grid.menu_requested.connect(self._on_menu_requested)
        self.loupe.left.connect(self.show_grid)
        self.loupe.stepped.connect(self.grid.step)
        self.compare.left.connect(self.show_grid)

    # State of the actions

    def in_grid(self) -> bool:
        """Return whether the grid is shown."""
        return self.stack.currentWidget() is self.grid

    def in_loupe(self) -> bool:
        """Return whether the loupe is shown."""
        return self.stack.currentWidget() is self.loupe

    def in_compare(self) -> bool:
        """Return whether the comparison is shown."""
        return self.stack.currentWidget() is self.compare

    def has_lines(self) -> bool:
        """Return whether captions are shown below the images."""
        return self.grid.lines

    def has_shown(self) -> bool:
        """Return whether any image is shown."""
        return bool(self._session.view.ids)

    def has_current(self) -> bool:
        """Return whether there is a current image."""
        return self._session.view.current in self._session.library.images

    def has_targets(self) -> bool:
        """Return whether any shown image is selected, or there is a current image."""
        return bool(self._session.view.scope()) or self.has_current()

    def can_compare(self) -> bool:
        """Return whether at least two of the shown images are selected."""
        return len(self._session.view.scope()) > 1

    def has_hidden(self) -> bool:
        """Return whether the filter hides some but not all images."""
        return 0 < len(self._session.view.ids) < len(self._session.library.images)

    def has_trashed(self) -> bool:
        """Return whether images deleted in this session are in the trash."""
        return bool(self._in_trash())

    def has_dataset(self) -> bool:
        """Return whether a dataset is open."""
        return bool(self._session.datasets.folders)

    def targets(self) -> list[LibraryImage]:
        """Return the images that actions apply to: in the grid, the selected ones; otherwise the current one."""
        view, images = self._session.view, self._session.library.images
        current = images.get(view.current or 0)
        selected = [images[number] for number in view.scope() if number in images] if self.in_grid() else []
        return selected or ([current] if current else [])

    # Views

    def show_grid(self, _: bool = True) -> None:
        """Show the grid."""
        self._show_view(self.grid)

    def show_loupe(self, _: bool = True) -> None:
        """Show the current image in the loupe."""
        if not self.has_current():
            self.grid.step(0)
        self._show_view(self.loupe)

    def show_compare(self, _: bool = True) -> None:
        """Show up to four selected images side by side."""
        chosen = self._session.view.scope()[:MOST]
        if len(chosen) > 1:
            self.compare.compare(chosen)
            if self._session.view.current not in chosen:
                self._session.view.select(self._session.view.selected, chosen[0])
            self._show_view(self.compare)

    def take_focus(self) -> None:
        """Give the focus to the visible view."""
        (self.stack.currentWidget() or self.grid).setFocus()

    def _show_view(self, view: QWidget) -> None:
        self.stack.setCurrentWidget(view)
        view.setFocus()
        self.slider.setVisible(view is self.grid)
        self._commands.refresh()

    def toggle_full_size(self) -> None:
        """Toggle between 100% and fitted."""
        if self.in_compare():
            self.compare.toggle_full()
            return
        if not self.in_loupe():
            self.show_loupe()
            self.loupe.area.zoom.fit()
        self.loupe.area.toggle_full()

    def toggle_alone(self, on: bool) -> None:
        """Show only the images in full screen, or restore the window."""
        self.is_alone = on
        self.bar.setVisible(not on)
        self.full_screen_requested.emit(on)

    def show_lines(self, on: bool) -> None:
        """Show or hide captions below the images."""
        self.grid.show_lines(on)

    def larger(self) -> None:
        """Make thumbnails larger."""
        self.grid.set_side(self.grid.side + 24)

    def smaller(self) -> None:
        """Make thumbnails smaller."""
        self.grid.set_side(self.grid.side - 24)

    def next(self) -> None:
        """Go to the next image."""
        (self.compare if self.in_compare() else self.grid).step(1)

    def previous(self) -> None:
        """Go to the previous image."""
        (self.compare if self.in_compare() else self.grid).step(-1)

    def select_all(self) -> None:
        """Select all shown images."""
        self.grid.select_all()

    # Culling

    def rate_1(self) -> None:
        """Rate the images with one star."""
        self._rate(1)

    def rate_2(self) -> None:
        """Rate the images with two stars."""
        self._rate(2)

    def rate_3(self) -> None:
        """Rate the images with three stars."""
        self._rate(3)

    def rate_4(self) -> None:
        """Rate the images with four stars."""
        self._rate(4)

    def rate_5(self) -> None:
        """Rate the images with five stars."""
        self._rate(5)

    def unrate(self) -> None:
        """Remove the rating."""
        self._rate(None)

    def reject(self) -> None:
        """Exclude the images from training."""
        self._apply(exclude(self.targets(), True))

    def pick(self) -> None:
        """Include the images in training."""
        self._apply(exclude(self.targets(), False))

    def train_only_shown(self) -> None:
        """Exclude every image that the filter hides, as one edit."""
        self._apply(exclude_others(self._session.library.images.values(), self._session.view.ids))

    def _rate(self, rating: int | None) -> None:
        self._apply(rate(self.targets(), rating))

    def _apply(self, edit: Edit) -> None:
        if edit:
            self._session.history.do(edit)
            self.message_shown.emit(edit.name)

    # Folders and files

    def mark_folder(self) -> None:
        """Open the settings dialog for the current image's folder."""
        from app.qt.images.dialogs import FolderDialog

        image = self._session.library.images[self._session.view.current or 0]
        dialog = FolderDialog(image.folder, self)
        dialog.accepted.connect(lambda: self._apply(mark_folder(image.folder, **dialog.settings())))
        dialog.open()

    def close_dataset(self) -> None:
        """Close the current image's dataset or, if no image is current, the one opened last; no files change."""
        image = self._session.library.images.get(self._session.view.current or 0)
        folders = self._session.datasets.folders
        root = image.folder.root if image and image.folder.root in folders else folders[-1]
        name = unique_name(root, folders)
        self._session.datasets.close(root)
        self.message_shown.emit(self.tr("Closed “{folder}”. Nothing on disk changed.").format(folder=name))
        self._commands.refresh()

    def delete(self) -> None:
        """Move the images to the trash with their captions and masks, and select the next image."""
        from app.qt.images.deletion import TrashStep

        chosen = self.targets()
        if not chosen:
            return
        next_id = self._next_after(chosen)
        deletion = TrashStep(self._session, chosen, self)
        deletion.done.connect(lambda: self.message_shown.emit(deletion.message()))
        deletion.done.connect(self._commands.refresh)
        self._deletions.append(deletion)
        if next_id is not None:
            self._session.view.select([next_id], next_id)
        self._session.history.perform(deletion)
        self._commands.refresh()

    def _next_after(self, gone: list[LibraryImage]) -> int | None:
        ids, out = self._session.view.ids, {image.id for image in gone}
        places = [place for place, number in enumerate(ids) if number in out]
        after = (number for number in ids[places[-1] + 1 :] if number not in out) if places else iter(())
        before = (number for number in reversed(ids[: places[0]]) if number not in out) if places else iter(())
        return next(after, next(before, None))

    def undelete(self) -> None:
        """Restore the most recently deleted images from the trash, without undoing later edits."""
        from app.qt.images.deletion import RestoreStep

        deletion = self._in_trash()[-1]

        def on_restored() -> None:
            self.message_shown.emit(self.tr("Restored %n image(s) from the trash.", "", deletion.count))
            self._commands.refresh()

        self._session.history.forget(deletion)
        self._session.history.perform(RestoreStep(deletion, on_restored))
        self._commands.refresh()

    def _in_trash(self) -> list[TrashStep]:
        return [deletion for deletion in self._deletions if deletion.in_trash]

    def paste(self) -> None:
        """Copy the clipboard's images into the dataset."""
        self._arriving.paste()

    def _on_menu_requested(self, place: QPoint) -> None:
        menu = QMenu(self)
        self._commands.refresh_now()
        for name in _MENU:
            menu.addSeparator() if name is None else menu.addAction(self._commands[name])
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:  # noqa: N802
        """Accept dragged files and images."""
        self._arriving.enter(event)

    def dropEvent(self, event: QDropEvent) -> None:  # noqa: N802
        """Copy dropped images into the dataset; open dropped folders and other files."""
        self._arriving.drop(event)


_MENU = (
    "views.loupe",
    "views.compare",
    None,
    "images.pick",
    "images.reject",
    "images.only_shown",
    None,
    *(f"images.rate_{stars}" for stars in range(1, 6)),
    "images.unrate",
    None,
    "images.folder",
    "images.delete",
)

# These shortcuts need the focus on the images: Delete in a list of tags must not delete images.
_NEED_FOCUS = (
    "images.select_all",
    "images.delete",
    "images.reject",
    "images.pick",
    "images.unrate",
    *(f"images.rate_{stars}" for stars in range(1, 6)),
)


class DiskPoller(QTimer):
    """Timer that scans for changes on disk every two seconds, and checks every file when the app becomes active.

    Also lets extra threads load thumbnails while an unresponsive disk blocks the usual ones.
    """

    def __init__(self, session: Session, in_sight: Callable[[], list[int]], parent: QWidget) -> None:
        super().__init__(parent)
        self._datasets, self._in_sight = session.datasets, in_sight
        self.setInterval(_PERIOD_MS)
        self.timeout.connect(lambda: self._datasets.refresh(self._in_sight()))
        self.timeout.connect(lambda: session.thumbnails.look())
        application = QGuiApplication.instance()
        assert isinstance(application, QGuiApplication)
        application.applicationStateChanged.connect(self._on_application_state_changed)

    def _on_application_state_changed(self, state: Qt.ApplicationState) -> None:
        if state == Qt.ApplicationState.ApplicationActive and self.isActive():
            self._datasets.refresh(self._in_sight(), whole=True)
