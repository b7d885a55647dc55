"""The list of the queue: what each entry is and how it stands; dragging changes the order."""

from __future__ import annotations

import time
from collections.abc import Sequence

from PySide6.QtCore import (
    QCoreApplication,
    QLocale,
    QMimeData,
    QModelIndex,
    QObject,
    QPoint,
    QRect,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QPainter, QResizeEvent
from PySide6.QtWidgets import QListView, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.qt.durations import upcoming
from app.qt.runs.rows import DOT, Index, StandingModel, paint_dot, paint_focus, paint_ground, paint_words
from app.qt.runs.state_words import ending_word, state_colour, state_word
from app.qt.theme import colours
from app.qt.tips import plain_tip
from trainer.protocol.queue import Entry, State

ENTRY = int(Qt.ItemDataRole.UserRole)
WORDS = ENTRY + 1
_MIME = "application/x-impasto-queue-entry"
_SIDE, _ABOVE = 12, 6


def standing(entry: Entry, now: float) -> str:
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
        """Show these; returns whether they are others than before, and not only the same standing otherwise."""
        now = time.time()
        return self.renew(rows, [standing(row, now) for row in rows])

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
            case _ if role == WORDS:
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
        return QSize(120, 2 * option.fontMetrics.height() + 2 * _ABOVE + 2)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        """Draw one entry."""
        entry: Entry = index.data(ENTRY)
        scheme = colours()
        painter.save()
        chosen = paint_ground(painter, option)
        inside = option.rect.adjusted(_SIDE, _ABOVE, -_SIDE, -_ABOVE)
        height = option.fontMetrics.height()
        line = QRect(inside.left(), inside.top(), inside.width(), height)
        paint_dot(painter, line, scheme.on_accent if chosen else getattr(scheme, _colour(entry.state)))
        line.setLeft(line.left() + DOT + 8)
        faint = scheme.on_accent if chosen else scheme.muted
        name = scheme.on_accent if chosen else scheme.muted if entry.state in ("done", "stopped") else scheme.text
        paint_words(painter, line, entry.name, name, option.font)
        paint_words(painter, line.translated(0, height + 2), str(index.data(WORDS)), faint, option.font)
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
