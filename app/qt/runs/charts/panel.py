"""The Progress tab: charts of the selected runs, display options, and differences between compared jobs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QLocale, Qt, QTimer
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QCheckBox,
    QFrame,
    QHBoxLayout,
    QHeaderView,
    QLabel,
    QLayout,
    QScrollArea,
    QTableWidget,
    QTableWidgetItem,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.runs.run import GpuMonitor, Run
from app.core.session import Session
from app.core.tasks import ExclusiveTask
from app.qt.actions.commands import Action, Commands
from app.qt.runs.charts.painting import Legend, color_of
from app.qt.runs.remarks import leak
from app.qt.widgets import QT_TRANSLATE_NOOP, FlowLayout, Slider, plain_tip, while_alive
from trainer.protocol import events

if TYPE_CHECKING:
    from app.qt.runs.charts.board import Board
    from app.qt.runs.charts.memory import RunMemory


_MAX_ROWS = 12
# Milliseconds between redraws of an active run; a finished run is drawn once it is read.
_REDRAW = 400
_GPU_POLL_MS = 2_000
# Number of averaged steps at each position of the smoothing slider.
SMOOTHING = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)
ACTIONS = (
    Action(
        "charts.all", QT_TRANSLATE_NOOP("Action", "Show all steps"), "runs", "show_all", ("Ctrl+0",), enabled="has_runs"
    ),
    Action(
        "charts.logarithmic",
        QT_TRANSLATE_NOOP("Action", "Logarithmic loss"),
        "runs",
        "set_logarithmic",
        enabled="has_runs",
        checked="is_logarithmic",
    ),
    Action(
        "charts.outliers",
        QT_TRANSLATE_NOOP("Action", "Ignore outliers"),
        "runs",
        "set_clip",
        enabled="has_runs",
        checked="is_clipped",
        tip=QT_TRANSLATE_NOOP("Action", "Cuts the highest and lowest 1% of the values off the axis"),
    ),
)


def _leaks(run: Run) -> Iterator[str]:
    """Yield a sentence for each leak of memory in a run."""
    for remark in run.remarks.all:
        if isinstance(remark.event, events.MemoryLeak):
            yield leak(remark.event)


class DifferenceTable(QWidget):
    """Table of the settings in which the compared runs differ, with a column for each run."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shown: tuple[object, ...] = ()
        self.title = QLabel(self.tr("Differences between the jobs"))
        self.title.setProperty("role", "heading")
        self.sentence = QLabel()
        self.sentence.setProperty("role", "muted")
        self.sentence.setWordWrap(True)
        self.table = QTableWidget()
        self.table.setAccessibleName(self.title.text())
        self.table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.table.setSelectionBehavior(QTableWidget.SelectionBehavior.SelectRows)
        self.table.setTabKeyNavigation(False)
        self.table.setShowGrid(False)
        self.table.verticalHeader().hide()
        self.table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        self.table.horizontalHeader().setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 0, 16, 16)
        for part in (self.title, self.sentence, self.table):
            column.addWidget(part)
        self.hide()

    def show_runs(self, runs: Sequence[Run]) -> None:
        """Compare the jobs of these runs; for a single run, the table is hidden."""
        self.setVisible(len(runs) > 1)
        shown = tuple((run.summary.name, run.job) for run in runs)
        if len(runs) < 2 or shown == self._shown:
            return
        self._shown = shown
        from app.core.after.run_jobs import differences
        from app.core.jobs.settings import full_title  # imports the job's schema, which is slow

        jobs = [run.job for run in runs if run.job is not None]
        found = differences(jobs) if len(jobs) == len(runs) else []
        self.sentence.setText(self._words(len(jobs) == len(runs), len(found)))
        self.sentence.setVisible(not found)
        self.table.setVisible(bool(found))
        self.table.setColumnCount(1 + len(runs))
        self.table.setHorizontalHeaderLabels([self.tr("Setting"), *(run.summary.name for run in runs)])
        self.table.setRowCount(len(found))
        for row, difference in enumerate(found):
            for place, text in enumerate((full_title(difference.key), *map(self._value, difference.values))):
                item = QTableWidgetItem(text)
                item.setToolTip(plain_tip(text if place else difference.key))
                self.table.setItem(row, place, item)
        rows = min(len(found), _MAX_ROWS)
        self.table.setFixedHeight(
            self.table.horizontalHeader().sizeHint().height()
            + rows * self.table.verticalHeader().defaultSectionSize()
            + 4
        )

    def _words(self, known: bool, differences: int) -> str:
        if not known:
            return self.tr("Could not read the job of one of these runs.")
        return "" if differences else self.tr("All settings are the same.")

    def _value(self, value: object) -> str:
        if value is None:
            return self.tr("not set")
        if isinstance(value, bool):
            return self.tr("yes") if value else self.tr("no")
        if isinstance(value, int | float):
            return QLocale().toString(float(value), "g", 8)
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


class ProgressPanel(QWidget):
    """Tab with charts in which the selected runs are overlaid."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self.runs: Sequence[Run] = ()
        self.board: Board | None = None
        self.memory: RunMemory | None = None
        self._ends: list[Callable[[], None]] = []
        self._loading = ExclusiveTask(session.tasks)
        self._logarithmic, self._clip = False, True
        self.gpu = GpuMonitor(session.tasks)
        self.legend = Legend()
        self.difference = DifferenceTable()
        self.waiting = QLabel()
        self.leaks = QLabel()
        """Leaks of the run, above its charts; hidden if there are none."""
        self._redraw = QTimer(self)
        self._redraw.setSingleShot(True)
        self._redraw.timeout.connect(self.draw)
        self._gpu_timer = QTimer(self)
        self._gpu_timer.setInterval(_GPU_POLL_MS)
        self._gpu_timer.timeout.connect(self.gpu.look)
        self._lay_out()
        commands.add(ACTIONS, self)
        self.every.setDefaultAction(commands["charts.all"])
        self._load()

    def show_runs(self, runs: Sequence[Run]) -> None:
        """Show these runs; outside this tab, the page shows only the first one."""
        for end in self._ends:
            end()
        if self.board and (not self.runs or not runs or self.runs[0] is not runs[0]):
            self.board.steps = None
        self.runs = tuple(runs)
        self.gpu.watch(self.runs[0] if runs else None)
        self._ends = [
            event.connect(lambda _: self._schedule_draw())
            for run in runs
            for event in (run.events_arrived, run.changed)
        ]
        entries = [(run.summary.name, color_of(place), "plain") for place, run in enumerate(runs)]
        self.legend.show_entries(entries)
        self.legend.setVisible(len(runs) > 1)
        self.draw()
        self._commands.refresh()

    def draw(self) -> None:
        """Draw the charts with the current data."""
        self._redraw.stop()
        started = [run for run in self.runs if run.series.loss]
        self.waiting.setText(self._waiting_words())
        self.waiting.setVisible(not started or self.board is None)
        self.difference.show_runs(self.runs)
        self.leaks.setText("\n".join(_leaks(self.runs[0])) if len(self.runs) == 1 else "")
        self.leaks.setVisible(bool(self.leaks.text()))
        if self.board is None:
            return
        from app.qt.runs.charts.board import ChartOptions  # imported with the board, after numpy

        if self.memory is not None:
            self.memory.show_run(self.runs[0] if len(self.runs) == 1 else None)
        if not started:
            self.board.rest()
        elif self.isVisible():
            wishes = ChartOptions(float(SMOOTHING[self.smoothing.value()]), self._logarithmic, self._clip)
            self.board.draw(self.runs, wishes)

    # --- called by actions

    def show_all(self) -> None:
        """Show all steps."""
        if self.board:
            self.board.show_all()

    def set_logarithmic(self, on: bool) -> None:
        """Switch the loss between a logarithmic and a linear axis."""
        self._logarithmic = on
        self.logarithmic.setChecked(on)
        self.draw()

    def set_clip(self, on: bool) -> None:
        """Set whether the axes ignore outliers."""
        self._clip = on
        self.outliers.setChecked(on)
        self.draw()

    def is_logarithmic(self) -> bool:
        """Return whether the loss has a logarithmic axis."""
        return self._logarithmic

    def is_clipped(self) -> bool:
        """Return whether the axes ignore outliers."""
        return self._clip

    def has_runs(self) -> bool:
        """Return whether at least one run is shown."""
        return bool(self.runs)

    # --- Qt's events

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Draw the data that arrived while the tab was hidden, and start polling the GPU."""
        super().showEvent(event)
        self.draw()
        self._gpu_timer.start()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop drawing and polling the GPU."""
        super().hideEvent(event)
        self._redraw.stop()
        self._gpu_timer.stop()

    # --- inside

    def _schedule_draw(self) -> None:
        """Schedule a redraw if the tab is visible and all runs have been read."""
        if self.isVisible() and not self._redraw.isActive() and all(run.loaded for run in self.runs):
            self._redraw.start(_REDRAW)

    def _waiting_words(self) -> str:
        if not self.runs and not self._session.runs.all:
            return self.tr("A started run appears here after a few seconds.")
        if not self.runs:
            return self.tr("Select a run on the left. Select several with Ctrl or Shift to compare them.")
        if any(run.series.loss for run in self.runs):
            return self.tr("Drawing…")
        if not all(run.loaded for run in self.runs):
            return self.tr("Reading…")
        return self.tr("No step is finished yet. The loss appears with the first step.")

    def _load(self) -> None:
        """Load numpy, which the charts need, on a worker: this takes about 0.1 s."""
        build = while_alive(self, lambda _: self._build())
        self._loading.run(lambda: importlib.import_module("app.core.runs.curves"), build)

    def _build(self) -> None:
        """Create the board, whose charts are created when first drawn."""
        from app.qt.runs.charts.board import Board
        from app.qt.runs.charts.memory import RunMemory

        self.board, self.memory = Board(self.gpu), RunMemory()
        self._column.insertWidget(1, self.board, 1)
        self._column.insertWidget(2, self.memory)
        self.draw()

    def _lay_out(self) -> None:
        inside, self._column = QWidget(), QVBoxLayout()
        self.waiting.setProperty("role", "muted")
        self.waiting.setWordWrap(True)
        self.waiting.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.waiting.setMargin(40)
        self._column.addWidget(self.waiting)
        self._column.addWidget(self.difference)
        self._column.addStretch()
        self._column.setContentsMargins(0, 0, 0, 0)
        inside.setLayout(self._column)
        self.area = QScrollArea()
        self.area.setWidget(inside)
        self.area.setWidgetResizable(True)
        self.area.setFrameShape(QFrame.Shape.NoFrame)
        self.area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(self._tools())
        self.legend.setContentsMargins(16, 2, 16, 6)
        self.legend.hide()
        column.addWidget(self.legend)
        self.leaks.setProperty("role", "warning")
        self.leaks.setTextFormat(Qt.TextFormat.PlainText)
        self.leaks.setWordWrap(True)
        self.leaks.setContentsMargins(16, 2, 16, 6)
        column.addWidget(self.leaks)
        column.addWidget(self.area, 1)

    def _tools(self) -> QLayout:
        tools, smoothing = FlowLayout(14), QWidget()
        tools.setContentsMargins(16, 8, 16, 4)
        row = QHBoxLayout(smoothing)
        row.setContentsMargins(0, 0, 0, 0)
        label, self.smoothed = QLabel(self.tr("Smoothing")), QLabel()
        self.smoothing = Slider(Qt.Orientation.Horizontal)
        self.smoothing.setRange(0, len(SMOOTHING) - 1)
        self.smoothing.setFixedWidth(140)
        self.smoothing.setAccessibleName(self.tr("Number of steps to average for the smoothed line"))
        self.smoothing.valueChanged.connect(self._on_smoothing_changed)
        self.smoothing.setValue(SMOOTHING.index(50))
        self.smoothed.setProperty("role", "muted")
        self.smoothed.setMinimumWidth(self.fontMetrics().horizontalAdvance(self.tr("%n step(s)", "", 10000)))
        self.logarithmic = self._box(self.tr("Logarithmic"), False, self.set_logarithmic)
        self.outliers = self._box(self.tr("Ignore outliers"), True, self.set_clip)
        self.every = QToolButton()
        for part in (label, self.smoothing, self.smoothed):
            row.addWidget(part)
        for tool in (smoothing, self.logarithmic, self.outliers, self.every):
            tools.addWidget(tool)
        return tools

    def _on_smoothing_changed(self, place: int) -> None:
        self.smoothed.setText(self.tr("%n step(s)", "", SMOOTHING[place]))
        self.smoothing.setAccessibleDescription(self.smoothed.text())
        self._schedule_draw()

    def _box(self, text: str, on: bool, then: Callable[[bool], None]) -> QCheckBox:
        box = QCheckBox(text)
        box.setChecked(on)
        box.clicked.connect(then)
        return box
