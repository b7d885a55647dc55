"""The tour: the demo, from its pictures to its LoRA, in steps that each show one page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QObject, Qt, Signal
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QLabel, QPushButton, QToolButton, QVBoxLayout, QWidget

from app.core.first import demo_job, demo_pictures
from app.core.session import Session
from app.core.tasks import only
from app.qt.notices import Notices
from app.qt.page_loader import Page, Use
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, until_destroyed, while_there
from trainer.errors import ImpastoError
from trainer.protocol.queue import Entry


class Coach(QFrame):
    """One step of a tour at a time."""

    back = Signal()
    onward = Signal()
    acted = Signal()
    """The step's own button was pressed."""
    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("coach")
        self.count, self.title, self.words = QLabel(), QLabel(), QLabel()
        self.former, self.next, self.act = QPushButton(self.tr("Back")), QPushButton(), QPushButton()
        self.closing = QToolButton()
        self._build()
        for button, signal in (
            (self.former, self.back),
            (self.next, self.onward),
            (self.act, self.acted),
            (self.closing, self.closed),
        ):
            button.clicked.connect(lambda _=False, signal=signal: signal.emit())

    def show_step(self, number: int, of: int, title: str, words: str, act: str = "") -> None:
        """Show a step, numbered from 1; `act` is the title of a button of its own."""
        self.count.setText(self.tr("Tour, {number} of {of}").format(number=number, of=of))
        self.title.setText(title)
        self.words.setText(words)
        self.former.setEnabled(number > 1)
        self.next.setText(self.tr("Next") if number < of else self.tr("Done"))
        self.act.setText(act)
        self.act.setVisible(bool(act))
        self.act.setDefault(bool(act))  # the look of what comes next
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
        for button in (self.act, self.former, self.next):
            row.addWidget(button, 0, Qt.AlignmentFlag.AlignVCenter)
        row.addWidget(self.closing, 0, Qt.AlignmentFlag.AlignTop)


@dataclass(frozen=True, slots=True)
class TourStep:
    """`go` names the tour's method that shows the page, `act` the title of a button for the tour's method `do`."""

    title: str
    words: str
    go: str
    act: str = ""
    do: str = ""


STEPS = (
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Your pictures"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "These 18 pictures have one look: tubes of neon light. A LoRA learns what its pictures have in common. "
            "They are as small as the tour's base, so never mind the problem that is listed. For your own, "
            "drop any folder on the window.",
        ),
        "show_pictures",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "What each one shows"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "A caption names what a picture shows, so that only the look is left to learn. Edit one if you like: "
            "it is saved by itself, and Ctrl+Z takes it back. These are copies.",
        ),
        "show_caption",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "What is learned, and from which base"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "A job is a base, pictures and a recipe. This base is tiny, so that any PC can train on it. "
            "The trigger word, neontube, will call the look up.",
        ),
        "show_job",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Start"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "On a graphics card, memory and time are known before anything starts; the demo trains on the processor, "
            "a few minutes. Training goes on when this window is closed, and survives a crash.",
        ),
        "show_job",
        QT_TRANSLATE_NOOP("Tour", "Start training"),
        "start",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Watch"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "The run is here after some seconds, and its loss falls while it learns. Every 100 steps the same two "
            "prompts are drawn again: under Samples you see a fish and a heart turn into neon.",
        ),
        "show_run",
    ),
    TourStep(
        QT_TRANSLATE_NOOP("Tour", "Keep the best"),
        QT_TRANSLATE_NOOP(
            "Tour",
            "When it is done, compare the saved steps, draw with the one you like, and export it to ComfyUI, Forge "
            "or another tool. That is all: now with your own pictures.",
        ),
        "show_after",
    ),
)


class Tour(QObject):
    """One tour through a window; it ends with its last step, with the coach's cross, or with the window."""

    ended = Signal()

    def __init__(
        self,
        session: Session,
        place: QBoxLayout,
        *,
        notices: Notices,
        show_pictures: Callable[[], None],
        show_runs: Callable[[Use | None], None],
        parent: QWidget,
    ) -> None:
        """`place` is the layout that gets the tour's panel; the two functions go to a page of the window."""
        super().__init__(parent)
        self._session, self._notices = session, notices
        self._show_pictures_page, self._show_runs_page = show_pictures, show_runs
        self._at = 0
        self._pictures: Path | None = None
        self._job: Path | None = None
        self._started: str | None = None
        """The id of the entry that this tour put in the queue, which does not list it at once."""
        self._waiting: list[Callable[[Path], None]] = []
        self._began = time.time()
        self.coach = Coach()
        place.addWidget(self.coach)
        self.coach.back.connect(lambda: self._step(self._at - 1))
        self.coach.onward.connect(lambda: self._step(self._at + 1))
        self.coach.acted.connect(lambda: getattr(self, STEPS[self._at].do)())
        self.coach.closed.connect(lambda: self.end())
        until_destroyed(self, self._session.view.shown.connect(lambda _: self._catch_up()))
        self._step(0)
        self.coach.next.setFocus()

    def end(self) -> None:
        """Leave all as it is: the pictures open, the job among the others, the run running."""
        self.coach.hide()
        self.coach.deleteLater()
        self.setParent(None)  # another may begin at once
        self.ended.emit()
        self.deleteLater()

    # --- what the steps name

    def show_pictures(self) -> None:
        """Open the demo's pictures."""
        self._show_pictures_page()
        self._behind(demo_pictures, self._open)

    def show_caption(self) -> None:
        """Select the demo's first picture, for its caption to be seen; as soon as it is there, if it is not yet."""
        self._show_pictures_page()
        self._choose_first()

    def show_job(self) -> None:
        """Set the demo's job up, and show it."""
        self._with_job(self._session.going.job.emit)

    def start(self) -> None:
        """Train the demo's job, unless that goes on already."""
        self._with_job(self._start)

    def show_run(self) -> None:
        """Show the run of the job, or its entry in the queue while it has none, or else all runs."""
        entry = self._entry()
        if entry and entry.run:
            self._session.going.run.emit(entry.run)
        elif started := entry.id if entry else self._started:
            self._session.going.entry.emit(started)
        else:
            self._show_runs_page(None)

    def show_after(self) -> None:
        """Show what comes after the run."""

        def show(page: Page) -> None:
            from app.qt.runs.page import RunsPage  # with the page, which is loaded late

            assert isinstance(page, RunsPage)
            page.show_after()

        self.show_run()
        self._show_runs_page(show)

    # --- inside

    def _choose_first(self) -> None:
        view, pictures = self._session.view, self._session.library.pictures
        first = next((number for number in view.ids if pictures[number].folder.path == self._pictures), None)
        if first is not None:
            view.select([first], first)

    def _catch_up(self) -> None:
        """Do for pictures that come late what the step would have done."""
        if STEPS[self._at].go == "show_caption" and self._session.view.current is None:
            self._choose_first()

    def _entry(self) -> Entry | None:
        """What the queue has of the job since the tour began, whoever put it there."""
        entries = [entry for entry in self._session.queue.entries if entry.job == self._job]
        return next((entry for entry in reversed(entries) if entry.added >= self._began), None)

    def _open(self, folder: Path) -> None:
        self._pictures = folder
        self._session.datasets.open(folder)  # without its page: the tour may have gone on to another

    def _with_job(self, then: Callable[[Path], None]) -> None:
        """Do something with the demo's job, which is written when it is first asked for."""
        if self._job is not None:
            then(self._job)
            return
        self._waiting.append(then)
        if len(self._waiting) == 1:
            self._behind(lambda: demo_job(self._session.jobs.folder), self._have_job)

    def _have_job(self, job: Path) -> None:
        self._job = job
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(job)

    def _start(self, job: Path) -> None:
        if self._entry() is None:
            self._started = self._session.queue.start(job)
        self._step(self._at + 1)

    def _step(self, number: int) -> None:
        if number == len(STEPS):
            self.end()
            return
        self._at = number
        step = STEPS[number]
        act = _tr(step.act) if step.act and self._entry() is None else ""
        self.coach.show_step(number + 1, len(STEPS), _tr(step.title), _tr(step.words), act)
        getattr(self, step.go)()

    def _behind(self, work: Callable[[], Path], then: Callable[[Path], None]) -> None:
        """Do `work` on a worker, and go on with what comes of it while there is a tour."""

        def failed(fault: Exception) -> None:
            self._waiting.clear()
            if isinstance(fault, ImpastoError):
                self._notices.tell_error(fault)
            else:
                sentence = self.tr("The demo's pictures cannot be put where they belong: {why}.")
                self._notices.tell(sentence.format(why=fault), "error")

        self._session.tasks.run(work, while_there(self, then), only((ImpastoError, OSError), failed))


def _tr(text: str) -> str:
    return QCoreApplication.translate("Tour", text)
