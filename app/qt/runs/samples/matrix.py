"""The Samples tab: a grid with a row per prompt and a column per step, and a comparison of two samples."""

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

from app.core.library import LibraryImage
from app.core.runs.series import CellIndex, Samples
from app.core.session import Session
from app.core.tasks import reraise
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
        _NOOP("Action", "Compares the current sample with the pinned one, or with step 0 if none is pinned."),
    ),
    Action(
        "samples.side_by_side",
        _NOOP("Action", "Samples side by side"),
        "runs",
        "set_side_by_side",
        ("Shift+B",),
        "in_compare",
        "is_side_by_side",
        "side_by_side",
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
        _NOOP("Action", "Other samples are compared with the pinned one."),
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
    Action(
        "samples.newest",
        _NOOP("Action", "Go to the newest sample"),
        "runs",
        "show_newest",
        ("Shift+End",),
        "has_samples",
    ),
)


class SampleMatrix(QWidget):
    """Tab that shows the previews of one run and compares two of them."""

    message_shown = Signal(str)
    failed = Signal(object)
    """ImpastoError to show as a notice."""
    chosen = Signal(int)
    """Step whose LoRA the user wants to use."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self._run: Run | None = None
        self._job: Job | None = None
        self._lost = False
        """Whether the run's folder was unreadable at the last check."""
        self._ends: list[Callable[[], None]] = []
        self.samples: Samples | None = None
        self.grid, self.compare = SampleGrid(session), SampleCompare(session)
        self.stack = QStackedWidget()
        self.best = QLabel()
        self.slider = size_slider(SIDES, self.grid.side, self.tr("Sample size"))
        commands.add(ACTIONS, self)
        self._lay_out()
        self._listen()
        self.show_run(None)

    def show_run(self, run: Run | None) -> None:
        """Show another run, or nothing for None."""
        for end in self._ends:
            end()
        self._run = run
        self._ends = (
            [run.events_arrived.connect(self._on_events), run.changed.connect(lambda _: self._on_run_changed())]
            if run
            else []
        )
        self._load_samples()

    # --- updates from the run

    def _load_samples(self) -> None:
        run = self._run
        self.samples = Samples(run.directory.path) if run else None
        if run and self.samples:
            self.samples.take([*run.previews, *run.validations, *run.saved])
        self._job, self._lost = None, False
        self.grid.show_samples(self.samples)
        self._on_run_changed()
        self.show_grid()
        self._update_best()

    def _on_run_changed(self) -> None:
        """Update the prompts, the cell shape and the text of the empty grid from the run's job."""
        run = self._run
        job = run.job if run else None
        if job is not None and job is not self._job and self.samples:
            self.samples.name_prompts([prompt.prompt for prompt in job.report.previews.prompts])
            self.grid.set_shape(*_shape(job))
        self._job = job
        was_lost, self._lost = self._lost, bool(run and run.summary.problem)
        if was_lost and not self._lost and self.samples:  # the folder is back
            self._session.thumbnails.retry(self.samples.images)
            self.grid.follow()
        if (words := self._empty_text()) != self.grid.empty:
            self.grid.empty = words
            self.grid.viewport().update()

    def _empty_text(self) -> str:
        if self._run is None:
            return self.tr("Select a run to see its previews.")
        if self._job is not None and not self._job.report.previews.prompts:
            return self.tr("This run generates no previews: its job has no preview prompts.")
        if not self._run.alive:
            return self.tr("This run generated no previews.")
        if self._job is not None and self._job.report.previews.first is False:
            return self.tr("The first previews are generated at step {step}.").format(
                step=self._job.report.previews.every
            )
        return self.tr("The first previews are generated before training starts, as a baseline.")

    def _on_events(self, news: list[Event]) -> None:
        if not news:  # the run was reread from the start
            self._load_samples()
        elif self.samples and self.samples.take(news):
            self.grid.follow()
            self._update_best()
            self._show_compared()
            self._commands.refresh()

    def _update_best(self) -> None:
        best = self.samples.best if self.samples else None
        words = self.tr("Lowest validation loss: step {step}")
        if self.samples and not self.samples.has_held_out:
            words = self.tr("Lowest loss on training images: step {step}")
        self.best.setText("" if best is None else words.format(step=QLocale().toString(best)))

    # --- which commands are enabled

    def has_samples(self) -> bool:
        """Return whether there are samples."""
        return bool(self.samples and self.samples.steps)

    def has_current(self) -> bool:
        """Return whether a cell with an image is selected."""
        return self.grid.image(self.grid.current) is not None

    def has_lora(self) -> bool:
        """Return whether a LoRA was saved at the current sample's step."""
        return bool(self.samples and self.grid.current and self.grid.current.step in self.samples.saved)

    def in_compare(self) -> bool:
        """Return whether the comparison is shown."""
        return self.stack.currentWidget() is self.compare

    def is_side_by_side(self) -> bool:
        """Return whether the compared samples are side by side."""
        return self.compare.side_by_side

    def is_pinned(self) -> bool:
        """Return whether the current sample is pinned."""
        return self.grid.current is not None and self.grid.current == self.grid.pinned

    # --- called by actions

    def show_grid(self) -> None:
        """Show the grid of all samples."""
        self._show_view(self.grid)

    def show_compare(self, on: bool = True) -> None:
        """Compare the current sample with another one; if `on` is False or no cell is selected, return to the grid."""
        if on and self.has_current():
            self.compare.stage.zoom.fit()
            self._show_view(self.compare)
            self._show_compared()
        else:
            self.show_grid()

    def set_side_by_side(self, on: bool) -> None:
        """Arrange the compared samples side by side, or overlay them."""
        self.compare.set_side_by_side(on)

    def pin(self, on: bool) -> None:
        """Pin the current sample so that others are compared with it, or unpin it to compare with step 0."""
        self.grid.pinned = self.grid.current if on else None
        self.grid.viewport().update()
        self._show_compared()
        self._commands.refresh()

    def use_lora(self) -> None:
        """Emit `chosen` to use the LoRA saved at the current sample's step."""
        self._with_lora(lambda step, _: self.chosen.emit(step))

    def reveal_lora(self) -> None:
        """Show the LoRA file saved at the current sample's step in the file manager."""
        self._with_lora(lambda _, file: reveal(file))

    def show_newest(self) -> None:
        """Select the newest sample in the current row."""
        self.grid.step(0, len(self.samples.steps) if self.samples else 0)

    def _with_lora(self, do: Callable[[int, Path], object]) -> None:
        """Call `do` with the current step and the LoRA file saved there, or report that the file is missing."""
        if not (self.samples and self.grid.current and self.has_lora()):
            return
        step = self.grid.current.step
        file = self.samples.saved[step]

        def done(there: bool) -> None:
            do(step, file) if there else self.failed.emit(_gone(file))

        self._session.tasks.run(file.is_file, done, reraise)

    # --- the rest

    def _show_view(self, view: QWidget) -> None:
        here = self.isAncestorOf(QApplication.focusWidget() or self)
        self.stack.setCurrentWidget(view)
        self.slider.setVisible(view is self.grid)
        if here:
            view.setFocus()
        self._commands.refresh()

    def _show_compared(self) -> None:
        """Compare the current sample with the pinned one or, if none is pinned, with step 0 of the same prompt."""
        samples, current = self.samples, self.grid.current
        if not self.in_compare() or samples is None or current is None:
            return
        other = self.grid.pinned or CellIndex(samples.steps[0], current.prompt)
        self.compare.show_samples(samples.images, self._titled_sample(other), self._titled_sample(current))

    def _titled_sample(self, spot: CellIndex) -> tuple[LibraryImage | None, str]:
        return self.grid.image(spot), self.grid.step_title(spot.step)

    def _on_moved(self) -> None:
        self._show_compared()
        self._commands.refresh()

    def _on_menu_requested(self, place: QPoint) -> None:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        for action in ACTIONS[:-1]:
            if action.id != "samples.side_by_side":
                menu.addAction(self._commands[action.id])
        self._commands.refresh_now()
        menu.popup(place)

    def _listen(self) -> None:
        self.slider.valueChanged.connect(self.grid.set_side)
        self.grid.resized.connect(self.slider.setValue)
        self.grid.opened.connect(self.show_compare)
        self.grid.moved.connect(self._on_moved)
        self.grid.menu_requested.connect(self._on_menu_requested)
        self.compare.moved.connect(self.grid.step)
        self.compare.left.connect(self.show_grid)

    def _lay_out(self) -> None:
        self.stack.addWidget(self.grid)
        self.stack.addWidget(self.compare)
        self.best.setProperty("role", "good")
        row = QHBoxLayout()
        row.setContentsMargins(8, 4, 8, 4)
        for name in ("compare", "side_by_side", "pin", "use", "reveal"):
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
        """Enable the commands, which work only while the tab is visible."""
        super().showEvent(event)
        self._commands.refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Disable the commands, which work only while the tab is visible."""
        super().hideEvent(event)
        self._commands.refresh()


def _shape(job: Job) -> tuple[int, int]:
    """Return the width and height, in pixels, of a cell that fits all previews of a job."""
    size = job.recipe.resolution or 512
    prompts = job.report.previews.prompts
    widths = [prompt.width or size for prompt in prompts] or [1]
    heights = [prompt.height or size for prompt in prompts] or [1]
    return max(widths), max(heights)


def _gone(file: Path) -> RunError:
    return RunError(
        "run.lora_gone",
        f"Could not find the LoRA {file.name}: the run keeps only some of its LoRAs, or the file was moved or deleted.",
        "Choose another step, or raise saving.keep in the job to keep more LoRAs.",
    )
