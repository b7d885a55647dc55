"""Painting of one grid cell: the image, its badges and its line of text."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QPointF, QRect, QRectF, Qt
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter, QPalette, QPen, QPixmap

from app.core.library import LibraryImage
from app.core.tags.splitting import one_line
from app.qt.theme import colors, icon

_INSET = 6
_BADGE = 20
_ICON = 14
_DIMMED = 0.35


class CellPainter:
    """Painter of grid cells, in the current theme and a given font."""

    def __init__(self, font: QFont) -> None:
        self.font = font
        self.metrics = QFontMetrics(font)

    @property
    def line(self) -> int:
        """Return the height of the text line below an image."""
        return self.metrics.height() + 6

    def paint(
        self, painter: QPainter, cell: QRect, record: LibraryImage, image: QPixmap | str | None, text: str | None,
        *, selected: bool, current: bool, focused: bool,
    ) -> None:  # fmt: skip
        """Paint a cell; `image` is the thumbnail, or the reason why there is none, or None while it is loading."""
        square = QRect(cell.left(), cell.top(), cell.width(), cell.width())
        if selected:
            panel(painter, QRectF(cell), colors().accent)
        self.image(painter, square.adjusted(_INSET, _INSET, -_INSET, -_INSET), record, image)
        self._badges(painter, square, record)
        if text is not None:
            self._text(painter, cell, text or _no_caption(), selected, bool(text))
        if current and focused:
            ring(painter, cell, selected=selected)

    def image(self, painter: QPainter, room: QRect, record: LibraryImage, image: QPixmap | str | None) -> None:
        """Paint a thumbnail centered in `room`; if it is still loading, an empty frame; if it failed, a warning."""
        if not isinstance(image, QPixmap):
            self._sign(painter, room, image or record.problem)
            return
        size = image.deviceIndependentSize()
        corner = QPointF(room.center().x() + 1 - size.width() / 2, room.center().y() + 1 - size.height() / 2)
        painter.setOpacity(_DIMMED if record.excluded else 1.0)
        painter.drawPixmap(corner.toPoint(), image)
        painter.setOpacity(1.0)

    def _sign(self, painter: QPainter, room: QRect, problem: str | None) -> None:
        """Paint an empty frame, with a warning if the image cannot be shown."""
        panel(painter, QRectF(room), colors().raised, colors().line)
        if problem is None:
            return
        side = min(32, room.width() // 3)
        middle = QRect(room.center().x() - side // 2, room.center().y() - side, side, side)
        icon("warning").paint(painter, middle)
        painter.setPen(QColor(colors().bad))
        words = room.adjusted(6, room.height() // 2 + 6, -6, -4)
        painter.setFont(self.font)
        short = QCoreApplication.translate("CellPainter", "Cannot show image")
        painter.drawText(words, int(Qt.AlignmentFlag.AlignHCenter | Qt.TextFlag.TextWordWrap), short)

    def _badges(self, painter: QPainter, square: QRect, image: LibraryImage) -> None:
        names = [
            name
            for name, present in (
                ("exclude", image.excluded),
                ("warning", image.problem is not None),
                ("caption", not (image.caption or "").strip()),
                ("brush", image.mask),
                ("crop", image.crop is not None),
            )
            if present
        ]
        place = QRect(square.left() + 4, square.top() + 4, _BADGE, _BADGE)
        for name in names:
            panel(painter, QRectF(place), colors().raised, colors().edge)
            inner = place.adjusted(3, 3, -3, -3)
            icon(name).paint(painter, inner)
            if name == "caption":  # crossed out: no caption
                painter.setPen(QPen(QColor(colors().bad), 2.0))
                painter.drawLine(inner.topLeft(), inner.bottomRight())
            place.translate(_BADGE + 2, 0)
        if image.rating:
            self._stars(painter, square, image.rating)

    def _stars(self, painter: QPainter, square: QRect, rating: int) -> None:
        width = min(rating, 5) * _ICON + 6
        strip = QRect(square.left() + 4, square.bottom() - _BADGE - 2, width, _BADGE)
        panel(painter, QRectF(strip), colors().raised, colors().edge)
        for star in range(min(rating, 5)):
            icon("star-filled").paint(painter, QRect(strip.left() + 3 + star * _ICON, strip.top() + 3, _ICON, _ICON))

    def _text(self, painter: QPainter, cell: QRect, text: str, selected: bool, present: bool) -> None:
        room = QRect(cell.left() + _INSET, cell.top() + cell.width(), cell.width() - 2 * _INSET, self.line - 4)
        painter.setFont(self.font)
        color = colors().on_accent if selected else colors().text if present else colors().muted
        painter.setPen(QColor(color))
        line = self.metrics.elidedText(one_line(text[:400]), Qt.TextElideMode.ElideRight, room.width())
        painter.drawText(room, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), line)


def ring(painter: QPainter, cell: QRect, *, selected: bool = False) -> None:
    """Paint the focus ring of a cell."""
    painter.setBrush(Qt.BrushStyle.NoBrush)
    inset = 3 if selected else 1  # inside a selection the background shows on both sides of the ring
    painter.setPen(QPen(QColor(colors().on_accent if selected else colors().focus), 2.0))
    painter.drawRoundedRect(QRectF(cell).adjusted(inset, inset, -inset, -inset), 5, 5)


def band(painter: QPainter, room: QRect, palette: QPalette) -> None:
    """Paint the rubber band that selects images."""
    fill = palette.color(QPalette.ColorRole.Highlight)
    painter.setPen(QPen(fill, 1.0))
    fill.setAlpha(60)
    painter.setBrush(fill)
    painter.drawRect(QRectF(room).adjusted(0.5, 0.5, -0.5, -0.5))


def panel(painter: QPainter, room: QRectF, fill: str, line: str | None = None) -> None:
    """Paint a rounded rectangle."""
    painter.setPen(QPen(QColor(line), 1.0) if line else Qt.PenStyle.NoPen)
    painter.setBrush(QColor(fill))
    painter.drawRoundedRect(room.adjusted(0.5, 0.5, -0.5, -0.5), 5, 5)


def _no_caption() -> str:
    return QCoreApplication.translate("CellPainter", "no caption")
