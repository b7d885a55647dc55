"""The list of runs: how each stands and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import localtime

from PySide6.QtCore import (
    QItemSelection,
    QItemSelectionModel,
    QObject,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QFont, QPainter
from PySide6.QtWidgets import QListView, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.core.runs.summary import RunSummary
from app.qt.runs.rows import DOT, Index, StandingModel, paint_dot, paint_focus, paint_ground, paint_words
from app.qt.runs.state_words import standing, state_colour
from app.qt.theme import colours
from app.qt.tips import plain_tip

SUMMARY = int(Qt.ItemDataRole.UserRole)
WORDS = SUMMARY + 1
COLOUR = WORDS + 1
_SIDE, _ABOVE, _BAR = 12, 8, 3


class RunModel(StandingModel[RunSummary]):
    """The runs of now; `left` tells the seconds that a run still needs."""

    def __init__(
        self,
        left: Callable[[Path], float | None],
        begins: Callable[[RunSummary], bool],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(lambda run: run.path, parent)
        self._left, self._begins = left, begins
        self._beginning: set[Path] = set()
        """Those whose engines were on their way when it was said how they stand."""
        self._day = _today()
        """When it was said how runs stand: of some it is said which day they began on, as seen from today."""

    def show(self, rows: Sequence[RunSummary]) -> bool:
        """Show these; returns whether they are others than before, and not only the same standing otherwise."""
        same_day, self._day = self._day == _today(), _today()
        before = dict(zip(map(id, self.rows), self.words, strict=True)) if same_day else {}
        was, self._beginning = self._beginning, {row.path for row in rows if self._begins(row)}
        for row in rows:
            if row.path in was ^ self._beginning:
                before.pop(id(row), None)
        return self.renew(rows, [self._words(row, before.get(id(row))) for row in rows])

    def _words(self, row: RunSummary, before: str | None) -> str:
        """Say how a run stands; of one that does not go on and is the same object, as `before`: there may be many."""
        if before is not None and row.state != "running":
            return before
        return standing(row, self._left(row.path), begins=row.path in self._beginning)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return what the view asks of a run."""
        row = self.rows[index.row()]
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return row.name
            case Qt.ItemDataRole.ToolTipRole:
                return plain_tip("\n".join(filter(None, (str(row.path), row.problem))))
            case Qt.ItemDataRole.AccessibleTextRole:
                return ", ".join(filter(None, (row.name, self.words[index.row()], row.problem)))
            case _ if role == SUMMARY:
                return row
            case _ if role == WORDS:
                return self.words[index.row()]
            case _ if role == COLOUR:
                return state_colour("running" if row.path in self._beginning else row.state)
        return None


def _today() -> tuple[int, int]:
    now = localtime()
    return now.tm_year, now.tm_yday


class RunDelegate(QStyledItemDelegate):
    """Draws the name, how the run stands, and a bar of how far it is."""

    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:  # noqa: N802
        """Return two lines and the bar."""
        return QSize(120, 2 * option.fontMetrics.height() + 2 * _ABOVE + _BAR + 8)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        """Draw one run."""
        run: RunSummary = index.data(SUMMARY)
        scheme = colours()
        painter.save()
        chosen = paint_ground(painter, option)
        inside = option.rect.adjusted(_SIDE, _ABOVE, -_SIDE, -_ABOVE)
        text, muted = (scheme.on_accent, scheme.on_accent) if chosen else (scheme.text, scheme.muted)
        height = option.fontMetrics.height()
        line = QRect(inside.left(), inside.top(), inside.width(), height)
        paint_dot(painter, line, scheme.on_accent if chosen else getattr(scheme, index.data(COLOUR)))
        line.setLeft(line.left() + DOT + 8)
        bold = QFont(option.font)
        bold.setBold(True)
        paint_words(painter, line, run.name, text, bold)
        below = line.translated(0, height + 2)
        paint_words(painter, below, str(index.data(WORDS)), muted, option.font)
        if run.steps and run.state != "done":
            self._draw_bar(painter, QRectF(line.left(), below.bottom() + 5, line.width(), _BAR), run, chosen)
        paint_focus(painter, option, chosen)
        painter.restore()

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

    def __init__(
        self,
        left: Callable[[Path], float | None],
        begins: Callable[[RunSummary], bool],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.runs = RunModel(left, begins, self)
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

    def clear_choice(self) -> None:
        """Clear the selection."""
        self._quiet = True
        self.selectionModel().clearSelection()
        self._quiet, self._order = False, []

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
