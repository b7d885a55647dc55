"""The tag panel: a list of all tags and, below it, the tags that occur with the selected one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from heapq import merge
from typing import Literal, TypeVar

from PySide6.QtCore import (
    QAbstractListModel,
    QItemSelectionModel,
    QLocale,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPoint,
    QSize,
    Qt,
    QTimer,
)
from PySide6.QtGui import (
    QColor,
    QGuiApplication,
    QHideEvent,
    QKeyEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import (
    QHBoxLayout,
    QInputDialog,
    QLabel,
    QLineEdit,
    QListView,
    QMenu,
    QSizePolicy,
    QSplitter,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QToolButton,
    QVBoxLayout,
    QWidget,
)
from shiboken6 import isValid

from app.core.edits.bulk import remove_tags, rename_tag
from app.core.edits.history import Edit
from app.core.library import LibraryImage
from app.core.query.terms import Term, literal
from app.core.session import Session
from app.core.tags.index import Row, TagCount, co_occurring
from app.core.tasks import handle_only, reraise
from app.core.words import full_message
from app.qt.actions.commands import Action, Commands
from app.qt.theme import colors, set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, until_destroyed
from trainer.errors import ImpastoError

_Index = QModelIndex | QPersistentModelIndex
_SIDE = 10
_GAP = 10
# Rows that the model adds at a time; the view fetches more when scrolled to the end.
_FETCH_SIZE = 1000
# Sorting holds the GIL; parts of this size take about 5 ms.
_PART = 5000
# Counts change with every word typed; the list is updated after a pause.
_PAUSE_MS = 150
_TOGETHER = 30
ACTIONS = (
    Action(
        "finding.tags",
        QT_TRANSLATE_NOOP("Action", "Search tags"),
        "find",
        "search_tags",
        keys=("Ctrl+Shift+F",),
        icon="tag",
    ),
    Action(
        "finding.rename",
        QT_TRANSLATE_NOOP("Action", "Rename tag everywhere…"),
        "find",
        "rename",
        enabled="has_tag",
    ),
    Action(
        "finding.remove",
        QT_TRANSLATE_NOOP("Action", "Remove tag everywhere"),
        "find",
        "remove",
        enabled="has_tag",
    ),
)


class TagDelegate(QStyledItemDelegate):
    """Delegate that paints a tag and its count; the count is muted, so that the tag stands out."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Paint background, tag and count."""
        scheme = colors()
        chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        if chosen:
            painter.fillRect(option.rect, QColor(scheme.accent))
        elif option.state & QStyle.StateFlag.State_MouseOver:
            painter.fillRect(option.rect, QColor(scheme.hover))
        inside = option.rect.adjusted(_SIDE, 0, -_SIDE, 0)
        count = QLocale().toString(int(index.data(Qt.ItemDataRole.UserRole)))
        painter.setFont(option.font)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.muted))
        painter.drawText(inside, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, count)
        inside.setRight(inside.right() - option.fontMetrics.horizontalAdvance(count) - _GAP)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.text))
        tag = option.fontMetrics.elidedText(str(index.data()), Qt.TextElideMode.ElideMiddle, inside.width())
        painter.drawText(inside, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, tag)

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return the size of a row."""
        return QSize(80, option.fontMetrics.height() + 8)


Order = Literal["count", "name"]


class TagModel(QAbstractListModel):
    """List model of sorted tags with their counts, fetched in batches."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[TagCount] = []
        self._fetched = 0

    def show(self, rows: list[TagCount]) -> None:
        """Replace all rows."""
        self.beginResetModel()
        self.rows = rows
        self._fetched = min(len(rows), max(_FETCH_SIZE, self._fetched))
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return the number of fetched rows."""
        return 0 if parent.isValid() else self._fetched

    def canFetchMore(self, parent: _Index) -> bool:  # noqa: N802
        """Return whether there are rows left to fetch."""
        return not parent.isValid() and self._fetched < len(self.rows)

    def fetchMore(self, parent: _Index) -> None:  # noqa: N802
        """Add the next batch of rows."""
        if self.canFetchMore(parent):
            more = min(_FETCH_SIZE, len(self.rows) - self._fetched)
            self.beginInsertRows(QModelIndex(), self._fetched, self._fetched + more - 1)
            self._fetched += more
            self.endInsertRows()

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return the tag or its count; for screen readers, both."""
        if not index.isValid():
            return None
        tag, images = self.rows[index.row()]
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            return tag
        if role == Qt.ItemDataRole.UserRole:
            return images
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return self.tr("%1, %n image(s)", "", images).replace("%1", tag)
        return None

    def index_of(self, tag: str) -> QModelIndex:
        """Return a tag's index among the fetched rows; an invalid index if it is not there."""
        for row, found in enumerate(self.rows[: self._fetched]):
            if found.tag == tag:
                return self.index(row)
        return QModelIndex()


def sort_tags(counts: Iterable[tuple[str, int]], order: Order) -> list[TagCount]:
    """Return the tags with their counts, sorted by count or by name.

    Sorts the tags in several parts, so that the main thread can run in between when a worker calls this.
    """
    rows = [TagCount(*pair) for pair in counts]
    key = _by_count if order == "count" else _by_name
    parts = [sorted(rows[start : start + _PART], key=key) for start in range(0, len(rows), _PART)]
    return list(merge(*parts, key=key))


def _by_count(row: TagCount) -> tuple[int, str]:
    return -row.images, row.tag


def _by_name(row: TagCount) -> tuple[str, str]:
    return row.tag.casefold(), row.tag


_Result = TypeVar("_Result")


class TagView(QListView):
    """List of tags with counts. A click or Enter filters by a tag; Ctrl adds it to the filter, Alt excludes it."""

    def __init__(self, name: str, use: Callable[[str, Qt.KeyboardModifier], None]) -> None:
        super().__init__()
        self.tags = TagModel(self)
        self.setModel(self.tags)
        self.setItemDelegate(TagDelegate(self))
        self.setUniformItemSizes(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.setAccessibleName(name)
        self.setAccessibleDescription(
            self.tr("Enter filters by the tag, Ctrl+Enter adds it to the filter, Alt+Enter excludes it")
        )
        self._use = use
        self.empty_text = ""
        """Message shown while there are no tags."""
        self.clicked.connect(self._on_clicked)

    @property
    def tag(self) -> str | None:
        """Return the selected tag, or None."""
        row = self.currentIndex().row()
        return self.tags.rows[row].tag if 0 <= row < len(self.tags.rows) else None

    def show_rows(self, rows: list[TagCount]) -> None:
        """Replace all rows, keeping selection and scroll position if possible."""
        tag, place = self.tag, self.verticalScrollBar().value()
        self.tags.show(rows)
        if tag is not None and (index := self.tags.index_of(tag)).isValid():
            self.selectionModel().setCurrentIndex(index, QItemSelectionModel.SelectionFlag.ClearAndSelect)
        self.verticalScrollBar().setValue(place)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Filter by the selected tag when Enter is pressed."""
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.tag is not None:
            self._use(self.tag, event.modifiers())
        else:
            super().keyPressEvent(event)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the message if the list is empty."""
        super().paintEvent(event)
        if not self.tags.rows and self.empty_text:
            painter = QPainter(self.viewport())
            painter.setPen(QColor(colors().muted))
            flags = int(Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop | Qt.TextFlag.TextWordWrap)
            painter.drawText(self.viewport().rect().adjusted(12, 16, -12, -8), flags, self.empty_text)
            painter.end()

    def _on_clicked(self, index: QModelIndex) -> None:
        self._use(self.tags.rows[index.row()].tag, QGuiApplication.keyboardModifiers())


class TagPanel(QWidget):
    """Panel with all tags in the open datasets and, below, those that occur most often with the selected tag."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._index = session.tags
        self._commands = commands
        self.order: Order = "count"
        self.search = QLineEdit()
        self.sort = QToolButton()
        self.heading = QLabel()
        self.all = TagView(self.tr("Tags"), self.use)
        self.title = QLabel()
        self.together = TagView(self.tr("Tags seen with the selected one"), self.use)
        self.message = QLabel()
        self._update_timer = QTimer(self)
        self._title = ""
        self._sorting = self._stale = False
        self._build()
        self._connect()
        commands.add(ACTIONS, self)
        self._request()

    @property
    def has_tag(self) -> bool:
        """Return whether a tag is selected."""
        return self.all.tag is not None

    def search_tags(self) -> None:
        """Focus the search field."""
        self.search.setFocus()
        self.search.selectAll()

    def use(self, tag: str, modifiers: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier) -> None:
        """Filter by a tag; Ctrl adds it to the filter, Alt excludes it."""
        term = Term("tag", literal(tag))
        if modifiers & Qt.KeyboardModifier.AltModifier:
            self._session.filtering.narrow(term, exclude=True)
        elif modifiers & Qt.KeyboardModifier.ControlModifier:
            self._session.filtering.narrow(term)
        else:
            self._session.filtering.apply(str(term))

    def rename(self) -> None:
        """Ask for a new name for the selected tag and rename it in all captions, as one edit."""
        tag = self.all.tag
        if tag is None:
            return
        new, accepted = QInputDialog.getText(
            self, self.tr("Rename tag"), self.tr("New name for %1:").replace("%1", tag), text=tag
        )
        if accepted and new.strip() not in ("", tag):
            self._edit(tag, lambda images: rename_tag(images, tag, new.strip()))

    def remove(self) -> None:
        """Remove the selected tag from all captions, as one edit."""
        tag = self.all.tag
        if tag is not None:
            self._edit(tag, lambda images: remove_tags(images, [tag]))

    def choose_order(self, order: Order) -> None:
        """Sort by count or by name."""
        self.order = order
        self._update_sort_button()
        self._request()

    def _build(self) -> None:
        self.search.setPlaceholderText(self.tr("Search tags"))
        self.search.setAccessibleName(self.tr("Search tags"))
        self.search.setClearButtonEnabled(True)
        set_icon(self.sort, "sort")
        self._update_sort_button()
        self.heading.setProperty("role", "heading")
        self.title.setProperty("role", "muted")
        self.title.setContentsMargins(10, 6, 8, 2)
        for label in (self.heading, self.title):  # a long tag must not widen the panel
            label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.message.setProperty("role", "bad")
        self.message.setWordWrap(True)
        self.message.hide()
        top = QHBoxLayout()
        top.setContentsMargins(10, 6, 8, 0)
        top.addWidget(self.heading, 1)
        top.addWidget(self.sort)
        field = QHBoxLayout()
        field.setContentsMargins(8, 4, 8, 4)
        field.addWidget(self.search)
        below = QWidget()
        column = QVBoxLayout(below)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.title)
        column.addWidget(self.together, 1)
        split = QSplitter(Qt.Orientation.Vertical)
        split.addWidget(self.all)
        split.addWidget(below)
        split.setSizes([420, 200])
        split.setChildrenCollapsible(False)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.setSpacing(0)
        whole.addLayout(top)
        whole.addLayout(field)
        whole.addWidget(self.message)
        whole.addWidget(split, 1)
        self._show_together(None, [])

    def _connect(self) -> None:
        self._update_timer.setSingleShot(True)
        self._update_timer.setInterval(_PAUSE_MS)
        self._update_timer.timeout.connect(self._request)
        self.search.textChanged.connect(lambda _: self._request())
        self.sort.clicked.connect(lambda: self.choose_order("name" if self.order == "count" else "count"))
        self.all.selectionModel().currentChanged.connect(lambda *_: self._on_selection_changed())
        for view in (self.all, self.together):
            view.customContextMenuRequested.connect(lambda place, view=view: self._on_menu_requested(view, place))
        until_destroyed(self, self._index.changed.connect(lambda _: self._on_index_changed()))

    def _on_index_changed(self) -> None:
        """Schedule an update; if the panel is hidden, update it once it is shown."""
        if self.isVisible():
            self._update_timer.start()
        else:
            self._stale = True

    def _update_sort_button(self) -> None:
        by_count = self.order == "count"
        self.sort.setToolTip(self.tr("Most frequent first") if by_count else self.tr("Alphabetical order"))
        self.sort.setAccessibleName(
            self.tr("Sort by name instead of count") if by_count else self.tr("Sort by count instead of name")
        )

    def _request(self) -> None:
        """Sort the matching tags on a worker, then show them; start over if the tags change in the meantime."""
        self._update_timer.stop()
        if self._sorting:
            self._stale = True
            return
        self._sorting, self._stale = True, False
        index, order, part = self._index, self.order, self.search.text()
        counts = {tag: index.count(tag) for tag in index.search(part)} if part else index.counts()
        self._session.tasks.run(lambda: sort_tags(counts.items(), order), self._while_open(self._on_sorted), reraise)

    def _while_open(self, callback: Callable[[_Result], None]) -> Callable[[_Result], None]:
        """Wrap a worker's callback so that it does nothing once the panel is destroyed."""
        return lambda result: callback(result) if isValid(self) else None

    def _on_sorted(self, rows: list[TagCount]) -> None:
        self._sorting = False
        known = len(self._index) > 0
        self.all.empty_text = self.tr("No tag contains this text.") if known else self.tr("Tags appear here.")
        self.all.show_rows(rows)
        number = QLocale().toString
        text = self.tr("%n tag(s)", "", len(self._index))
        if len(rows) != len(self._index):
            text = self.tr("%1 of %2 tags").replace("%1", number(len(rows))).replace("%2", number(len(self._index)))
        self.heading.setText(text)
        self._on_selection_changed()
        if self._stale and self.isVisible():
            self._request()

    def _on_selection_changed(self) -> None:
        """Count the tags that occur with the selected one on a worker; drop the result if the selection has changed."""
        self._commands.refresh()
        tag = self.all.tag
        if tag is None:
            self._show_together(None, [])
            return
        rows: list[Row] = self._index.rows(self._index.images_with(tag))
        callback = self._while_open(partial(self._show_together, tag))
        self._session.tasks.run(lambda: co_occurring(rows, tag, _TOGETHER), callback, reraise)

    def _show_together(self, tag: str | None, found: list[TagCount]) -> None:
        if tag != self.all.tag:
            return
        text = self.tr("Seen together")
        if tag is not None:
            text = self.tr("Seen together with %1").replace("%1", tag)
        self._title = text
        self._fit_title()
        self.together.show_rows(found)

    def _fit_title(self) -> None:
        room = self.width() - 24
        self.title.setText(self.title.fontMetrics().elidedText(self._title, Qt.TextElideMode.ElideMiddle, room))

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Elide the title to the new width."""
        super().resizeEvent(event)
        self._fit_title()

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Update if the tags have changed while hidden."""
        super().showEvent(event)
        if self._stale:
            self._request()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop updating while hidden."""
        super().hideEvent(event)
        self._stale |= self._update_timer.isActive()
        self._update_timer.stop()

    def _on_menu_requested(self, view: TagView, place: QPoint) -> None:
        index = view.indexAt(place)
        if index.isValid():
            view.setCurrentIndex(index)
            self._make_menu(view).exec(view.viewport().mapToGlobal(place))

    def _make_menu(self, view: TagView) -> QMenu:
        tag = view.tag or ""
        menu = QMenu(self)
        menu.addAction(self.tr("Filter by this tag"), lambda: self.use(tag))
        menu.addAction(self.tr("Add to filter"), lambda: self.use(tag, Qt.KeyboardModifier.ControlModifier))
        menu.addAction(self.tr("Exclude this tag"), lambda: self.use(tag, Qt.KeyboardModifier.AltModifier))
        menu.addAction(self.tr("Copy"), lambda: QGuiApplication.clipboard().setText(tag))
        if view is self.all:
            menu.addSeparator()
            menu.addAction(self._commands["finding.rename"])
            menu.addAction(self._commands["finding.remove"])
        return menu

    def _edit(self, tag: str, change: Callable[[list[LibraryImage]], Edit]) -> None:
        """On a worker, compute an edit of all images with exactly this tag; then apply it."""
        images = self._session.library.images
        chosen = [images[number] for number in self._index.images_with(tag)]
        self.message.hide()
        self._session.tasks.run(
            lambda: change(chosen),
            self._session.history.do,
            self._while_open(handle_only(ImpastoError, self._on_edit_failed)),
        )

    def _on_edit_failed(self, fault: ImpastoError) -> None:
        self.message.setText(full_message(fault))
        self.message.show()
