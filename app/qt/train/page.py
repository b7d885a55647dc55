"""The Train page: jobs on the left, the open job in the middle, its forecast and Start on the right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QFileDialog, QPushButton, QSplitter, QVBoxLayout, QWidget

from app.core.edits.bulk import exclude_others
from app.core.jobs import essentials
from app.core.jobs.draft import Draft, DraftStep
from app.core.jobs.jobs import TrashedJob
from app.core.jobs.settings import full_title, setting
from app.core.session import Session
from app.core.tasks import reraise
from app.qt.actions.commands import Action, Commands
from app.qt.page_loader import Page
from app.qt.theme import set_icon
from app.qt.train.forecast.panel import ForecastPanel
from app.qt.train.form import translated
from app.qt.train.job_list import JobList
from app.qt.train.sheet import JobSheet
from app.qt.train.starting import JobStarter
from app.qt.widgets import QT_TRANSLATE_NOOP, until_destroyed, while_alive
from trainer.config.presets.library import PresetEntry
from trainer.errors import ImpastoError

ACTIONS = (
    Action(
        "train.new",
        QT_TRANSLATE_NOOP("Action", "New job"),
        "train",
        "new",
        keys=("Ctrl+N",),
        icon="add",
        tip=QT_TRANSLATE_NOOP("Action", "Creates a job that trains on the open images"),
    ),
    Action("train.open", QT_TRANSLATE_NOOP("Action", "Open job file…"), "train", "ask_for_file", icon="folder"),
    Action(
        "train.duplicate",
        QT_TRANSLATE_NOOP("Action", "Duplicate job"),
        "train",
        "duplicate",
        enabled="has_job",
        icon="copy",
    ),
    Action(
        "train.rename", QT_TRANSLATE_NOOP("Action", "Rename job"), "train", "rename", keys=("F2",), enabled="has_job"
    ),
    Action(
        "train.delete", QT_TRANSLATE_NOOP("Action", "Delete job"), "train", "delete", enabled="has_job", icon="trash"
    ),
    Action(
        "train.search",
        QT_TRANSLATE_NOOP("Action", "Find a setting"),
        "train",
        "find_setting",
        keys=("Ctrl+F",),
        enabled="has_job",
        icon="search",
    ),
    Action(
        "train.start",
        QT_TRANSLATE_NOOP("Action", "Start training"),
        "train",
        "start",
        keys=("Ctrl+Return",),
        enabled="can_start",
        icon="train",
    ),
)


_ESSENTIALS = {
    "base.model": QT_TRANSLATE_NOOP("Train", "Base"),
    "dataset.folders": QT_TRANSLATE_NOOP("Train", "Images"),
    "output.runs": QT_TRANSLATE_NOOP("Train", "Output"),
}
_LOOK_MS = 2000
"""Interval at which the job file is checked for changes by other programs, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Named:
    """Undo step with the name that the user sees."""

    name: str


class DraftUndo:
    """Undo and redo for the open job."""

    def __init__(self) -> None:
        self.draft: Draft | None = None

    @property
    def undo_name(self) -> str | None:
        """Name of the change that undo would revert, or None."""
        return _words(self.draft.undo_name) if self.draft else None

    @property
    def redo_name(self) -> str | None:
        """Name of the change that redo would repeat, or None."""
        return _words(self.draft.redo_name) if self.draft else None

    def undo(self) -> Named | None:
        """Undo the last change to the job; return None if there is none."""
        return _named(self.draft.undo() if self.draft else None)

    def redo(self) -> Named | None:
        """Redo the change that was undone last; return None if there is none."""
        return _named(self.draft.redo() if self.draft else None)


def _named(step: DraftStep | None) -> Named | None:
    return Named(_words(step.name) or "") if step else None


def _words(name: str | None) -> str | None:
    """Return a change's name for the user: the title of a setting's key, or the translation of another name."""
    if name is None:
        return None
    if name in _ESSENTIALS:
        return translated(_ESSENTIALS[name])
    try:
        title = setting(name).title
    except KeyError:
        return translated(name)
    return title if any(part.isdigit() for part in name.split(".")) else full_title(name)


class TrainPage(Page):
    """Page to edit one job at a time; every change is saved at once."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        self.draft: Draft | None = None
        self._stops: list[Callable[[], None]] = []
        self._presets: tuple[PresetEntry, ...] = ()
        self._recipe = ""
        self._awaited = False
        """Whether a requested job is being created or opened."""
        self._open_error: ImpastoError | None = None
        """Reason why the last requested job could not be opened, or None."""
        self._is_visible = False
        self.undoing = self._undo = DraftUndo()
        self._timer = QTimer(self)
        self._timer.setInterval(_LOOK_MS)

    def build(self) -> Iterator[None]:
        """Create the list, form and forecast, then lay them out; yield after each part."""
        session, commands = self.session, self.commands
        commands.add(ACTIONS, self)
        yield
        self.jobs = JobList(session, commands)
        self.sheet = JobSheet(session)
        yield
        self.forecast = ForecastPanel(session, commands)
        yield
        self.start_button = QPushButton()
        self._starting = JobStarter(session, self, self.forecast)
        yield from self._lay_out()
        self._listen()

    # --- called by actions

    def new(self) -> None:
        """Create a job that trains on the open images."""
        self.begin("")

    def ask_for_file(self) -> None:
        """Ask for a job file and open it."""
        title, kinds = self.tr("Open a job file"), self.tr("Job files (*.toml)")
        chosen, _ = QFileDialog.getOpenFileName(self, title, "", kinds)
        if chosen:
            self.open(Path(chosen))

    def duplicate(self) -> None:
        """Copy the open job and open the copy."""
        if self.draft is not None:
            self.session.jobs.duplicate(self.draft.path, *self._callbacks(self.show_job))

    def rename(self) -> None:
        """Focus the name field and select its text."""
        self.sheet.name.setFocus()
        self.sheet.name.selectAll()

    def delete(self) -> None:
        """Move the open job to the trash, show another job, and offer to restore the one in the trash."""
        if self.draft is None:
            return
        name = self.draft.name
        self.session.jobs.trash(self.draft.path, *self._callbacks(lambda trashed: self._on_trashed(name, trashed)))

    def find_setting(self) -> None:
        """Focus the search field for settings."""
        self.sheet.find_setting()

    def start(self) -> None:
        """Queue the open job."""
        if self.draft is not None:
            self._starting.start(self.draft)

    def has_job(self) -> bool:
        """Return whether a job is open."""
        return self.draft is not None

    def can_start(self) -> bool:
        """Return whether the open job is valid and not already starting."""
        return self.draft is not None and self.draft.job is not None and not self._starting.is_starting(self.draft)

    # --- what is shown

    def open(self, path: Path) -> None:
        """Open a job file; a run's frozen job is opened as a copy."""
        self.show_job(path)

    def begin(self, recipe: str) -> None:
        """Create a job that trains on the open images, using the recipe with this name unless the name is ""."""
        session = self.session
        images = essentials.open_images(session.library, session.datasets.folders)
        stated = session.target.for_new_job()
        name = (images[0].path.name if images else "") or self.tr("My LoRA")
        self._awaited = True

        def show(draft: Draft) -> None:
            self._show(draft)
            self._recipe = recipe
            self._apply_recipe()
            self._report_hidden_images()

        session.jobs.create(
            name,
            lambda free, folder: essentials.new_values(free, images, folder, stated),
            *self._callbacks(lambda path: session.jobs.open(path, *self._callbacks(show))),
        )

    def show_job(self, path: Path) -> None:
        """Open a job file; if that fails, report why and keep showing the job that is open."""
        self._awaited = True
        self.session.jobs.open(path, while_alive(self, self._show), while_alive(self, self._on_open_failed))

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Start watching the job file; if no job is open, open one as soon as the list of jobs has been read."""
        super().showEvent(event)
        self._is_visible = True
        self._timer.start()
        self.session.tasks.run(essentials.recipes, self._on_recipes, reraise)
        self.session.jobs.refresh(self._show_first)
        self.sheet.refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop watching the job file as soon as everything is saved."""
        super().hideEvent(event)
        self._is_visible = False
        self._stop_if_idle()

    def _show_first(self) -> None:
        """Show the job that was opened last, or the latest job, or a new one if there are no jobs."""
        if self.draft is not None or self._awaited or not self.isVisible():
            return
        entries = [entry.path for entry in self.session.jobs.all if not entry.problem]
        last = self.session.jobs.last
        if entries:
            self.show_job(last if last in entries else entries[0])
        elif not self.session.jobs.all:
            self.new()

    def _show(self, draft: Draft | None) -> None:
        self._clear_open_error()
        for stop in self._stops:
            stop()
        self.draft = self._undo.draft = draft
        self._awaited = self._awaited and draft is None
        self._stops = []
        if draft is not None:
            self._stops = [
                draft.changed.connect(lambda _: self._on_changed()),
                draft.external_change_applied.connect(lambda _: self._on_taken_over()),
                draft.file.failed.connect(self._on_save_failed),
                draft.file.backed_up.connect(self._on_kept),
                draft.file.written.connect(lambda _: self.sheet.show_saved()),
            ]
        self.sheet.show_draft(draft)
        self.forecast.show_draft(draft)
        self._on_changed()

    def _on_turned(self, draft: Draft | None) -> None:
        """Show the job that another page has opened."""
        if draft is not None and draft is not self.draft:
            self._show(draft)

    def _on_changed(self) -> None:
        draft = self.draft
        self.sheet.refresh()
        self.jobs.show_open(draft.path if draft else None, draft.name if draft else "")
        self._show_start()
        self.undoable.emit()

    def _show_start(self) -> None:
        is_starting = self.draft is not None and self._starting.is_starting(self.draft)
        self.start_button.setText(self.tr("Starting…") if is_starting else self.tr("Start training"))
        self.start_button.setEnabled(self.can_start())
        self.commands.refresh()

    def _on_recipes(self, presets: tuple[PresetEntry, ...]) -> None:
        if presets != self._presets:
            self._presets = presets
            self.sheet.show_recipes(presets)
        self._apply_recipe()

    def _apply_recipe(self) -> None:
        """Apply the recipe that another page requested, as soon as the recipes and a job are loaded."""
        if not self._recipe or not self._presets or self.draft is None:
            return
        preset = essentials.find_recipe(self._recipe, self._presets, self.draft.family)
        self._recipe = ""
        if preset is not None:
            essentials.choose_recipe(self.draft, preset)

    def _callbacks(self, then: Callable[..., None]) -> tuple[Callable[..., None], Callable[[ImpastoError], None]]:
        """Return success and failure callbacks for work on job files; they do nothing after the page is deleted."""
        return while_alive(self, then), while_alive(self, self._on_failed)

    def _on_failed(self, error: ImpastoError) -> None:
        self._awaited = False
        self.failed.emit(error)

    def _on_open_failed(self, error: ImpastoError) -> None:
        """Report why a job could not be opened; the report is removed when another job is shown."""
        self._clear_open_error()
        self._open_error = error
        self._on_failed(error)

    def _clear_open_error(self) -> None:
        unopened, self._open_error = self._open_error, None
        if unopened:
            self.resolved.emit(unopened)

    def _on_trashed(self, name: str, job: TrashedJob) -> None:
        """Show another job and offer to restore the one in the trash."""
        if self.draft is not None and self.draft.path == job.path:  # otherwise another job has been opened
            self._show(None)
        if self.session.jobs.all:
            self._show_first()
        words = self.tr("Moved “{name}” to the trash.") if job.moved_to else self.tr("Removed “{name}” from the list.")
        restore = partial(self.session.jobs.restore, job, *self._callbacks(self.show_job))
        self.notified.emit(words.format(name=name), "info", (self.tr("Restore"), restore))

    def _report_hidden_images(self) -> None:
        """Warn that training also uses the images that the filter hides, and offer to exclude them."""
        library, shown = self.session.library.images, frozenset(self.session.view.ids)
        hidden = sum(not image.excluded for number, image in library.items() if number not in shown)
        if shown and hidden:
            words = self.tr("The filter hides %Ln image(s), which training will use anyway.", "", hidden)
            self.notified.emit(
                words, "info", (self.tr("Train only on the images shown"), partial(self._exclude_all_but, shown))
            )

    def _exclude_all_but(self, shown: frozenset[int]) -> None:
        if edit := exclude_others(self.session.library.images.values(), shown):
            self.session.history.do(edit)
            self.message_shown.emit(edit.name)

    def _on_taken_over(self) -> None:
        words = self.tr("Another program changed this job. Its version is shown; undo restores yours.")
        self.notified.emit(words, "info", None)

    def _on_save_failed(self, error: ImpastoError) -> None:
        """Report why the job could not be saved, or why another program's changes could not be read."""
        if self.draft is not None and self.draft.file.unsaved:
            self.sheet.show_unsaved()
        self.failed.emit(error)

    def _on_kept(self, kept: Path) -> None:
        words = self.tr("The previous job file is kept as {name} in the same folder.")
        self.notified.emit(words.format(name=kept.name), "info", None)

    def _on_rescued(self, kept: Path) -> None:
        words = self.tr("The last changes could not be saved to the job file. They are kept in {path}.")
        self.notified.emit(words.format(path=kept), "warning", None)

    def _check_disk(self) -> None:
        if self.draft is not None:
            self.draft.check_file()
        self._starting.look()
        self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        """Stop the timer if the page is hidden and all changes are saved; until then, the timer retries saving."""
        if not self._is_visible and not (self.draft and self.draft.file.unsaved):
            self._timer.stop()

    def _listen(self) -> None:
        self._timer.timeout.connect(self._check_disk)
        self.jobs.chosen.connect(self.show_job)
        self.start_button.clicked.connect(lambda: self.start())
        self.sheet.empty_state.button.clicked.connect(lambda: self.new())
        for part in (self.forecast, self._starting):
            part.message_shown.connect(self.message_shown)
            part.notified.connect(self.notified)
            part.failed.connect(self.failed)
        self.forecast.wanted.connect(self.sheet.show_setting)
        self._starting.resolved.connect(self.resolved)
        self._starting.changed.connect(self._show_start)
        until_destroyed(
            self,
            self.session.library.altered.connect(lambda _: self._on_library_altered()),
            self.session.jobs.opened_changed.connect(self._on_turned),
            self.session.jobs.rescued.connect(self._on_rescued),
            self.session.jobs.resolved.connect(self.resolved.emit),
            self.session.jobs.secured.connect(lambda message: self.notified.emit(message, "warning", None)),
        )
        if self.session.jobs.notice:
            QTimer.singleShot(0, self, lambda: self.notified.emit(self.session.jobs.notice, "warning", None))

    def _on_library_altered(self) -> None:
        """If the page is visible, recount the images after a delay, because a scan emits hundreds of signals."""
        if self.isVisible():
            self.sheet.count_soon()

    def _lay_out(self) -> Iterator[None]:
        self.start_button.setDefault(True)
        self.start_button.setMinimumHeight(40)
        set_icon(self.start_button, "train", "on_accent")
        right, column = QWidget(), QVBoxLayout()
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.forecast, 1)
        below = QVBoxLayout()
        below.setContentsMargins(16, 8, 16, 16)
        below.addWidget(self.start_button)
        column.addLayout(below)
        right.setLayout(column)
        self.columns = QSplitter(Qt.Orientation.Horizontal, self)
        self.columns.setObjectName("train.columns")
        self.columns.setChildrenCollapsible(False)
        for part in (self.jobs, self.sheet, right):
            self.columns.addWidget(part)
            yield
        self.columns.setStretchFactor(1, 1)
        self.columns.setSizes([180, 680, 340])
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.addWidget(self.columns)
        yield
