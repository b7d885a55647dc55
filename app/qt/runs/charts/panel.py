"""What a run learned so far, in charts, and how they are to be seen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QCheckBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLayout,
    QScrollArea,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.runs.run import CardWatch, Run
from app.core.session import Session
from app.core.tasks import Single
from app.qt.actions.commands import Commands
from app.qt.actions.table import Action
from app.qt.flow_layout import FlowLayout
from app.qt.inputs import Slider
from app.qt.parts import while_there
from app.qt.runs.charts.difference import DifferenceTable
from app.qt.runs.charts.legend import Legend, colour_of
from app.qt.words import QT_TRANSLATE_NOOP

if TYPE_CHECKING:
    from app.qt.runs.charts.board import Board

# A run that goes on is drawn anew at most so often, in milliseconds; one that is read at once, when it is read.
_REDRAW = 400
_CARD = 2_000
# The slider's places: each is the steps that the smooth line averages over.
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
        QT_TRANSLATE_NOOP("Action", "Leave outliers out"),
        "runs",
        "set_clip",
        enabled="has_runs",
        checked="is_clipped",
        tip=QT_TRANSLATE_NOOP("Action", "The axis has no room for the highest and lowest of a hundred values"),
    ),
)


class ProgressPanel(QWidget):
    """The charts of the chosen run, with others laid over them."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self.runs: Sequence[Run] = ()
        self.board: Board | None = None
        self._ends: list[Callable[[], None]] = []
        self._loading = Single(session.tasks)
        self._logarithmic, self._clip = False, True
        self.card = CardWatch(session.tasks)
        self.legend = Legend()
        self.difference = DifferenceTable()
        self.waiting = QLabel()
        self._redraw = QTimer(self)
        self._redraw.setSingleShot(True)
        self._redraw.timeout.connect(self.draw)
        self._asking = QTimer(self)
        self._asking.setInterval(_CARD)
        self._asking.timeout.connect(self.card.look)
        self._lay_out()
        commands.add(ACTIONS, self)
        self.every.setDefaultAction(commands["charts.all"])
        self._load()

    def show_runs(self, runs: Sequence[Run]) -> None:
        """Show these runs; the first is the one that everything else on the page is about."""
        for end in self._ends:
            end()
        if self.board and (not self.runs or not runs or self.runs[0] is not runs[0]):
            self.board.steps = None
        self.runs = tuple(runs)
        self.card.watch(self.runs[0] if runs else None)
        self._ends = [event.connect(lambda _: self._soon()) for run in runs for event in (run.arrived, run.changed)]
        entries = [(run.summary.name, colour_of(place), "plain") for place, run in enumerate(runs)]
        self.legend.show_entries(entries)
        self.legend.setVisible(len(runs) > 1)
        self.draw()
        self._commands.refresh()

    def draw(self) -> None:
        """Draw what is known now."""
        self._redraw.stop()
        started = [run for run in self.runs if run.series.loss]
        self.waiting.setText(self._waiting_words())
        self.waiting.setVisible(not started or self.board is None)
        self.difference.show_runs(self.runs)
        if self.board is None:
            return
        from app.qt.runs.charts.drawings import Wishes  # with the board, that is after numpy

        if not started:
            self.board.rest()
        elif self.isVisible():
            wishes = Wishes(float(SMOOTHING[self.smoothing.value()]), self._logarithmic, self._clip)
            self.board.draw(self.runs, wishes)

    # --- what the table of actions names

    def show_all(self) -> None:
        """Show all steps."""
        if self.board:
            self.board.show_all()

    def set_logarithmic(self, on: bool) -> None:
        """Give the loss a logarithmic axis, or an even one."""
        self._logarithmic = on
        self.logarithmic.setChecked(on)
        self.draw()

    def set_clip(self, on: bool) -> None:
        """Let the axes have no room for outliers, or for all values."""
        self._clip = on
        self.outliers.setChecked(on)
        self.draw()

    def is_logarithmic(self) -> bool:
        """Tell whether the loss has a logarithmic axis."""
        return self._logarithmic

    def is_clipped(self) -> bool:
        """Tell whether outliers are left out."""
        return self._clip

    def has_runs(self) -> bool:
        """Tell whether there is anything to be seen."""
        return bool(self.runs)

    # --- Qt's events

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Draw what came while nobody looked, and ask how the card is."""
        super().showEvent(event)
        self.draw()
        self._asking.start()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Draw nothing that nobody sees."""
        super().hideEvent(event)
        self._redraw.stop()
        self._asking.stop()

    # --- inside

    def _soon(self) -> None:
        """Draw soon; a long run that is being read is drawn when it is read."""
        if self.isVisible() and not self._redraw.isActive() and all(run.loaded for run in self.runs):
            self._redraw.start(_REDRAW)

    def _waiting_words(self) -> str:
        if not self.runs and not self._session.runs.all:
            return self.tr("A training that was started appears here after some seconds.")
        if not self.runs:
            return self.tr("Choose a run on the left; with Ctrl or Shift several, to lay them over each other.")
        if any(run.series.loss for run in self.runs):
            return self.tr("Drawing…")
        if not all(run.loaded for run in self.runs):
            return self.tr("Reading…")
        return self.tr("No step is done yet. The loss is drawn from the first step on.")

    def _load(self) -> None:
        """Load numpy on a worker: a tenth of a second that charts need before the first of them."""
        build = while_there(self, lambda _: self._build())
        self._loading.run(lambda: importlib.import_module("app.core.runs.curves"), build)

    def _build(self) -> None:
        """Make the board, whose charts are made when they are first drawn."""
        from app.qt.runs.charts.board import Board

        self.board = Board(self.card)
        self._column.insertWidget(1, self.board, 1)
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
        self.smoothing.setAccessibleName(self.tr("Steps that the smooth line averages over"))
        self.smoothing.valueChanged.connect(self._smooth)
        self.smoothing.setValue(SMOOTHING.index(50))
        self.smoothed.setProperty("role", "muted")
        self.smoothed.setMinimumWidth(self.fontMetrics().horizontalAdvance(self.tr("%n step(s)", "", 10000)))
        self.logarithmic = self._box(self.tr("Logarithmic"), False, self.set_logarithmic)
        self.outliers = self._box(self.tr("Leave outliers out"), True, self.set_clip)
        self.every = QToolButton()
        for part in (label, self.smoothing, self.smoothed):
            row.addWidget(part)
        for tool in (smoothing, self.logarithmic, self.outliers, self.every):
            tools.addWidget(tool)
        return tools

    def _smooth(self, place: int) -> None:
        self.smoothed.setText(self.tr("%n step(s)", "", SMOOTHING[place]))
        self.smoothing.setAccessibleDescription(self.smoothed.text())
        self._soon()

    def _box(self, text: str, on: bool, then: Callable[[bool], None]) -> QCheckBox:
        box = QCheckBox(text)
        box.setChecked(on)
        box.clicked.connect(then)
        return box
