"""The board of chips: every tag of a caption, or of many, in rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFocusEvent, QKeyEvent, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QLineEdit, QSizePolicy, QWidget

from app.qt.pictures.captions.chip import Chip, ChipData
from app.qt.pictures.captions.flow import flow
from app.qt.theme import colours

_GAP, _EDGE = 5, 4
_Key = Qt.Key


class ChipEdit(QLineEdit):
    """Stands over a chip while its tag is written anew: Enter takes it, Escape leaves the tag as it was."""

    done = Signal(bool)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """See the class."""
        if event.key() in (_Key.Key_Return, _Key.Key_Enter, _Key.Key_Escape):
            self.done.emit(event.key() != _Key.Key_Escape)
        else:
            super().keyPressEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Take it: who clicks elsewhere means what he wrote."""
        super().focusOutEvent(event)
        if event.reason() != Qt.FocusReason.PopupFocusReason:
            self.done.emit(True)


class ChipBoard(QWidget):
    """Numbers in the signals count the chips. One Tab stop: arrow keys go from chip to chip."""

    removed = Signal(int)
    edited = Signal(int, str)
    added = Signal(int)
    moved = Signal(int, int)
    """The tag at the first place is to stand at the second."""
    left = Signal()
    """The keyboard went past the last chip: on to the line below."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.chips: list[Chip] = []
        self._spare: list[Chip] = []
        self._current = 0
        self._target: int | None = None
        self._movable = True
        self._edit: ChipEdit | None = None
        self._writing = 0
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Minimum)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setAccessibleName(self.tr("Tags"))

    def show_chips(self, chips: Sequence[ChipData], movable: bool) -> None:
        """Show these in place of the former; the keyboard stays at the same place, and a tag that is being written."""
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
        """Give a chip the keyboard; past the last one, and where there is none, leave the board."""
        if not 0 <= number < len(self.chips):
            if number >= len(self.chips) or not self.chips:
                self.left.emit()
            return
        self._mark_stop(number)
        self.chips[number].setFocus()

    def write_anew(self, number: int) -> None:
        """Let the user write a tag differently, in its place."""
        self._close_edit(False)
        chip = self.chips[number]
        self._writing = number
        edit = self._edit = ChipEdit(chip.chip.tag, self)
        edit.setAccessibleName(self.tr("Tag"))
        self._place_edit()
        edit.done.connect(self._close_edit)
        edit.selectAll()
        edit.show()
        edit.setFocus()

    def stop_writing(self) -> None:
        """Leave the tag that is being written as it was."""
        self._close_edit(False)

    # --- Qt's events

    def hasHeightForWidth(self) -> bool:  # noqa: N802
        """Return that the height follows from the width."""
        return True

    def heightForWidth(self, width: int) -> int:  # noqa: N802
        """Return the height that all rows take."""
        return self._places(width)[1]

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size at the width of now."""
        return QSize(200, self.heightForWidth(max(self.width(), 120)))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the same: what scrolls it gives it all its height."""
        return QSize(60, self.heightForWidth(max(self.width(), 120)))

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Arrange the chips anew."""
        super().resizeEvent(event)
        self._arrange()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Mark the place where a dragged tag would fall."""
        if self._target is None or not self.chips:
            return
        painter = QPainter(self)
        last = self._target == len(self.chips)
        place = self.chips[-1 if last else self._target].geometry()
        x = place.right() + 2 if last else place.left() - 4
        painter.fillRect(QRect(x, place.top(), 2, place.height()), QColor(colours().focus))

    # --- inside

    def _new(self) -> Chip:
        chip = Chip(self)
        number = partial(self._number, chip)
        chip.remove_asked.connect(lambda: self.removed.emit(number()))
        chip.edit_asked.connect(lambda: self.write_anew(number()))
        chip.add_asked.connect(lambda: self.added.emit(number()))
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
        """Make one chip the board's Tab stop."""
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
        """Return the chip above or below; past the last row, the number after the last chip."""
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
        target = slot - (slot > source)
        if target != source:
            self.moved.emit(source, target)
            self.choose(target)

    def _slot(self, place: QPoint) -> int:
        """Return before which chip a tag falls that is let go here; their number is after the last."""
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
            chip = self.chips[self._writing]
            width = min(self.width() - chip.x(), max(chip.width() + 40, 140))
            self._edit.setGeometry(chip.x(), chip.y(), width, chip.height())
            self._edit.raise_()

    def _follow_edit(self, chips: Sequence[ChipData]) -> None:
        """Keep what is being written with its tag, wherever that is now; without it there is nothing to replace."""
        if self._edit is None:
            return
        tag, number = self.chips[self._writing].chip.tag, self._writing
        places = [place for place, chip in enumerate(chips) if chip.tag == tag]
        if places:
            self._writing = min(places, key=lambda place: abs(place - number))
        else:
            self._close_edit(False)

    def _close_edit(self, take: bool) -> None:
        edit, self._edit = self._edit, None
        if edit is None:
            return
        tag, number, focused = edit.text().strip(), self._writing, edit.hasFocus()
        edit.hide()
        edit.deleteLater()
        if focused:
            self.choose(number)
        if take and number < len(self.chips) and tag != self.chips[number].chip.tag:
            self.edited.emit(number, tag)
