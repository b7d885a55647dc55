"""The samples of a run: a row for each prompt, a column for each step, and any two of them compared closely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QLocale, QPoint, Qt, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QApplication,
    QHBoxLayout,
    QLabel,
    QMenu,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.library import Picture
from app.core.runs.series import CellIndex, Samples
from app.core.session import Session
from app.core.tasks import raise_again
from app.qt.actions.commands import Action, Commands
from app.qt.runs.samples.compare import SampleCompare
from app.qt.runs.samples.grid import SIDES, SampleGrid
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import reveal, size_slider
from trainer.errors import RunError

if TYPE_CHECKING:
    from app.core.runs.run import Run
    from trainer.config.job import Job
    from trainer.protocol.events import Event

_CURRENT, _SAVED = "has_current", "has_lora"
ACTIONS = (
    Action(
        "samples.compare",
        _NOOP("Action", "Compare samples"),
        "runs",
        "show_compare",
        ("Shift+C",),
        _CURRENT,
        "in_compare",
        "compare",
        _NOOP("Action", "Compares the sample with the pinned one, or else with that of step 0."),
    ),
    Action(
        "samples.beside",
        _NOOP("Action", "Samples side by side"),
        "runs",
        "set_beside",
        ("Shift+B",),
        "in_compare",
        "is_beside",
        "beside",
    ),
    Action(
        "samples.pin",
        _NOOP("Action", "Pin this sample"),
        "runs",
        "pin",
        ("Shift+P",),
        _CURRENT,
        "is_pinned",
        "pin",
        _NOOP("Action", "Others are compared with it from now on."),
    ),
    Action(
        "samples.use",
        _NOOP("Action", "Use the LoRA of this step"),
        "runs",
        "use_lora",
        ("Shift+Return",),
        _SAVED,
        icon="check",
    ),
    Action(
        "samples.reveal",
        _NOOP("Action", "Show the LoRA file of this step"),
        "runs",
        "reveal_lora",
        (),
        _SAVED,
        icon="folder",
    ),
    Action("samples.newest", _NOOP("Action", "Newest samples"), "runs", "show_newest", ("Shift+End",), "has_samples"),
)


class SampleMatrix(QWidget):
    """Shows the previews of one run, and compares any two of them."""

    said = Signal(str)
    failed = Signal(object)
    """An ImpastoError."""
    chosen = Signal(int)
    """Use the LoRA of this step."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self._run: Run | None = None
        self._job: Job | None = None
        self._lost = False
        """Whether the run's folder could not be read when it was looked at last."""
        self._ends: list[Callable[[], None]] = []
        self.samples: Samples | None = None
        self.grid, self.compare = SampleGrid(session), SampleCompare(session)
        self.stack = QStackedWidget()
        self.best = QLabel()
        self.slider = size_slider(SIDES, self.grid.side, self.tr("Size of samples"))
        commands.add(ACTIONS, self)
        self._lay_out()
        self._listen()
        self.show_run(None)

    def show_run(self, run: Run | None) -> None:
        """Show another run, or none."""
        for end in self._ends:
            end()
        self._run = run
        self._ends = [run.arrived.connect(self._take), run.changed.connect(lambda _: self._learn())] if run else []
        self._begin()

    # --- what is told of the run

    def _begin(self) -> None:
        run = self._run
        self.samples = Samples(run.directory.path) if run else None
        if run and self.samples:
            self.samples.take([*run.previews, *run.validations, *run.saved])
        self._job, self._lost = None, False
        self.grid.show_samples(self.samples)
        self._learn()
        self.show_grid()
        self._say_best()

    def _learn(self) -> None:
        """Take over what the job says of its previews, and what there is to say while there are none."""
        run = self._run
        job = run.job if run else None
        if job is not None and job is not self._job and self.samples:
            self.samples.name_prompts([prompt.prompt for prompt in job.report.previews.prompts])
            self.grid.set_shape(*_shape(job))
        self._job = job
        lost, self._lost = self._lost, bool(run and run.summary.problem)
        if lost and not self._lost and self.samples:  # the folder is there again
            self._session.thumbnails.retry(self.samples.pictures)
            self.grid.follow()
        if (words := self._empty()) != self.grid.empty:
            self.grid.empty = words
            self.grid.viewport().update()

    def _empty(self) -> str:
        if self._run is None:
            return self.tr("Choose a run to see what it has drawn.")
        if self._job is not None and not self._job.report.previews.prompts:
            return self.tr("This run draws no previews: its job has no prompts for them.")
        if not self._run.alive:
            return self.tr("This run has drawn no previews.")
        return self.tr("The first previews are drawn before training begins, as a baseline.")

    def _take(self, news: list[Event]) -> None:
        if not news:  # told anew from the start
            self._begin()
        elif self.samples and self.samples.take(news):
            self.grid.follow()
            self._say_best()
            self._show_compared()
            self._commands.refresh()

    def _say_best(self) -> None:
        best = self.samples.best if self.samples else None
        words = self.tr("Lowest held-out loss: step {step}")
        self.best.setText("" if best is None else words.format(step=QLocale().toString(best)))

    # --- what can be done now

    def has_samples(self) -> bool:
        """Tell whether there is anything to see."""
        return bool(self.samples and self.samples.steps)

    def has_current(self) -> bool:
        """Tell whether a sample is the current one."""
        return self.grid.picture(self.grid.current) is not None

    def has_lora(self) -> bool:
        """Tell whether a LoRA was saved at the step of the current sample."""
        return bool(self.samples and self.grid.current and self.grid.current.step in self.samples.saved)

    def in_compare(self) -> bool:
        """Tell whether two samples are compared."""
        return self.stack.currentWidget() is self.compare

    def is_beside(self) -> bool:
        """Tell whether they stand side by side."""
        return self.compare.beside

    def is_pinned(self) -> bool:
        """Tell whether the current sample is the pinned one."""
        return self.grid.current is not None and self.grid.current == self.grid.pinned

    # --- what the table of actions names

    def show_grid(self) -> None:
        """Show all samples."""
        self._look(self.grid)

    def show_compare(self, on: bool = True) -> None:
        """Look closely at the current sample, over or beside the one that it is compared with; or show all again."""
        if on and self.has_current():
            self.compare.stage.zoom.fit()
            self._look(self.compare)
            self._show_compared()
        else:
            self.show_grid()

    def set_beside(self, on: bool) -> None:
        """Put the samples side by side, or one over the other."""
        self.compare.set_beside(on)

    def pin(self, on: bool) -> None:
        """Compare others with the current sample from now on, or with step 0 again."""
        self.grid.pinned = self.grid.current if on else None
        self.grid.viewport().update()
        self._show_compared()
        self._commands.refresh()

    def use_lora(self) -> None:
        """Hand the LoRA of the current sample's step on."""
        self._with_lora(lambda step, _: self.chosen.emit(step))

    def reveal_lora(self) -> None:
        """Show the LoRA file of the current sample's step where it lies."""
        self._with_lora(lambda _, file: reveal(file))

    def show_newest(self) -> None:
        """Go to the newest sample of the row."""
        self.grid.step(0, len(self.samples.steps) if self.samples else 0)

    def _with_lora(self, do: Callable[[int, Path], object]) -> None:
        """Do something with the LoRA of the current step, if its file is still there."""
        if not (self.samples and self.grid.current and self.has_lora()):
            return
        step = self.grid.current.step
        file = self.samples.saved[step]

        def done(there: bool) -> None:
            do(step, file) if there else self.failed.emit(_gone(file))

        self._session.tasks.run(file.is_file, done, raise_again)

    # --- the rest

    def _look(self, view: QWidget) -> None:
        here = self.isAncestorOf(QApplication.focusWidget() or self)
        self.stack.setCurrentWidget(view)
        self.slider.setVisible(view is self.grid)
        if here:
            view.setFocus()
        self._commands.refresh()

    def _show_compared(self) -> None:
        """Show the current sample, and what it is compared with: the pinned one, or else the same prompt at step 0."""
        samples, current = self.samples, self.grid.current
        if not self.in_compare() or samples is None or current is None:
            return
        other = self.grid.pinned or CellIndex(samples.steps[0], current.prompt)
        self.compare.show_samples(samples.pictures, self._worded(other), self._worded(current))

    def _worded(self, spot: CellIndex) -> tuple[Picture | None, str]:
        return self.grid.picture(spot), self.grid.step_title(spot.step)

    def _moved(self) -> None:
        self._show_compared()
        self._commands.refresh()

    def _menu(self, place: QPoint) -> None:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        for action in ACTIONS[:-1]:
            if action.id != "samples.beside":
                menu.addAction(self._commands[action.id])
        self._commands.refresh_now()
        menu.popup(place)

    def _listen(self) -> None:
        self.slider.valueChanged.connect(self.grid.set_side)
        self.grid.resized.connect(self.slider.setValue)
        self.grid.opened.connect(self.show_compare)
        self.grid.moved.connect(self._moved)
        self.grid.menu_asked.connect(self._menu)
        self.compare.walked.connect(self.grid.step)
        self.compare.left.connect(self.show_grid)

    def _lay_out(self) -> None:
        self.stack.addWidget(self.grid)
        self.stack.addWidget(self.compare)
        self.best.setProperty("role", "good")
        row = QHBoxLayout()
        row.setContentsMargins(8, 4, 8, 4)
        for name in ("compare", "beside", "pin", "use", "reveal"):
            row.addWidget(self._commands.button(f"samples.{name}"))
        row.addSpacing(8)
        row.addWidget(self.best)
        row.addStretch(1)
        row.addWidget(self.slider)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(row)
        column.addWidget(self.stack, 1)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Its actions can be done while it is seen."""
        super().showEvent(event)
        self._commands.refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Its actions cannot be done while it is not."""
        super().hideEvent(event)
        self._commands.refresh()


def _shape(job: Job) -> tuple[int, int]:
    """Return width and height of a cell that every preview of a job fits."""
    size = job.recipe.resolution or 512
    prompts = job.report.previews.prompts
    widths = [prompt.width or size for prompt in prompts] or [1]
    heights = [prompt.height or size for prompt in prompts] or [1]
    return max(widths), max(heights)


def _gone(file: Path) -> RunError:
    return RunError(
        "run.lora_gone",
        f"The LoRA {file.name} is not there any more: the run keeps only some, or it was moved or deleted.",
        "Choose another step; the job's saving.keep says how many LoRAs a run keeps.",
    )
