"""Memory of a run: measured against forecast in every phase, and what holds a peak. Imports numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from PySide6.QtCore import QLocale, QPointF, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QGridLayout, QLabel, QVBoxLayout, QWidget

from app.core.runs.curves import Values, arrays, peaks
from app.core.runs.run import Run
from app.core.runs.series import MemoryTrack
from app.qt.theme import colors
from app.qt.train import words
from app.qt.train.forecast.charts import PeakMark, Timeline
from app.qt.train.forecast.lists import KindTable
from app.qt.widgets import format_memory
from trainer.protocol.forecast import Forecast, ForecastPhase

_MARGIN = 1.02


class MeasuredTimeline(Timeline):
    """Forecast memory over the phases of a run, with lines of what was measured.

    Training has its steps from left to right; other phases have their measurements in order.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._tracks: Mapping[ForecastPhase, MemoryTrack] = {}
        self._steps = 1

    def show_run(self, forecast: Forecast, tracks: Mapping[ForecastPhase, MemoryTrack], steps: int) -> None:
        """Show a run of so many steps; the selected peak stays if the forecast is the same."""
        self._tracks, self._steps = tracks, max(steps, 1)
        if forecast is not self._forecast:
            self.show_forecast(forecast)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the forecast, then the measured lines."""
        super().paintEvent(event)
        if self._forecast is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setClipRect(self._field())
        for phase, left, width in self._columns():
            track = self._tracks.get(phase.phase)
            if track is not None:
                last = self._steps if phase.phase == "train" else 0
                for line, style in ((track.reserved, Qt.PenStyle.DotLine), (track.allocated, Qt.PenStyle.SolidLine)):
                    painter.setPen(QPen(QColor(colors().series2), 2, style))
                    painter.drawPolyline(self._points(*arrays(line), left, width, last))
        painter.end()

    def _top(self) -> int:
        """Return the bytes at the upper edge, at least the most that was measured."""
        measured = (track.peak_reserved for track in self._tracks.values())
        return round(max(super()._top(), _MARGIN * max(measured, default=0)))

    def _points(self, steps: Values, values: Values, left: float, width: float, last: int) -> list[QPointF]:
        """Return a line's points in a phase's column; `last` is the phase's last step, or 0 to fill the column."""
        known = np.isfinite(values)
        steps, values = steps[known], values[known]
        if len(values) == 1 and not last:
            steps, values = np.array([0.0, 1.0]), np.repeat(values, 2)
        end = float(last) if last else float(steps[-1]) if len(steps) else 1.0
        steps, values = peaks(steps, values, 0.0, end, max(int(width), 1))
        across = left + width * steps / max(end, 1e-9)
        return [QPointF(x, self._height_of(y)) for x, y in zip(across.tolist(), values.tolist(), strict=True)]


class MemoryTable(QWidget):
    """Table of the peaks of each phase: measured, forecast and their difference, in use and reserved."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows: list[list[str]] = []
        """Texts of each row below the headings."""
        self.setAccessibleName(self.tr("Measured and forecast memory of each phase"))
        self._labels: list[list[QLabel]] = []
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(16)
        self._grid.setVerticalSpacing(3)
        self._grid.setColumnStretch(8, 1)
        forecast = self.tr("Forecast")
        self._add(0, ["", self.tr("Phase"), self.tr("In use"), forecast, "", self.tr("Reserved"), forecast, ""])

    def show_run(self, forecast: Forecast, tracks: Mapping[ForecastPhase, MemoryTrack]) -> None:
        """Show the phases of a forecast and what has been measured in each."""
        rows = list(_rows(forecast, tracks))
        if rows == self.rows:
            return
        self.rows = rows
        while len(self._labels) < len(rows):
            self._labels.append(self._add(len(self._labels) + 1, rows[len(self._labels)]))
        for labels, texts in zip(self._labels, [*rows, *([[""] * 8] * len(self._labels))], strict=False):
            for label, text in zip(labels, texts, strict=True):
                label.setText(text)
                label.setVisible(bool(texts[0]))

    def _add(self, row: int, texts: list[str]) -> list[QLabel]:
        labels = [QLabel(text) for text in texts]
        for column, label in enumerate(labels):
            label.setTextFormat(Qt.TextFormat.PlainText)
            if row == 0 or column in (0, 3, 4, 6, 7):
                label.setProperty("role", "muted")
            side = Qt.AlignmentFlag(0) if column == 1 else Qt.AlignmentFlag.AlignRight
            self._grid.addWidget(label, row, column, side | Qt.AlignmentFlag.AlignVCenter)
        return labels


def _rows(forecast: Forecast, tracks: Mapping[ForecastPhase, MemoryTrack]) -> Iterator[list[str]]:
    for number, phase in enumerate(forecast.phases, start=1):
        track = tracks.get(phase.phase)
        # A run that fits frees cached blocks to stay within the budget.
        reserved = min(phase.reserved, forecast.budget) if forecast.fits else phase.reserved
        in_use = _compared(track.peak_allocated if track else None, phase.allocated)
        yield [
            str(number),
            words.phase_name(phase.phase),
            *in_use,
            *_compared(track.peak_reserved if track else None, reserved),
        ]


def _compared(measured: float | None, forecast: int) -> tuple[str, str, str]:
    """Return the measured bytes, the forecast and their difference in percent as texts.

    Nothing is measured in a phase that has not run or had nothing to do, such as encoding images that are in the cache.
    """
    if not measured:
        return "–", format_memory(forecast), ""
    difference = round(100 * (measured - forecast) / max(forecast, 1), 1) or 0.0  # never -0.0
    sign = "+" if difference > 0 else ""
    return format_memory(round(measured)), format_memory(forecast), f"{sign}{QLocale().toString(difference, 'f', 1)}%"


class RunMemory(QWidget):
    """Section of the Progress tab about the GPU memory of one run; hidden without a forecast or measurements."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.key, self.marker = QLabel(), QLabel()
        self.timeline, self.kinds, self.table = MeasuredTimeline(), KindTable(), MemoryTable()
        title, holders = QLabel(self.tr("Memory by phase")), QLabel(self.tr("At the selected peak, as forecast"))
        for heading in (title, holders):
            heading.setProperty("role", "heading")
        self.key.setProperty("role", "muted")
        for label in (self.key, self.marker):
            label.setTextFormat(Qt.TextFormat.PlainText)
            label.setWordWrap(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 8, 16, 16)
        column.setSpacing(6)
        for part in (title, self.timeline, self.key, self.table, holders, self.marker, self.kinds):
            column.addWidget(part)
        self._of_peak = (holders, self.marker)
        self.timeline.pointed.connect(self._show_peak)
        self.hide()

    def show_run(self, run: Run | None) -> None:
        """Show a run's memory, or nothing for None."""
        forecast = run.forecast if run else None
        if run is None or forecast is None or forecast.on_cpu or not run.series.phase_memory:
            self.hide()
            return
        self.timeline.show_run(forecast, run.series.phase_memory, run.summary.steps)
        self.table.show_run(forecast, run.series.phase_memory)
        key = self.tr(
            "Area: forecast in use. Gray: forecast reserved. Line: measured in use. Dotted: measured reserved."
        )
        self.key.setText(f"{key} {self.tr('Dashed: limit.')}" if self.timeline.shows_limit else key)
        self.show()

    def _show_peak(self, spot: PeakMark | None) -> None:
        """Show what holds the memory at a peak of the forecast."""
        for part in self._of_peak:
            part.setVisible(spot is not None)
        self.marker.setText(words.peak_name(spot.phase, spot.peak) if spot else "")
        self.kinds.show_peak(spot.peak if spot else None)
