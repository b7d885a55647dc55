"""All charts of the chosen runs, moved together along their steps. Loads numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

from PySide6.QtCore import QLocale, QTimer
from PySide6.QtWidgets import QGridLayout, QWidget

from app.core.runs.run import CardWatch, Run
from app.qt.parts import keep_room
from app.qt.runs.charts import drawings
from app.qt.runs.charts.axis import Wording, count, number, rate
from app.qt.runs.charts.chart import Chart
from app.qt.runs.charts.drawings import Wishes
from app.qt.runs.charts.lines import Drawing

_LARGE, _SMALL = 280, 190
# Charts beside the one that is moved follow a little later: one is looked at, six would cost six frames.
_FOLLOW = 120
_EDGE = 1.02


class Board(QWidget):
    """The loss at full width, and what else is known in two columns below."""

    def __init__(self, card: CardWatch, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._card_watch = card
        self._runs: Sequence[Run] = ()
        self._made: list[Chart] = []
        self._waiting: list[tuple[Callable[[], Chart], Callable[[], Drawing]]] = []
        self._shown: list[Chart] = []
        self._next = QTimer(self)
        self._next.setSingleShot(True)
        self._next.setInterval(0)
        self._next.timeout.connect(self._draw_next)
        self.steps: tuple[float, float] | None = None
        """What the user wants to see; None: all there is."""
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(16, 12, 16, 16)
        self._grid.setHorizontalSpacing(24)
        self._grid.setVerticalSpacing(18)
        for column in range(2):
            self._grid.setColumnStretch(column, 1)
            self._grid.setColumnMinimumWidth(column, 1)  # of equal width, whatever stands in them
        self._laid: tuple[Chart, ...] = ()
        self._hidden: list[Chart] = []
        """Those that have their place and are still to be shown."""
        self._unplaced = False
        self._follow = QTimer(self)
        self._follow.setSingleShot(True)
        self._follow.setInterval(_FOLLOW)
        self._follow.timeout.connect(self._follow_on)
        card.changed.connect(lambda _: self._draw_card())

    # --- the charts: each is made when it is first drawn

    @cached_property
    def loss(self) -> Chart:
        """The loss of the steps."""
        chart = self._by_step(self.tr("Loss"), number)
        chart.setMinimumHeight(_LARGE)
        return chart

    @cached_property
    def held_out(self) -> Chart:
        """The loss at fixed noise."""
        return self._by_step(self.tr("Loss on fixed noise"), number)

    @cached_property
    def rates(self) -> Chart:
        """Learning rates."""
        return self._by_step(self.tr("Learning rate"), rate)

    @cached_property
    def memory(self) -> Chart:
        """Memory on the device."""
        return self._by_step(self.tr("Memory, GB"), number)

    @cached_property
    def seconds(self) -> Chart:
        """Seconds of each step."""
        return self._by_step(self.tr("Seconds a step"), number)

    @cached_property
    def speed(self) -> Chart:
        """Pictures a second."""
        return self._by_step(self.tr("Pictures a second"), number)

    @cached_property
    def card(self) -> Chart:
        """Load and temperature of the card, by the time instead of the steps."""
        return self._placed(Chart(self.tr("Graphics card"), count, _minutes, whole=False))

    # --- drawing

    def rest(self) -> None:
        """Show nothing; the charts come back one after the other with the next drawing."""
        self.hide()
        for chart in self._laid[1:]:
            chart.hide()

    def draw(self, runs: Sequence[Run], wishes: Wishes) -> None:
        """Draw these runs as they are now: the loss at once, the other charts one after the other, each in its turn.

        Together they would hold the window for longer than is not felt, with a run of very many steps.
        """
        self._runs = runs
        self._waiting = [
            (lambda: self.held_out, lambda: drawings.held_out(runs, wishes)),
            (lambda: self.rates, lambda: drawings.learning_rates(runs)),
            (lambda: self.memory, lambda: drawings.memory(runs)),
            (lambda: self.seconds, lambda: drawings.seconds(runs, wishes)),
            (lambda: self.speed, lambda: drawings.speed(runs, wishes)),
        ]
        self._shown, self._unplaced = [self.loss], True
        self.loss.show_steps(*self._span())
        self.loss.draw(drawings.loss(runs, wishes))
        if not self._laid:
            self._arrange((self.loss,))
        self.show()
        self._next.start()

    def _draw_next(self) -> None:
        """Draw the next chart that waits; after the last, give all that show something their places, and show them.

        One at a time: each takes some milliseconds to be computed, and some to be painted.
        """
        if self._waiting:
            chart_of, make = self._waiting.pop(0)
            drawing = make()
            if drawing.lines:
                chart = chart_of()
                chart.show_steps(*self._span())
                chart.draw(drawing)
                self._shown.append(chart)
        elif self._unplaced:
            self._unplaced = False
            self._draw_card()
            self._arrange((*self._shown, *([self.card] if len(self._card_watch.load) > 1 else [])))
        elif self._hidden:
            self._hidden.pop(0).show()
        if self._waiting or self._unplaced or self._hidden:
            self._next.start()

    def show_all(self) -> None:
        """Show all steps again, those to come too."""
        self.steps = None
        self._follow_on()

    def _span(self) -> tuple[float, float]:
        if self.steps:
            return self.steps
        last = max((run.series.loss.steps[-1] for run in self._runs if run.series.loss), default=1.0)
        return 0.0, max(1.0, last) * _EDGE

    def _move(self, chart: Chart, first: float, last: float) -> None:
        """Show other steps: at once in the chart that was moved, a little later in the others."""
        furthest = max((run.series.loss.steps[-1] for run in self._runs if run.series.loss), default=1.0) * _EDGE
        width = min(max(last - first, 4.0), furthest)
        first = min(max(0.0, first), furthest - width)
        self.steps = None if width >= furthest else (first, first + width)
        chart.show_steps(*self._span())
        if not self._follow.isActive():
            self._follow.start()

    def _follow_on(self) -> None:
        for chart in self._made:
            if not chart.isHidden():
                chart.show_steps(*self._span())

    def _by_step(self, title: str, words: Wording) -> Chart:
        """Make a chart along the steps, which moves with the others."""
        chart = self._placed(Chart(title, words))
        chart.moved.connect(lambda first, last: self._move(chart, first, last))
        chart.reset.connect(self.show_all)
        self._made.append(chart)
        return chart

    def _placed(self, chart: Chart) -> Chart:
        chart.setParent(self)
        chart.hide()
        chart.setMinimumHeight(_SMALL)
        keep_room(chart)
        return chart

    def _draw_card(self) -> None:
        watch = self._card_watch
        if len(watch.load) > 1:
            self.card.show_steps(watch.load.steps[0], watch.load.steps[-1])
            self.card.draw(drawings.card(watch))

    def _arrange(self, charts: tuple[Chart, ...]) -> None:
        """Give the charts that show something their places; one alone in its row has all of it."""
        for chart in self._laid:
            if chart not in charts:
                chart.hide()
        charts[0].show()
        self._hidden = [chart for chart in charts if chart.isHidden()]
        if charts == self._laid:
            return
        for chart in self._laid:
            self._grid.removeWidget(chart)
        self._laid = charts
        self._grid.addWidget(charts[0], 0, 0, 1, 2)
        rest = charts[1:]
        for place, chart in enumerate(rest):
            alone = place == len(rest) - 1 and place % 2 == 0
            self._grid.addWidget(chart, 1 + place // 2, place % 2, 1, 2 if alone else 1)
        self._grid.setRowStretch(0, 3)
        for row in range(1, self._grid.rowCount()):
            self._grid.setRowStretch(row, 2 if row <= (len(rest) + 1) // 2 else 0)
        for earlier, later in pairwise(charts):
            QWidget.setTabOrder(earlier.plot, later.plot)


def _minutes(value: float) -> str:
    """Word seconds as minutes and seconds."""
    minutes, rest = divmod(round(value), 60)
    return f"{QLocale().toString(minutes)}:{rest:02d}"
