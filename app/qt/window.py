"""Main window: a sidebar on the left, the page next to it, notices above and the status bar below."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QByteArray, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QDragEnterEvent, QDropEvent, QPaintEvent
from PySide6.QtWidgets import (
    QButtonGroup,
    QFileDialog,
    QFrame,
    QHBoxLayout,
    QMainWindow,
    QMessageBox,
    QSplitter,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.disk.datasets import OpenedDataset
from app.core.session import Session
from app.core.settings import recent
from app.qt import page_loader
from app.qt.actions.commands import CommandAction, Commands
from app.qt.images.arriving import unsupported_files_message
from app.qt.images.page import ImagesPage
from app.qt.main_thread import InputPriorityFilter
from app.qt.notices import Notices
from app.qt.page_loader import Page, PageCallback, PageLoader, PagePlaceholder, UndoHistory
from app.qt.recent import EmptyState, RecentMenu
from app.qt.status import StatusBar, TrainingRing, title_of
from app.qt.theme import set_icon
from app.qt.widgets import raise_window, while_alive
from app.qt.window_actions import ACTIONS
from trainer.errors import ImpastoError

if TYPE_CHECKING:
    from app.qt.runs.notifier import Notifier

_MAX_QUICK_WRITES = 500
"""Maximum number of unsaved edits that the closing window writes before counting conflicts; of more, it writes none."""
_PATIENCE = 2.0
"""Seconds without a finished write after which the closing window stops waiting for unsaved edits."""


class Sidebar(QFrame):
    """Column of buttons that open pages, one per command; exactly one is checked."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("rail")
        self.buttons = QButtonGroup(self)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(6, 8, 6, 8)
        self._column.setSpacing(4)
        self._column.addStretch()

    def add(self, command: CommandAction) -> QToolButton:
        """Add a page's button below the others."""
        button = QToolButton()
        button.setText(command.text())
        button.setToolTip(command.toolTip())
        button.setCheckable(True)
        button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextUnderIcon)
        button.setIconSize(QSize(24, 24))
        button.setFixedWidth(72)
        button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        set_icon(button, command.action.icon or "more")
        button.clicked.connect(lambda: command.trigger())
        self.buttons.addButton(button, len(self.buttons.buttons()))
        self._column.insertWidget(self._column.count() - 1, button)
        return button

    def mark(self, index: int) -> None:
        """Check the button of the open page."""
        self.buttons.button(index).setChecked(True)


_IMAGES, _TRAIN, _RUNS, _PRESETS = range(4)
_LATER = {_TRAIN: page_loader.TRAIN, _RUNS: page_loader.RUNS, _PRESETS: page_loader.PRESETS}


class Window(QMainWindow):
    """Main window of a session."""

    painted = Signal()
    """Emitted after the window is painted for the first time; work that would delay startup waits for this."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._painted = self._closing = self._decided_later = False
        self._notifier: Notifier | None = None
        self._state, self._state_notice = recent.read_window_state()
        """Saved window state by name, including the state of pages that are not built yet."""
        self.commands = Commands(self, session.settings.preferences.shortcuts)
        self.setWindowTitle("Impasto")
        self.setAcceptDrops(True)
        self.resize(1280, 800)
        self.commands.add(ACTIONS, self)
        self.commands.fill(self.menuBar())
        self.recent = self._add_recent()
        self.images = ImagesPage(session, self.commands)
        self.pages = QStackedWidget()
        self._page_loader = PageLoader(session, self.commands, self.pages, _LATER)
        self.notices = Notices()
        self.status = StatusBar(session)
        self._sidebar = Sidebar()
        self._above = QVBoxLayout()
        self._build()
        self._connect_signals()
        self._restore()
        self._fresh = True
        """Whether no page has been opened yet; only then may the window open the running training by itself."""
        InputPriorityFilter(self)

    def open(self, paths: Iterable[str | Path], then: Callable[[], None] | None = None) -> None:
        """Open folders as datasets (for an image, its folder), and open LoRAs and presets; then call `then`.

        Shows the Images page unless the user opens another page first.
        """
        page = self.pages.currentIndex()

        def open_all(folders: list[Path], images: list[Path], others: list[Path]) -> None:
            wanted = dict.fromkeys((*folders, *(image.parent for image in images)))
            if others:
                self.notices.show_notice(unsupported_files_message(others), "warning")
            for folder in wanted:
                if folder.absolute() in self.session.datasets.folders:
                    self.status.say(self.tr("{folder} is already open.").format(folder=folder.name))
                self.session.datasets.open(folder)
            if wanted and self.pages.currentIndex() == page:
                self.show_images()
            if then:
                then()

        whole = map(Path, map(os.path.abspath, paths))  # resolves "cats/.."
        self.session.navigator.open_paths(whole, while_alive(self, open_all))

    def come_forward(self, paths: list[str]) -> None:
        """Bring the window to the front and open the paths that were passed when the app was started a second time."""
        raise_window(self)
        if self.session.training.now and not paths:
            self.show_training()
        self.open(paths)

    def report_crash(self, text: str) -> None:
        """Report that the app crashed last time; a button shows the details."""
        show = (self.tr("Show details"), lambda: self._show_crash(text))
        self.notices.show_notice(self.tr("Impasto crashed the last time it was open."), "warning", show)

    def report_error(self, text: str) -> None:
        """Report an unexpected error; a button shows the details, and the app keeps running."""
        show = (self.tr("Show details"), lambda: self._show_crash(text))
        self.notices.show_notice(self.tr("Something went wrong. Your captions are safe."), "error", show)

    # --- methods named in the table of actions

    def open_folder(self) -> None:
        """Ask for a folder and open it."""
        folder = QFileDialog.getExistingDirectory(self, self.tr("Open a folder of images"))
        if folder:
            self.open([folder])

    def open_lora(self) -> None:
        """Ask for LoRA files and show each in its own window."""
        title, kinds = self.tr("Inspect a LoRA"), self.tr("LoRA files (*.safetensors)")
        for path in QFileDialog.getOpenFileNames(self, title, "", kinds)[0]:
            self.show_lora(Path(path))

    def show_lora(self, path: Path) -> None:
        """Show a LoRA file in a viewer."""
        from app.qt.lora_viewer import LoraViewer  # imports Pillow

        LoraViewer(self.session, path, self).show()

    def undo(self) -> None:
        """Undo the last edit and show what was undone."""
        step = self._undoing().undo()
        if step:
            self.status.say(self.tr("Undone: {edit}").format(edit=step.name))

    def redo(self) -> None:
        """Redo the last undone edit and show what was redone."""
        step = self._undoing().redo()
        if step:
            self.status.say(self.tr("Redone: {edit}").format(edit=step.name))

    def can_undo(self) -> bool:
        """Return whether there is an edit to undo."""
        return self._undoing().undo_name is not None

    def can_redo(self) -> bool:
        """Return whether there is an edit to redo."""
        return self._undoing().redo_name is not None

    def show_images(self) -> None:
        """Show the Images page."""
        self._show_page(_IMAGES)

    def show_train(self) -> None:
        """Show the Train page."""
        self._show_page(_TRAIN)

    def show_runs(self, use: PageCallback | None = None) -> None:
        """Show the Runs page; call `use` with the page as soon as it is built."""
        self._show_page(_RUNS, use)

    def show_training(self) -> None:
        """Show the running training."""
        now = self.session.training.now
        if now and now.entry:
            self.session.navigator.entry.emit(now.entry)
        elif now:
            self.session.navigator.run.emit(now.summary.path)

    def show_presets(self) -> None:
        """Show the Presets page."""
        self._show_page(_PRESETS)

    def show_full_screen(self, full: bool) -> None:
        """Enter or leave full screen."""
        state, bit = self.windowState(), Qt.WindowState.WindowFullScreen
        self.setWindowState(state | bit if full else state & ~bit)

    def show_preferences(self) -> None:
        """Open the preferences."""
        from app.qt.preferences import PreferencesDialog  # imported late: the schema costs time at startup

        PreferencesDialog(self.session.settings, self.commands, self).exec()

    def show_palette(self) -> None:
        """Open the command palette."""
        from app.qt.actions.palette import CommandPalette

        CommandPalette(self.commands, self).exec()

    def show_keys(self) -> None:
        """Show all keyboard shortcuts."""
        from app.qt.actions.palette import ShortcutList

        ShortcutList(self.commands, self).exec()

    def show_welcome(self) -> None:
        """Show the welcome dialog (not modal), which says what this PC can train and has a button to start the tour."""
        from app.qt.first_run.welcome import Welcome

        welcome = self.findChild(Welcome)
        if welcome is None:
            welcome = Welcome(self.session, self)
            welcome.tour.connect(self.show_tour)
            welcome.images.connect(self.open_folder)
        welcome.show()
        welcome.raise_()

    def show_tour(self) -> None:
        """Start the guided tour, unless it is running."""
        from app.qt.first_run.tour import Tour

        if self.findChild(Tour) is None:
            Tour(
                self.session,
                self._above,
                notices=self.notices,
                show_images=self.show_images,
                show_runs=self.show_runs,
                parent=self,
            )

    # --- Qt's events

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:  # noqa: N802
        """Accept local folders and files."""
        if any(url.isLocalFile() for url in event.mimeData().urls()):
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:  # noqa: N802
        """Open the dropped folders and files."""
        self.open(url.toLocalFile() for url in event.mimeData().urls() if url.isLocalFile())
        event.acceptProposedAction()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint, and emit `painted` after the first time."""
        super().paintEvent(event)
        if not self._painted:
            self._painted = True
            QTimer.singleShot(0, self, self.painted.emit)

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        """Save the window state, and ask about unresolved conflicts; all other edits are in the journal.

        If a pending undo or a move to or from the trash is unfinished, the window closes only once it is done, unless
        the user closes the window again. If it fails, the window stays open and shows the error.
        """
        step = self.session.history.writing
        if step and not self._closing:
            self._closing = True
            words = self.tr("Impasto closes when this is done: {step}. To close now, close the window again.")
            self.notices.show_notice(words.format(step=step.name))
            event.ignore()
            return
        self._closing = False  # another start may show it again
        self.images.editor.finish()
        if not self._decided_later and (count := self._conflicts_now()):
            self._ask_about_conflicts(count)
            event.ignore()
            return
        self._decided_later = False
        state = {splitter.objectName(): _text(splitter.saveState()) for splitter in self._splitters()}
        self._state |= {**state, "geometry": _text(self.saveGeometry())}
        self._tell_what_continues()
        recent.write_window_state(self._state)
        super().closeEvent(event)

    # --- inside

    def _conflicts_now(self) -> int:
        """Write the unsaved edits if there are only a few; return the number of unresolved conflicts."""
        saver = self.session.saver
        if saver.now.pending <= _MAX_QUICK_WRITES:
            self.session.history.finish()
            saver.flush(patience=_PATIENCE)
        return len(saver.refresh().conflicts)

    def _ask_about_conflicts(self, count: int) -> None:
        """Ask whether to resolve conflicts before closing."""
        words = self.tr("Another program changed %n value(s) that you changed too.", "", count)
        box = QMessageBox(QMessageBox.Icon.Question, self.tr("Quit Impasto?"), words, parent=self)
        details = self.tr(
            "Nothing was overwritten. If you quit now, your version is kept, and you can choose next time."
        )
        box.setInformativeText(details)
        choose = box.addButton(self.tr("Choose…"), QMessageBox.ButtonRole.AcceptRole)
        quit_ = box.addButton(self.tr("Quit and choose later"), QMessageBox.ButtonRole.DestructiveRole)
        box.addButton(QMessageBox.StandardButton.Cancel)
        box.setDefaultButton(choose)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        choose.clicked.connect(self._choose_and_close)
        quit_.clicked.connect(self._close_undecided)
        box.open()

    def _choose_and_close(self) -> None:
        from app.qt.images.captions.recovery_dialogs import ConflictsDialog

        dialog = ConflictsDialog(self.session, self)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.accepted.connect(lambda: QTimer.singleShot(0, self, self.close))
        dialog.open()

    def _close_undecided(self) -> None:
        self._decided_later = True
        QTimer.singleShot(0, self, self.close)

    def _tell_what_continues(self) -> None:
        """Tell the user what keeps running after the window is closed, but only once for each kind of work."""
        continuing = self.session.run_watcher.continuing
        if self._notifier and continuing and f"said.{continuing}" not in self._state:
            self._state[f"said.{continuing}"] = "yes"
            self._notifier.show_close_notice(continuing)

    def _on_training_changed(self) -> None:
        """Show the training's progress in the title and sidebar; at app start, open the running training."""
        now = self.session.training.now
        self.setWindowTitle(title_of(now))
        self._ring.show_training(now)
        if self._fresh and now:
            self.show_training()
        elif self.session.runs.looked:
            self._fresh = False

    def _close_when_done(self) -> None:
        if self._closing and self.session.history.writing is None:
            QTimer.singleShot(0, self, self._close_unless_it_failed)

    def _close_unless_it_failed(self) -> None:
        if self._closing:
            self.close()

    def _on_history_failed(self, error: ImpastoError) -> None:
        self._closing = False
        self._show_error(error)

    def _show_page(self, index: int, use: PageCallback | None = None) -> None:
        """Show a page; call `use` with the page as soon as it is built."""
        self._fresh = False
        self.pages.setCurrentIndex(index)
        self._sidebar.mark(index)
        if index in _LATER:
            self._page_loader.ask(index, use)

    def _on_page_made(self, page: Page) -> None:
        """Connect a newly built page and restore its saved state."""
        page.message_shown.connect(self.status.say)
        page.notified.connect(self.notices.show_notice)
        page.failed.connect(self._show_error)
        page.resolved.connect(self.notices.dismiss)
        page.undoable.connect(self._update_undo_actions)
        for splitter in _named_splitters(page):
            self._restore_splitter(splitter)

    def _watch_runs(self) -> None:
        """Start notifying the user when runs end."""
        from app.qt.runs.notifier import Notifier

        self._notifier = Notifier(self.session, self.notices, self)

    def _open_in(self, index: int, path: Path) -> None:
        self._show_page(index, lambda page: page.open(path))

    def _begin_job(self, recipe: str) -> None:
        self._show_page(_TRAIN, lambda page: page.begin(recipe))

    def _build(self) -> None:
        self._add_page("window.images", self.images)
        self.empty_state = EmptyState(self.session, self.images.views)
        self.empty_state.button.clicked.connect(lambda: self.open_folder())
        self.empty_state.recent.chosen.connect(lambda folder: self.open([folder]))
        for command in ("window.train", "window.runs", "window.presets"):
            place = self._page_loader.place(self.pages.count(), self.commands[command].text())
            button = self._add_page(command, place)
            if command == "window.runs":
                self._ring = TrainingRing(button)
        middle, column, row = QWidget(), QVBoxLayout(), QHBoxLayout()
        column.addLayout(self._above)
        column.addWidget(self.notices)
        column.addWidget(self.pages, 1)
        row.addWidget(self._sidebar)
        row.addLayout(column, 1)
        for layout in (column, row):
            layout.setContentsMargins(0, 0, 0, 0)
            layout.setSpacing(0)
        middle.setLayout(row)
        self.setCentralWidget(middle)
        self.setStatusBar(self.status)
        self._show_page(_IMAGES)
        self.empty_state.button.setFocus()

    def _add_recent(self) -> RecentMenu:
        menu = RecentMenu(self.session.recent, lambda folder: self.open([folder]), self)
        file = self.commands.menu("file")
        file.insertMenu(self.commands["window.preferences"], menu)
        file.aboutToShow.connect(self.session.recent.check)
        return menu

    def _add_page(self, command: str, page: QWidget) -> QToolButton:
        self.pages.addWidget(page)
        return self._sidebar.add(self.commands[command])

    def _connect_signals(self) -> None:
        session = self.session
        session.view.shown.connect(lambda _: self.commands.refresh())
        session.view.selection.connect(lambda _: self.commands.refresh())
        session.history.changed.connect(lambda _: self._update_undo_actions())
        session.history.changed.connect(lambda _: self._close_when_done())
        session.history.failed.connect(self._on_history_failed)
        session.datasets.problems.connect(self._show_error)
        session.datasets.opened.connect(self._on_dataset_opened)
        session.datasets.recovered.connect(self.notices.dismiss)
        session.folder_missing.connect(self._on_folder_missed)
        session.target.failed.connect(self._show_error)
        self.images.views.message_shown.connect(self.status.say)
        self.images.views.full_screen_requested.connect(self._on_alone)
        self.images.editor.save_status.notified.connect(
            lambda sentence, act: self.notices.show_notice(sentence, "info", act)
        )
        self.images.editor.save_status.outdated.connect(self.notices.dismiss)
        session.settings.changed.connect(lambda chosen: self.commands.rebind(chosen.shortcuts))
        self.notices.watch_files(session.settings.file, session.filters.file)
        stored = (session.settings.file, session.recent, session.models, session.filters.file)
        for notice in filter(None, (self._state_notice, *(file.notice for file in stored))):
            self.notices.show_notice(notice, "warning")
        session.completer.loaded.connect(self._on_tag_lists_loaded)
        session.navigator.run.connect(lambda run: self._open_in(_RUNS, run))
        session.navigator.entry.connect(lambda number: self.show_runs(lambda page: page.begin(number)))
        session.training.changed.connect(lambda _: self._on_training_changed())
        session.runs.changed.connect(lambda _: self._on_training_changed())
        self.status.training.opened.connect(self.show_training)
        session.navigator.job.connect(lambda job: self._open_in(_TRAIN, job))
        session.navigator.recipe.connect(self._begin_job)
        session.navigator.lora.connect(self.show_lora)
        session.navigator.preset.connect(lambda preset: self._open_in(_PRESETS, preset))
        self._page_loader.made.connect(lambda _, page: self._on_page_made(page))
        self.pages.currentChanged.connect(lambda _: self._update_undo_actions())
        # One event loop turn later, when the first paint is on the screen.
        self.painted.connect(lambda: QTimer.singleShot(0, self._page_loader.make_all))
        self.painted.connect(self._watch_runs)

    def _on_alone(self, alone: bool) -> None:
        """Show only the images, in full screen, if `alone`; otherwise restore the window."""
        for part in (self._sidebar, self.menuBar(), self.status):
            part.setVisible(not alone)
        self.show_full_screen(alone)

    def _show_crash(self, text: str) -> None:
        from app.qt.notices import CrashDialog

        CrashDialog(text, self).exec()

    def _show_error(self, error: ImpastoError) -> None:
        self.notices.show_error(error)

    def _on_dataset_opened(self, opened: OpenedDataset) -> None:
        """Report a folder without images if other images are open; otherwise the empty state reports it."""
        if not opened.images and self.session.library.images:
            self.status.say(self.tr("No images in {folder}").format(folder=opened.folder.name))

    def _on_folder_missed(self, folder: Path) -> None:
        """Report that a folder that was open last time cannot be opened now."""
        words = self.tr(
            "{folder} was open last time but cannot be opened now. You can find it in File > Recent folders."
        )
        self.notices.show_notice(words.format(folder=folder), "warning")

    def _on_tag_lists_loaded(self, faults: tuple[str, ...]) -> None:
        """Report tag lists that could not be loaded."""
        if faults:
            self.notices.show_notice("\n".join(faults), "warning")

    def _undoing(self) -> UndoHistory:
        """Return the current page's own undo history (empty while the page loads) or, if it has none, the captions'."""
        page = self.pages.currentWidget()
        return (page.undoing if isinstance(page, Page | PagePlaceholder) else None) or self.session.history

    def _update_undo_actions(self) -> None:
        undo, redo = self._undoing().undo_name, self._undoing().redo_name
        self.commands["edit.undo"].setText(self.tr("Undo {edit}").format(edit=undo) if undo else self.tr("Undo"))
        self.commands["edit.redo"].setText(self.tr("Redo {edit}").format(edit=redo) if redo else self.tr("Redo"))
        self.commands.refresh()

    def _splitters(self) -> list[QSplitter]:
        """Return the named splitters of all finished pages; their positions are saved.

        The splitters of a half-built page do not have all parts yet, so their positions would be wrong.
        """
        pages = filter(None, map(self.pages.widget, range(self.pages.count())))
        return [splitter for page in pages for splitter in _named_splitters(page)]

    def _restore(self) -> None:
        self.restoreGeometry(_bytes(self._state.get("geometry", "")))
        for splitter in self._splitters():
            self._restore_splitter(splitter)

    def _restore_splitter(self, splitter: QSplitter) -> None:
        """Restore a splitter's saved position without changing whether its parts may collapse."""
        collapsible = splitter.childrenCollapsible()
        splitter.restoreState(_bytes(self._state.get(splitter.objectName(), "")))
        splitter.setChildrenCollapsible(collapsible)  # restoreState sets it too


def _named_splitters(part: QWidget) -> list[QSplitter]:
    return [splitter for splitter in part.findChildren(QSplitter) if splitter.objectName()]


def _text(state: QByteArray) -> str:
    return bytes(state.toBase64().data()).decode("ascii")


def _bytes(text: str) -> QByteArray:
    return QByteArray.fromBase64(text.encode("ascii", "replace"))
