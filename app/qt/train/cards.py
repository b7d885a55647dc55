"""Recipe cards: a button with name and notes for each preset that suits the base."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QEnterEvent, QFont, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QAbstractButton, QSizePolicy, QWidget

from app.qt.theme import colors, icon
from app.qt.widgets import plain_tip
from trainer.config.base import Family
from trainer.config.presets.library import PresetEntry
from trainer.config.presets.preset import Preset
from trainer.files.architecture import NAMES

_WIDTH, _HEIGHT, _GAP = 176, 98, 10
"""Minimum width of a card, its height, and the gap between cards, in logical pixels."""
_INSET = 12


class RecipeCards(QWidget):
    """Grid of recipe cards, at most one of them checked."""

    chosen = Signal(object)
    """Preset that the user chose."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.cards: list[RecipeCard] = []
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_recipes(self, presets: Sequence[PresetEntry], family: Family | None) -> None:
        """Show the recipes for bases of this family, or all recipes if the family is unknown."""
        fitting = [each for each in presets if family in (None, each.preset.base.family)]
        if [card.entry for card in self.cards] == fitting and all(
            card.tells_family == (not family) for card in self.cards
        ):
            return
        for card in self.cards:
            card.hide()
            card.deleteLater()
        self.cards = [RecipeCard(each, not family, self) for each in fitting]
        for card in self.cards:
            card.clicked.connect(lambda _=False, card=card: self.chosen.emit(card.entry.preset))
            card.show()
        self._arrange()

    def mark(self, preset: Preset | None) -> None:
        """Check the card of the preset that the job's recipe came from; for None, check no card."""
        for card in self.cards:
            card.setChecked(card.entry.preset == preset)

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the width of three cards and the height of all rows."""
        return QSize(3 * _WIDTH + 2 * _GAP, self._height())

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the width of one card and the height of all rows."""
        return QSize(_WIDTH, self._height())

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Arrange the cards for the new width."""
        self._arrange()
        super().resizeEvent(event)

    def _columns(self) -> int:
        """Return the number of columns that fit, balanced so that no row is nearly empty."""
        room = max(1, (self.width() + _GAP) // (_WIDTH + _GAP))
        rows = -(-len(self.cards) // room) or 1
        return max(1, -(-len(self.cards) // rows))

    def _height(self) -> int:
        rows = -(-len(self.cards) // self._columns())
        return rows * (_HEIGHT + _GAP) - _GAP if rows else 0

    def _arrange(self) -> None:
        columns = self._columns()
        width = (self.width() - (columns - 1) * _GAP) // columns
        for number, card in enumerate(self.cards):
            row, column = divmod(number, columns)
            card.setGeometry(column * (width + _GAP), row * (_HEIGHT + _GAP), width, _HEIGHT)
        if self.height() != self._height():
            self.setFixedHeight(self._height())


class RecipeCard(QAbstractButton):
    """Card with a preset's name and first note, painted as plain text: presets may come from strangers."""

    def __init__(self, shelved: PresetEntry, tells_family: bool, parent: QWidget) -> None:
        super().__init__(parent)
        self.entry = shelved
        self.tells_family = tells_family
        preset = shelved.preset
        self.name = preset.name.replace("-", " ")
        self.name = self.name[:1].upper() + self.name[1:]
        self.setCheckable(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Recipe {name}").format(name=self.name))
        self.setAccessibleDescription(preset.notes)
        self.setToolTip(plain_tip(preset.notes or self.name))

    def nextCheckState(self) -> None:  # noqa: N802
        """Do nothing, because the job determines which card is checked; see `mark`."""

    def enterEvent(self, event: QEnterEvent) -> None:  # noqa: N802
        """Repaint with the hover color."""
        self.update()
        super().enterEvent(event)

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        """Repaint without the hover color."""
        self.update()
        super().leaveEvent(event)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the card."""
        now, painter = colors(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        strong = self.isChecked() or self.hasFocus()
        line = now.focus if strong else now.edge
        background = now.pressed if self.isDown() else now.hover if self.underMouse() else now.raised
        painter.setPen(QPen(QColor(line), 2 if strong else 1))
        painter.setBrush(QColor(background))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(1, 1, -1, -1), 8, 8)
        inside = self.rect().adjusted(_INSET, _INSET - 2, -_INSET, -_INSET + 2)
        self._paint_words(painter, inside)
        if self.isChecked():
            place = QRect(inside.right() - 15, inside.top() + 1, 16, 16)
            icon("check", "focus").paint(painter, place)

    def _paint_words(self, painter: QPainter, inside: QRect) -> None:
        now, bold = colors(), QFont(self.font())
        bold.setWeight(QFont.Weight.DemiBold)
        painter.setFont(bold)
        painter.setPen(QColor(now.text))
        metrics = painter.fontMetrics()
        title = metrics.elidedText(self.name, Qt.TextElideMode.ElideRight, inside.width() - 20)
        painter.drawText(inside, Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft, title)
        painter.setFont(self.font())
        painter.setPen(QColor(now.muted))
        below = inside.adjusted(0, metrics.height() + 4, 0, 0)
        origin = self._origin()
        if origin:
            painter.drawText(below, Qt.AlignmentFlag.AlignBottom | Qt.AlignmentFlag.AlignLeft, origin)
            below.setHeight(below.height() - painter.fontMetrics().height() - 2)
        _paint_lines(painter, below, self.entry.preset.notes.partition("\n")[0])

    def _origin(self) -> str:
        words = [NAMES[self.entry.preset.base.family]] if self.tells_family else []
        if self.entry.origin == "yours":
            words.append(self.entry.preset.author or self.tr("yours"))
        return self.fontMetrics().elidedText(" · ".join(words), Qt.TextElideMode.ElideRight, self.width() - 2 * _INSET)


def _paint_lines(painter: QPainter, inside: QRect, text: str) -> None:
    """Paint as many lines as fit; end the last one with an ellipsis if the text is longer."""
    metrics = painter.fontMetrics()
    room = max(1, inside.height() // metrics.lineSpacing())
    words, lines = text.split(), list[str]()
    while words and len(lines) < room:
        line = words.pop(0)
        while words and metrics.horizontalAdvance(f"{line} {words[0]}") <= inside.width():
            line = f"{line} {words.pop(0)}"
        if (
            metrics.horizontalAdvance(line) > inside.width()
        ):  # one long word; eliding other lines would cut some that just fit
            line = metrics.elidedText(line, Qt.TextElideMode.ElideRight, inside.width())
        lines.append(line)
    if words:
        while " " in lines[-1] and metrics.horizontalAdvance(f"{lines[-1]} …") > inside.width():
            lines[-1] = lines[-1].rpartition(" ")[0]
        lines[-1] = f"{lines[-1].rstrip(',;:.')} …"
    for number, line in enumerate(lines):
        painter.drawText(inside.left(), inside.top() + metrics.ascent() + number * metrics.lineSpacing(), line)
