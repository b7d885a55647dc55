"""Charts of the dataset, painted with QPainter in the theme's colors.

QPainter draws a few dozen bars instantly and sharply at any scale. A chart library would not support the theme, the
keyboard and screen readers.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import log2

from PySide6.QtCore import QEvent, QLocale, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFocusEvent, QHelpEvent, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.core.health.charts import Bar, SizeCell
from app.core.health.groups import TOKEN_MARKS
from app.qt.theme import colors

_SIDE = 10
_FORWARD = (Qt.Key.Key_Down, Qt.Key.Key_Right)
_BACK = (Qt.Key.Key_Up, Qt.Key.Key_Left)


class HealthChart(QWidget):
    """Base class for charts with parts that can be selected: bars, columns or cells.

    Arrow keys make the next or previous part the current one; Enter selects the current part, a click the clicked one.
    """

    chosen = Signal(object)
    """The user selected a part; the argument is the set of its image ids."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.current = -1
        self._hovered = -1
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setAccessibleName(name)

    def parts(self) -> list[tuple[QRectF, str, Set[int]]]:
        """Return the clickable rectangle, text and image ids of each part."""
        raise NotImplementedError

    def step(self, by: int) -> None:
        """Move forward or back by this many parts, stopping at the first and the last."""
        parts = self.parts()
        if parts:
            self.current = min(max(self.current + by, 0), len(parts) - 1)
            self.setAccessibleDescription(parts[self.current][1])
            self.update()

    def choose(self, number: int) -> None:
        """Select a part."""
        parts = self.parts()
        if 0 <= number < len(parts):
            self.current = number
            self.setAccessibleDescription(parts[number][1])
            self.chosen.emit(frozenset(parts[number][2]))
            self.update()

    def part_at(self, place: QPointF) -> int:
        """Return the index of the part at a point; -1 if there is none."""
        return next((number for number, part in enumerate(self.parts()) if part[0].contains(place)), -1)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Move between parts, or select one."""
        if event.key() in _FORWARD:
            self.step(1)
        elif event.key() in _BACK:
            self.step(-1)
        elif event.key() == Qt.Key.Key_Home:
            self.step(-self.current)
        elif event.key() == Qt.Key.Key_End:
            self.step(len(self.parts()))
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.choose(self.current)
        else:
            super().keyPressEvent(event)

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Select the clicked part."""
        self.choose(self.part_at(event.position()))

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Highlight the part under the pointer."""
        under = self.part_at(event.position())
        if under != self._hovered:
            self._hovered = under
            self.update()

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        """Remove the highlight."""
        self._hovered = -1
        self.update()

    def focusInEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """If no part is current, make the first one current."""
        if self.current < 0:
            self.step(1)
        super().focusInEvent(event)

    def event(self, event: QEvent) -> bool:
        """Show a tooltip for the part under the pointer."""
        if isinstance(event, QHelpEvent):
            number = self.part_at(QPointF(event.pos()))
            QToolTip.showText(event.globalPos(), self.parts()[number][1] if number >= 0 else "", self)
            return True
        return super().event(event)

    def color(self, number: int) -> QColor:
        """Return the color of a part."""
        scheme = colors()
        return QColor(
            scheme.focus if number in (self._hovered, self.current) and self._marks(number) else scheme.accent
        )

    def ring(self, painter: QPainter) -> None:
        """Draw the focus ring around the current part."""
        parts = self.parts()
        if self.hasFocus() and 0 <= self.current < len(parts):
            painter.setPen(QPen(QColor(colors().focus), 2.0))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(parts[self.current][0].adjusted(1, 1, -1, -1), 3, 3)

    def _marks(self, number: int) -> bool:
        return number == self._hovered or self.hasFocus()

    def part_text(self, label: str, images: int) -> str:
        """Return the text of a part: label and number of images."""
        return f"{label}: " + self.tr("%n image(s)", "", images)


class BarChart(HealthChart):
    """Chart of horizontal bars, for buckets and tags."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(name, parent)
        self.bars: Sequence[Bar] = ()

    def show_bars(self, bars: Sequence[Bar]) -> None:
        """Replace the bars."""
        self.bars = bars
        self.setMinimumHeight(self._pitch() * len(bars) + 8)
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size that shows all rows."""
        return QSize(200, self._pitch() * len(self.bars) + 8)

    def parts(self) -> list[tuple[QRectF, str, Set[int]]]:
        """Return one part per bar; its rectangle is the bar's whole row, including the label."""
        pitch = self._pitch()
        return [
            (QRectF(0, 4 + row * pitch, self.width(), pitch), self.part_text(bar.label, bar.images), bar.ids)
            for row, bar in enumerate(self.bars)
        ]

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the label, bar and number in each row."""
        painter, scheme, metrics = QPainter(self), colors(), self.fontMetrics()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        number = QLocale().toString
        most = max((bar.images for bar in self.bars), default=1)
        label = min(
            max((metrics.horizontalAdvance(bar.label) + 2 for bar in self.bars), default=0), self.width() // 2 - 20
        )
        count = metrics.horizontalAdvance(number(most))
        start, room = _SIDE + label + 8, self.width() - 2 * _SIDE - label - count - 16
        for place, (bar, (row, _, _)) in enumerate(zip(self.bars, self.parts(), strict=True)):
            if not row.intersects(QRectF(event.rect())):
                continue
            painter.setPen(QColor(scheme.text))
            text = metrics.elidedText(bar.label, Qt.TextElideMode.ElideRight, label)
            painter.drawText(row.adjusted(_SIDE, 0, 0, 0), _LEFT, text)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(self.color(place))
            length = max(room * bar.images / most, 2.0)
            painter.drawRoundedRect(QRectF(start, row.top() + 5, length, row.height() - 10), 2, 2)
            painter.setPen(QColor(scheme.muted))
            painter.drawText(QRectF(start + length + 6, row.top(), count + 8, row.height()), _LEFT, number(bar.images))
        self.ring(painter)
        painter.end()

    def _pitch(self) -> int:
        return self.fontMetrics().height() + 9


class ColumnChart(HealthChart):
    """Histogram of caption lengths, with a mark at the end of each chunk of tokens."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(name, parent)
        self.bars: Sequence[Bar] = ()
        self.read = TOKEN_MARKS[0]
        """Token limit; columns beyond it are painted as truncated."""
        self.setMinimumHeight(120)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    def show_bars(self, bars: Sequence[Bar], read: int) -> None:
        """Replace the columns and the token limit."""
        self.bars, self.read = bars, read
        self.update()

    def parts(self) -> list[tuple[QRectF, str, Set[int]]]:
        """Return one part per column; its rectangle is as high as the chart, however short the column."""
        field = self._field()
        wide = field.width() / max(len(self.bars), 1)
        return [
            (
                QRectF(field.left() + place * wide, field.top(), wide, field.height()),
                self.part_text(self.tr("{range} tokens").format(range=bar.label), bar.images),
                bar.ids,
            )
            for place, bar in enumerate(self.bars)
        ]

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint columns, axis and marks."""
        painter, scheme, field = QPainter(self), colors(), self._field()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        most = max((bar.images for bar in self.bars), default=0) or 1
        painter.setPen(Qt.PenStyle.NoPen)
        for place, (bar, (whole, _, _)) in enumerate(zip(self.bars, self.parts(), strict=True)):
            if bar.images:
                high = max(whole.height() * bar.images / most, 2.0)
                cut = bar.value >= self.read
                painter.setBrush(QColor(scheme.warning) if cut and place != self._hovered else self.color(place))
                painter.drawRect(QRectF(whole.left() + 1, whole.bottom() - high, max(whole.width() - 2, 1), high))
        painter.setPen(QColor(scheme.edge))
        painter.drawLine(field.bottomLeft(), field.bottomRight())
        self._marks_of(painter, field)
        painter.setPen(QColor(scheme.muted))
        painter.drawText(QRectF(_SIDE, 0, self.width(), field.top()), _LEFT, QLocale().toString(most))
        self.ring(painter)
        painter.end()

    def _marks_of(self, painter: QPainter, field: QRectF) -> None:
        """Paint a line at the end of each chunk, solid at the token limit and dashed elsewhere."""
        step = self.bars[1].value if len(self.bars) > 1 else 1.0
        for mark in TOKEN_MARKS:
            x = field.left() + field.width() * mark / (step * max(len(self.bars), 1))
            if x > field.right() + 1:
                continue
            read = mark == self.read
            painter.setPen(
                QPen(
                    QColor(colors().text if read else colors().edge),
                    1.5 if read else 1.0,
                    Qt.PenStyle.SolidLine if read else Qt.PenStyle.DashLine,
                )
            )
            painter.drawLine(QPointF(x, field.top()), QPointF(x, field.bottom()))
            painter.setPen(QColor(colors().text if read else colors().muted))
            painter.drawText(QRectF(x - 24, field.bottom() + 2, 48, 20), int(Qt.AlignmentFlag.AlignHCenter), str(mark))

    def _field(self) -> QRectF:
        line = self.fontMetrics().height()
        return QRectF(_SIDE, line + 4, self.width() - 2 * _SIDE - 4, max(self.height() - 2 * line - 14, 10))


class SizeMap(HealthChart):
    """Chart of image widths and heights on log2 axes; images below the line have too small an area."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(name, parent)
        self.cells: Sequence[SizeCell] = ()
        self.resolution = 1024
        self.setMinimumHeight(160)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    def show_cells(self, cells: Sequence[SizeCell], resolution: int) -> None:
        """Replace the cells; `resolution` squared is the minimum area of an image."""
        self.cells = sorted(cells, key=lambda cell: (cell.left, cell.top))
        self.resolution = resolution
        self.update()

    def parts(self) -> list[tuple[QRectF, str, Set[int]]]:
        """Return one part per cell, at the cell's position in the chart."""
        return [(self._place(cell), self.part_text(_bounds(cell), len(cell.ids)), cell.ids) for cell in self.cells]

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the grid, the cells and the line that marks the minimum area."""
        painter, scheme, field = QPainter(self), colors(), self._field()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        low, high = self._range()
        for power in range(int(low), int(high) + 1):
            spot = self._point(2.0**power, 2.0**power)
            painter.setPen(QColor(scheme.line))
            painter.drawLine(QPointF(spot.x(), field.top()), QPointF(spot.x(), field.bottom()))
            painter.drawLine(QPointF(field.left(), spot.y()), QPointF(field.right(), spot.y()))
            painter.setPen(QColor(scheme.muted))
            painter.drawText(QRectF(spot.x() - 30, field.bottom() + 2, 60, 20), _CENTER, str(2**power))
            painter.drawText(QRectF(0, spot.y() - 10, field.left() - 6, 20), _RIGHT, str(2**power))
        most = max((len(cell.ids) for cell in self.cells), default=1)
        painter.setPen(Qt.PenStyle.NoPen)
        for place, (whole, _, ids) in enumerate(self.parts()):
            color = self.color(place)
            color.setAlphaF(0.35 + 0.65 * len(ids) / most)
            painter.setBrush(color)
            painter.drawRoundedRect(whole.adjusted(0.5, 0.5, -0.5, -0.5), 2, 2)
        self._paint_area_line(painter, field)
        self.ring(painter)
        painter.end()

    def _paint_area_line(self, painter: QPainter, field: QRectF) -> None:
        """Paint the line of all sizes whose area equals the resolution squared."""
        painter.setClipRect(field)  # the line's ends are outside the chart
        painter.setPen(QPen(QColor(colors().warning), 1.5))
        low, _ = self._range()
        area = 2 * log2(self.resolution)  # on log axes, width * height = constant is a straight line
        painter.drawLine(self._point(2.0**low, 2 ** (area - low)), self._point(2.0 ** (area - low), 2.0**low))
        painter.setClipping(False)

    def _range(self) -> tuple[float, float]:
        """Return the ends of both axes: log2 of the smallest and the largest side that is shown."""
        sides = [side for cell in self.cells for side in (cell.left, cell.right, cell.top, cell.bottom)]
        sides += [self.resolution / 2, self.resolution * 2]
        return float(int(log2(min(sides)))), float(int(log2(max(sides)) + 0.999))

    def _point(self, width: float, height: float) -> QPointF:
        field, (low, high) = self._field(), self._range()
        span = max(high - low, 1.0)
        across, up = (log2(width) - low) / span, (log2(height) - low) / span
        return QPointF(field.left() + across * field.width(), field.bottom() - up * field.height())

    def _place(self, cell: SizeCell) -> QRectF:
        return QRectF(self._point(cell.left, cell.bottom), self._point(cell.right, cell.top))

    def _field(self) -> QRectF:
        line = self.fontMetrics().height()
        left = self.fontMetrics().horizontalAdvance("4096") + _SIDE + 6
        return QRectF(left, 8, max(self.width() - left - 2 * _SIDE, 10), max(self.height() - line - 18, 10))


def _bounds(cell: SizeCell) -> str:
    return f"{cell.left:.0f} – {cell.right:.0f} × {cell.top:.0f} – {cell.bottom:.0f}"


_LEFT = int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
_RIGHT = int(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
_CENTER = int(Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop)
