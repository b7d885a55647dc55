"""One tag as a chip, and what it shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QEvent, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFontMetrics, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QAbstractButton, QApplication, QWidget

from app.core.tags.splitting import Lines, Piece
from app.qt.theme import colours, icon

_PAD, _ICON, _ROUND = 8, 14, 6
_LONGEST = 320
"""Pixels; a longer tag is cut with dots and stands whole in its tip."""


@dataclass(frozen=True, slots=True)
class ChipData:
    """What a chip stands for: a tag of one caption, or one that `have` of `total` captions have."""

    tag: str
    repeated: bool = False
    """It stands further in front already."""
    have: int = 1
    total: int = 1
    row: int = 0
    """The line of the caption, where each line is an alternative."""

    @property
    def mixed(self) -> bool:
        """Tell whether only some of the captions have it."""
        return self.have < self.total


class Chip(QAbstractButton):
    """Click or arrow keys choose it, Delete or the cross removes it, Enter or a double click writes it anew.

    A mixed one has a plus before it, which gives the tag to the others too; Enter does the same.
    """

    remove_asked = Signal()
    edit_asked = Signal()
    add_asked = Signal()
    stepped = Signal(int)
    """To another chip: a `Qt.Key` among the arrows, Home and End."""
    carried = Signal(int)
    """The keyboard moves the tag to the former place, -1, or the next one, 1."""
    dragged = Signal(QPoint)
    """The mouse moves it; by where the pointer is on the board."""
    dropped = Signal(QPoint)

    def __init__(self, board: QWidget) -> None:
        super().__init__(board)
        self.chip = ChipData("")
        self.movable = True
        self._size: QSize | None = None
        self._pressed: QPoint | None = None
        self._dragging = False
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setMouseTracking(True)
        self.setCursor(Qt.CursorShape.ArrowCursor)

    def show_chip(self, chip: ChipData, movable: bool) -> None:
        """Stand for this from now on."""
        if chip == self.chip and movable == self.movable:
            return
        self.chip, self.movable = chip, movable
        self._size = None
        self.setText(self._words())
        self.setToolTip(self._tip())
        self.setAccessibleName(self._tip())
        self.setAccessibleDescription(self._help())
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the room that text and signs take; asked for many times at each layout, so measured once."""
        if self._size is None:
            measure = QFontMetrics(self.font())
            width = min(measure.horizontalAdvance(self.text()), _LONGEST) + 2 * _PAD + _ICON + 4
            self._size = QSize(width + (_ICON + 4 if self.chip.mixed else 0), measure.height() + 10)
        return self._size

    # --- Qt's events

    def event(self, event: QEvent) -> bool:
        """Keep the chip's keys from the window: Delete means the tag here, not the picture."""
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent) and event.key() in _OWN:
            event.accept()
            return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """See the class."""
        key = Qt.Key(event.key())
        carrying = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        if key in _REMOVE:
            self.remove_asked.emit()
        elif key in _ENTER:
            (self.add_asked if self.chip.mixed else self.edit_asked).emit()
        elif carrying and key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            self.carried.emit(-1 if key == Qt.Key.Key_Left else 1)
        elif not carrying and key in _STEPS:
            self.stepped.emit(int(key))
        else:
            event.ignore()

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Remember where a drag may begin."""
        if event.button() == Qt.MouseButton.LeftButton:
            self._pressed = event.position().toPoint()
            self._dragging = False
        self.update()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Drag the tag, once the pointer is far enough."""
        place = event.position().toPoint()
        if self._pressed is not None and self.movable:
            far = (place - self._pressed).manhattanLength() >= QApplication.startDragDistance()
            self._dragging = self._dragging or far
        if self._dragging:
            self.setCursor(Qt.CursorShape.ClosedHandCursor)
            self.dragged.emit(self.mapToParent(place))
        self.update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """End a drag, or do what was clicked."""
        place, pressed, dragging = event.position().toPoint(), self._pressed, self._dragging
        self._pressed, self._dragging = None, False
        self.setCursor(Qt.CursorShape.ArrowCursor)
        if dragging:
            self.dropped.emit(self.mapToParent(place))
        elif pressed is not None and self.cross.contains(place) and self.cross.contains(pressed):
            self.remove_asked.emit()
        elif pressed is not None and self.plus.contains(place) and self.plus.contains(pressed):
            self.add_asked.emit()
        self.update()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Write it anew."""
        if event.button() == Qt.MouseButton.LeftButton and not self.cross.contains(event.position().toPoint()):
            self.edit_asked.emit()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Measure anew in another font."""
        super().changeEvent(event)
        self._size = None

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        """Show the cross as untouched."""
        super().leaveEvent(event)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint ground, edge, signs and text."""
        look, painter = colours(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        focused = self.hasFocus()
        edge = QPen(QColor(look.focus if focused else look.edge if self.chip.mixed else look.line), 2 if focused else 1)
        edge.setStyle(Qt.PenStyle.DashLine if self.chip.mixed and not focused else Qt.PenStyle.SolidLine)
        painter.setPen(edge)
        over = self.underMouse() or self._pressed is not None
        painter.setBrush(QColor(look.hover if over else look.window if self.chip.mixed else look.raised))
        painter.drawRoundedRect(self.rect().adjusted(1, 1, -1, -1), _ROUND, _ROUND)
        if self.chip.mixed:
            icon("add").paint(painter, self.plus)
        icon("close").paint(painter, self.cross)
        self._write(painter)

    # --- inside

    @property
    def cross(self) -> QRect:
        """Where a click removes the tag."""
        return QRect(self.width() - _ICON - _PAD + 3, (self.height() - _ICON) // 2, _ICON, _ICON)

    @property
    def plus(self) -> QRect:
        """Where a click gives the tag to all; empty where all have it."""
        if not self.chip.mixed:
            return QRect()
        return QRect(_PAD - 3, (self.height() - _ICON) // 2, _ICON, _ICON)

    def _write(self, painter: QPainter) -> None:
        look = colours()
        left = self.plus.right() + 4 if self.chip.mixed else _PAD
        place = QRect(left, 0, self.cross.left() - left - 2, self.height())
        font = self.font()
        font.setStrikeOut(self.chip.repeated)
        painter.setFont(font)
        painter.setPen(QColor(look.warning if self.chip.repeated else look.text))
        text = painter.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideMiddle, place.width())
        painter.drawText(place, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, text)

    def _words(self) -> str:
        if not self.chip.mixed:
            return self.chip.tag
        words = self.tr("{tag}  in {have} of {total}")
        return words.format(tag=self.chip.tag, have=self.chip.have, total=self.chip.total)

    def _tip(self) -> str:
        if self.chip.repeated:
            return self.tr("{tag}, which stands in this caption already").format(tag=self.chip.tag)
        return self._words().replace("  ", ", ")

    def _help(self) -> str:
        if self.chip.mixed:
            return self.tr("Enter gives the tag to all of them, Delete removes it from those that have it")
        if self.movable:
            return self.tr("Enter writes it anew, Delete removes it, Ctrl+Left and Ctrl+Right move it")
        return self.tr("Enter writes it anew, Delete removes it")


_REMOVE = (Qt.Key.Key_Delete, Qt.Key.Key_Backspace)
_ENTER = (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_F2, Qt.Key.Key_Space)
_STEPS = (
    Qt.Key.Key_Left,
    Qt.Key.Key_Right,
    Qt.Key.Key_Up,
    Qt.Key.Key_Down,
    Qt.Key.Key_Home,
    Qt.Key.Key_End,
)
_OWN = (*_REMOVE, *_ENTER, *_STEPS)


def chips_of(text: str, found: Sequence[Piece], lines: Lines) -> Sequence[ChipData]:
    """Return the chips of one caption; a tag is repeated where it stands further in front of the same alternative."""
    chips, seen = [], set()
    for piece in found:
        row = text.count("\n", 0, piece.start) if lines == "variants" else 0
        chips.append(ChipData(piece.tag, repeated=(row, piece.tag) in seen, row=row))
        seen.add((row, piece.tag))
    return chips
