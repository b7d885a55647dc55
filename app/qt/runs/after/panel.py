"""The Try & export tab, which compares saved LoRAs, generates images with them and exports one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QLocale, Qt, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import (
    QComboBox,
    QDialog,
    QFrame,
    QHBoxLayout,
    QInputDialog,
    QLabel,
    QMenu,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.after.export import Candidate, SavedSteps, candidates, model_card, read_summary
from app.core.after.run_jobs import Edited, edited, new_job
from app.core.models.verdict import Destination
from app.core.session import Session
from app.core.tasks import ExclusiveTask, handle_only, reraise
from app.qt.actions.commands import Action, Commands
from app.qt.runs.after.export import Exporting, ModelCardDialog, destination_name
from app.qt.runs.after.grid_dialog import GridDialog
from app.qt.runs.after.strip import CandidateStrip
from app.qt.runs.after.try_box import TryBox
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import ComboBox, FlowLayout, plain_tip, until_destroyed
from trainer.errors import ImpastoError
from trainer.protocol import events

if TYPE_CHECKING:
    from app.core.runs.run import Run
    from trainer.config.job import Job

_CANDIDATE = "has_candidate"
_MAX_PROMPT_WIDTH = 520  # px: shows a prompt of usual length in full
ACTIONS = (
    Action(
        "after.draw",
        _NOOP("Action", "Generate with the selected step"),
        "runs",
        "start_rendering",
        (),
        "can_render",
        icon="brush",
    ),
    Action("after.cancel", _NOOP("Action", "Stop generating"), "runs", "cancel", (), "is_drawing"),
    Action(
        "after.grid",
        _NOOP("Action", "Grid of steps and strengths…"),
        "runs",
        "show_grid",
        (),
        "can_compare",
        icon="grid",
    ),
    Action(
        "after.export",
        _NOOP("Action", "Export LoRA…"),
        "runs",
        "ask_export",
        ("Ctrl+Shift+E",),
        _CANDIDATE,
        icon="save",
    ),
    Action("after.send", _NOOP("Action", "Export to the last folder"), "runs", "send", (), "can_send"),
    Action("after.card", _NOOP("Action", "Model card…"), "runs", "show_model_card", (), "can_compare", icon="caption"),
    Action("after.longer", _NOOP("Action", "Train longer…"), "runs", "ask_longer", (), "can_go_on", icon="train"),
    Action("after.again", _NOOP("Action", "New job from this run"), "runs", "begin_again", (), "has_job", icon="copy"),
)


class AfterPanel(QWidget):
    """Tab to compare, try and export a run's saved LoRAs."""

    message_shown = Signal(str)
    notified = Signal(str, str, object)
    failed = Signal(object)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self._run: Run | None = None
        self._ends: list[Callable[[], None]] = []
        self._job: Job | None = None
        self._wanted: int | None = None
        self._stale, self._search = False, ExclusiveTask(session.tasks)
        self.dialog: QDialog | None = None
        """Most recently opened dialog, or None once it is closed."""
        self.strip, self.trying = CandidateStrip(session), TryBox(session)
        self.exporting = Exporting(session, self)
        self.empty, self.prompt_box = QLabel(), ComboBox()
        self.edited_bar, self.edited_words = QFrame(), QLabel()
        self.export_button, self.send_button, self.send_menu = QPushButton(), QToolButton(), QMenu(self)
        commands.add(ACTIONS, self)
        self._refused = handle_only(ImpastoError, self.failed.emit)
        self._lay_out()
        self._listen()
        self.show_run(None)

    def show_run(self, run: Run | None) -> None:
        """Show a run's saved LoRAs, or an empty tab for None."""
        for end in self._ends:
            end()
        self._run = run
        self._ends = (
            [run.events_arrived.connect(self._on_events), run.changed.connect(lambda _: self._on_run_changed())]
            if run
            else []
        )
        self.edited_bar.hide()
        self._job = None
        self._show([])
        self._on_run_changed()
        self._update_candidates()

    def choose(self, step: int) -> None:
        """Select a saved step; if it is not listed yet, select it as soon as it is."""
        self._wanted = step
        steps = [candidate.step for candidate in self.strip.candidates.all]
        if step in steps:
            self._wanted = None
            self.strip.choose(steps.index(step))

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Update everything that may have changed while the tab was hidden."""
        super().showEvent(event)
        self._update_candidates()
        self._check_dataset_edits()
        self._session.models.destinations()  # starts the search for programs that use LoRAs
        self._refresh()

    # --- which commands are enabled

    def has_candidate(self) -> bool:
        """Return whether a saved step is selected."""
        return self.strip.current() is not None

    def has_job(self) -> bool:
        """Return whether the run's job can be read."""
        return bool(self._run and self._run.job)

    def can_compare(self) -> bool:
        """Return whether a grid can be generated: a step is selected and the job can be read."""
        return self.has_candidate() and self.has_job()

    def can_render(self) -> bool:
        """Return whether an image can be generated."""
        return self.trying.can_render()

    def is_drawing(self) -> bool:
        """Return whether an image is being generated."""
        return self.trying.is_drawing()

    def can_send(self) -> bool:
        """Return whether a saved step is selected and an export folder is known."""
        return self.has_candidate() and self._destination() is not None

    def can_go_on(self) -> bool:
        """Return whether the run can be continued: it has saved a LoRA and is not training."""
        run = self._run
        return bool(run and run.job and not run.alive and self.strip.candidates.all)

    # --- called by actions

    def start_rendering(self) -> None:
        """Generate an image with the current settings."""
        self.trying.start_rendering()

    def cancel(self) -> None:
        """Stop generating."""
        self.trying.cancel()

    def show_grid(self) -> None:
        """Open the grid that compares steps and strengths for several prompts."""
        run = self._run
        if run and run.job:
            found, settings = self.strip.candidates.all, self.trying.prompt_settings()
            dialog = GridDialog(self._session, run.job, found, settings, self._tries(run), self)
            dialog.picked.connect(self._on_picked)
            dialog.failed.connect(self.failed.emit)
            self._open(dialog)

    def ask_export(self) -> None:
        """Ask for a folder and the metadata, then export the selected LoRA."""
        candidate = self.strip.current()
        if candidate:
            self.exporting.ask(candidate, self._image(candidate))

    def send(self) -> None:
        """Export the selected LoRA to the most recently used folder or, if there is none, to the first known one."""
        destination = self._destination()
        if destination:
            self.send_to(destination)

    def send_to(self, destination: Destination) -> None:
        """Export the selected LoRA, with its current metadata, to a folder."""
        candidate = self.strip.current()
        if candidate:
            self.exporting.send(candidate, self._image(candidate), destination)

    def show_model_card(self) -> None:
        """Show the model card of the selected LoRA."""
        run, candidate = self._run, self.strip.current()
        if run and run.job and candidate:
            job, listing = run.job, run.directory.listing

            def work() -> str:
                name = candidate.file.stem
                return model_card(job, read_summary(candidate.file), candidate, name, _trained_on(listing))

            self._session.tasks.run(work, lambda text: self._on_model_card(text, candidate.file.stem), self._refused)

    def ask_longer(self) -> None:
        """Ask for a larger total number of steps, then queue the run to continue up to it."""
        run = self._run
        if run is None or run.job is None:
            return
        now = run.job.recipe.steps or run.summary.steps
        dialog = QInputDialog(self)
        dialog.setInputMode(QInputDialog.InputMode.IntInput)
        dialog.setWindowTitle(self.tr("Train longer"))
        words = self.tr("The run has {steps} steps. New total:")
        dialog.setLabelText(words.format(steps=QLocale().toString(now)))
        dialog.setIntRange(now + 1, 10_000_000)
        dialog.setIntStep(max(1, now // 10))
        dialog.setIntValue(now + max(1, now // 2))
        dialog.setOkButtonText(self.tr("Train"))
        dialog.intValueSelected.connect(lambda steps: self.go_on(run.directory.path, steps))
        self._open(dialog)

    def go_on(self, run: Path, steps: int) -> None:
        """Queue a run to continue until it has trained `steps` steps in total."""
        self._session.renderer.free()
        self._session.queue.resume(run, steps)
        words = self.tr("{name} continues to {steps} steps when its turn comes.")
        self.message_shown.emit(words.format(name=run.name, steps=QLocale().toString(steps)))

    def begin_again(self) -> None:
        """Create a new job from this run and show it."""
        if self._run is None:
            return
        folder, directory = self._session.jobs.folder, self._run.directory
        self._session.tasks.run(lambda: new_job(folder, directory), self._session.navigator.job.emit, self._refused)

    # --- updates from the run

    def _on_events(self, news: list[events.Event]) -> None:
        if not news or any(isinstance(one, events.Saved | events.Validation | events.Preview) for one in news):
            self._update_candidates()

    def _on_run_changed(self) -> None:
        """Update the prompts and the controls from the run's job."""
        run = self._run
        job = run.job if run else None
        self.trying.show_job(job, self._tries(run) if run else Path())
        prompts = [prompt.prompt for prompt in job.report.previews.prompts] if job else []
        if prompts != [self.prompt_box.itemData(place) for place in range(self.prompt_box.count())]:
            self.prompt_box.clear()
            for prompt in prompts:
                self.prompt_box.addItem(prompt.replace("\n", " ")[:80], prompt)
                self.prompt_box.setItemData(self.prompt_box.count() - 1, plain_tip(prompt), Qt.ItemDataRole.ToolTipRole)
        self.prompt_box.setVisible(len(prompts) > 1)
        if job is not self._job:
            self._job = job
            self._check_dataset_edits()
            self._update_candidates()  # its folder disappeared or is back
        self._refresh()

    def _update_candidates(self) -> None:
        """Search for saved steps on a worker; search again afterward if this is called during the search."""
        run = self._run
        if run is None or not self.isVisible() or self._search.busy:
            self._stale = True
            return
        self._stale = False
        saved = SavedSteps.of(run)
        self._search.run(lambda: candidates(saved), lambda found: self._on_candidates(run, found))

    def _on_candidates(self, run: Run, found: list[Candidate]) -> None:
        if run is self._run and found != self.strip.candidates.all:
            self._show(found)
        if self._stale:
            self._update_candidates()

    def _show(self, found: list[Candidate]) -> None:
        self.strip.show_candidates(found, max(0, self.prompt_box.currentIndex()))
        self.strip.setVisible(bool(found))
        self.empty.setVisible(not found)
        if self._wanted is not None:
            self.choose(self._wanted)
        self._refresh()

    def _check_dataset_edits(self) -> None:
        run = self._run
        if run and run.job and self.isVisible():
            directory, job = run.directory, run.job
            self._session.tasks.run(
                lambda: edited(directory, job), lambda found: self._on_edits_found(run, found), reraise
            )

    def _on_edits_found(self, run: Run, found: Edited) -> None:
        if run is not self._run:
            return
        number = QLocale().toString
        parts = [
            words.format(count=number(count))
            for count, words in (
                (found.captions, self.tr("captions changed: {count}")),
                (found.added, self.tr("images added: {count}")),
                (found.removed, self.tr("images removed: {count}")),
            )
            if count
        ]
        words = self.tr("The dataset has changed since this run started ({what}). The run still uses the old version.")
        self.edited_words.setText(words.format(what=", ".join(parts)))
        self.edited_bar.setVisible(bool(found))

    # --- inside

    def _destination(self) -> Destination | None:
        return self.exporting.destination() if self.isVisible() else None

    def _image(self, candidate: Candidate) -> Path | None:
        """Return the image to export with a candidate: a preview if it has one, otherwise the latest generated image.

        Returns None if there is no preview and the latest image was generated with another candidate.
        """
        drawn = candidate.images
        return drawn.get(self.strip.candidates.prompt) or next(iter(drawn.values()), self.trying.image_of(candidate))

    def _on_picked(self, step: int, strength: float) -> None:
        self.choose(step)
        self.trying.strength.setValue(strength)

    def _on_model_card(self, text: str, name: str) -> None:
        dialog = ModelCardDialog(self._session, text, name, self)
        dialog.message_shown.connect(self.message_shown.emit)
        dialog.failed.connect(self.failed.emit)
        self._open(dialog)

    def _open(self, dialog: QDialog) -> None:
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.dialog = dialog
        dialog.destroyed.connect(lambda: self._on_dialog_destroyed(dialog))
        dialog.open()

    def _on_dialog_destroyed(self, dialog: QDialog) -> None:
        if self.dialog is dialog:
            self.dialog = None

    def _tries(self, run: Run) -> Path:
        """Return the folder for generated images, which is inside the run's folder."""
        return run.directory.path / "tries"

    def _refresh(self) -> None:
        run = self._run
        self.trying.setEnabled(self.has_candidate() and self.has_job())
        self.export_button.setEnabled(self.has_candidate())
        destination = self._destination()
        self.send_button.setVisible(destination is not None)
        self.send_button.setEnabled(self.can_send())
        if destination:
            place = destination_name(destination).replace("&", "&&")
            self.send_button.setText(self.tr("Export to {place}").format(place=place))
            self.send_button.setToolTip(plain_tip(str(destination.folder)))
        still_running = self.tr("Nothing is saved yet. Each LoRA that the run saves appears here.")
        nothing_saved = self.tr("This run did not save a LoRA.")
        unreadable = self.tr("The files that this run saved cannot be read now.")
        no_run = self.tr("Select a run to see its saved LoRAs.")
        ended = unreadable if run and run.summary.problem else nothing_saved
        self.empty.setText(no_run if run is None else still_running if run.alive else ended)
        self._commands.refresh()

    def _on_about_to_show(self) -> None:
        self.send_menu.clear()
        for one in self._session.models.destinations():
            entry = self.send_menu.addAction(f"{destination_name(one)}   {one.folder}".replace("&", "&&"))
            entry.triggered.connect(lambda _=False, one=one: self.send_to(one))

    def _on_candidate_chosen(self, candidate: Candidate | None) -> None:
        self.trying.show_candidate(candidate, self.strip.candidates.title(candidate) if candidate else "")
        self._refresh()

    def _listen(self) -> None:
        self.strip.chosen.connect(self._on_candidate_chosen)
        self.prompt_box.currentIndexChanged.connect(
            lambda place: self.strip.show_candidates(self.strip.candidates.all, max(0, place))
        )
        self.trying.failed.connect(self.failed.emit)
        self.trying.message_shown.connect(self.message_shown.emit)
        self.exporting.notified.connect(self.notified.emit)
        self.exporting.failed.connect(self.failed.emit)
        self.exporting.opened.connect(self._open)
        self.exporting.used.connect(self._refresh)
        self.export_button.clicked.connect(self.ask_export)
        self.send_button.clicked.connect(self.send)
        self.send_menu.aboutToShow.connect(self._on_about_to_show)
        until_destroyed(self, self._session.models.changed.connect(lambda _: self._refresh()))

    def _lay_out(self) -> None:
        inside, whole = QWidget(), QVBoxLayout(self)
        scroll = QScrollArea()  # keeps the window's minimum height small on low screens
        scroll.setWidget(inside)
        scroll.setWidgetResizable(True)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.addWidget(scroll)
        column = QVBoxLayout(inside)
        column.setContentsMargins(16, 10, 16, 10)
        column.setSpacing(9)
        column.addWidget(self._edited_row())
        column.addLayout(self._head())
        column.addWidget(self.strip)
        column.addWidget(self.empty, 1)
        column.addLayout(self._export_row())
        column.addWidget(_heading(self.tr("Try it")))
        column.addWidget(self.trying, 1)
        self.empty.setProperty("role", "muted")
        self.empty.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.empty.setWordWrap(True)

    def _edited_row(self) -> QFrame:
        button = QPushButton(self.tr("New job with the changes"))
        button.clicked.connect(self.begin_again)
        self.edited_words.setWordWrap(True)
        self.edited_words.setProperty("role", "warning")
        self.edited_bar.setObjectName("notice")
        row = QHBoxLayout(self.edited_bar)
        row.addWidget(self.edited_words, 1)
        row.addWidget(button)
        return self.edited_bar

    def _head(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.addWidget(_heading(self.tr("Saved LoRAs")))
        row.addSpacing(12)
        self.prompt_box.setAccessibleName(self.tr("Preview prompt"))
        self.prompt_box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.prompt_box.setMinimumContentsLength(6)
        self.prompt_box.setMaximumWidth(_MAX_PROMPT_WIDTH)
        self.prompt_box.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        row.addWidget(self.prompt_box, 1)
        row.addStretch()
        for name in ("after.longer", "after.again"):
            row.addWidget(self._commands.button(name, Qt.ToolButtonStyle.ToolButtonTextBesideIcon))
        return row

    def _export_row(self) -> FlowLayout:
        self.export_button.setText(self.tr("Export…"))
        self.export_button.setDefault(True)
        set_icon(self.export_button, "save", "on_accent")
        self.send_button.setPopupMode(QToolButton.ToolButtonPopupMode.MenuButtonPopup)
        self.send_button.setMenu(self.send_menu)
        row = FlowLayout(6)
        row.addWidget(self.export_button)
        row.addWidget(self.send_button)
        for name in ("after.grid", "after.card"):
            row.addWidget(self._commands.button(name, Qt.ToolButtonStyle.ToolButtonTextBesideIcon))
        return row


def _heading(words: str) -> QLabel:
    label = QLabel(words)
    label.setProperty("role", "heading")
    return label


def _trained_on(listing: Path) -> int:
    """Return the number of training images in `listing`, a run's file that lists its images."""
    from trainer.dataset.dataset import read_listing
    from trainer.dataset.image import count_files

    return count_files(image for image in read_listing(listing) if image.kind == "train")
