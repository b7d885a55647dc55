"""The card's memory as one bar: who holds it, what the run takes at its peak, what stays free."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QCoreApplication, QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.core.planning.answer import Answer, Plan
from app.qt.theme import colours
from app.qt.tips import plain_tip
from app.qt.train.forecast import words

KINDS = {
    "weights": "series1",
    "activations": "series2",
    "adapter": "series3",
    "optimizer": "series4",
    "gradients": "series5",
    "temporary": "series6",
}
"""Kinds of storage in the order in which they are stacked, and their colours."""
_BAR, _LINE, _SWATCH, _GAP, _MARK = 26, 20, 10, 14, 7


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the bar."""

    name: str
    bytes: int
    colour: str
    """A role of the theme's colours."""
    ours: bool = True
    """Whether the run takes it; else it is hatched."""


def pieces(answer: Answer, plan: Plan) -> list[Piece]:
    """Return what fills the card at the highest moment of a plan, from the left."""
    found = [
        Piece(
            QCoreApplication.translate("Forecast", "Other programs"),
            answer.card.total - answer.card.free,
            "edge",
            ours=False,
        ),
        Piece(QCoreApplication.translate("Forecast", "CUDA"), plan.forecast.outside, "disabled"),
    ]
    phase = plan.decisive
    taken = plan.taken(phase.reserved)
    if phase.peaks:
        kinds = max(phase.peaks, key=lambda one: one.allocated).by_kind
        found += [Piece(words.kind_name(kind), kinds.get(kind, 0), role) for kind, role in KINDS.items()]
        taken -= sum(kinds.get(kind, 0) for kind in KINDS)
    found.append(Piece(QCoreApplication.translate("Forecast", "Cache and rounding"), max(taken, 0), "pressed"))
    return [piece for piece in found if piece.bytes > 0]


class MemoryBar(QWidget):
    """Paints the pieces against the whole card, with a mark at what may be taken; a legend stands below."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.pieces: list[Piece] = []
        self._total = self._limit = 0
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setAccessibleName(self.tr("Memory of the card at the peak"))

    def show_plan(self, answer: Answer, plan: Plan) -> None:
        """Show what a plan does to the card."""
        card = answer.card
        self.pieces = pieces(answer, plan)
        self._limit = card.total - card.free + plan.forecast.outside + card.budget
        self._total = max(card.total, sum(piece.bytes for piece in self.pieces))
        told = [f"{piece.name} {words.gigabytes(piece.bytes)}" for piece in self.pieces]
        self.setAccessibleDescription(", ".join(told))
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Leave room for the legend as it breaks in this width."""
        return QSize(240, self.heightForWidth(self.width()))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """As high as it is wide enough for."""
        return QSize(160, self.heightForWidth(self.width()))

    def heightForWidth(self, width: int) -> int:  # noqa: N802
        """Bar, mark and the legend's lines."""
        return _BAR + 2 * _MARK + (self._legend(width)[-1][1] + _LINE if self.pieces else _LINE)

    def resizeEvent(self, event: object) -> None:  # noqa: N802
        """Let the legend break anew."""
        super().resizeEvent(event)  # type: ignore[arg-type]
        self.updateGeometry()

    def event(self, event: QEvent) -> bool:
        """Tell the piece under the pointer."""
        if isinstance(event, QHelpEvent):
            piece = self._at(event.pos().x())
            text = f"{piece.name}: {words.gigabytes(piece.bytes)}" if piece else ""
            QToolTip.showText(event.globalPos(), plain_tip(text), self)
            return True
        return super().event(event)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint bar, mark and legend."""
        now, painter = colours(), QPainter(self)
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
        painter.setPen(QPen(QColor(colours().text), 2))
        painter.drawLine(QPointF(place, bar.top() - _MARK + 1), QPointF(place, bar.bottom() + _MARK - 1))

    def _paint_legend(self, painter: QPainter) -> None:
        now, top = colours(), _BAR + 2 * _MARK
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
        painter.setPen(QColor(colours().text))
        text = QRectF(left + _SWATCH + 6, top, self.width(), _LINE)
        painter.drawText(text, Qt.AlignmentFlag.AlignVCenter, label)

    def _legend(self, width: int) -> list[tuple[int, int]]:
        """Where the label of each piece begins, and last that of the limit."""
        places, left, top = [], 0, 0
        for label in (*map(self._label, self.pieces), self._limit_label()):
            needed = self.fontMetrics().horizontalAdvance(label) + _SWATCH + 6
            if left and left + needed > width:
                left, top = 0, top + _LINE
            places.append((left, top))
            left += needed + _GAP
        return places

    def _label(self, piece: Piece) -> str:
        return f"{piece.name} {words.gigabytes(piece.bytes)}"

    def _limit_label(self) -> str:
        return self.tr("Limit {size}").format(size=words.gigabytes(self._limit))

    def _at(self, place: int) -> Piece | None:
        share = 0.0
        for piece in self.pieces:
            share += piece.bytes / self._total
            if place <= share * self.width():
                return piece
        return None


def _brush(piece: Piece) -> QBrush:
    style = Qt.BrushStyle.SolidPattern if piece.ours else Qt.BrushStyle.BDiagPattern
    return QBrush(QColor(getattr(colours(), piece.colour)), style)
