"""The lists on the Runs page: the runs with their state and progress, and the queue entries."""

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
    StatusModel,
    ending_word,
    paint_background,
    paint_dot,
    paint_focus,
    paint_words,
    run_status,
    state_color,
    state_word,
)
from app.qt.theme import colors
from app.qt.widgets import format_future, plain_tip
from trainer.protocol.queue import Entry, State

SUMMARY = int(Qt.ItemDataRole.UserRole)
RUN_WORDS = SUMMARY + 1
COLOR = RUN_WORDS + 1
ENTRY = int(Qt.ItemDataRole.UserRole)
_MIME = "application/x-impasto-queue-entry"
_SIDE, _RUN_ABOVE, _BAR = 12, 8, 3


class RunModel(StatusModel[RunSummary]):
    """List model of the runs; `left` returns a run's remaining seconds, `starting` whether a run is starting."""

    def __init__(
        self,
        left: Callable[[Path], float | None],
        starting: Callable[[RunSummary], bool],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(lambda run: run.path, parent)
        self._left, self._starting = left, starting
        self._beginning: set[Path] = set()
        """Runs whose engine was starting when their status text was created."""
        self._day = _today()
        """Day on which the status texts were created; some say “yesterday”, so a new day makes them outdated."""

    def show(self, rows: Sequence[RunSummary]) -> bool:
        """Show these runs; return whether any were added, removed or moved (not whether any changed)."""
        same_day, self._day = self._day == _today(), _today()
        # By identity: an unchanged run is the same object as last time, which `self.rows` keeps alive until the end.
        before = dict(zip(map(id, self.rows), self.words, strict=True)) if same_day else {}
        was, self._beginning = self._beginning, {row.path for row in rows if self._starting(row)}
        for row in rows:
            if row.path in was ^ self._beginning:
                before.pop(id(row), None)
        return self.update_rows(rows, [self._words(row, before.get(id(row))) for row in rows])

    def _words(self, row: RunSummary, before: str | None) -> str:
        """Return a run's status text: `before`, if given, unless the run is running; otherwise a new one."""
        if before is not None and row.state != "running":
            return before
        return run_status(row, self._left(row.path), starting=row.path in self._beginning)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return a run's name, tooltip, text for screen readers, summary, status text or color, by role."""
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
            case _ if role == COLOR:
                return state_color("running" if row.path in self._beginning else row.state)
        return None


def _today() -> tuple[int, int]:
    now = localtime()
    return now.tm_year, now.tm_yday


class RunDelegate(QStyledItemDelegate):
    """Delegate that draws a run's name, status and progress bar."""

    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:  # noqa: N802
        """Return a size that fits two lines and the bar."""
        return QSize(120, 2 * option.fontMetrics.height() + 2 * _RUN_ABOVE + _BAR + 8)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        """Draw one run."""
        run: RunSummary = index.data(SUMMARY)
        scheme = colors()
        painter.save()
        chosen = paint_background(painter, option)
        inside = option.rect.adjusted(_SIDE, _RUN_ABOVE, -_SIDE, -_RUN_ABOVE)
        text, muted = (scheme.on_accent, scheme.on_accent) if chosen else (scheme.text, scheme.muted)
        height = option.fontMetrics.height()
        line = QRect(inside.left(), inside.top(), inside.width(), height)
        paint_dot(painter, line, scheme.on_accent if chosen else getattr(scheme, index.data(COLOR)))
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
        scheme = colors()
        painter.setPen(Qt.PenStyle.NoPen)
        track = QColor(scheme.on_accent if chosen else scheme.line)
        track.setAlpha(90 if chosen else 255)
        painter.setBrush(track)
        painter.drawRoundedRect(place, 1.5, 1.5)
        share = min(1.0, run.step / run.steps)
        painter.setBrush(QColor(scheme.on_accent if chosen else scheme.focus))
        painter.drawRoundedRect(QRectF(place.left(), place.top(), place.width() * share, place.height()), 1.5, 1.5)


class RunList(QListView):
    """List of all runs, latest first; the charts overlay the selected ones."""

    chosen = Signal()
    """Emitted when the selected runs or their order changed."""

    def __init__(
        self,
        left: Callable[[Path], float | None],
        starting: Callable[[RunSummary], bool],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.runs = RunModel(left, starting, self)
        self._order: list[Path] = []
        self._quiet = False
        self.setModel(self.runs)
        self.setItemDelegate(RunDelegate(self))
        self.setAccessibleName(self.tr("Runs"))
        self.setSelectionMode(QListView.SelectionMode.ExtendedSelection)
        self.setUniformItemSizes(True)
        self.setMouseTracking(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.selectionModel().selectionChanged.connect(self._on_selection_changed)

    @property
    def paths(self) -> list[Path]:
        """Return the selected runs in the order in which they were selected."""
        return list(self._order)

    def show_runs(self, rows: Sequence[RunSummary]) -> None:
        """Show these runs; selected runs that are still listed stay selected."""
        self._quiet = True
        if self.runs.show(rows):
            self._select(self._order)  # replacing the rows has cleared Qt's selection
        self._quiet = False
        self._on_selection_changed()

    def clear_choice(self) -> None:
        """Clear the selection."""
        self._quiet = True
        self.selectionModel().clearSelection()
        self._quiet, self._order = False, []

    def choose(self, path: Path) -> None:
        """Select only this run."""
        self._quiet = True
        self._select([path])
        self._quiet = False
        self._on_selection_changed()
        place = self.runs.index_of(path)
        if place.isValid():
            self.scrollTo(place)

    def _select(self, paths: Sequence[Path]) -> None:
        selection = QItemSelection()
        places = [place for path in paths if (place := self.runs.index_of(path)).isValid()]
        for place in places:
            selection.select(place, place)
        self.selectionModel().select(selection, QItemSelectionModel.SelectionFlag.ClearAndSelect)
        if places:
            self.selectionModel().setCurrentIndex(places[0], QItemSelectionModel.SelectionFlag.NoUpdate)

    def _on_selection_changed(self) -> None:
        """Update the order of selection: the page shows the run that was selected first."""
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
    """Return the status text below an entry's name; `now` is Unix time in seconds."""
    if entry.state == "running":
        if entry.wish is not None:
            return ending_word(entry.wish)
        return state_word("running") if entry.run else _tr("Preparing")
    parts = [_tr("Queued") if entry.state == "waiting" else state_word(entry.state)]
    if entry.state == "waiting" and entry.after is not None and entry.after > now:
        parts.append(_tr("from {time}").format(time=format_future(entry.after, now)))
    if entry.steps is not None and entry.state == "waiting":
        parts.append(_tr("to {steps} steps").format(steps=QLocale().toString(entry.steps)))
    return " · ".join([*parts, *entry.problem.splitlines()[:1]])


class QueueModel(StatusModel[Entry]):
    """List model of the queue entries, which the user can reorder by dragging."""

    moved = Signal(str, object)
    """Id of the dropped entry, and id of the entry that it will precede (None: at the end)."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(lambda entry: entry.id, parent)

    def show(self, rows: Sequence[Entry]) -> bool:
        """Show these entries; return whether any were added, removed or moved (not whether any changed)."""
        now = time.time()
        return self.update_rows(rows, [entry_status(row, now) for row in rows])

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return an entry's name, tooltip, text for screen readers, the entry or its status text, by role."""
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
        """Return flags that allow dragging entries and dropping them only between other entries."""
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled
        return Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemIsDragEnabled

    def supportedDropActions(self) -> Qt.DropAction:  # noqa: N802
        """Return the only drop action that is supported: moving."""
        return Qt.DropAction.MoveAction

    def mimeTypes(self) -> list[str]:  # noqa: N802
        """Return the MIME type of dragged entries."""
        return [_MIME]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:  # noqa: N802
        """Return the dragged entry's id as MIME data."""
        data = QMimeData()
        data.setData(_MIME, self.rows[indexes[0].row()].id.encode("ascii"))
        return data

    def dropMimeData(  # noqa: N802
        self, data: QMimeData, action: Qt.DropAction, row: int, column: int, parent: Index
    ) -> bool:
        """Emit `moved` and return False, so that Qt removes no row: the list changes only after the queue does."""
        if data.hasFormat(_MIME):
            name = bytes(data.data(_MIME).data()).decode("ascii")
            self.moved.emit(name, self.rows[row].id if 0 <= row < len(self.rows) else None)
        return False


class QueueDelegate(QStyledItemDelegate):
    """Delegate that draws an entry's name and status."""

    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:  # noqa: N802
        """Return a size that fits two lines."""
        return QSize(120, 2 * option.fontMetrics.height() + 2 * _ENTRY_ABOVE + 2)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        """Draw one entry."""
        entry: Entry = index.data(ENTRY)
        scheme = colors()
        painter.save()
        chosen = paint_background(painter, option)
        inside = option.rect.adjusted(_SIDE, _ENTRY_ABOVE, -_SIDE, -_ENTRY_ABOVE)
        height = option.fontMetrics.height()
        line = QRect(inside.left(), inside.top(), inside.width(), height)
        paint_dot(painter, line, scheme.on_accent if chosen else getattr(scheme, _color(entry.state)))
        line.setLeft(line.left() + DOT + 8)
        faint = scheme.on_accent if chosen else scheme.muted
        name = scheme.on_accent if chosen else scheme.muted if entry.state in ("done", "stopped") else scheme.text
        paint_words(painter, line, entry.name, name, option.font)
        paint_words(painter, line.translated(0, height + 2), str(index.data(ENTRY_WORDS)), faint, option.font)
        paint_focus(painter, option, chosen)
        painter.restore()


class QueueList(QListView):
    """List of the queue entries, in order."""

    chosen = Signal()
    """Emitted when another entry is selected or the selection is cleared."""

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
        """Return the selected entry, or None."""
        chosen = self.selectionModel().selectedIndexes()
        return self.queue.rows[chosen[0].row()] if chosen else None

    def choose(self, number: str) -> None:
        """Select an entry by its id, if it is in the list."""
        place = self.queue.index_of(number)
        if place.isValid():
            self.setCurrentIndex(place)
            self.scrollTo(place)

    def show_entries(self, rows: Sequence[Entry]) -> None:
        """Show these entries and keep the selection and the scroll position.

        The first time, scroll to the first entry that has not ended.
        """
        first, before, place = not self.queue.rows, self.entry(), self.verticalScrollBar().value()
        watched = before is not None and self._is_visible(self.queue.index_of(before.id), self.viewport().size())
        if not self.queue.show(rows):
            return
        chosen = self.queue.index_of(before.id) if before is not None else QModelIndex()
        self.setCurrentIndex(chosen)
        if first:
            self.scrollTo(self._first_open(), QListView.ScrollHint.PositionAtTop)
        else:
            self.verticalScrollBar().setValue(place)
        if watched:
            self.scrollTo(chosen)  # it may have moved out of view

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """If the first entry that has not ended was visible, keep it in view."""
        to_do = self._first_open()
        was_seen = self._is_visible(to_do, event.oldSize())
        super().resizeEvent(event)
        if was_seen:
            self.scrollTo(to_do)

    def _first_open(self) -> QModelIndex:
        """Return the index of the first entry that has not ended; invalid if there is none."""
        return next((self.queue.index_of(row.id) for row in self.queue.rows if not row.ended), QModelIndex())

    def _is_visible(self, place: QModelIndex, size: QSize) -> bool:
        """Return whether part of an entry is visible in a view of this size; True if the size is invalid."""
        return not size.isValid() or QRect(QPoint(), size).intersects(self.visualRect(place))


def _color(state: State) -> str:
    return "focus" if state == "waiting" else state_color(state)


def _tr(text: str) -> str:
    return QCoreApplication.translate("QueueState", text)
