"""All charts of the selected runs, which pan and zoom together along the steps. Imports numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from PySide6.QtCore import QCoreApplication, QLocale, QTimer
from PySide6.QtWidgets import QGridLayout, QWidget

from app.core.runs.curves import arrays, smoothed
from app.core.runs.run import GpuMonitor, Run
from app.core.runs.series import Mark, Track
from app.qt.runs.charts.chart import Chart
from app.qt.runs.charts.painting import ChartLine, ChartSpec, Level, Look, Wording, color_of, count, number, rate
from app.qt.widgets import retain_size

# Percent of the values at either end that the axis may cut off.
_CLIP = 1.0
# The memory limit is drawn only up to this multiple of the peak: higher up it would flatten the lines.
_LIMIT_RATIO = 1.6
_GIB = 1024.0**3
# Milliseconds after which the other charts follow a pan or zoom: updating all at once would cost a frame each.
_FOLLOW_MS = 120
_RIGHT_MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class ChartOptions:
    """The user's display options for the charts."""

    smoothing: float = 50.0
    """Approximate number of steps to average for the smoothed line."""
    logarithmic: bool = False
    clip: bool = True


def loss(runs: Sequence[Run], wishes: ChartOptions) -> ChartSpec:
    """Return the loss chart with each run's smoothed loss; for a single run, also the loss per step."""
    lines = list(_noisy(runs, lambda run: run.series.loss, _tr("each step"), _tr("smoothed"), wishes.smoothing))
    kinds = {mark.kind for run in runs[:1] for mark in run.series.marks}
    legend = (("saved", _tr("saved"), "good"), ("preview", _tr("samples"), "muted"))
    return ChartSpec(
        lines,
        marks=_marks(runs),
        best=_best(runs),
        best_label=_best_label(runs),
        logarithmic=wishes.logarithmic,
        clip=_CLIP if wishes.clip else 0.0,
        words=_summary(lines, number),
        extra=tuple((label, color) for kind, label, color in legend if kind in kinds),
    )


def held_out(runs: Sequence[Run], wishes: ChartOptions) -> ChartSpec:
    """Return the validation loss chart; runs without validation images show their loss on training images."""
    held = list(_each(runs, lambda run: run.series.held_out, _tr("validation images"), "points"))
    trained = list(_each(runs, lambda run: run.series.validation, _tr("training images (none held out)"), "points"))
    title = "" if held and trained else _tr("Validation loss") if held else _tr("Loss on training images")
    lines, words = [*held, *trained], _summary([*held, *trained], number)
    best, label = _best(runs), _best_label(runs)
    return ChartSpec(lines, best=best, best_label=label, title=title, logarithmic=wishes.logarithmic, words=words)


def learning_rates(runs: Sequence[Run]) -> ChartSpec:
    """Return the chart of learning rates, with a line for each trained part of the model."""
    looks: tuple[Look, ...] = ("plain", "dashed", "dotted")
    names = {"unet": _tr("U-Net"), "text_encoder": _tr("text encoder"), "text_encoder_2": _tr("second text encoder")}
    parts = list(dict.fromkeys(part for run in runs for part in run.series.rates))
    lines: list[ChartLine] = []
    for place, part in enumerate(parts):
        lines += _each(runs, partial(_rate, part), names.get(part, part), looks[place % len(looks)])
    return ChartSpec(lines, words=_summary(lines, rate))


def _rate(part: str, run: Run) -> Track | None:
    return run.series.rates.get(part)


def memory(runs: Sequence[Run]) -> ChartSpec:
    """Return the chart of GPU memory in GiB, with the forecast and the memory limit of the first run.

    The limit is left out if it is far above all other values, because it would flatten the lines.
    """
    measured = _each(runs, lambda run: run.series.memory, _tr("measured"), "thin")
    lines = [replace(line, values=line.values / _GIB) for line in measured]
    most = max((float(np.nanmax(line.values)) for line in lines), default=0.0)
    levels = list(_memory_levels(runs[0], most)) if runs and lines else []
    words = " ".join([_summary(lines, number), *(f"{level.label}: {number(level.value)}." for level in levels)])
    return ChartSpec(lines, levels, marks=_marks(runs), words=words)


def seconds(runs: Sequence[Run], wishes: ChartOptions) -> ChartSpec:
    """Return the chart of seconds per step."""
    lines = list(_noisy(runs, lambda run: run.series.seconds, _tr("each step"), _tr("smoothed"), wishes.smoothing))
    return ChartSpec(lines, clip=_CLIP if wishes.clip else 0.0, words=_summary(lines, number))


def speed(runs: Sequence[Run], wishes: ChartOptions) -> ChartSpec:
    """Return the chart of images per second."""
    lines = list(_noisy(runs, lambda run: run.series.speed, _tr("each step"), _tr("smoothed"), wishes.smoothing))
    return ChartSpec(lines, clip=_CLIP if wishes.clip else 0.0, words=_summary(lines, number))


def gpu_spec(watch: GpuMonitor) -> ChartSpec:
    """Return the chart of GPU load and temperature since monitoring began."""
    tracks = ((watch.load, _tr("load, %"), "series1"), (watch.temperature, _tr("temperature, °C"), "series2"))
    lines = [ChartLine(label, *arrays(track), "plain", color) for track, label, color in tracks if len(track) > 1]
    return ChartSpec(lines, words=_summary(lines, count))


def _noisy(
    runs: Sequence[Run], track: Callable[[Run], Track], raw: str, smooth: str, steps: float
) -> Iterator[ChartLine]:
    """Yield each run's smoothed line; if there is only one run, first yield a line with its value at each step."""
    for place, run in enumerate(runs):
        x, y = arrays(track(run))
        if not len(x):
            continue
        if len(runs) == 1:
            yield ChartLine(raw, x, y, "raw", color_of(place), run.summary.name)
        yield ChartLine(smooth, x, smoothed(y, steps), "smooth", color_of(place), _run_label(runs, run))


def _each(runs: Sequence[Run], track: Callable[[Run], Track | None], label: str, look: Look) -> Iterator[ChartLine]:
    for place, run in enumerate(runs):
        found = track(run)
        if found:
            yield ChartLine(label, *arrays(found), look, color_of(place), _run_label(runs, run))


def _memory_levels(run: Run, most: float) -> Iterator[Level]:
    if run.forecast is None:
        return
    training = [phase for phase in map(run.forecast.of, ("first_step", "train")) if phase]
    foreseen = max((phase.allocated / _GIB for phase in training), default=0.0)
    budget = run.forecast.budget / _GIB
    if foreseen:
        yield Level(_tr("forecast"), foreseen)
    if 0 < budget < _LIMIT_RATIO * max(most, foreseen):
        yield Level(_tr("limit"), budget, "bad")


def _marks(runs: Sequence[Run]) -> Sequence[Mark]:
    """Return only the first run's marks, because marks of several runs would be hard to tell apart."""
    return tuple(runs[0].series.marks) if runs else ()


def _best(runs: Sequence[Run]) -> int | None:
    return runs[0].series.best_step() if runs else None


def _best_label(runs: Sequence[Run]) -> str:
    if runs and not runs[0].series.held_out:
        return _tr("lowest on training images: {step}")
    return _tr("best: {step}")


def _run_label(runs: Sequence[Run], run: Run) -> str:
    return run.summary.name if len(runs) > 1 else ""


def _summary(lines: Sequence[ChartLine], words: Wording) -> str:
    """Return a description for screen readers: each line's first, last, lowest and highest value."""
    sentences = [_describe_line(line, words) for line in lines if line.look != "raw" and np.isfinite(line.values).any()]
    return " ".join(sentences) or _tr("No measurements yet.")


def _describe_line(line: ChartLine, words: Wording) -> str:
    known = np.flatnonzero(np.isfinite(line.values))
    steps, values = line.steps[known], line.values[known]
    low = int(np.argmin(values))
    sentence = _tr("{name}: starts at {first}, {last} at step {step}; lowest {low} at step {where}, highest {high}.")
    return sentence.format(
        name=" ".join(filter(None, (line.run, line.label))),
        first=words(values[0]),
        last=words(values[-1]),
        step=count(steps[-1]),
        low=words(values[low]),
        where=count(steps[low]),
        high=words(float(values.max())),
    )


def _tr(text: str) -> str:
    return QCoreApplication.translate("Charts", text)


_LARGE, _SMALL = 280, 190


class Board(QWidget):
    """Grid of charts: the loss at full width, the others in two columns below."""

    def __init__(self, gpu: GpuMonitor, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._gpu = gpu
        self._runs: Sequence[Run] = ()
        self._made: list[Chart] = []
        self._waiting: list[tuple[Callable[[], Chart], Callable[[], ChartSpec]]] = []
        self._shown: list[Chart] = []
        self._next = QTimer(self)
        self._next.setSingleShot(True)
        self._next.setInterval(0)
        self._next.timeout.connect(self._draw_next)
        self.steps: tuple[float, float] | None = None
        """First and last visible step, or None to show all steps."""
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(16, 12, 16, 16)
        self._grid.setHorizontalSpacing(24)
        self._grid.setVerticalSpacing(18)
        for column in range(2):
            self._grid.setColumnStretch(column, 1)
            self._grid.setColumnMinimumWidth(column, 1)  # equal widths, whatever the content
        self._laid: tuple[Chart, ...] = ()
        self._hidden: list[Chart] = []
        """Charts that are in the layout but not shown yet."""
        self._unplaced = False
        self._follow = QTimer(self)
        self._follow.setSingleShot(True)
        self._follow.setInterval(_FOLLOW_MS)
        self._follow.timeout.connect(self._update_spans)
        gpu.changed.connect(lambda _: self._draw_gpu())

    # --- the charts: each is created when first drawn

    @cached_property
    def loss(self) -> Chart:
        """Chart of the training loss."""
        chart = self._by_step(self.tr("Loss"), number)
        chart.setMinimumHeight(_LARGE)
        return chart

    @cached_property
    def held_out(self) -> Chart:
        """Chart of the loss at fixed noise: validation loss, or the loss on training images."""
        return self._by_step(self.tr("Loss on fixed noise"), number)

    @cached_property
    def rates(self) -> Chart:
        """Chart of the learning rates."""
        return self._by_step(self.tr("Learning rate"), rate)

    @cached_property
    def memory(self) -> Chart:
        """Chart of GPU memory."""
        return self._by_step(self.tr("Memory, GiB"), number)

    @cached_property
    def seconds(self) -> Chart:
        """Chart of the seconds per step."""
        return self._by_step(self.tr("Seconds per step"), number)

    @cached_property
    def speed(self) -> Chart:
        """Chart of the images per second."""
        return self._by_step(self.tr("Images per second"), number)

    @cached_property
    def gpu_chart(self) -> Chart:
        """Chart of GPU load and temperature, by time instead of by step."""
        return self._placed(Chart(self.tr("GPU"), count, _minutes, whole=False))

    # --- drawing

    def rest(self) -> None:
        """Hide all charts; the next call of `draw` shows them again, one by one."""
        self.hide()
        for chart in self._laid[1:]:
            chart.hide()

    def draw(self, runs: Sequence[Run], wishes: ChartOptions) -> None:
        """Draw these runs: the loss chart at once, every other chart in a later turn of the event loop.

        With very long runs, drawing all charts at once would noticeably block the window.
        """
        self._runs = runs
        self._waiting = [
            (lambda: self.held_out, lambda: held_out(runs, wishes)),
            (lambda: self.rates, lambda: learning_rates(runs)),
            (lambda: self.memory, lambda: memory(runs)),
            (lambda: self.seconds, lambda: seconds(runs, wishes)),
            (lambda: self.speed, lambda: speed(runs, wishes)),
        ]
        self._shown, self._unplaced = [self.loss], True
        self.loss.show_steps(*self._span())
        self.loss.draw(loss(runs, wishes))
        if not self._laid:
            self._arrange((self.loss,))
        self.show()
        self._next.start()

    def _draw_next(self) -> None:
        """Draw the next pending chart; after the last one, place the charts that have data and show them.

        Only one chart is drawn per event loop turn, because each takes a few milliseconds to compute and paint.
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
            self._draw_gpu()
            self._arrange((*self._shown, *([self.gpu_chart] if len(self._gpu.load) > 1 else [])))
        elif self._hidden:
            self._hidden.pop(0).show()
        if self._waiting or self._unplaced or self._hidden:
            self._next.start()

    def show_all(self) -> None:
        """Show all steps again, including new ones."""
        self.steps = None
        self._update_spans()

    def _span(self) -> tuple[float, float]:
        if self.steps:
            return self.steps
        last = max((run.series.loss.steps[-1] for run in self._runs if run.series.loss), default=1.0)
        return 0.0, max(1.0, last) * _RIGHT_MARGIN

    def _on_moved(self, chart: Chart, first: float, last: float) -> None:
        """Change the visible steps: at once in the chart that the user moved, soon after in the others."""
        furthest = (
            max((run.series.loss.steps[-1] for run in self._runs if run.series.loss), default=1.0) * _RIGHT_MARGIN
        )
        width = min(max(last - first, 4.0), furthest)
        first = min(max(0.0, first), furthest - width)
        self.steps = None if width >= furthest else (first, first + width)
        chart.show_steps(*self._span())
        if not self._follow.isActive():
            self._follow.start()

    def _update_spans(self) -> None:
        for chart in self._made:
            if not chart.isHidden():
                chart.show_steps(*self._span())

    def _by_step(self, title: str, words: Wording) -> Chart:
        """Create a chart with a step axis, which pans and zooms together with the others."""
        chart = self._placed(Chart(title, words))
        chart.moved.connect(lambda first, last: self._on_moved(chart, first, last))
        chart.reset.connect(self.show_all)
        self._made.append(chart)
        return chart

    def _placed(self, chart: Chart) -> Chart:
        chart.setParent(self)
        chart.hide()
        chart.setMinimumHeight(_SMALL)
        retain_size(chart)
        return chart

    def _draw_gpu(self) -> None:
        watch = self._gpu
        if len(watch.load) > 1:
            self.gpu_chart.show_steps(watch.load.steps[0], watch.load.steps[-1])
            self.gpu_chart.draw(gpu_spec(watch))

    def _arrange(self, charts: tuple[Chart, ...]) -> None:
        """Place these charts in the grid and hide all others; a chart that is alone in its row gets the full width."""
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
    """Format seconds as minutes and seconds (M:SS)."""
    minutes, rest = divmod(round(value), 60)
    return f"{QLocale().toString(minutes)}:{rest:02d}"
