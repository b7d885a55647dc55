"""The Train page: jobs on the left, the job that is set up in the middle, what it will need and Start on the right."""

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
from app.core.tasks import raise_again
from app.qt.actions.commands import Action, Commands
from app.qt.page_loader import Page
from app.qt.theme import set_icon
from app.qt.train.forecast.panel import ForecastPanel
from app.qt.train.form import words
from app.qt.train.job_list import JobList
from app.qt.train.sheet import JobSheet
from app.qt.train.starting import JobStarter
from app.qt.widgets import QT_TRANSLATE_NOOP, until_destroyed, while_there
from trainer.config.presets.library import PresetEntry
from trainer.errors import ImpastoError

ACTIONS = (
    Action(
        "train.new",
        QT_TRANSLATE_NOOP("Action", "New Job"),
        "train",
        "new",
        keys=("Ctrl+N",),
        icon="add",
        tip=QT_TRANSLATE_NOOP("Action", "Set up a training with the pictures that are open"),
    ),
    Action("train.open", QT_TRANSLATE_NOOP("Action", "Open Job File…"), "train", "ask_for_file", icon="folder"),
    Action(
        "train.duplicate",
        QT_TRANSLATE_NOOP("Action", "Duplicate Job"),
        "train",
        "duplicate",
        enabled="has_job",
        icon="copy",
    ),
    Action(
        "train.rename", QT_TRANSLATE_NOOP("Action", "Rename Job"), "train", "rename", keys=("F2",), enabled="has_job"
    ),
    Action(
        "train.delete", QT_TRANSLATE_NOOP("Action", "Delete Job"), "train", "delete", enabled="has_job", icon="trash"
    ),
    Action(
        "train.search",
        QT_TRANSLATE_NOOP("Action", "Find a Setting"),
        "train",
        "find_setting",
        keys=("Ctrl+F",),
        enabled="has_job",
        icon="search",
    ),
    Action(
        "train.start",
        QT_TRANSLATE_NOOP("Action", "Start Training"),
        "train",
        "start",
        keys=("Ctrl+Return",),
        enabled="can_start",
        icon="train",
    ),
)


_ESSENTIALS = {
    "base.model": QT_TRANSLATE_NOOP("Train", "Base"),
    "dataset.folders": QT_TRANSLATE_NOOP("Train", "Pictures"),
    "output.runs": QT_TRANSLATE_NOOP("Train", "Output"),
}
_LOOK_MS = 2000
"""How often the file is looked at for changes of other programs."""


@dataclass(frozen=True, slots=True)
class Named:
    """A step in the user's words."""

    name: str


class DraftUndo:
    """Takes back what was done to the job that is open."""

    def __init__(self) -> None:
        self.draft: Draft | None = None

    @property
    def undo_name(self) -> str | None:
        """What would be taken back."""
        return _words(self.draft.undo_name) if self.draft else None

    @property
    def redo_name(self) -> str | None:
        """What would be done again."""
        return _words(self.draft.redo_name) if self.draft else None

    def undo(self) -> Named | None:
        """Take the last change of the job back."""
        return _named(self.draft.undo() if self.draft else None)

    def redo(self) -> Named | None:
        """Do it again."""
        return _named(self.draft.redo() if self.draft else None)


def _named(step: DraftStep | None) -> Named | None:
    return Named(_words(step.name) or "") if step else None


def _words(name: str | None) -> str | None:
    """A key as the page calls it, all else translated."""
    if name is None:
        return None
    if name in _ESSENTIALS:
        return words(_ESSENTIALS[name])
    try:
        title = setting(name).title
    except KeyError:
        return words(name)
    return title if any(part.isdigit() for part in name.split(".")) else full_title(name)


class TrainPage(Page):
    """Sets up one job at a time; every change is in its file at once."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        self.draft: Draft | None = None
        self._stops: list[Callable[[], None]] = []
        self._shelf: tuple[PresetEntry, ...] = ()
        self._recipe = ""
        self._awaited = False
        """Whether a job that was asked for is on its way."""
        self._unopened: ImpastoError | None = None
        """Why the job that was asked for last could not be opened."""
        self._seen = False
        self.undoing = self._undo = DraftUndo()
        self._clock = QTimer(self)
        self._clock.setInterval(_LOOK_MS)

    def build(self) -> Iterator[None]:
        """Make list, form and forecast, then lay them out."""
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

    # --- what the table of actions names

    def new(self) -> None:
        """Set up another job, with the pictures that are open."""
        self.begin("")

    def ask_for_file(self) -> None:
        """Open a job file that lies elsewhere."""
        title, kinds = self.tr("Open a job file"), self.tr("Job files (*.toml)")
        chosen, _ = QFileDialog.getOpenFileName(self, title, "", kinds)
        if chosen:
            self.open(Path(chosen))

    def duplicate(self) -> None:
        """Go on with a copy of this job."""
        if self.draft is not None:
            self.session.jobs.duplicate(self.draft.path, *self._answers(self.show_job))

    def rename(self) -> None:
        """Let the user type another name."""
        self.sheet.name.setFocus()
        self.sheet.name.selectAll()

    def delete(self) -> None:
        """Put this job into the trash, and show the one below it; a notice brings it back."""
        if self.draft is None:
            return
        name = self.draft.name
        self.session.jobs.trash(self.draft.path, *self._answers(lambda thrown: self._tell_thrown(name, thrown)))

    def find_setting(self) -> None:
        """Search in all settings."""
        self.sheet.find_setting()

    def start(self) -> None:
        """Put this job into the queue."""
        if self.draft is not None:
            self._starting.start(self.draft)

    def has_job(self) -> bool:
        """Tell whether a job is open."""
        return self.draft is not None

    def can_start(self) -> bool:
        """Tell whether the job that is open is sound and not on its way already."""
        return self.draft is not None and self.draft.job is not None and not self._starting.awaits(self.draft)

    # --- what is shown

    def open(self, path: Path) -> None:
        """Show this job; of a run's frozen job a copy."""
        self.show_job(path)

    def begin(self, recipe: str) -> None:
        """Set up another job from the recipe of this name, if any."""
        session = self.session
        pictures = essentials.open_pictures(session.library, session.datasets.folders)
        stated = session.target.for_new_job()
        name = (pictures[0].path.name if pictures else "") or self.tr("My LoRA")
        self._awaited = True

        def show(draft: Draft) -> None:
            self._show(draft)
            self._recipe = recipe
            self._take_recipe()
            self._tell_hidden()

        session.jobs.create(
            name,
            lambda free, folder: essentials.new_values(free, pictures, folder, stated),
            *self._answers(lambda path: session.jobs.open(path, *self._answers(show))),
        )

    def show_job(self, path: Path) -> None:
        """Open a job file; what stands against it is told, and the job that is open stays."""
        self._awaited = True
        self.session.jobs.open(path, while_there(self, self._show), while_there(self, self._tell_unopened))

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Follow the disk while it is seen, and show a job as soon as it is known which."""
        super().showEvent(event)
        self._seen = True
        self._clock.start()
        self.session.tasks.run(essentials.recipes, self._learn_recipes, raise_again)
        self.session.jobs.look(self._show_first)
        self.sheet.refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Let the disk be, as soon as it holds what is shown."""
        super().hideEvent(event)
        self._seen = False
        self._rest()

    def _show_first(self) -> None:
        """Show the job that was open last, else the latest; where there is none, a new one."""
        if self.draft is not None or self._awaited or not self.isVisible():
            return
        entries = [entry.path for entry in self.session.jobs.all if not entry.problem]
        last = self.session.jobs.last
        if entries:
            self.show_job(last if last in entries else entries[0])
        elif not self.session.jobs.all:
            self.new()

    def _show(self, draft: Draft | None) -> None:
        self._take_back_unopened()
        for stop in self._stops:
            stop()
        self.draft = self._undo.draft = draft
        self._awaited = self._awaited and draft is None
        self._stops = []
        if draft is not None:
            self._stops = [
                draft.changed.connect(lambda _: self._follow()),
                draft.taken_over.connect(lambda _: self._tell_taken_over()),
                draft.file.failed.connect(self._tell_unsaved),
                draft.file.kept.connect(self._tell_kept),
                draft.file.written.connect(lambda _: self.sheet.say_saved()),
            ]
        self.sheet.show_draft(draft)
        self.forecast.show_draft(draft)
        self._follow()

    def _turn(self, draft: Draft | None) -> None:
        """Show the job that another page opened."""
        if draft is not None and draft is not self.draft:
            self._show(draft)

    def _follow(self) -> None:
        draft = self.draft
        self.sheet.refresh()
        self.jobs.show_open(draft.path if draft else None, draft.name if draft else "")
        self._show_start()
        self.undoable.emit()

    def _show_start(self) -> None:
        begins = self.draft is not None and self._starting.awaits(self.draft)
        self.start_button.setText(self.tr("Starting…") if begins else self.tr("Start training"))
        self.start_button.setEnabled(self.can_start())
        self.commands.refresh()

    def _learn_recipes(self, shelf: tuple[PresetEntry, ...]) -> None:
        if shelf != self._shelf:
            self._shelf = shelf
            self.sheet.show_recipes(shelf)
        self._take_recipe()

    def _take_recipe(self) -> None:
        """Give the new job the recipe that another page asked for, once recipes and family are known."""
        if not self._recipe or not self._shelf or self.draft is None:
            return
        preset = essentials.recipe_called(self._recipe, self._shelf, self.draft.family)
        self._recipe = ""
        if preset is not None:
            essentials.choose_recipe(self.draft, preset)

    def _answers(self, then: Callable[..., None]) -> tuple[Callable[..., None], Callable[[ImpastoError], None]]:
        """Return what to do when the files of jobs are read or written, and when they could not be."""
        return while_there(self, then), while_there(self, self._refuse)

    def _refuse(self, error: ImpastoError) -> None:
        self._awaited = False
        self.failed.emit(error)

    def _tell_unopened(self, error: ImpastoError) -> None:
        """Say why a job cannot be opened, until another one is asked for."""
        self._take_back_unopened()
        self._unopened = error
        self._refuse(error)

    def _take_back_unopened(self) -> None:
        unopened, self._unopened = self._unopened, None
        if unopened:
            self.mended.emit(unopened)

    def _tell_thrown(self, name: str, thrown: TrashedJob) -> None:
        """Show the job below the one that is in the trash, and offer to bring that back."""
        if self.draft is not None and self.draft.path == thrown.path:  # else another was opened meanwhile
            self._show(None)
        if self.session.jobs.all:
            self._show_first()
        words = self.tr("“{name}” is in the trash.") if thrown.lies else self.tr("“{name}” is off the list.")
        back = partial(self.session.jobs.bring_back, thrown, *self._answers(self.show_job))
        self.told.emit(words.format(name=name), "info", (self.tr("Bring back"), back))

    def _tell_hidden(self) -> None:
        """Say that a filter changes nothing in training, and offer to train only what it shows."""
        library, shown = self.session.library.pictures, frozenset(self.session.view.ids)
        hidden = sum(not picture.excluded for number, picture in library.items() if number not in shown)
        if shown and hidden:
            words = self.tr("The filter hides %Ln image(s), which will be trained too.", "", hidden)
            self.told.emit(words, "info", (self.tr("Train only what is shown"), partial(self._exclude_all_but, shown)))

    def _exclude_all_but(self, shown: frozenset[int]) -> None:
        if edit := exclude_others(self.session.library.pictures.values(), shown):
            self.session.history.do(edit)
            self.said.emit(edit.name)

    def _tell_taken_over(self) -> None:
        words = self.tr("Another program changed this job. Its changes are shown; undo brings yours back.")
        self.told.emit(words, "info", None)

    def _tell_unsaved(self, error: ImpastoError) -> None:
        """Say why the job cannot be saved, or another program's changes not be taken over."""
        if self.draft is not None and self.draft.file.unsaved:
            self.sheet.say_unsaved()
        self.failed.emit(error)

    def _tell_kept(self, kept: Path) -> None:
        words = self.tr("The job file as it was before is kept as {name}, beside it.")
        self.told.emit(words.format(name=kept.name), "info", None)

    def _tell_rescued(self, kept: Path) -> None:
        words = self.tr("What was changed last could not be saved in its place. It is kept in {path}.")
        self.told.emit(words.format(path=kept), "warning", None)

    def _look(self) -> None:
        if self.draft is not None:
            self.draft.look()
        self._starting.look()
        self._rest()

    def _rest(self) -> None:
        """Look no more while nobody sees it, unless something could not be saved: that is tried until it can be."""
        if not self._seen and not (self.draft and self.draft.file.unsaved):
            self._clock.stop()

    def _listen(self) -> None:
        self._clock.timeout.connect(self._look)
        self.jobs.chosen.connect(self.show_job)
        self.start_button.clicked.connect(lambda: self.start())
        self.sheet.invitation.button.clicked.connect(lambda: self.new())
        for part in (self.forecast, self._starting):
            part.said.connect(self.said)
            part.told.connect(self.told)
            part.failed.connect(self.failed)
        self.forecast.wanted.connect(self.sheet.show_setting)
        self._starting.mended.connect(self.mended)
        self._starting.changed.connect(self._show_start)
        until_destroyed(
            self,
            self.session.library.altered.connect(lambda _: self._count_soon()),
            self.session.jobs.turned.connect(self._turn),
            self.session.jobs.rescued.connect(self._tell_rescued),
            self.session.jobs.mended.connect(self.mended.emit),
            self.session.jobs.secured.connect(lambda message: self.told.emit(message, "warning", None)),
        )
        if self.session.jobs.notice:
            QTimer.singleShot(0, self, lambda: self.told.emit(self.session.jobs.notice, "warning", None))

    def _count_soon(self) -> None:
        """Pictures come in by the hundred: only what is shown is counted again."""
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
