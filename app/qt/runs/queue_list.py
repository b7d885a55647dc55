"""The list of the queue: what each entry is and how it stands; dragging changes the order."""

from __future__ import annotations

import time
from collections.abc import Sequence

from PySide6.QtCore import (
    QAbstractListModel,
    QCoreApplication,
    QLocale,
    QMimeData,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import QListView, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.qt.durations import upcoming
from app.qt.theme import colours
from app.qt.tips import plain_tip
from app.qt.words import QT_TRANSLATE_NOOP
from trainer.protocol.queue import Entry, State, Wish

_Index = QModelIndex | QPersistentModelIndex
ENTRY = int(Qt.ItemDataRole.UserRole)
WORDS = ENTRY + 1
_MIME = "application/x-impasto-queue-entry"
_SIDE, _ABOVE, _DOT = 12, 6, 8

_STATES: dict[State, tuple[str, str]] = {
    "waiting": (QT_TRANSLATE_NOOP("QueueState", "Waits"), "focus"),
    "running": (QT_TRANSLATE_NOOP("QueueState", "Running"), "good"),
    "paused": (QT_TRANSLATE_NOOP("QueueState", "Paused"), "warning"),
    "interrupted": (QT_TRANSLATE_NOOP("QueueState", "Broken off"), "bad"),
    "done": (QT_TRANSLATE_NOOP("QueueState", "Done"), "muted"),
    "stopped": (QT_TRANSLATE_NOOP("QueueState", "Stopped"), "muted"),
    "failed": (QT_TRANSLATE_NOOP("QueueState", "Failed"), "bad"),
}
_WISHES: dict[Wish, str] = {
    "pause": QT_TRANSLATE_NOOP("QueueState", "Pausing…"),
    "stop": QT_TRANSLATE_NOOP("QueueState", "Stopping…"),
}


def standing(entry: Entry, now: float) -> str:
    """Return what the list says below an entry's name; `now` is Unix time in seconds."""
    if entry.state == "running":
        if entry.wish is not None:
            return _tr(_WISHES[entry.wish])
        return _tr("Running") if entry.run else _tr("Preparing")
    parts = [_tr(_STATES[entry.state][0])]
    if entry.state == "waiting" and entry.after is not None and entry.after > now:
        parts.append(_tr("from {time}").format(time=upcoming(entry.after, now)))
    if entry.steps is not None and entry.state == "waiting":
        parts.append(_tr("to {steps} steps").format(steps=QLocale().toString(entry.steps)))
    return " · ".join([*parts, *entry.problem.splitlines()[:1]])


class QueueModel(QAbstractListModel):
    """The entries of now."""

    moved = Signal(str, object)
    """An entry's id, and that of the one it was dropped before; None: dropped at the end."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: Sequence[Entry] = ()
        self._words: list[str] = []

    def show(self, rows: Sequence[Entry]) -> None:
        """Show these; the view keeps its place as long as only their standing is another."""
        now = time.time()
        words = [standing(row, now) for row in rows]
        if [row.id for row in rows] != [row.id for row in self.rows]:
            self.beginResetModel()
            self.rows, self._words = tuple(rows), words
            self.endResetModel()
            return
        pairs = zip(rows, words, self.rows, self._words, strict=True)
        changed = [place for place, (row, word, old, said) in enumerate(pairs) if (row, word) != (old, said)]
        self.rows, self._words = tuple(rows), words
        for place in changed:
            self.dataChanged.emit(self.index(place), self.index(place))

    def place_of(self, name: str) -> QModelIndex:
        """Return where an entry stands; an invalid index where it is not listed."""
        place = next((place for place, row in enumerate(self.rows) if row.id == name), -1)
        return self.index(place) if place >= 0 else QModelIndex()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: N802, B008 (Qt's signature)
        """Return how many there are."""
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return what the view asks of an entry."""
        row, words = self.rows[index.row()], self._words[index.row()]
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

    def flags(self, index: _Index) -> Qt.ItemFlag:
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
        self, data: QMimeData, action: Qt.DropAction, row: int, column: int, parent: _Index
    ) -> bool:
        """Ask for the move; the list shows it when the queue has it. False: nothing is to be taken out here."""
        if data.hasFormat(_MIME):
            name = bytes(data.data(_MIME).data()).decode("ascii")
            self.moved.emit(name, self.rows[row].id if 0 <= row < len(self.rows) else None)
        return False


class QueueDelegate(QStyledItemDelegate):
    """Draws the name and how the entry stands."""

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return two lines."""
        return QSize(120, 2 * option.fontMetrics.height() + 2 * _ABOVE + 2)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Draw one entry."""
        entry: Entry = index.data(ENTRY)
        scheme = colours()
        chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        hovered = bool(option.state & QStyle.StateFlag.State_MouseOver)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.fillRect(option.rect, QColor(scheme.accent if chosen else scheme.hover if hovered else scheme.base))
        inside = option.rect.adjusted(_SIDE, _ABOVE, -_SIDE, -_ABOVE)
        height = option.fontMetrics.height()
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(scheme.on_accent if chosen else getattr(scheme, _STATES[entry.state][1])))
        painter.drawEllipse(QRectF(inside.left(), inside.top() + (height - _DOT) / 2, _DOT, _DOT))
        line = QRect(inside.left() + _DOT + 8, inside.top(), inside.width() - _DOT - 8, height)
        faint = scheme.on_accent if chosen else scheme.muted
        name = scheme.on_accent if chosen else scheme.muted if entry.state in ("done", "stopped") else scheme.text
        for place, text, colour in (
            (line, entry.name, name),
            (line.translated(0, height + 2), str(index.data(WORDS)), faint),
        ):
            painter.setPen(QColor(colour))
            cut = option.fontMetrics.elidedText(text, Qt.TextElideMode.ElideRight, place.width())
            painter.drawText(place, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), cut)
        if option.state & QStyle.StateFlag.State_HasFocus:
            painter.setPen(QColor(scheme.on_accent if chosen else scheme.focus))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(QRectF(option.rect).adjusted(1.5, 1.5, -1.5, -1.5), 3, 3)
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

    def show_entries(self, rows: Sequence[Entry]) -> None:
        """Show these; what was chosen stays chosen as long as it is there."""
        before = self.entry()
        self.queue.show(rows)
        if before is not None and self.entry() is None:
            self.setCurrentIndex(self.queue.place_of(before.id))


def _tr(text: str) -> str:
    return QCoreApplication.translate("QueueState", text)
