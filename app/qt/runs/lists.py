"""The list of runs: how each stands and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import localtime

from PySide6.QtCore import (
    QCoreApplication,
    QItemSelection,
    QItemSelectionModel,
    QLocale,
    QMimeData,
    QModelIndex,
    QObject,
    QPoint,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QFont, QPainter, QResizeEvent
from PySide6.QtWidgets import QListView, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.core.runs.summary import RunSummary
from app.qt.runs.rows import (
    DOT,
    Index,
    StandingModel,
    ending_word,
    paint_dot,
    paint_focus,
    paint_ground,
    paint_words,
    run_status,
    state_colour,
    state_word,
)
from app.qt.theme import colours
from app.qt.widgets import plain_tip, upcoming
from trainer.protocol.queue import Entry, State

SUMMARY = int(Qt.ItemDataRole.UserRole)
RUN_WORDS = SUMMARY + 1
COLOUR = RUN_WORDS + 1
ENTRY = int(Qt.ItemDataRole.UserRole)
_MIME = "application/x-impasto-queue-entry"
_SIDE, _RUN_ABOVE, _BAR = 12, 8, 3


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
        """Show these; returns whether they are others than before, and not only the same rows with another status."""
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
        return run_status(row, self._left(row.path), begins=row.path in self._beginning)

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
            case _ if role == RUN_WORDS:
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
        return QSize(120, 2 * option.fontMetrics.height() + 2 * _RUN_ABOVE + _BAR + 8)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        """Draw one run."""
        run: RunSummary = index.data(SUMMARY)
        scheme = colours()
        painter.save()
        chosen = paint_ground(painter, option)
        inside = option.rect.adjusted(_SIDE, _RUN_ABOVE, -_SIDE, -_RUN_ABOVE)
        text, muted = (scheme.on_accent, scheme.on_accent) if chosen else (scheme.text, scheme.muted)
        height = option.fontMetrics.height()
        line = QRect(inside.left(), inside.top(), inside.width(), height)
        paint_dot(painter, line, scheme.on_accent if chosen else getattr(scheme, index.data(COLOUR)))
        line.setLeft(line.left() + DOT + 8)
        bold = QFont(option.font)
        bold.setBold(True)
        paint_words(painter, line, run.name, text, bold)
        below = line.translated(0, height + 2)
        paint_words(painter, below, str(index.data(RUN_WORDS)), muted, option.font)
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


ENTRY_WORDS = ENTRY + 1
_ENTRY_ABOVE = 6


def entry_status(entry: Entry, now: float) -> str:
    """Return what the list says below an entry's name; `now` is Unix time in seconds."""
    if entry.state == "running":
        if entry.wish is not None:
            return ending_word(entry.wish)
        return state_word("running") if entry.run else _tr("Preparing")
    parts = [_tr("Waits") if entry.state == "waiting" else state_word(entry.state)]
    if entry.state == "waiting" and entry.after is not None and entry.after > now:
        parts.append(_tr("from {time}").format(time=upcoming(entry.after, now)))
    if entry.steps is not None and entry.state == "waiting":
        parts.append(_tr("to {steps} steps").format(steps=QLocale().toString(entry.steps)))
    return " · ".join([*parts, *entry.problem.splitlines()[:1]])


class QueueModel(StandingModel[Entry]):
    """The entries of now."""

    moved = Signal(str, object)
    """An entry's id, and that of the one it was dropped before; None: dropped at the end."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(lambda entry: entry.id, parent)

    def show(self, rows: Sequence[Entry]) -> bool:
        """Show these; returns whether they are others than before, and not only the same rows with another status."""
        now = time.time()
        return self.renew(rows, [entry_status(row, now) for row in rows])

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return what the view asks of an entry."""
        row, words = self.rows[index.row()], self.words[index.row()]
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return row.name
            case Qt.ItemDataRole.ToolTipRole:
                return plain_tip("\n".join(filter(None, (str(row.run or row.job), row.problem))))
            case Qt.ItemDataRole.AccessibleTextRole:
                return f"{row.name}, {words}"
            case _ if role == ENTRY:
                return row
            case _ if role == ENTRY_WORDS:
                return words
        return None

    # --- dragging

    def flags(self, index: Index) -> Qt.ItemFlag:
        """Let entries be dragged, and dropped between others."""
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled
        return Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemIsDragEnabled

    def supportedDropActions(self) -> Qt.DropAction:  # noqa: N802
        """Return that dropping moves."""
        return Qt.DropAction.MoveAction

    def mimeTypes(self) -> list[str]:  # noqa: N802
        """Return what can be dropped: entries of this list."""
        return [_MIME]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:  # noqa: N802
        """Return the dragged entry's id."""
        data = QMimeData()
        data.setData(_MIME, self.rows[indexes[0].row()].id.encode("ascii"))
        return data

    def dropMimeData(  # noqa: N802
        self, data: QMimeData, action: Qt.DropAction, row: int, column: int, parent: Index
    ) -> bool:
        """Ask for the move; the list shows it when the queue has it. False: nothing is to be taken out here."""
        if data.hasFormat(_MIME):
            name = bytes(data.data(_MIME).data()).decode("ascii")
            self.moved.emit(name, self.rows[row].id if 0 <= row < len(self.rows) else None)
        return False


class QueueDelegate(QStyledItemDelegate):
    """Draws the name and how the entry stands."""

    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:  # noqa: N802
        """Return two lines."""
        return QSize(120, 2 * option.fontMetrics.height() + 2 * _ENTRY_ABOVE + 2)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        """Draw one entry."""
        entry: Entry = index.data(ENTRY)
        scheme = colours()
        painter.save()
        chosen = paint_ground(painter, option)
        inside = option.rect.adjusted(_SIDE, _ENTRY_ABOVE, -_SIDE, -_ENTRY_ABOVE)
        height = option.fontMetrics.height()
        line = QRect(inside.left(), inside.top(), inside.width(), height)
        paint_dot(painter, line, scheme.on_accent if chosen else getattr(scheme, _colour(entry.state)))
        line.setLeft(line.left() + DOT + 8)
        faint = scheme.on_accent if chosen else scheme.muted
        name = scheme.on_accent if chosen else scheme.muted if entry.state in ("done", "stopped") else scheme.text
        paint_words(painter, line, entry.name, name, option.font)
        paint_words(painter, line.translated(0, height + 2), str(index.data(ENTRY_WORDS)), faint, option.font)
        paint_focus(painter, option, chosen)
        painter.restore()


class QueueList(QListView):
    """The queue in order."""

    chosen = Signal()
    """Another entry is chosen, or none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.queue = QueueModel(self)
        self.setModel(self.queue)
        self.setItemDelegate(QueueDelegate(self))
        self.setAccessibleName(self.tr("Queue"))
        self.setUniformItemSizes(True)
        self.setMouseTracking(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setDragDropMode(QListView.DragDropMode.InternalMove)
        self.setDefaultDropAction(Qt.DropAction.MoveAction)
        self.selectionModel().selectionChanged.connect(lambda *_: self.chosen.emit())

    def entry(self) -> Entry | None:
        """Return the chosen entry."""
        chosen = self.selectionModel().selectedIndexes()
        return self.queue.rows[chosen[0].row()] if chosen else None

    def choose(self, number: str) -> None:
        """Select an entry if it is in the list."""
        place = self.queue.place_of(number)
        if place.isValid():
            self.setCurrentIndex(place)
            self.scrollTo(place)

    def show_entries(self, rows: Sequence[Entry]) -> None:
        """Show these; what was chosen stays chosen as long as it is there, and what is read stays in its place.

        At first what is still to be done is in sight.
        """
        first, before, place = not self.queue.rows, self.entry(), self.verticalScrollBar().value()
        watched = before is not None and self._is_seen(self.queue.place_of(before.id), self.viewport().size())
        if not self.queue.show(rows):
            return
        chosen = self.queue.place_of(before.id) if before is not None else QModelIndex()
        self.setCurrentIndex(chosen)
        if first:
            self.scrollTo(self._to_do(), QListView.ScrollHint.PositionAtTop)
        else:
            self.verticalScrollBar().setValue(place)
        if watched:
            self.scrollTo(chosen)  # it was moved

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Keep in sight what is still to be done where it was."""
        to_do = self._to_do()
        was_seen = self._is_seen(to_do, event.oldSize())
        super().resizeEvent(event)
        if was_seen:
            self.scrollTo(to_do)

    def _to_do(self) -> QModelIndex:
        """Return the first entry that has not ended; an invalid index where there is none."""
        return next((self.queue.place_of(row.id) for row in self.queue.rows if not row.ended), QModelIndex())

    def _is_seen(self, place: QModelIndex, size: QSize) -> bool:
        """Tell whether some of an entry is in sight in a view of this size; yes for one that was never shown."""
        return not size.isValid() or QRect(QPoint(), size).intersects(self.visualRect(place))


def _colour(state: State) -> str:
    return "focus" if state == "waiting" else state_colour(state)


def _tr(text: str) -> str:
    return QCoreApplication.translate("QueueState", text)
