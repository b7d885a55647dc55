"""The Runs page: the runs and the queue on the left, one run on the right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from PySide6.QtCore import QLocale, Qt, QTimer, Signal, SignalInstance
from PySide6.QtGui import QFontDatabase, QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QPlainTextEdit,
    QPushButton,
    QSplitter,
    QStackedWidget,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.runs.run import Run
from app.core.session import Session
from app.core.words import full_message
from app.qt.actions.commands import Action, Commands
from app.qt.page_loader import Page
from app.qt.runs.after.panel import AfterPanel
from app.qt.runs.charts.painting import SERIES_COLORS
from app.qt.runs.charts.panel import ProgressPanel
from app.qt.runs.header import RunHeader
from app.qt.runs.lists import RunList
from app.qt.runs.log import LogView
from app.qt.runs.queue_panel import QueuePanel
from app.qt.runs.samples.matrix import SampleMatrix
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, icon_label, plain_label, until_destroyed

_LINES = 5
_AROUND = 34  # the field's frame, padding and margin, plus a horizontal scroll bar; in px
# Milliseconds. A crashed run must show within two seconds; a chart that moves more often is not easier to read.
_READ_EVERY = 500
_SCAN_EVERY = 1_000
ACTIONS = (
    Action(
        "runs.forget",
        QT_TRANSLATE_NOOP("Action", "Remove from the list"),
        "runs",
        "forget",
        ("Del",),
        "can_forget",
        tip=QT_TRANSLATE_NOOP("Action", "Removes the selected runs from the list and keeps their folders"),
    ),
)


class FailureBanner(QFrame):
    """Banner that says why a run failed, with the engine's last lines; hidden if nothing is wrong."""

    removal_requested = Signal()
    """Emitted when the user wants to remove a missing run from the list."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("notice")
        self.sign, self.sentence = icon_label(20), plain_label()
        set_icon(self.sign, "error", "bad")
        self.last_words = QPlainTextEdit()
        self.last_words.setReadOnly(True)
        self.last_words.setTabChangesFocus(True)
        self.last_words.setAccessibleName(self.tr("Last lines of the engine's log"))
        self.last_words.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.last_words.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.leave = QPushButton(self.tr("Remove from the list"))
        self.leave.clicked.connect(self.removal_requested)
        self._lay_out()
        self.hide()

    def show_run(self, run: Run | None, failure: str = "") -> None:
        """Show what is wrong with a run; `failure` is the reason recorded by the queue, if any."""
        sentence = self._words(run, failure) if run else ""
        self.setVisible(bool(sentence))
        if not run or not sentence:
            return
        self.sentence.setText(sentence)
        self.leave.setVisible(run.summary.missing is not None)
        self.last_words.setVisible(bool(run.last_words) and run.summary.state == "interrupted" and not failure)
        lines = run.last_words.splitlines()[-_LINES:]  # the log has the rest
        if self.last_words.toPlainText() != "\n".join(lines):
            self.last_words.setPlainText("\n".join(lines))
            self.last_words.setFixedHeight(len(lines) * self.last_words.fontMetrics().lineSpacing() + _AROUND)

    def _words(self, run: Run, failure: str) -> str:
        if run.problem:
            return run.problem
        if run.summary.state == "interrupted":
            if failure:
                return failure
            killed = self.tr("This run stopped unexpectedly: it was killed, or the computer shut down.")
            ended = run.summary.status_fault or killed
            resume = self._resume_words(run)
            heading = self.tr("Its last output:") if run.last_words else ""
            return " ".join(filter(None, (ended, resume, heading)))
        if run.summary.state in ("failed", "paused") and run.error:  # a full disk pauses it
            return full_message(run.error)
        return ""

    def _resume_words(self, run: Run) -> str:
        """Return sentences that say where the run would resume and how many steps it would repeat."""
        kept, step = run.summary.kept, run.summary.step
        if kept is None:
            return self.tr("It has no checkpoint yet: “Resume” starts from the first step.")
        number = QLocale().toString
        start = self.tr("“Resume” continues from its last checkpoint, at step {step}.").format(step=number(kept))
        lost = self.tr("%n later step(s) will be repeated.", "", step - kept) if step > kept else ""
        return " ".join(filter(None, (start, lost)))

    def _lay_out(self) -> None:
        row, column = QHBoxLayout(self), QVBoxLayout()
        row.setContentsMargins(12, 8, 12, 8)
        row.setSpacing(10)
        column.addWidget(self.sentence)
        column.addWidget(self.last_words)
        row.addWidget(self.sign, 0, Qt.AlignmentFlag.AlignTop)
        row.addLayout(column, 1)
        row.addWidget(self.leave, 0, Qt.AlignmentFlag.AlignTop)


class RunsPage(Page):
    """Page with the runs and the queue; training runs are updated live."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        self.run: Run | None = None
        """Run that the header and the tabs show."""
        self._open: dict[Path, Run] = {}
        self._live: dict[Path, Run] = {}
        """Runs that are training; they are read even when not selected, because the list shows their time left."""
        self._wanted: Path | None = None
        self._awaited: str | None = None
        """Id of the queue entry that was just started, until it has a run or the user selects another run."""
        self._was_awaited_listed = False
        """Whether the queue has listed that entry; a worker thread adds it, so it is missing at first."""
        self._disconnect_run: Callable[[], None] | None = None
        self._reading = self._timer(_READ_EVERY, self._read)
        self._scanning = self._timer(_SCAN_EVERY, self._scan)

    def build(self) -> Iterator[None]:
        """Create the list, queue, header and tabs, then lay them out; yield after each part."""
        session, commands = self.session, self.commands
        self.list = RunList(self._seconds_left, session.queue.is_starting)
        self.queue = QueuePanel(session, commands)
        yield
        self.header = RunHeader(session, commands)
        self.failure_banner = FailureBanner()
        yield
        self.progress = ProgressPanel(session, commands)
        yield
        self.samples = SampleMatrix(session, commands)
        yield
        self.after = AfterPanel(session, commands)
        yield
        self.log = LogView(session, commands)
        yield
        yield from self._lay_out()
        commands.add(ACTIONS, self)
        until_destroyed(
            self,
            session.runs.changed.connect(lambda _: self._show_list()),
            session.queue.changed.connect(lambda _: self._show_queue()),
            session.runs.failed.connect(self.failed.emit),
        )
        self.list.chosen.connect(self._on_runs_chosen)
        self.samples.chosen.connect(self._on_sample_chosen)
        self.failure_banner.removal_requested.connect(self._on_unwanted)
        self._forward_signals()
        yield
        self.list.show_runs(session.runs.all)  # slow with hundreds of runs, so it comes last

    def open(self, path: Path) -> None:
        """Add a run to the list and show it."""
        self._wanted = path.absolute()
        self.session.runs.open(self._wanted)
        self.session.runs.refresh()
        self._show_list()

    def begin(self, name: str) -> None:
        """Show the queue entry with this id, which was just started, and its run as soon as there is one."""
        self._awaited, self._wanted, self._was_awaited_listed = name, None, False
        self.list.clear_choice()
        self.show_runs([])
        self._show_awaited()

    def show_runs(self, paths: list[Path]) -> None:
        """Show the first of these runs in the header and tabs, and overlay the runs in the charts.

        The charts show at most one run per line color.
        """
        # More lines than colors would be hard to tell apart.
        opened = {path: self.session.runs.open(path) for path in paths[:SERIES_COLORS]}
        for path, run in self._open.items():
            if path not in opened and path not in self._live:
                run.close()
        self._open = opened
        first = next(iter(opened.values()), None)
        if first is not self.run:
            self._show_run(first)
        self.progress.show_runs(list(opened.values()))
        self._read()
        self.commands.refresh()

    def show_after(self) -> None:
        """Switch to the tab for trying and exporting the trained LoRA."""
        self.tabs.setCurrentWidget(self.after)

    # --- called by actions

    def forget(self) -> None:
        """Remove the selected runs from the list, except those that are training."""
        for path in self._forgettable():
            self.session.runs.forget(path)

    def can_forget(self) -> bool:
        """Return whether the list has the focus and at least one selected run can be removed from it."""
        return bool(self._forgettable()) and self.list.hasFocus()

    # --- Qt's events

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Start reading the runs, because the page is visible."""
        super().showEvent(event)
        self._show_list()  # runs read before this page existed send no signal again
        self.session.runs.refresh()
        self._read()
        self._reading.start()
        self._scanning.start()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop reading the runs, because the page is hidden."""
        super().hideEvent(event)
        self._reading.stop()
        self._scanning.stop()

    # --- inside

    def _scan(self) -> None:
        self.list.show_runs(self.session.runs.all)  # the time left changes even if nothing else does
        self.session.runs.refresh()

    def _read(self) -> None:
        for run in {**self._live, **self._open}.values():
            run.read()

    def _show_list(self) -> None:
        """Update the list of runs; if none is selected, select the one that is training, or the latest."""
        runs = self.session.runs
        self._watch_live()
        self.list.show_runs(runs.all)
        self._update_empty_text()
        self.lists.setCurrentIndex(0 if runs.all or not runs.looked else 1)
        if self._wanted and self.list.runs.index_of(self._wanted).isValid():
            self.list.choose(self._wanted)
            self._wanted = None
        elif not self.list.paths and runs.all and not self._wanted and not self._awaited:
            alive = (run.path for run in runs.all if run.state == "running")
            self.list.choose(next(alive, runs.all[0].path))
        elif self._open and runs.looked and not runs.all:
            self.show_runs([])
        self.commands.refresh()

    def _show_queue(self) -> None:
        """Update everything that depends on the queue, such as starting runs and the reason why a run failed."""
        self.list.show_runs(self.session.runs.all)
        self._show_trouble()
        self._show_awaited()
        self._update_empty_text()

    def _show_awaited(self) -> None:
        """Show the state of the entry that was just started, then its run; stop waiting if it has ended or is gone."""
        if self._awaited is None:
            return
        entry = self.session.queue.entry(self._awaited)
        if entry is None:  # not listed yet, or removed
            if self._was_awaited_listed:
                self._awaited = None
                self._show_list()
        elif entry.run is not None:
            self._awaited = None
            self.open(entry.run)
        else:
            self._was_awaited_listed = True
            self.queue.list.choose(entry.id)
            self.header.show_run(None, entry)
            if entry.ended:
                self._awaited = None

    def _update_empty_text(self) -> None:
        states = {entry.state for entry in self.session.queue.entries}
        if "waiting" in states and "running" not in states and self.session.queue.now.reading.held:
            words = self.tr("There are no runs yet. The queue below is on hold: “Resume queue” starts its jobs.")
        elif states & {"running", "waiting"}:
            words = self.tr("Runs that the queue below starts appear here after a few seconds.")
        else:
            words = self.tr("There are no runs yet. Start one on the Train page, or with “python -m trainer train”.")
        self.empty.setText(words)

    def _forgettable(self) -> list[Path]:
        """Return the selected runs that are not training."""
        chosen = set(self.list.paths)
        return [run.path for run in self.session.runs.all if run.path in chosen and run.state != "running"]

    def _on_unwanted(self) -> None:
        if self.run:
            self.session.runs.forget(self.run.directory.path)

    def _watch_live(self) -> None:
        alive = [run.path for run in self.session.runs.all if run.state == "running"]
        for path in set(self._live) - set(alive):
            run = self._live.pop(path)
            if path not in self._open:
                run.close()
        self._live |= {path: self.session.runs.open(path) for path in alive if path not in self._live}

    def _on_runs_chosen(self) -> None:
        if self.list.paths:
            self._awaited = None
            self.show_runs(self.list.paths)

    def _show_run(self, run: Run | None) -> None:
        """Show another run in the header and the tabs."""
        if self._disconnect_run:
            self._disconnect_run()
        self.run = run
        self._disconnect_run = run.changed.connect(lambda _: self._on_run_changed()) if run else None
        for part in (self.header, self.samples, self.after, self.log):
            part.show_run(run)
        self._show_trouble()

    def _on_sample_chosen(self, step: int) -> None:
        """Open the export tab with the LoRA saved at the chosen sample's step."""
        self.show_after()
        self.after.choose(step)

    def _on_run_changed(self) -> None:
        """Update the banner and the run's row in the list; the list's own updates are less frequent."""
        self._show_trouble()
        if self.run:
            self.session.runs.update_summary(self.run.summary)

    def _show_trouble(self) -> None:
        self.failure_banner.show_run(self.run, self.session.queue.failure_of(self.run.summary) if self.run else "")

    def _seconds_left(self, path: Path) -> float | None:
        run = self._open.get(path) or self._live.get(path)
        return run.seconds_left() if run else None

    def _forward_signals(self) -> None:
        """Forward the panels' messages and errors to the window."""
        for part in (self.queue, self.header, self.samples, self.after, self.log):
            for name in ("message_shown", "notified", "failed"):
                signal = getattr(part, name, None)
                if isinstance(signal, SignalInstance):
                    signal.connect(getattr(self, name))

    def _timer(self, every: int, then: Callable[[], None]) -> QTimer:
        timer = QTimer(self)
        timer.setInterval(every)
        timer.timeout.connect(then)
        return timer

    def _lay_out(self) -> Iterator[None]:
        self.tabs = QTabWidget()
        for part, title in (
            (self.progress, self.tr("Progress")),
            (self.samples, self.tr("Samples")),
            (self.after, self.tr("Try && export")),
            (self.log, self.tr("Log")),
        ):
            self.tabs.addTab(part, title)
            yield
        left = QSplitter(Qt.Orientation.Vertical)
        left.setObjectName("runs.left")
        left.setChildrenCollapsible(False)
        left.addWidget(self._lists())
        left.addWidget(self.queue)
        left.setStretchFactor(0, 3)
        left.setStretchFactor(1, 2)
        yield
        right, column = QWidget(), QVBoxLayout()
        column.addWidget(self.header)
        column.addWidget(self.failure_banner)
        column.addWidget(self.tabs, 1)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        right.setLayout(column)
        yield
        middle = QSplitter(self)
        middle.setObjectName("runs")
        middle.setChildrenCollapsible(False)
        middle.addWidget(left)
        yield
        middle.addWidget(right)
        middle.setStretchFactor(1, 1)
        middle.setSizes([300, 980])
        yield
        row = QHBoxLayout(self)
        row.addWidget(middle)
        row.setContentsMargins(0, 0, 0, 0)

    def _lists(self) -> QWidget:
        """Return the list of runs, stacked with the text shown while it is empty."""
        self.empty = QLabel()
        self.empty.setProperty("role", "muted")
        self.empty.setWordWrap(True)
        self.empty.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.empty.setMargin(16)
        self.lists = QStackedWidget()
        self.lists.addWidget(self.list)
        self.lists.addWidget(self.empty)
        self.lists.setMinimumWidth(200)
        return self.lists
