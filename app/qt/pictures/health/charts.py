"""The charts, painted with QPainter in the palette's colours.

They are a few dozen bars: QPainter shows them sharp at every scaling and in the moment, and no library would know the
palette, the keyboard and what a screen reader asks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import log2

from PySide6.QtCore import QEvent, QLocale, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFocusEvent, QHelpEvent, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.core.health.charts import Bar, SizeCell
from app.core.health.groups import TOKEN_MARKS
from app.qt.theme import colours

_SIDE = 10
_FORWARD = (Qt.Key.Key_Down, Qt.Key.Key_Right)
_BACK = (Qt.Key.Key_Up, Qt.Key.Key_Left)


class HealthChart(QWidget):
    """Parts that can be walked through by arrow keys and chosen by Enter or a click."""

    chosen = Signal(object)
    """The pictures of the part that was chosen: a set of ids."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.current = -1
        self._under = -1
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setAccessibleName(name)

    def parts(self) -> list[tuple[QRectF, str, Set[int]]]:
        """Return where each part stands, what it says, and its pictures."""
        raise NotImplementedError

    def step(self, by: int) -> None:
        """Go to another part."""
        parts = self.parts()
        if parts:
            self.current = min(max(self.current + by, 0), len(parts) - 1)
            self.setAccessibleDescription(parts[self.current][1])
            self.update()

    def choose(self, number: int) -> None:
        """Choose a part."""
        parts = self.parts()
        if 0 <= number < len(parts):
            self.current = number
            self.setAccessibleDescription(parts[number][1])
            self.chosen.emit(frozenset(parts[number][2]))
            self.update()

    def part_at(self, place: QPointF) -> int:
        """Return the part at a place, -1 where there is none."""
        return next((number for number, part in enumerate(self.parts()) if part[0].contains(place)), -1)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Walk and choose."""
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
        """Choose what is clicked."""
        self.choose(self.part_at(event.position()))

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Mark what is under the pointer."""
        under = self.part_at(event.position())
        if under != self._under:
            self._under = under
            self.update()

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        """Mark nothing."""
        self._under = -1
        self.update()

    def focusInEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Show where the keyboard is."""
        if self.current < 0:
            self.step(1)
        super().focusInEvent(event)

    def event(self, event: QEvent) -> bool:
        """Say what is under the pointer."""
        if isinstance(event, QHelpEvent):
            number = self.part_at(QPointF(event.pos()))
            QToolTip.showText(event.globalPos(), self.parts()[number][1] if number >= 0 else "", self)
            return True
        return super().event(event)

    def colour(self, number: int) -> QColor:
        """Return the colour of a part."""
        scheme = colours()
        return QColor(scheme.focus if number in (self._under, self.current) and self._marks(number) else scheme.accent)

    def ring(self, painter: QPainter) -> None:
        """Draw a ring round the part that has the keyboard."""
        parts = self.parts()
        if self.hasFocus() and 0 <= self.current < len(parts):
            painter.setPen(QPen(QColor(colours().focus), 2.0))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(parts[self.current][0].adjusted(1, 1, -1, -1), 3, 3)

    def _marks(self, number: int) -> bool:
        return number == self._under or self.hasFocus()

    def counted(self, label: str, pictures: int) -> str:
        """Return what a part says."""
        return f"{label}: " + self.tr("%n picture(s)", "", pictures)


class BarChart(HealthChart):
    """Bars from left to right, one below the other: buckets, tags."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(name, parent)
        self.bars: Sequence[Bar] = ()

    def show_bars(self, bars: Sequence[Bar]) -> None:
        """Show these."""
        self.bars = bars
        self.setMinimumHeight(self._pitch() * len(bars) + 8)
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return what all rows need."""
        return QSize(200, self._pitch() * len(self.bars) + 8)

    def parts(self) -> list[tuple[QRectF, str, Set[int]]]:
        """Return the rows."""
        pitch = self._pitch()
        return [
            (QRectF(0, 4 + row * pitch, self.width(), pitch), self.counted(bar.label, bar.pictures), bar.ids)
            for row, bar in enumerate(self.bars)
        ]

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw label, bar and number of each row."""
        painter, scheme, metrics = QPainter(self), colours(), self.fontMetrics()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        number = QLocale().toString
        most = max((bar.pictures for bar in self.bars), default=1)
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
            painter.setBrush(self.colour(place))
            length = max(room * bar.pictures / most, 2.0)
            painter.drawRoundedRect(QRectF(start, row.top() + 5, length, row.height() - 10), 2, 2)
            painter.setPen(QColor(scheme.muted))
            painter.drawText(
                QRectF(start + length + 6, row.top(), count + 8, row.height()), _LEFT, number(bar.pictures)
            )
        self.ring(painter)
        painter.end()

    def _pitch(self) -> int:
        return self.fontMetrics().height() + 9


class ColumnChart(HealthChart):
    """Bars side by side over an axis with marks: how long captions are."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(name, parent)
        self.bars: Sequence[Bar] = ()
        self.read = TOKEN_MARKS[0]
        """Tokens that are read; captions beyond them are drawn as cut."""
        self.setMinimumHeight(120)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    def show_bars(self, bars: Sequence[Bar], read: int) -> None:
        """Show these."""
        self.bars, self.read = bars, read
        self.update()

    def parts(self) -> list[tuple[QRectF, str, Set[int]]]:
        """Return the columns, each over the whole height."""
        field = self._field()
        wide = field.width() / max(len(self.bars), 1)
        return [
            (
                QRectF(field.left() + place * wide, field.top(), wide, field.height()),
                self.counted(self.tr("{range} tokens").format(range=bar.label), bar.pictures),
                bar.ids,
            )
            for place, bar in enumerate(self.bars)
        ]

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw columns, axis and marks."""
        painter, scheme, field = QPainter(self), colours(), self._field()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        most = max((bar.pictures for bar in self.bars), default=0) or 1
        painter.setPen(Qt.PenStyle.NoPen)
        for place, (bar, (whole, _, _)) in enumerate(zip(self.bars, self.parts(), strict=True)):
            if bar.pictures:
                high = max(whole.height() * bar.pictures / most, 2.0)
                cut = bar.value >= self.read
                painter.setBrush(QColor(scheme.warning) if cut and place != self._under else self.colour(place))
                painter.drawRect(QRectF(whole.left() + 1, whole.bottom() - high, max(whole.width() - 2, 1), high))
        painter.setPen(QColor(scheme.edge))
        painter.drawLine(field.bottomLeft(), field.bottomRight())
        self._marks_of(painter, field)
        painter.setPen(QColor(scheme.muted))
        painter.drawText(QRectF(_SIDE, 0, self.width(), field.top()), _LEFT, QLocale().toString(most))
        self.ring(painter)
        painter.end()

    def _marks_of(self, painter: QPainter, field: QRectF) -> None:
        """Draw where one, two and three chunks end; the one that is read to its end as a full line."""
        step = self.bars[1].value if len(self.bars) > 1 else 1.0
        for mark in TOKEN_MARKS:
            x = field.left() + field.width() * mark / (step * max(len(self.bars), 1))
            if x > field.right() + 1:
                continue
            read = mark == self.read
            painter.setPen(
                QPen(
                    QColor(colours().text if read else colours().edge),
                    1.5 if read else 1.0,
                    Qt.PenStyle.SolidLine if read else Qt.PenStyle.DashLine,
                )
            )
            painter.drawLine(QPointF(x, field.top()), QPointF(x, field.bottom()))
            painter.setPen(QColor(colours().text if read else colours().muted))
            painter.drawText(QRectF(x - 24, field.bottom() + 2, 48, 20), int(Qt.AlignmentFlag.AlignHCenter), str(mark))

    def _field(self) -> QRectF:
        line = self.fontMetrics().height()
        return QRectF(_SIDE, line + 4, self.width() - 2 * _SIDE - 4, max(self.height() - 2 * line - 14, 10))


class SizeMap(HealthChart):
    """Where pictures lie by width and height, both in doublings, with the line on which the area suffices."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(name, parent)
        self.cells: Sequence[SizeCell] = ()
        self.resolution = 1024
        self.setMinimumHeight(160)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    def show_cells(self, cells: Sequence[SizeCell], resolution: int) -> None:
        """Show these; pictures below `resolution` squared have too few pixels."""
        self.cells = sorted(cells, key=lambda cell: (cell.left, cell.top))
        self.resolution = resolution
        self.update()

    def parts(self) -> list[tuple[QRectF, str, Set[int]]]:
        """Return the cells."""
        return [(self._place(cell), self.counted(_bounds(cell), len(cell.ids)), cell.ids) for cell in self.cells]

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw grid, line and cells."""
        painter, scheme, field = QPainter(self), colours(), self._field()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        low, high = self._range()
        for power in range(int(low), int(high) + 1):
            spot = self._point(2.0**power, 2.0**power)
            painter.setPen(QColor(scheme.line))
            painter.drawLine(QPointF(spot.x(), field.top()), QPointF(spot.x(), field.bottom()))
            painter.drawLine(QPointF(field.left(), spot.y()), QPointF(field.right(), spot.y()))
            painter.setPen(QColor(scheme.muted))
            painter.drawText(QRectF(spot.x() - 30, field.bottom() + 2, 60, 20), _CENTRE, str(2**power))
            painter.drawText(QRectF(0, spot.y() - 10, field.left() - 6, 20), _RIGHT, str(2**power))
        most = max((len(cell.ids) for cell in self.cells), default=1)
        painter.setPen(Qt.PenStyle.NoPen)
        for place, (whole, _, ids) in enumerate(self.parts()):
            colour = self.colour(place)
            colour.setAlphaF(0.35 + 0.65 * len(ids) / most)
            painter.setBrush(colour)
            painter.drawRoundedRect(whole.adjusted(0.5, 0.5, -0.5, -0.5), 2, 2)
        self._enough(painter, field)
        self.ring(painter)
        painter.end()

    def _enough(self, painter: QPainter, field: QRectF) -> None:
        """Draw the line of all sizes that have just the area of the resolution."""
        painter.setClipRect(field)
        painter.setPen(QPen(QColor(colours().warning), 1.5))
        low, _ = self._range()
        area = 2 * log2(self.resolution)
        painter.drawLine(self._point(2.0**low, 2 ** (area - low)), self._point(2.0 ** (area - low), 2.0**low))
        painter.setClipping(False)

    def _range(self) -> tuple[float, float]:
        """Return the least and greatest side shown, as powers of two."""
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
_CENTRE = int(Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop)
