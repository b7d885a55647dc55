"""Charts of the forecast panel: memory over the phases of a run, and memory at the peak."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QCoreApplication, QEvent, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QBrush,
    QColor,
    QFocusEvent,
    QHelpEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QPolygonF,
)
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.core.planning.answer import AnsweredPlan, PlanAnswer
from app.qt.theme import colors
from app.qt.train import words
from app.qt.widgets import plain_tip
from trainer.protocol.forecast import Forecast, Peak, PhaseForecast

_HEIGHT, _NUMBERS, _MARGIN, _DOT = 132, 18, 4, 3
# Relative widths: training is widest, and phases without memory of their own are narrow.
_WEIGHTS = {"train": 3.0, "first_step": 2.0, "checkpoint": 0.5, "save": 0.5}

# A limit above this multiple of the needed memory is not drawn, because it would flatten the curve of a small job.
_NEAR = 4.0
_ROOM = 1.15
KINDS = {
    "weights": "series1",
    "activations": "series2",
    "adapter": "series3",
    "optimizer": "series4",
    "gradients": "series5",
    "temporary": "series6",
    "workspace": "muted",
}
"""Kinds of memory, in the order of their segments in the memory bar, with their color roles."""


@dataclass(frozen=True, slots=True)
class PeakMark:
    """Memory peak of a phase, and the index of its sample in the phase's timeline."""

    phase: PhaseForecast
    peak: Peak
    sample: int


class Timeline(QWidget):
    """Chart of memory over time; arrow keys and the mouse select a peak, and `pointed` emits its PeakMark or None."""

    pointed = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.spots: list[PeakMark] = []
        self.current: int | None = None
        self._forecast: Forecast | None = None
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(self.tr("Memory over the run; arrow keys move between peaks"))

    def show_forecast(self, forecast: Forecast) -> None:
        """Show the phases of a forecast and select the highest peak."""
        self._forecast = forecast
        self.spots = [spot for phase in forecast.phases for spot in _spots(phase)]
        highest = [i for i, spot in enumerate(self.spots) if spot.phase is forecast.decisive]
        self.point(max(highest, key=lambda i: self.spots[i].peak.allocated) if highest else None)
        self.update()

    @property
    def shows_limit(self) -> bool:
        """Return whether the limit is drawn; it is omitted if the job needs much less memory."""
        return self._forecast is not None and self._forecast.budget <= _NEAR * self._forecast.reserved

    def point(self, index: int | None) -> None:
        """Select the peak at this index, or no peak for None, and emit `pointed`."""
        self.current = index
        spot = None if index is None else self.spots[index]
        self.setAccessibleDescription(spot.peak.name if spot else "")
        self.pointed.emit(spot)
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the preferred size, a wide strip."""
        return QSize(320, _HEIGHT)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return a minimum size that is narrower than the preferred size, but as high."""
        return QSize(200, _HEIGHT)

    # --- Qt's events

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Select the next or previous peak with the arrow keys; with no peak selected, the first or the last."""
        move = {Qt.Key.Key_Left: -1, Qt.Key.Key_Right: 1}.get(Qt.Key(event.key()))
        if move is None or not self.spots:
            super().keyPressEvent(event)
            return
        last = len(self.spots) - 1
        if self.current is None:
            self.point(0 if move > 0 else last)
        else:
            self.point(max(0, min(last, self.current + move)))

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Select the nearest peak."""
        self._point_near(event.position())

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Select the nearest peak, for touch screens, which cannot hover."""
        self._point_near(event.position())

    def focusInEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Show the focus ring."""
        super().focusInEvent(event)
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Hide the focus ring."""
        super().focusOutEvent(event)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint each phase's memory, then the limit and the peaks."""
        now, painter = colors(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        field = self._field()
        painter.fillRect(field, QColor(now.base))
        if self._forecast is not None:
            for number, (phase, left, width) in enumerate(self._columns(), start=1):
                self._paint_phase(painter, phase, left, width)
                painter.setPen(QColor(now.muted))
                place = QRectF(left, field.bottom() + 2, width, _NUMBERS)
                painter.drawText(place, Qt.AlignmentFlag.AlignCenter, str(number))
                painter.setPen(QPen(QColor(now.line), 1))
                painter.drawLine(QPointF(left + width, field.top()), QPointF(left + width, field.bottom()))
            if self.shows_limit:
                self._paint_limit(painter, self._forecast.budget)
            self._paint_spots(painter)
        painter.setBrush(Qt.BrushStyle.NoBrush)
        ring = QPen(QColor(now.focus), 2) if self.hasFocus() else QPen(QColor(now.edge), 1)
        painter.setPen(ring)
        painter.drawRect(field)

    # --- inside

    def _field(self) -> QRectF:
        return QRectF(1, 1, self.width() - 2, self.height() - _NUMBERS - 4)

    def _top(self) -> int:
        assert self._forecast is not None
        most = self._forecast.reserved
        return max(most, self._forecast.budget, 1) if self.shows_limit else round(_ROOM * most)

    def _height_of(self, size: float) -> float:
        field = self._field()
        return field.bottom() - size / self._top() * (field.height() - 2 * _MARGIN)

    def _columns(self) -> list[tuple[PhaseForecast, float, float]]:
        """Return each phase with its left edge and its width, in pixels."""
        assert self._forecast is not None
        phases, field = self._forecast.phases, self._field()
        every = sum(_WEIGHTS.get(phase.phase, 1.0) for phase in phases)
        found, left = [], field.left()
        for phase in phases:
            width = field.width() * _WEIGHTS.get(phase.phase, 1.0) / every
            found.append((phase, left, width))
            left += width
        return found

    def _paint_phase(self, painter: QPainter, phase: PhaseForecast, left: float, width: float) -> None:
        """Paint a phase's reserved memory and, in front of it, its memory in use."""
        now = colors()
        painter.setPen(Qt.PenStyle.NoPen)
        for column, role in ((1, "pressed"), (0, "series1")):
            corners = [QPointF(left, self._field().bottom())]
            for index, sample in enumerate(phase.timeline):
                start, end = (left + width * place / len(phase.timeline) for place in (index, index + 1))
                height = self._height_of(min(sample[column], self._top()))
                corners += [QPointF(start, height), QPointF(end, height)]
            corners.append(QPointF(left + width, self._field().bottom()))
            painter.setBrush(QColor(getattr(now, role)))
            painter.drawPolygon(QPolygonF(corners))

    def _paint_limit(self, painter: QPainter, budget: int) -> None:
        field, height = self._field(), self._height_of(budget)
        painter.setPen(QPen(QColor(colors().text), 1.5, Qt.PenStyle.DashLine))
        painter.drawLine(QPointF(field.left(), height), QPointF(field.right(), height))

    def _paint_spots(self, painter: QPainter) -> None:
        now = colors()
        order = sorted(range(len(self.spots)), key=lambda index: index == self.current)
        for index, spot in ((index, self.spots[index]) for index in order):
            chosen = index == self.current
            painter.setPen(QPen(QColor(now.text), 1.5))
            painter.setBrush(QColor(now.series2 if chosen else now.base))
            size = _DOT + 3 if chosen else _DOT
            painter.drawEllipse(self._place(spot), size, size)

    def _place(self, spot: PeakMark) -> QPointF:
        left, width = next((left, width) for phase, left, width in self._columns() if phase is spot.phase)
        across = left + width * (spot.sample + 0.5) / max(len(spot.phase.timeline), 1)
        return QPointF(across, self._height_of(spot.peak.allocated))

    def _point_near(self, place: QPointF) -> None:
        if self.spots:
            nearest = min(range(len(self.spots)), key=lambda i: abs(self._place(self.spots[i]).x() - place.x()))
            if nearest != self.current:
                self.point(nearest)


def _spots(phase: PhaseForecast) -> list[PeakMark]:
    """Return a mark for each peak of the phase, at the timeline sample whose memory is closest to the peak's.

    Each search starts at the previous peak's sample, so the marks are in chronological order.
    """
    found, start = [], 0
    for peak in phase.peaks:
        rest = range(start, len(phase.timeline))
        start = min(rest, key=lambda i: abs(phase.timeline[i][0] - peak.allocated), default=start)
        found.append(PeakMark(phase, peak, start))
    return found


_BAR, _LINE, _SWATCH, _GAP, _MARK = 26, 20, 10, 14, 7


@dataclass(frozen=True, slots=True)
class BarSegment:
    """One segment of the memory bar."""

    name: str
    bytes: int
    color: str
    """Color role, a field of `Colors`."""
    ours: bool = True
    """Whether the run itself uses this memory; other segments are hatched."""


def pieces(answer: PlanAnswer, plan: AnsweredPlan) -> list[BarSegment]:
    """Return the memory bar's segments at a plan's peak, from left to right, other programs' memory first."""
    found = [
        BarSegment(
            QCoreApplication.translate("Forecast", "Other programs"),
            answer.gpu.total - answer.gpu.free,
            "edge",
            ours=False,
        ),
        BarSegment(QCoreApplication.translate("Forecast", "CUDA"), plan.forecast.outside, "disabled"),
    ]
    phase = plan.decisive
    taken = plan.reserved(phase.reserved)
    if phase.peaks:
        kinds = max(phase.peaks, key=lambda one: one.allocated).by_kind
        found += [BarSegment(words.kind_name(kind), kinds.get(kind, 0), role) for kind, role in KINDS.items()]
        taken -= sum(kinds.get(kind, 0) for kind in KINDS)
    found.append(BarSegment(QCoreApplication.translate("Forecast", "Cache and rounding"), max(taken, 0), "pressed"))
    return [piece for piece in found if piece.bytes > 0]


class MemoryBar(QWidget):
    """Bar that shows GPU memory at the peak, with a mark at the limit and a legend below."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.pieces: list[BarSegment] = []
        self._total = self._limit = 0
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setAccessibleName(self.tr("GPU memory at the peak"))

    def show_plan(self, answer: PlanAnswer, plan: AnsweredPlan) -> None:
        """Show a plan's GPU memory."""
        gpu = answer.gpu
        self.pieces = pieces(answer, plan)
        self._limit = gpu.total - gpu.free + plan.forecast.outside + gpu.budget
        self._total = max(gpu.total, sum(piece.bytes for piece in self.pieces))
        texts = [f"{piece.name} {words.format_memory(piece.bytes)}" for piece in self.pieces]
        self.setAccessibleDescription(", ".join(texts))
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return a size with space for the legend at this width."""
        return QSize(240, self.heightForWidth(self.width()))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the minimum width, and the height for the current width."""
        return QSize(160, self.heightForWidth(self.width()))

    def heightForWidth(self, width: int) -> int:  # noqa: N802
        """Return the height of the bar, the mark and the legend."""
        return _BAR + 2 * _MARK + (self._legend(width)[-1][1] + _LINE if self.pieces else _LINE)

    def resizeEvent(self, event: object) -> None:  # noqa: N802
        """Update the layout, because the legend may need more or fewer lines."""
        super().resizeEvent(event)  # type: ignore[arg-type]
        self.updateGeometry()

    def event(self, event: QEvent) -> bool:
        """Show a tooltip for the segment under the pointer."""
        if isinstance(event, QHelpEvent):
            piece = self._at(event.pos().x())
            text = f"{piece.name}: {words.format_memory(piece.bytes)}" if piece else ""
            QToolTip.showText(event.globalPos(), plain_tip(text), self)
            return True
        return super().event(event)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the bar, the mark and the legend."""
        now, painter = colors(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        bar = QRectF(0.5, _MARK + 0.5, self.width() - 1, _BAR)
        painter.fillRect(bar, QColor(now.base))
        left = bar.left()
        for piece in self.pieces:
            width = piece.bytes * bar.width() / self._total
            painter.fillRect(QRectF(left, bar.top(), max(width - 1, 1), bar.height()), _brush(piece))
            left += width
        painter.setPen(QPen(QColor(now.edge), 1))
        painter.drawRect(bar)
        if self._total:
            self._paint_limit(painter, bar)
            self._paint_legend(painter)

    def _paint_limit(self, painter: QPainter, bar: QRectF) -> None:
        place = bar.left() + self._limit * bar.width() / self._total
        painter.setPen(QPen(QColor(colors().text), 2))
        painter.drawLine(QPointF(place, bar.top() - _MARK + 1), QPointF(place, bar.bottom() + _MARK - 1))

    def _paint_legend(self, painter: QPainter) -> None:
        now, top = colors(), _BAR + 2 * _MARK
        for piece, (left, line) in zip(self.pieces, self._legend(self.width()), strict=False):
            swatch = QRectF(left + 0.5, top + line + (_LINE - _SWATCH) / 2, _SWATCH, _SWATCH)
            painter.setPen(QPen(QColor(now.edge), 1))
            painter.setBrush(_brush(piece))
            painter.drawRect(swatch)
            self._paint_label(painter, left, top + line, self._label(piece))
        left, line = self._legend(self.width())[-1]
        painter.setPen(QPen(QColor(now.text), 2))
        painter.drawLine(left + _SWATCH // 2, top + line + 3, left + _SWATCH // 2, top + line + _LINE - 3)
        self._paint_label(painter, left, top + line, self._limit_label())

    def _paint_label(self, painter: QPainter, left: int, top: int, label: str) -> None:
        painter.setPen(QColor(colors().text))
        text = QRectF(left + _SWATCH + 6, top, self.width(), _LINE)
        painter.drawText(text, Qt.AlignmentFlag.AlignVCenter, label)

    def _legend(self, width: int) -> list[tuple[int, int]]:
        """Return the legend's label positions (left, top): one per segment, then the limit's."""
        places, left, top = [], 0, 0
        for label in (*map(self._label, self.pieces), self._limit_label()):
            needed = self.fontMetrics().horizontalAdvance(label) + _SWATCH + 6
            if left and left + needed > width:
                left, top = 0, top + _LINE
            places.append((left, top))
            left += needed + _GAP
        return places

    def _label(self, piece: BarSegment) -> str:
        return f"{piece.name} {words.format_memory(piece.bytes)}"

    def _limit_label(self) -> str:
        return self.tr("Limit {size}").format(size=words.format_memory(self._limit))

    def _at(self, place: int) -> BarSegment | None:
        share = 0.0
        for piece in self.pieces:
            share += piece.bytes / self._total
            if place <= share * self.width():
                return piece
        return None


def _brush(piece: BarSegment) -> QBrush:
    style = Qt.BrushStyle.SolidPattern if piece.ours else Qt.BrushStyle.BDiagPattern
    return QBrush(QColor(getattr(colors(), piece.color)), style)
