"""The guided tour: trains the demo LoRA, from its images to the export, in steps that each show one page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QObject, Qt, Signal
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QLabel, QPushButton, QToolButton, QVBoxLayout, QWidget

from app.core.first_run import demo_images, demo_job
from app.core.session import Session
from app.core.tasks import handle_only
from app.qt.notices import Notices
from app.qt.page_loader import Page, PageCallback
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, until_destroyed, while_alive
from trainer.errors import ImpastoError
from trainer.protocol.queue import Entry


class Coach(QFrame):
    """Panel that shows one step of the tour."""

    back = Signal()
    onward = Signal()
    action_requested = Signal()
    """Emitted when the step's action button is clicked."""
    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("coach")
        self.count, self.title, self.words = QLabel(), QLabel(), QLabel()
        self.back_button, self.next, self.act = QPushButton(self.tr("Back")), QPushButton(), QPushButton()
        self.closing = QToolButton()
        self._build()
        for button, signal in (
            (self.back_button, self.back),
            (self.next, self.onward),
            (self.act, self.action_requested),
            (self.closing, self.closed),
        ):
            button.clicked.connect(lambda _=False, signal=signal: signal.emit())

    def show_step(self, number: int, of: int, title: str, words: str, act: str = "") -> None:
        """Show a step, numbered from 1; `act` is the title of its action button."""
        self.count.setText(self.tr("Tour: step {number} of {of}").format(number=number, of=of))
        self.title.setText(title)
        self.words.setText(words)
        self.back_button.setEnabled(number > 1)
        self.next.setText(self.tr("Next") if number < of else self.tr("Done"))
        self.act.setText(act)
        self.act.setVisible(bool(act))
        self.act.setDefault(bool(act))  # highlight the expected next click
        self.next.setDefault(not act)
        self.setAccessibleName(f"{self.count.text()}: {title}")
        self.setAccessibleDescription(words)

    def _build(self) -> None:
        self.count.setProperty("role", "muted")
        self.title.setProperty("role", "heading")
        for label in (self.title, self.words):
            label.setTextFormat(Qt.TextFormat.PlainText)
        self.words.setWordWrap(True)
        self.closing.setToolTip(self.tr("End the tour"))
        self.closing.setAccessibleName(self.tr("End the tour"))
        self.closing.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        set_icon(self.closing, "close")
        texts = QVBoxLayout()
        texts.setSpacing(2)
        head = QHBoxLayout()
        head.setSpacing(10)
        head.addWidget(self.title)
        head.addWidget(self.count)
        head.addStretch()
        texts.addLayout(head)
        texts.addWidget(self.words)
        row = QHBoxLayout(self)
        row.setContentsMargins(14, 10, 8, 10)
        row.setSpacing(8)
        row.addLayout(texts, 1)
        for button in (self.act, self.back_button, self.next):
            row.addWidget(button, 0, Qt.AlignmentFlag.AlignVCenter)
        row.addWidget(self.closing, 0, Qt.AlignmentFlag.AlignTop)


@dataclass(frozen=True, slots=True)
class TourStep:
    """One step of the tour.

    `go` names the `Tour` method that shows the step's page. `act` is the title of its action button, if any; a click
    calls the `Tour` method named by `do`.
    """

    title: str
    words: str
    go: str
    act: str = ""
    do: str = ""


STEPS = (
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Your images"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "These 18 images share one style: neon tubes. A LoRA learns what its images have in common. "
            "They are small because the tour's base is tiny, so you can ignore the problem shown. "
            "To use your own images, drop any folder on the window.",
        ),
        "show_images",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Captions"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "A caption describes what an image shows, so that the LoRA learns only the style. Edit one if you like: "
            "changes are saved automatically, and Ctrl+Z undoes them. These images are copies.",
        ),
        "show_caption",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "The job"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "A job is a base, images and a recipe. This base is tiny, so that any PC can train on it. "
            "Use the trigger word, neontube, in prompts to get the style.",
        ),
        "show_job",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Start"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "On a GPU, you see how much memory and time training needs before it starts. "
            "The demo trains on the CPU for a few minutes. "
            "Training continues when you close this window, and can be resumed after a crash.",
        ),
        "show_job",
        QT_TRANSLATE_NOOP("Tour", "Start training"),
        "start",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Watch the training"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "The run appears after a few seconds, and its loss falls as the LoRA learns. Every 100 steps, the same two "
            "prompts are rendered: under Samples you see a fish and a heart turn into neon.",
        ),
        "show_run",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Choose the best step"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "When training is done, compare the saved steps, render images with the best one, and export it to "
            "ComfyUI, Forge or another tool. That's it: now try your own images.",
        ),
        "show_after",
    ),
)


class Tour(QObject):
    """Controller for one tour, which ends after the last step or when its panel or the window is closed."""

    ended = Signal()

    def __init__(
        self,
        session: Session,
        place: QBoxLayout,
        *,
        notices: Notices,
        show_images: Callable[[], None],
        show_runs: Callable[[PageCallback | None], None],
        parent: QWidget,
    ) -> None:
        """Start the tour. Its panel is added to `place`; `show_images` opens Images and `show_runs` opens Runs."""
        super().__init__(parent)
        self._session, self._notices = session, notices
        self._show_images_page, self._show_runs_page = show_images, show_runs
        self._index = 0
        self._images: Path | None = None
        self._job: Path | None = None
        self._started: str | None = None
        """Id of the queue entry that this tour added, needed until the queue lists the entry."""
        self._waiting: list[Callable[[Path], None]] = []
        self._started_at = time.time()
        self.coach = Coach()
        place.addWidget(self.coach)
        self.coach.back.connect(lambda: self._step(self._index - 1))
        self.coach.onward.connect(lambda: self._step(self._index + 1))
        self.coach.action_requested.connect(lambda: getattr(self, STEPS[self._index].do)())
        self.coach.closed.connect(lambda: self.end())
        until_destroyed(self, self._session.view.shown.connect(lambda _: self._on_view_shown()))
        self._step(0)
        self.coach.next.setFocus()

    def end(self) -> None:
        """End the tour; the demo's images, job and run are not deleted."""
        self.coach.hide()
        self.coach.deleteLater()
        self.setParent(None)  # the window may start another tour at once
        self.ended.emit()
        self.deleteLater()

    # --- methods named in the steps

    def show_images(self) -> None:
        """Open the demo's images."""
        self._show_images_page()
        self._run_on_worker(demo_images, self._open)

    def show_caption(self) -> None:
        """Select the demo's first image to show its caption; `_on_view_shown` selects it if it loads later."""
        self._show_images_page()
        self._choose_first()

    def show_job(self) -> None:
        """Show the demo's job, creating it if needed."""
        self._with_job(self._session.navigator.job.emit)

    def start(self) -> None:
        """Start training the demo's job, unless it is already queued."""
        self._with_job(self._start)

    def show_run(self) -> None:
        """Show the job's run, or its queue entry if it has no run yet, or else all runs."""
        entry = self._entry()
        if entry and entry.run:
            self._session.navigator.run.emit(entry.run)
        elif started := entry.id if entry else self._started:
            self._session.navigator.entry.emit(started)
        else:
            self._show_runs_page(None)

    def show_after(self) -> None:
        """Show the run's Try & export tab."""

        def show(page: Page) -> None:
            from app.qt.runs.page import RunsPage  # imported late, like the page

            assert isinstance(page, RunsPage)
            page.show_after()

        self.show_run()
        self._show_runs_page(show)

    # --- inside

    def _choose_first(self) -> None:
        view, images = self._session.view, self._session.library.images
        first = next((number for number in view.ids if images[number].folder.path == self._images), None)
        if first is not None:
            view.select([first], first)

    def _on_view_shown(self) -> None:
        """Select the first image if the caption step was shown before the images were loaded."""
        if STEPS[self._index].go == "show_caption" and self._session.view.current is None:
            self._choose_first()

    def _entry(self) -> Entry | None:
        """Return the job's newest queue entry since the tour began, whether the tour or the user added it."""
        entries = [entry for entry in self._session.queue.entries if entry.job == self._job]
        return next((entry for entry in reversed(entries) if entry.added >= self._started_at), None)

    def _open(self, folder: Path) -> None:
        self._images = folder
        self._session.datasets.open(folder)  # without showing its page: the tour may be at another step

    def _with_job(self, then: Callable[[Path], None]) -> None:
        """Call `then` with the path of the demo's job file, which is written on first use."""
        if self._job is not None:
            then(self._job)
            return
        self._waiting.append(then)
        if len(self._waiting) == 1:
            self._run_on_worker(lambda: demo_job(self._session.jobs.folder), self._on_job_written)

    def _on_job_written(self, job: Path) -> None:
        self._job = job
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(job)

    def _start(self, job: Path) -> None:
        if self._entry() is None:
            self._started = self._session.queue.start(job)
        self._step(self._index + 1)

    def _step(self, number: int) -> None:
        if number == len(STEPS):
            self.end()
            return
        self._index = number
        step = STEPS[number]
        act = _tr(step.act) if step.act and self._entry() is None else ""
        self.coach.show_step(number + 1, len(STEPS), _tr(step.title), _tr(step.words), act)
        getattr(self, step.go)()

    def _run_on_worker(self, work: Callable[[], Path], then: Callable[[Path], None]) -> None:
        """Run `work` on a worker and call `then` with its result, unless the tour has ended; show errors as notices."""

        def failed(fault: Exception) -> None:
            self._waiting.clear()
            if isinstance(fault, ImpastoError):
                self._notices.show_error(fault)
            else:
                sentence = self.tr("Could not copy the demo's images: {why}.")
                self._notices.show_notice(sentence.format(why=fault), "error")

        errors = handle_only((ImpastoError, OSError), while_alive(self, failed))
        self._session.tasks.run(work, while_alive(self, then), errors)


def _tr(text: str) -> str:
    return QCoreApplication.translate("Tour", text)
