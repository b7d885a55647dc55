"""The list of all jobs, latest first, with the open one selected."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QPoint, QSize, Qt, Signal
from PySide6.QtWidgets import (
    QHBoxLayout,
    QLabel,
    QListWidget,
    QListWidgetItem,
    QMenu,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.jobs.jobs import JobEntry
from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.theme import set_icon
from app.qt.widgets import plain_tip, until_destroyed

_PATH = Qt.ItemDataRole.UserRole
MENU = ("train.new", "train.open", "train.duplicate", "train.rename", "train.delete")
"""Ids of the commands in the list's context menu."""


class JobList(QWidget):
    """List of jobs; clicking a job opens it, and a damaged job's tooltip says what is wrong."""

    chosen = Signal(object)
    """Path of the job file to open."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._jobs, self._commands = session.jobs, commands
        self._open: Path | None = None
        self.list = QListWidget()
        self.list.setAccessibleName(self.tr("Jobs"))
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.list.customContextMenuRequested.connect(self._on_context_menu_requested)
        self.list.itemClicked.connect(self._on_item_chosen)
        self.list.itemActivated.connect(self._on_item_chosen)
        self._build()
        until_destroyed(self, self._jobs.changed.connect(lambda _: self.refresh()))
        self.refresh()

    def show_open(self, path: Path | None, name: str = "") -> None:
        """Select the open job and show its current name, or select none if `path` is None."""
        self._open = path
        for item in self._items():
            if path is not None and item.data(_PATH) == str(path):
                item.setText(name or item.text())
                self.list.setCurrentItem(item)
                return
        self.list.setCurrentRow(-1)

    def refresh(self) -> None:
        """Show the current jobs."""
        self.list.clear()
        for entry in self._jobs.all:
            self.list.addItem(self._item(entry))
        self.show_open(self._open)

    def _item(self, entry: JobEntry) -> QListWidgetItem:
        item = QListWidgetItem(entry.name)
        item.setData(_PATH, str(entry.path))
        item.setToolTip(plain_tip(f"{entry.path}: {entry.problem}" if entry.problem else str(entry.path)))
        if entry.problem:
            item.setData(Qt.ItemDataRole.AccessibleDescriptionRole, entry.problem)
            item.setForeground(self.palette().placeholderText())
        return item

    def _items(self) -> list[QListWidgetItem]:
        return [self.list.item(row) for row in range(self.list.count())]

    def _on_item_chosen(self, item: QListWidgetItem) -> None:
        path = Path(item.data(_PATH))
        if path != self._open:
            self.chosen.emit(path)

    def _on_context_menu_requested(self, place: QPoint) -> None:
        item = self.list.itemAt(place)
        if item is not None:
            self._on_item_chosen(item)
        self._menu().exec(self.list.viewport().mapToGlobal(place))

    def _menu(self) -> QMenu:
        menu = QMenu(self)
        for name in MENU:
            menu.addAction(self._commands[name])
        return menu

    def _build(self) -> None:
        title = QLabel(self.tr("Jobs"))
        title.setProperty("role", "heading")
        self.add, self.more = QToolButton(), QToolButton()
        for button, drawing, words in (
            (self.add, "add", self.tr("New job")),
            (self.more, "more", self.tr("More actions for jobs")),
        ):
            button.setIconSize(QSize(16, 16))
            button.setToolTip(words)
            button.setAccessibleName(words)
            set_icon(button, drawing)
        self.add.clicked.connect(lambda: self._commands["train.new"].trigger())
        self.more.clicked.connect(lambda: self._menu().popup(self.more.mapToGlobal(self.more.rect().bottomLeft())))
        head = QHBoxLayout()
        head.setContentsMargins(14, 12, 8, 6)
        head.setSpacing(2)
        head.addWidget(title)
        head.addStretch()
        head.addWidget(self.add)
        head.addWidget(self.more)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(head)
        column.addWidget(self.list, 1)
