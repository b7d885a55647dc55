"""Window with the configurations that fill a GPU best: a chart of memory against time, and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from PySide6.QtCore import QCoreApplication, QLocale, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QCloseEvent, QColor, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QSizePolicy, QVBoxLayout, QWidget

from app.core.planning.forecaster import ForecastRequest
from app.core.planning.sweeper import Sweeper
from app.core.session import Session
from app.core.words import full_message
from app.qt.tables import Row, Table
from app.qt.theme import colors
from app.qt.widgets import QT_TRANSLATE_NOOP, close_row, format_memory, plain_label, set_message
from trainer.protocol.sweep import Sweep, SweepPoint, round_numbers

_BASES = {
    "none": QT_TRANSLATE_NOOP("Sweep", "16 bits"),
    "int8": QT_TRANSLATE_NOOP("Sweep", "int8"),
    "int8_products": QT_TRANSLATE_NOOP("Sweep", "int8 products"),
    "nf4": QT_TRANSLATE_NOOP("Sweep", "NF4"),
}
_SERIES = ("series1", "series2", "series3", "series4", "series5", "series6")
_HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT, _DOT = 280, 64, 44, 20, 60, 4.0


class SweepChart(QWidget):
    """Chart of memory against time per image; each resolution has a color, and its Pareto front is a line."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.found: Sweep | None = None
        self.selected: SweepPoint | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(self.tr("Memory in use against time per image; the table has the same numbers"))

    def show_sweep(self, found: Sweep) -> None:
        """Show the configurations of a sweep."""
        self.found = found
        self.update()

    def select(self, point: SweepPoint | None) -> None:
        """Mark one configuration, or none."""
        self.selected = point
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the preferred size, a wide strip."""
        return QSize(560, _HEIGHT)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return a minimum size that is narrower than the preferred size, but as high."""
        return QSize(320, _HEIGHT)

    def place_of(self, point: SweepPoint) -> QPointF:
        """Return where a configuration is drawn."""
        assert self.found is not None
        inside = self._inside()
        up = point.allocated / self.found.budget
        return QPointF(self._column(point.seconds_per_image), inside.bottom() - up * inside.height())

    def _column(self, seconds: float) -> float:
        """Return where a time is drawn, on a logarithmic scale."""
        low, high = map(math.log, self._span())
        inside = self._inside()
        return inside.left() + (math.log(seconds) - low) / (high - low) * inside.width()

    def _span(self) -> tuple[float, float]:
        """Return the shortest and the longest time on the axis."""
        assert self.found is not None
        times = [each.seconds_per_image for each in (*self.found.points, *self.found.others)]
        return min(times) / 1.2, max(times) * 1.2

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw axes, fronts and points."""
        if self.found is None or not self.found.points:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        self._draw_axes(painter, self.found.budget)
        points = [*self.found.others, *self.found.points]
        sides = sorted({point.resolution for point in points})
        for place, side in enumerate(sides):
            color = QColor(getattr(colors(), _SERIES[place % len(_SERIES)]))
            self._draw_series(painter, [point for point in points if point.resolution == side], color)
        painter.end()

    def _inside(self) -> QRectF:
        return QRectF(self.rect()).adjusted(_LEFT, _TOP, -_RIGHT, -_BOTTOM)

    def _draw_axes(self, painter: QPainter, budget: int) -> None:
        inside, scheme = self._inside(), colors()
        for share in range(5):
            row = inside.bottom() - share / 4 * inside.height()
            painter.setPen(QColor(scheme.edge if share in (0, 4) else scheme.line))
            painter.drawLine(QPointF(inside.left(), row), QPointF(inside.right(), row))
            painter.setPen(QColor(scheme.muted))
            label = QRectF(0, row - 10, _LEFT - 8, 20)
            painter.drawText(
                label, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, format_memory(budget * share / 4)
            )
        for seconds in round_numbers(*self._span()):
            below = QRectF(self._column(seconds) - 40, inside.bottom() + 4, 80, _BOTTOM / 2)
            painter.drawText(below, Qt.AlignmentFlag.AlignHCenter, format_seconds(seconds))
        below = QRectF(inside.left(), inside.bottom() + _BOTTOM / 2, inside.width(), _BOTTOM / 2)
        painter.drawText(below, Qt.AlignmentFlag.AlignHCenter, self.tr("Time per image"))

    def _draw_series(self, painter: QPainter, points: Sequence[SweepPoint], color: QColor) -> None:
        front = sorted((point for point in points if point.front), key=lambda point: point.allocated)
        painter.setPen(QPen(color, 1.5))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawPolyline(QPolygonF([self.place_of(point) for point in front]))
        for point in points:
            shown, chosen = point.reserved is not None, point == self.selected
            painter.setBrush(color if shown else Qt.BrushStyle.NoBrush)
            reach = _DOT * (2.0 if chosen else 1.0 if shown else 0.6)
            painter.drawEllipse(self.place_of(point), reach, reach)
        painter.drawText(self.place_of(front[0]) + QPointF(6, 4), str(front[0].resolution))


class SweepDialog(QDialog):
    """Non-modal window about a job on a GPU; `applied` emits the settings of the configuration that the user takes."""

    applied = Signal(object)
    """Emits the selected SweepPoint."""

    def __init__(self, session: Session, request: ForecastRequest, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.sweeper = Sweeper(session.tasks.post)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(self.tr("Settings that fill the GPU"))
        self.setSizeGripEnabled(True)
        self.resize(980, 720)
        self.state, self.notes, self.chart = plain_label("muted"), plain_label("muted"), SweepChart()
        titles = (
            self.tr("Reserved"), self.tr("Batch"), self.tr("Resolution"), self.tr("Rank"), self.tr("Base"),
            self.tr("Checkpointing"), self.tr("Optimizer"), self.tr("Per image"), self.tr("Filled"),
        )  # fmt: skip
        self.table = Table(titles, self.tr("Configurations, the one that fills the GPU best first"))
        buttons = close_row(self)
        self.take = buttons.addButton(self.tr("Use in this job"), QDialogButtonBox.ButtonRole.ActionRole)
        self.take.setAutoDefault(False)
        self.take.setEnabled(False)
        self.take.clicked.connect(self._on_take)
        self.table.selectionModel().currentChanged.connect(lambda *_: self._on_selected())
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 16, 16, 12)
        column.setSpacing(12)
        for widget in (self.state, self.chart, self.table, self.notes):
            column.addWidget(widget, 1 if widget is self.table else 0)
        column.addStretch()  # keeps the buttons at the bottom while there is no table
        column.addWidget(buttons)
        for hidden in (self.chart, self.table, self.notes):
            hidden.hide()
        self._disconnect: Callable[[], None] = self.sweeper.changed.connect(lambda _: self._renew())
        self.sweeper.ask(request)

    @property
    def selected(self) -> SweepPoint | None:
        """Return the selected configuration, or None."""
        row, found = self.table.currentIndex().row(), self.sweeper.found
        return found.points[row] if found is not None and 0 <= row < len(found.points) else None

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        """Stop the search."""
        self._stop()
        super().closeEvent(event)

    def done(self, result: int) -> None:
        """Stop the search: Escape closes a dialog without a close event."""
        self._stop()
        super().done(result)

    def _stop(self) -> None:
        self._disconnect()
        self._disconnect = lambda: None
        self.sweeper.close()

    def _renew(self) -> None:
        sweeper = self.sweeper
        if sweeper.error is not None:
            set_message(self.state, full_message(sweeper.error), "bad")
            return
        waiting = {
            "asked": self.tr("Starting the planner…"),
            "reading": self.tr("Reading images and captions…"),
            "tracing": self.tr("Computing new settings, up to half a minute…"),
        }
        set_message(self.state, waiting.get(sweeper.state, ""), "muted")
        if sweeper.found is not None:
            self._show(sweeper.found)

    def _show(self, found: Sweep) -> None:
        set_message(self.state, summary(found), "muted" if found.points else "bad")
        set_message(self.notes, notes(found))
        if not found.points:
            return
        self.table.show_rows([row_of(point) for point in found.points])
        self.chart.show_sweep(found)
        self.chart.show()
        self.table.show()
        self.table.setCurrentIndex(self.table.lines.index(0, 0))

    def _on_selected(self) -> None:
        self.chart.select(self.selected)
        self.take.setEnabled(self.selected is not None)

    def _on_take(self) -> None:
        self.applied.emit(self.selected)


def summary(found: Sweep) -> str:
    """Return how many configurations were computed and skipped, or that there are none."""
    if not found.computed:
        return QCoreApplication.translate("Sweep", "No configuration could be computed.")
    if not found.points:
        return QCoreApplication.translate("Sweep", "No configuration fits.")
    words = QCoreApplication.translate(
        "Sweep",
        "{computed} combinations computed, {skipped} skipped because a smaller one is too large or a larger batch "
        "fits.",
    )
    locale = QLocale()
    return words.format(computed=locale.toString(found.computed), skipped=locale.toString(found.skipped))


def notes(found: Sweep) -> str:
    """Return what the figures do not include."""
    words = [
        QCoreApplication.translate(
            "Sweep",
            "Memory of training, with the whole batch at once. The forecast of a job also includes encoding, "
            "validation and previews. Lines: the fastest configurations of a resolution for their memory.",
        )
    ]
    if found.left_out:
        missing = dict.fromkeys(QCoreApplication.translate("Sweep", _BASES[bits]) for bits, _ in found.left_out)
        incomplete = QCoreApplication.translate(
            "Sweep", "Incomplete for a base in {bases}: open this window again to add more."
        )
        words.append(incomplete.format(bases=", ".join(missing)))
    return " ".join(words)


def row_of(point: SweepPoint) -> Row:
    """Return the table row of a configuration; its bar is the share of the usable memory."""
    blocks = point.gradient_checkpointing
    checkpointing = {
        "none": QCoreApplication.translate("Sweep", "none"),
        "full": QCoreApplication.translate("Sweep", "all blocks"),
    }
    texts = (
        format_memory(point.reserved or point.allocated),
        str(point.batch),
        str(point.resolution),
        str(point.rank),
        QCoreApplication.translate("Sweep", _BASES[point.quantize]),
        checkpointing[blocks] if isinstance(blocks, str) else QCoreApplication.translate("Sweep", "some blocks"),
        point.optimizer,
        format_seconds(point.seconds_per_image),
        f"{point.fill:.0%}",
    )
    return Row(texts, point.fill)


def format_seconds(seconds: float) -> str:
    """Return a short time as text with three digits."""
    return QCoreApplication.translate("Sweep", "{seconds} s").format(seconds=QLocale().toString(seconds, "g", 3))
