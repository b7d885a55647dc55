"""The list of runs: how each stands and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import (
    QAbstractListModel,
    QItemSelection,
    QItemSelectionModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QFont, QPainter
from PySide6.QtWidgets import QListView, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.core.runs.summary import RunSummary
from app.qt.runs.state_words import standing, state_colour
from app.qt.theme import colours
from app.qt.tips import plain_tip

_Index = QModelIndex | QPersistentModelIndex
SUMMARY = int(Qt.ItemDataRole.UserRole)
WORDS = SUMMARY + 1
_SIDE, _ABOVE, _BAR, _DOT = 12, 8, 3, 8


class RunModel(QAbstractListModel):
    """The runs of now; `left` tells the seconds that a run still needs."""

    def __init__(self, left: Callable[[Path], float | None], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: Sequence[RunSummary] = ()
        self._words: list[str] = []
        self._left = left

    def show(self, rows: Sequence[RunSummary]) -> bool:
        """Show these; returns whether they are others than before, and not only the same standing otherwise."""
        words = [standing(row, self._left(row.path)) for row in rows]
        others = [row.path for row in rows] != [row.path for row in self.rows]
        if others:
            self.beginResetModel()
            self.rows, self._words = tuple(rows), words
            self.endResetModel()
            return True
        pairs = zip(rows, words, self.rows, self._words, strict=True)
        changed = [place for place, (row, word, old, said) in enumerate(pairs) if (row, word) != (old, said)]
        self.rows, self._words = tuple(rows), words
        for place in changed:
            self.dataChanged.emit(self.index(place), self.index(place))
        return False

    def place_of(self, path: Path) -> QModelIndex:
        """Return where a run stands; an invalid index where it is not listed."""
        place = next((place for place, row in enumerate(self.rows) if row.path == path), -1)
        return self.index(place) if place >= 0 else QModelIndex()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: N802, B008 (Qt's signature)
        """Return how many there are."""
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return what the view asks of a run."""
        row = self.rows[index.row()]
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return row.name
            case Qt.ItemDataRole.ToolTipRole:
                return plain_tip("\n".join(filter(None, (str(row.path), row.problem))))
            case Qt.ItemDataRole.AccessibleTextRole:
                return ", ".join(filter(None, (row.name, self._words[index.row()], row.problem)))
            case _ if role == SUMMARY:
                return row
            case _ if role == WORDS:
                return self._words[index.row()]
        return None


class RunDelegate(QStyledItemDelegate):
    """Draws the name, how the run stands, and a bar of how far it is."""

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return two lines and the bar."""
        return QSize(120, 2 * option.fontMetrics.height() + 2 * _ABOVE + _BAR + 8)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Draw one run."""
        run: RunSummary = index.data(SUMMARY)
        scheme = colours()
        chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        hovered = bool(option.state & QStyle.StateFlag.State_MouseOver)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.fillRect(option.rect, QColor(scheme.accent if chosen else scheme.hover if hovered else scheme.base))
        inside = option.rect.adjusted(_SIDE, _ABOVE, -_SIDE, -_ABOVE)
        text, muted = (scheme.on_accent, scheme.on_accent) if chosen else (scheme.text, scheme.muted)
        height = option.fontMetrics.height()
        middle = inside.top() + height / 2
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(scheme.on_accent if chosen else getattr(scheme, state_colour(run.state))))
        painter.drawEllipse(QRectF(inside.left(), middle - _DOT / 2, _DOT, _DOT))
        line = inside.adjusted(_DOT + 8, 0, 0, 0)
        self._write(
            painter, QRect(line.left(), line.top(), line.width(), height), run.name, text, option.font, bold=True
        )
        below = QRect(line.left(), line.top() + height + 2, line.width(), height)
        self._write(painter, below, str(index.data(WORDS)), muted, option.font, bold=False)
        if run.steps and run.state != "done":
            self._draw_bar(painter, QRectF(line.left(), below.bottom() + 5, line.width(), _BAR), run, chosen)
        if option.state & QStyle.StateFlag.State_HasFocus:
            painter.setPen(QColor(scheme.on_accent if chosen else scheme.focus))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(QRectF(option.rect).adjusted(1.5, 1.5, -1.5, -1.5), 3, 3)
        painter.restore()

    def _write(self, painter: QPainter, place: QRect, text: str, colour: str, font: QFont, *, bold: bool) -> None:
        own = QFont(font)
        own.setBold(bold)
        painter.setFont(own)
        painter.setPen(QColor(colour))
        cut = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, place.width())
        painter.drawText(place, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), cut)

    def _draw_bar(self, painter: QPainter, place: QRectF, run: RunSummary, chosen: bool) -> None:
        scheme = colours()
        painter.setPen(Qt.PenStyle.NoPen)
        ground = QColor(scheme.on_accent if chosen else scheme.line)
        ground.setAlpha(90 if chosen else 255)
        painter.setBrush(ground)
        painter.drawRoundedRect(place, 1.5, 1.5)
        share = min(1.0, run.step / run.steps)
        painter.setBrush(QColor(scheme.on_accent if chosen else scheme.focus))
        painter.drawRoundedRect(QRectF(place.left(), place.top(), place.width() * share, place.height()), 1.5, 1.5)


class RunList(QListView):
    """All runs, the latest first; the chosen ones are laid over each other in the charts."""

    chosen = Signal()
    """Other runs are chosen, or in another order."""

    def __init__(self, left: Callable[[Path], float | None], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.runs = RunModel(left, self)
        self._order: list[Path] = []
        self._quiet = False
        self.setModel(self.runs)
        self.setItemDelegate(RunDelegate(self))
        self.setAccessibleName(self.tr("Runs"))
        self.setSelectionMode(QListView.SelectionMode.ExtendedSelection)
        self.setUniformItemSizes(True)
        self.setMouseTracking(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.selectionModel().selectionChanged.connect(self._hear)

    @property
    def paths(self) -> list[Path]:
        """The chosen runs in the order in which they were chosen."""
        return list(self._order)

    def show_runs(self, rows: Sequence[RunSummary]) -> None:
        """Show these; what was chosen stays chosen as far as it is there."""
        self._quiet = True
        if self.runs.show(rows):
            self._select(self._order)
        self._quiet = False
        self._hear()

    def choose(self, path: Path) -> None:
        """Choose one run alone."""
        self._quiet = True
        self._select([path])
        self._quiet = False
        self._hear()
        place = self.runs.place_of(path)
        if place.isValid():
            self.scrollTo(place)

    def _select(self, paths: Sequence[Path]) -> None:
        selection = QItemSelection()
        places = [place for path in paths if (place := self.runs.place_of(path)).isValid()]
        for place in places:
            selection.select(place, place)
        self.selectionModel().select(selection, QItemSelectionModel.SelectionFlag.ClearAndSelect)
        if places:
            self.selectionModel().setCurrentIndex(places[0], QItemSelectionModel.SelectionFlag.NoUpdate)

    def _hear(self) -> None:
        """Keep the order in which runs were chosen: the first is the one that the rest of the page is about."""
        if self._quiet:
            return
        now = {self.runs.rows[index.row()].path for index in self.selectionModel().selectedIndexes()}
        order = [path for path in self._order if path in now]
        order += [row.path for row in self.runs.rows if row.path in now and row.path not in order]
        if order != self._order:
            self._order = order
            self.chosen.emit()
