"""Tag chips: the tags of one or more captions, arranged in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from PySide6.QtCore import QEvent, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFocusEvent,
    QFontMetrics,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import QAbstractButton, QApplication, QLineEdit, QSizePolicy, QWidget

from app.core.tags.splitting import Lines, TagSpan
from app.qt.theme import colors, icon
from app.qt.widgets import flow

_PAD, _ICON, _ROUND = 8, 14, 6
_MAX_WIDTH = 320
"""Maximum text width in px; longer tags are elided, and the tooltip shows the full tag."""
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
_HANDLED_KEYS = (*_REMOVE, *_ENTER, *_STEPS)


@dataclass(frozen=True, slots=True)
class ChipData:
    """Content of a chip: a tag in one caption, or a tag in `have` of `total` captions."""

    tag: str
    repeated: bool = False
    """Whether the tag already occurs earlier in the caption."""
    have: int = 1
    total: int = 1
    row: int = 0
    """Index of the tag's line if each line is a separate caption, else 0."""

    @property
    def mixed(self) -> bool:
        """Return whether only some of the captions have the tag."""
        return self.have < self.total


class Chip(QAbstractButton):
    """Chip for one tag.

    A click or the arrow keys select the chip. Delete or the cross removes the tag; Enter or a double click edits it. On
    a mixed chip, Enter or the plus sign adds the tag to the other captions.
    """

    remove_requested = Signal()
    edit_requested = Signal()
    add_requested = Signal()
    stepped = Signal(int)
    """Emitted when the user presses a key that moves to another chip (arrow, Home or End), with its `Qt.Key`."""
    carried = Signal(int)
    """Emitted when the user moves the tag with the keyboard, by -1 or 1."""
    dragged = Signal(QPoint)
    """Emitted while the user drags the tag, with the position on the board."""
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
        """Set the chip's content and whether it can be moved."""
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
        """Return the size of the text and icons, cached because each layout requests it many times."""
        if self._size is None:
            measure = QFontMetrics(self.font())
            width = min(measure.horizontalAdvance(self.text()), _MAX_WIDTH) + 2 * _PAD + _ICON + 4
            self._size = QSize(width + (_ICON + 4 if self.chip.mixed else 0), measure.height() + 10)
        return self._size

    # --- Qt's events

    def event(self, event: QEvent) -> bool:
        """Handle the chip's keys before the window does: Delete removes the tag, not the image."""
        if (
            event.type() == QEvent.Type.ShortcutOverride
            and isinstance(event, QKeyEvent)
            and event.key() in _HANDLED_KEYS
        ):
            event.accept()
            return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Remove, edit, move or leave the chip."""
        key = Qt.Key(event.key())
        carrying = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        if key in _REMOVE:
            self.remove_requested.emit()
        elif key in _ENTER:
            (self.add_requested if self.chip.mixed else self.edit_requested).emit()
        elif carrying and key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            self.carried.emit(-1 if key == Qt.Key.Key_Left else 1)
        elif not carrying and key in _STEPS:
            self.stepped.emit(int(key))
        else:
            event.ignore()

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Record the position at which a drag may start."""
        if event.button() == Qt.MouseButton.LeftButton:
            self._pressed = event.position().toPoint()
            self._dragging = False
        self.update()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Drag the tag once the pointer has moved far enough."""
        place = event.position().toPoint()
        if self._pressed is not None and self.movable:
            far = (place - self._pressed).manhattanLength() >= QApplication.startDragDistance()
            self._dragging = self._dragging or far
        if self._dragging:
            self.setCursor(Qt.CursorShape.ClosedHandCursor)
            self.dragged.emit(self.mapToParent(place))
        self.update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """End a drag, or run the clicked icon's action."""
        place, pressed, dragging = event.position().toPoint(), self._pressed, self._dragging
        self._pressed, self._dragging = None, False
        self.setCursor(Qt.CursorShape.ArrowCursor)
        if dragging:
            self.dropped.emit(self.mapToParent(place))
        elif pressed is not None and self.cross.contains(place) and self.cross.contains(pressed):
            self.remove_requested.emit()
        elif pressed is not None and self.plus.contains(place) and self.plus.contains(pressed):
            self.add_requested.emit()
        self.update()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Edit the tag."""
        if event.button() == Qt.MouseButton.LeftButton and not self.cross.contains(event.position().toPoint()):
            self.edit_requested.emit()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Reset the cached size, since the font may have changed."""
        super().changeEvent(event)
        self._size = None

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        """Repaint without the hover color."""
        super().leaveEvent(event)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint background, border, icons and text."""
        look, painter = colors(), QPainter(self)
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
        """Return the area to click to remove the tag."""
        return QRect(self.width() - _ICON - _PAD + 3, (self.height() - _ICON) // 2, _ICON, _ICON)

    @property
    def plus(self) -> QRect:
        """Return the area to click to add the tag to all captions; empty if all have it."""
        if not self.chip.mixed:
            return QRect()
        return QRect(_PAD - 3, (self.height() - _ICON) // 2, _ICON, _ICON)

    def _write(self, painter: QPainter) -> None:
        look = colors()
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
            return self.tr("{tag}, already in this caption").format(tag=self.chip.tag)
        return self._words().replace("  ", ", ")

    def _help(self) -> str:
        if self.chip.mixed:
            return self.tr("Enter adds the tag to all captions, Delete removes it from all")
        if self.movable:
            return self.tr("Enter edits the tag, Delete removes it, Ctrl+Left and Ctrl+Right move it")
        return self.tr("Enter edits the tag, Delete removes it")


def chips_of(text: str, found: Sequence[TagSpan], lines: Lines) -> Sequence[ChipData]:
    """Return the chips for one caption.

    A tag is marked as repeated if it occurs earlier in the caption, or in its line if each line is a separate caption.
    """
    chips, seen = [], set()
    for piece in found:
        row = text.count("\n", 0, piece.start) if lines == "variants" else 0
        chips.append(ChipData(piece.tag, repeated=(row, piece.tag) in seen, row=row))
        seen.add((row, piece.tag))
    return chips


_GAP, _EDGE = 5, 4
_Key = Qt.Key


class ChipEdit(QLineEdit):
    """Field shown over a chip to edit its tag: Enter accepts, Escape cancels."""

    done = Signal(bool)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Accept with Enter, cancel with Escape."""
        if event.key() in (_Key.Key_Return, _Key.Key_Enter, _Key.Key_Escape):
            self.done.emit(event.key() != _Key.Key_Escape)
        else:
            super().keyPressEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Accept the edit when the user clicks elsewhere."""
        super().focusOutEvent(event)
        if event.reason() != Qt.FocusReason.PopupFocusReason:
            self.done.emit(True)


class ChipBoard(QWidget):
    """Board of chips with a single Tab stop; arrow keys move between chips. Signals carry chip indexes."""

    removed = Signal(int)
    edited = Signal(int, str)
    added = Signal(int)
    moved = Signal(int, int)
    """Emitted when the user moves a tag, with its old and new index."""
    left = Signal()
    """Emitted when the user moves past the last chip; the focus should go to the field below."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.chips: list[Chip] = []
        self._spare: list[Chip] = []
        self._current = 0
        self._target: int | None = None
        self._movable = True
        self._edit: ChipEdit | None = None
        self._edited_index = 0
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Minimum)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setAccessibleName(self.tr("Tags"))

    def show_chips(self, chips: Sequence[ChipData], movable: bool) -> None:
        """Replace the chips; the focus stays at the same index, and an open edit field moves with its tag."""
        self._follow_edit(chips)
        focused = self._focused()
        self._movable = movable
        while len(self.chips) < len(chips):
            self.chips.append(self._spare.pop() if self._spare else self._new())
        while len(self.chips) > len(chips):
            chip = self.chips.pop()
            chip.hide()
            self._spare.append(chip)
        for chip, data in zip(self.chips, chips, strict=True):
            chip.show_chip(data, movable)
            chip.show()
        self._mark_stop(min(self._current, max(0, len(self.chips) - 1)))
        self._arrange()
        if focused is not None:
            self.choose(min(focused, len(self.chips) - 1))

    def choose(self, number: int) -> None:
        """Focus the chip at this index; an index past the last chip moves the focus off the board."""
        if not 0 <= number < len(self.chips):
            if number >= len(self.chips) or not self.chips:
                self.left.emit()
            return
        self._mark_stop(number)
        self.chips[number].setFocus()

    def edit_tag(self, number: int) -> None:
        """Let the user edit a tag in place."""
        self._close_edit(False)
        chip = self.chips[number]
        self._edited_index = number
        edit = self._edit = ChipEdit(chip.chip.tag, self)
        edit.setAccessibleName(self.tr("Tag"))
        self._place_edit()
        edit.done.connect(self._close_edit)
        edit.selectAll()
        edit.show()
        edit.setFocus()

    def stop_writing(self) -> None:
        """Cancel the edit in progress."""
        self._close_edit(False)

    # --- Qt's events

    def hasHeightForWidth(self) -> bool:  # noqa: N802
        """Return True, since the height depends on the width."""
        return True

    def heightForWidth(self, width: int) -> int:  # noqa: N802
        """Return the total height of the rows at this width."""
        return self._places(width)[1]

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size at the current width."""
        return QSize(200, self.heightForWidth(max(self.width(), 120)))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the full height, since the board is inside a scroll area."""
        return QSize(60, self.heightForWidth(max(self.width(), 120)))

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Arrange the chips at the new width."""
        super().resizeEvent(event)
        self._arrange()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Mark where a dragged tag would be inserted."""
        if self._target is None or not self.chips:
            return
        painter = QPainter(self)
        last = self._target == len(self.chips)
        place = self.chips[-1 if last else self._target].geometry()
        x = place.right() + 2 if last else place.left() - 4
        painter.fillRect(QRect(x, place.top(), 2, place.height()), QColor(colors().focus))

    # --- inside

    def _new(self) -> Chip:
        chip = Chip(self)
        number = partial(self._number, chip)
        chip.remove_requested.connect(lambda: self.removed.emit(number()))
        chip.edit_requested.connect(lambda: self.edit_tag(number()))
        chip.add_requested.connect(lambda: self.added.emit(number()))
        chip.stepped.connect(lambda key: self._step(number(), key))
        chip.carried.connect(lambda by: self._carry(number(), by))
        chip.dragged.connect(self._show_target)
        chip.dropped.connect(lambda place: self._drop(number(), place))
        return chip

    def _number(self, chip: Chip) -> int:
        return self.chips.index(chip)

    def _focused(self) -> int | None:
        return next((number for number, chip in enumerate(self.chips) if chip.hasFocus()), None)

    def _mark_stop(self, number: int) -> None:
        """Make a chip the board's Tab stop."""
        self._current = number
        for place, chip in enumerate(self.chips):
            chip.setFocusPolicy(Qt.FocusPolicy.StrongFocus if place == number else Qt.FocusPolicy.ClickFocus)

    def _step(self, number: int, key: int) -> None:
        goals = {
            int(_Key.Key_Left): number - 1,
            int(_Key.Key_Right): number + 1,
            int(_Key.Key_Home): 0,
            int(_Key.Key_End): len(self.chips) - 1,
        }
        self.choose(goals[key] if key in goals else self._beside(number, 1 if key == int(_Key.Key_Down) else -1))

    def _beside(self, number: int, down: int) -> int:
        """Return the index of the nearest chip in the row below (`down` is 1) or above (`down` is -1).

        If there is no row above, return `number`; if there is none below, return the number of chips.
        """
        here = self.chips[number].geometry().center()
        rows = sorted({chip.y() for chip in self.chips})
        row = rows.index(self.chips[number].y()) + down
        if not 0 <= row < len(rows):
            return number if down < 0 else len(self.chips)
        near = [place for place, chip in enumerate(self.chips) if chip.y() == rows[row]]
        return min(near, key=lambda place: abs(self.chips[place].geometry().center().x() - here.x()))

    def _carry(self, number: int, by: int) -> None:
        if self._movable and 0 <= number + by < len(self.chips):
            self._current = number + by
            self.moved.emit(number, number + by)
            self.choose(number + by)

    def _show_target(self, place: QPoint) -> None:
        self._target = self._slot(place)
        self.update()

    def _drop(self, source: int, place: QPoint) -> None:
        slot, self._target = self._slot(place), None
        self.update()
        target = slot - (slot > source)  # removing the tag first shifts all later positions by one
        if target != source:
            self.moved.emit(source, target)
            self.choose(target)

    def _slot(self, place: QPoint) -> int:
        """Return the index at which a tag dropped at this point is inserted."""
        for number, chip in enumerate(self.chips):
            box = chip.geometry()
            if place.y() < box.top() - _GAP or (place.y() <= box.bottom() + _GAP and place.x() < box.center().x()):
                return number
        return len(self.chips)

    def _places(self, width: int) -> tuple[list[QRect], int]:
        rows = [chip.chip.row for chip in self.chips]
        breaks = {number for number in range(1, len(rows)) if rows[number] != rows[number - 1]}
        places, height = flow([chip.sizeHint() for chip in self.chips], max(40, width - 2 * _EDGE), _GAP, breaks)
        return [place.translated(_EDGE, _EDGE) for place in places], height + 2 * _EDGE

    def _arrange(self) -> None:
        places, height = self._places(self.width())
        for chip, place in zip(self.chips, places, strict=True):
            chip.setGeometry(place)
        self._place_edit()
        self.setMinimumHeight(height)
        self.update()

    def _place_edit(self) -> None:
        if self._edit is not None:
            chip = self.chips[self._edited_index]
            width = min(self.width() - chip.x(), max(chip.width() + 40, 140))
            self._edit.setGeometry(chip.x(), chip.y(), width, chip.height())
            self._edit.raise_()

    def _follow_edit(self, chips: Sequence[ChipData]) -> None:
        """Move the open edit field to its tag's new index; cancel the edit if the tag is gone."""
        if self._edit is None:
            return
        tag, number = self.chips[self._edited_index].chip.tag, self._edited_index
        places = [place for place, chip in enumerate(chips) if chip.tag == tag]
        if places:
            self._edited_index = min(places, key=lambda place: abs(place - number))
        else:
            self._close_edit(False)

    def _close_edit(self, take: bool) -> None:
        edit, self._edit = self._edit, None
        if edit is None:
            return
        tag, number, focused = edit.text().strip(), self._edited_index, edit.hasFocus()
        edit.hide()
        edit.deleteLater()
        if focused:
            self.choose(number)
        if take and number < len(self.chips) and tag != self.chips[number].chip.tag:
            self.edited.emit(number, tag)
