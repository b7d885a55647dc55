"""The Runs page: the runs and the queue on the left, one run on the right."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QSplitter, QTabWidget, QVBoxLayout, QWidget

from app.core.runs.run import Run
from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.page import Page
from app.qt.runs.after.panel import AfterPanel
from app.qt.runs.charts.panel import ProgressPanel
from app.qt.runs.header import RunHeader
from app.qt.runs.log_view import LogView
from app.qt.runs.queue_panel import QueuePanel
from app.qt.runs.run_list import RunList
from app.qt.runs.samples.matrix import SampleMatrix

# A run that died is to be seen within two seconds, and a chart that moves more often than this is not read better.
_READ_EVERY = 500
_LOOK_EVERY = 1_000


class RunsPage(Page):
    """Shows runs, those that go on live."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        self.run: Run | None = None
        """The one that header and tabs show."""
        self.list = RunList(session)
        self.queue = QueuePanel(session, commands)
        self.header = RunHeader(session, commands)
        self.progress = ProgressPanel(session, commands)
        self.samples = SampleMatrix(session, commands)
        self.after = AfterPanel(session, commands)
        self.log = LogView(session, commands)
        self._lay_out()
        self._reading = self._timer(_READ_EVERY, self._read)
        self._looking = self._timer(_LOOK_EVERY, session.runs.look)

    def open(self, path: Path) -> None:
        """Show a run; it joins the list."""
        self.show_run(self.session.runs.open(path))

    def show_run(self, run: Run | None) -> None:
        """Let header and tabs speak of another run, or of none."""
        self.run = run
        for part in (self.header, self.samples, self.after, self.log):
            part.show_run(run)
        self.progress.show_runs([run] if run else [])
        self._read()

    # --- Qt's events

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Watch, from now on."""
        super().showEvent(event)
        self.session.runs.look()
        self._read()
        self._reading.start()
        self._looking.start()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Watch no more: nobody sees it."""
        super().hideEvent(event)
        self._reading.stop()
        self._looking.stop()

    # --- inside

    def _read(self) -> None:
        if self.run:
            self.run.read()

    def _timer(self, every: int, then: object) -> QTimer:
        timer = QTimer(self)
        timer.setInterval(every)
        timer.timeout.connect(then)
        return timer

    def _lay_out(self) -> None:
        self.tabs = QTabWidget()
        self.tabs.addTab(self.progress, self.tr("Progress"))
        self.tabs.addTab(self.samples, self.tr("Samples"))
        self.tabs.addTab(self.after, self.tr("After"))
        self.tabs.addTab(self.log, self.tr("Log"))
        left = QSplitter(Qt.Orientation.Vertical)
        left.setObjectName("runs.left")
        left.addWidget(self.list)
        left.addWidget(self.queue)
        right, column = QWidget(), QVBoxLayout()
        column.addWidget(self.header)
        column.addWidget(self.tabs, 1)
        column.setContentsMargins(0, 0, 0, 0)
        right.setLayout(column)
        middle = QSplitter()
        middle.setObjectName("runs")
        middle.addWidget(left)
        middle.addWidget(right)
        middle.setStretchFactor(1, 1)
        row = QHBoxLayout(self)
        row.addWidget(middle)
        row.setContentsMargins(0, 0, 0, 0)
