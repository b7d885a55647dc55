"""The middle of the Pictures page: grid, loupe and comparison of what is shown, and everything that culling does."""

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

from app.core.disk.roots import told_apart
from app.core.edits.bulk import exclude, exclude_others, mark_folder, rate
from app.core.edits.history import Edit
from app.core.library import Picture
from app.core.session import Session
from app.qt.actions.commands import Action, Commands
from app.qt.pictures.arriving import Arriving
from app.qt.pictures.grid import SIDES, Grid
from app.qt.pictures.loupe import MOST, Compare, Loupe
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import size_slider

if TYPE_CHECKING:  # brings numpy and Pillow: the window is shown before anything is thrown away
    from app.qt.pictures.deletion import Deletion

_PERIOD_MS = 2000
_CHOSEN = "has_chosen"
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
        _NOOP("Action", "Shows two to four selected pictures side by side."),
    ),
    Action(
        "views.full_size",
        _NOOP("Action", "Zoom to 100 %"),
        "view",
        "toggle_full_size",
        ("Z",),
        "has_current",
        icon="zoom",
    ),
    Action("views.alone", _NOOP("Action", "Full screen"), "view", "toggle_alone", ("F",), checked="is_alone"),
    Action(
        "views.lines", _NOOP("Action", "Captions below pictures"), "view", "show_lines", ("T",), checked="has_lines"
    ),
    Action("views.larger", _NOOP("Action", "Larger thumbnails"), "view", "larger", ("Ctrl+=", "Ctrl++")),
    Action("views.smaller", _NOOP("Action", "Smaller thumbnails"), "view", "smaller", ("Ctrl+-",)),
    Action("pictures.next", _NOOP("Action", "Next picture"), "pictures", "next", ("Alt+Right",), "has_shown"),
    Action(
        "pictures.previous", _NOOP("Action", "Previous picture"), "pictures", "previous", ("Alt+Left",), "has_shown"
    ),
    Action(
        "pictures.select_all", _NOOP("Action", "Select all shown"), "pictures", "select_all", ("Ctrl+A",), "has_shown"
    ),
    Action("pictures.rate_1", _NOOP("Action", "Rate 1"), "pictures", "rate_1", ("1",), _CHOSEN, icon="star"),
    Action("pictures.rate_2", _NOOP("Action", "Rate 2"), "pictures", "rate_2", ("2",), _CHOSEN, icon="star"),
    Action("pictures.rate_3", _NOOP("Action", "Rate 3"), "pictures", "rate_3", ("3",), _CHOSEN, icon="star"),
    Action("pictures.rate_4", _NOOP("Action", "Rate 4"), "pictures", "rate_4", ("4",), _CHOSEN, icon="star"),
    Action("pictures.rate_5", _NOOP("Action", "Rate 5"), "pictures", "rate_5", ("5",), _CHOSEN, icon="star"),
    Action("pictures.unrate", _NOOP("Action", "Remove the rating"), "pictures", "unrate", ("0",), _CHOSEN),
    Action(
        "pictures.reject",
        _NOOP("Action", "Exclude from training"),
        "pictures",
        "reject",
        ("X",),
        _CHOSEN,
        icon="reject",
        tip=_NOOP("Action", "The file stays; press P to take the picture in again."),
    ),
    Action("pictures.pick", _NOOP("Action", "Include in training"), "pictures", "pick", ("P",), _CHOSEN, icon="pick"),
    Action(
        "pictures.only_shown",
        _NOOP("Action", "Train only what is shown"),
        "pictures",
        "train_only_shown",
        enabled="has_hidden",
        icon="filter",
        tip=_NOOP("Action", "Excludes every picture that the filter hides."),
    ),
    Action("pictures.folder", _NOOP("Action", "Folder of this picture…"), "pictures", "mark_folder", (), "has_current"),
    Action(
        "pictures.close", _NOOP("Action", "Close this dataset"), "file", "close_dataset", ("Ctrl+W",), "has_dataset"
    ),
    Action("pictures.paste", _NOOP("Action", "Paste pictures"), "pictures", "paste", ("Ctrl+Shift+V",)),
    Action(
        "pictures.delete", _NOOP("Action", "Move to trash"), "pictures", "delete", ("Delete",), _CHOSEN, icon="trash"
    ),
    Action(
        "pictures.undelete",
        _NOOP("Action", "Bring back what was moved to the trash"),
        "pictures",
        "undelete",
        ("Ctrl+Shift+Delete",),
        "has_thrown",
    ),
)


class Views(QWidget):
    """Three ways to look at `session.view`, one of them at a time, under one bar.

    In the grid actions work on the selection, in loupe and comparison on the current picture. `said` carries
    sentences for the status line.
    """

    said = Signal(str)
    alone = Signal(bool)
    """All of the screen is wanted for the pictures, or no longer."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self.grid, self.loupe, self.compare = Grid(session), Loupe(session), Compare(session)
        self.stack = QStackedWidget()
        self.slider = size_slider(SIDES, self.grid.side, self.tr("Size of thumbnails"))
        self.bar = QFrame()
        self.is_alone = False
        self._deletions: list[Deletion] = []
        self._arriving = Arriving(session, self, self.said.emit)
        commands.add(ACTIONS, self)
        for name in _NEAR:
            commands[name].setShortcutContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
        self._build()
        self._listen()

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

    def _listen(self) -> None:
        self.slider.valueChanged.connect(self.grid.set_side)
        self.grid.resized.connect(self.slider.setValue)
        self.grid.opened.connect(self.show_loupe)
        self.grid.menu_asked.connect(self._menu)
        self.loupe.left.connect(self.show_grid)
        self.loupe.stepped.connect(self.grid.step)
        self.compare.left.connect(self.show_grid)

    # What can be done now

    def in_grid(self) -> bool:
        """Tell whether the grid is seen."""
        return self.stack.currentWidget() is self.grid

    def in_loupe(self) -> bool:
        """Tell whether the loupe is seen."""
        return self.stack.currentWidget() is self.loupe

    def in_compare(self) -> bool:
        """Tell whether the comparison is seen."""
        return self.stack.currentWidget() is self.compare

    def has_lines(self) -> bool:
        """Tell whether captions stand below pictures."""
        return self.grid.lines

    def has_shown(self) -> bool:
        """Tell whether anything is shown."""
        return bool(self._session.view.ids)

    def has_current(self) -> bool:
        """Tell whether a picture is the current one."""
        return self._session.view.current in self._session.library.pictures

    def has_chosen(self) -> bool:
        """Tell whether there is something to work on."""
        return bool(self._session.view.scope()) or self.has_current()

    def can_compare(self) -> bool:
        """Tell whether several pictures are selected, and shown."""
        return len(self._session.view.scope()) > 1

    def has_hidden(self) -> bool:
        """Tell whether the filter hides pictures and shows some."""
        return 0 < len(self._session.view.ids) < len(self._session.library.pictures)

    def has_thrown(self) -> bool:
        """Tell whether pictures were moved to the trash in this session."""
        return bool(self._lying())

    def has_dataset(self) -> bool:
        """Tell whether a dataset is open."""
        return bool(self._session.datasets.folders)

    def chosen(self) -> list[Picture]:
        """Return the pictures that an action works on: the selected ones in the grid, else the current one."""
        view, pictures = self._session.view, self._session.library.pictures
        current = pictures.get(view.current or 0)
        selected = [pictures[number] for number in view.scope() if number in pictures] if self.in_grid() else []
        return selected or ([current] if current else [])

    # Looking

    def show_grid(self, _: bool = True) -> None:
        """Show many pictures."""
        self._look(self.grid)

    def show_loupe(self, _: bool = True) -> None:
        """Show the current picture large."""
        if not self.has_current():
            self.grid.step(0)
        self._look(self.loupe)

    def show_compare(self, _: bool = True) -> None:
        """Show the selected pictures side by side, four at most."""
        chosen = self._session.view.scope()[:MOST]
        if len(chosen) > 1:
            self.compare.compare(chosen)
            if self._session.view.current not in chosen:
                self._session.view.select(self._session.view.selected, chosen[0])
            self._look(self.compare)

    def take_focus(self) -> None:
        """Give the keyboard to the view that is seen."""
        (self.stack.currentWidget() or self.grid).setFocus()

    def _look(self, view: QWidget) -> None:
        self.stack.setCurrentWidget(view)
        view.setFocus()
        self.slider.setVisible(view is self.grid)
        self._commands.refresh()

    def toggle_full_size(self) -> None:
        """Show one screen pixel for each of the picture's, or fit it again."""
        if self.in_compare():
            self.compare.toggle_full()
            return
        if not self.in_loupe():
            self.show_loupe()
            self.loupe.area.zoom.fit()
        self.loupe.area.toggle_full()

    def toggle_alone(self, on: bool) -> None:
        """Give the pictures all of the screen, or no longer."""
        self.is_alone = on
        self.bar.setVisible(not on)
        self.alone.emit(on)

    def show_lines(self, on: bool) -> None:
        """Show captions below pictures, or not."""
        self.grid.show_lines(on)

    def larger(self) -> None:
        """Make thumbnails larger."""
        self.grid.set_side(self.grid.side + 24)

    def smaller(self) -> None:
        """Make thumbnails smaller."""
        self.grid.set_side(self.grid.side - 24)

    def next(self) -> None:
        """Go to the next picture."""
        (self.compare if self.in_compare() else self.grid).step(1)

    def previous(self) -> None:
        """Go to the previous picture."""
        (self.compare if self.in_compare() else self.grid).step(-1)

    def select_all(self) -> None:
        """Select everything that is shown."""
        self.grid.select_all()

    # Culling

    def rate_1(self) -> None:
        """Give one star."""
        self._rate(1)

    def rate_2(self) -> None:
        """Give two stars."""
        self._rate(2)

    def rate_3(self) -> None:
        """Give three stars."""
        self._rate(3)

    def rate_4(self) -> None:
        """Give four stars."""
        self._rate(4)

    def rate_5(self) -> None:
        """Give five stars."""
        self._rate(5)

    def unrate(self) -> None:
        """Take the stars away."""
        self._rate(None)

    def reject(self) -> None:
        """Leave out of training."""
        self._do(exclude(self.chosen(), True))

    def pick(self) -> None:
        """Take into training again."""
        self._do(exclude(self.chosen(), False))

    def train_only_shown(self) -> None:
        """Exclude everything that the filter hides, as one edit."""
        self._do(exclude_others(self._session.library.pictures.values(), self._session.view.ids))

    def _rate(self, rating: int | None) -> None:
        self._do(rate(self.chosen(), rating))

    def _do(self, edit: Edit) -> None:
        if edit:
            self._session.history.do(edit)
            self.said.emit(edit.name)

    # Folders and files

    def mark_folder(self) -> None:
        """Ask for what holds for all pictures in the current picture's folder."""
        from app.qt.pictures.dialogs import FolderDialog

        picture = self._session.library.pictures[self._session.view.current or 0]
        dialog = FolderDialog(picture.folder, self)
        dialog.accepted.connect(lambda: self._do(mark_folder(picture.folder, **dialog.facts())))
        dialog.open()

    def close_dataset(self) -> None:
        """Close the dataset of the current picture, else the one opened last; its files stay as they are."""
        picture = self._session.library.pictures.get(self._session.view.current or 0)
        folders = self._session.datasets.folders
        root = picture.folder.root if picture and picture.folder.root in folders else folders[-1]
        name = told_apart(root, folders)
        self._session.datasets.close(root)
        self.said.emit(self.tr("Closed {folder}; its files are as they were.").format(folder=name))
        self._commands.refresh()

    def delete(self) -> None:
        """Move pictures to the system's trash with captions and masks; the next picture becomes the current one."""
        from app.qt.pictures.deletion import Deletion

        chosen = self.chosen()
        if not chosen:
            return
        following = self._following(chosen)
        deletion = Deletion(self._session, chosen, self)
        deletion.done.connect(lambda: self.said.emit(deletion.told()))
        deletion.done.connect(self._commands.refresh)
        self._deletions.append(deletion)
        if following is not None:
            self._session.view.select([following], following)
        self._session.history.perform(deletion)
        self._commands.refresh()

    def _following(self, gone: list[Picture]) -> int | None:
        ids, out = self._session.view.ids, {picture.id for picture in gone}
        places = [place for place, number in enumerate(ids) if number in out]
        after = (number for number in ids[places[-1] + 1 :] if number not in out) if places else iter(())
        before = (number for number in reversed(ids[: places[0]]) if number not in out) if places else iter(())
        return next(after, next(before, None))

    def undelete(self) -> None:
        """Bring back what was moved to the trash last, past all that was done since."""
        from app.qt.pictures.deletion import Return

        deletion = self._lying()[-1]

        def back() -> None:
            self.said.emit(self.tr("Brought back %n picture(s).", "", deletion.count))
            self._commands.refresh()

        self._session.history.forget(deletion)
        self._session.history.perform(Return(deletion, back))
        self._commands.refresh()

    def _lying(self) -> list[Deletion]:
        return [deletion for deletion in self._deletions if deletion.lies]

    def paste(self) -> None:
        """Copy the pictures of the clipboard into the dataset."""
        self._arriving.paste()

    def _menu(self, place: QPoint) -> None:
        menu = QMenu(self)
        self._commands.refresh_now()
        for name in _MENU:
            menu.addSeparator() if name is None else menu.addAction(self._commands[name])
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:  # noqa: N802
        """Take pictures that are dragged here."""
        self._arriving.enter(event)

    def dropEvent(self, event: QDropEvent) -> None:  # noqa: N802
        """Copy what is dropped into the dataset, or open it."""
        self._arriving.drop(event)


_MENU = (
    "views.loupe",
    "views.compare",
    None,
    "pictures.pick",
    "pictures.reject",
    "pictures.only_shown",
    None,
    *(f"pictures.rate_{stars}" for stars in range(1, 6)),
    "pictures.unrate",
    None,
    "pictures.folder",
    "pictures.delete",
)

# Their keys work while the pictures have the keyboard: Delete in a list of tags is not meant for pictures.
_NEAR = (
    "pictures.select_all",
    "pictures.delete",
    "pictures.reject",
    "pictures.pick",
    "pictures.unrate",
    *(f"pictures.rate_{stars}" for stars in range(1, 6)),
)


class Clock(QTimer):
    """Asks for what changed on disk every other second while it runs, thoroughly when the user comes back.

    Thumbnails that wait for a disk that does not answer hold no others up for longer than that.
    """

    def __init__(self, session: Session, in_sight: Callable[[], list[int]], parent: QWidget) -> None:
        super().__init__(parent)
        self._datasets, self._in_sight = session.datasets, in_sight
        self.setInterval(_PERIOD_MS)
        self.timeout.connect(lambda: self._datasets.refresh(self._in_sight()))
        self.timeout.connect(lambda: session.thumbnails.look())
        application = QGuiApplication.instance()
        assert isinstance(application, QGuiApplication)
        application.applicationStateChanged.connect(self._came_back)

    def _came_back(self, state: Qt.ApplicationState) -> None:
        if state == Qt.ApplicationState.ApplicationActive and self.isActive():
            self._datasets.refresh(self._in_sight(), whole=True)
