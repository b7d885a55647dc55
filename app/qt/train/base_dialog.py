"""Every base on this PC, to be searched and chosen from."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QEvent, QModelIndex, QObject, Qt
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import (
    QDialog,
    QFileDialog,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListView,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.core.models.models import Models
from app.qt.parts import until_destroyed
from app.qt.train.base_rows import BaseDelegate, BaseRows, rows

_MOVES = (Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown)


class BaseDialog(QDialog):
    """`text` is what was chosen for `base.model`, once it is accepted."""

    def __init__(self, models: Models, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._models = models
        self.text = ""
        self.setWindowTitle(self.tr("Choose a base"))
        self.resize(680, 540)
        self.field, self.list, self.rows = QLineEdit(), QListView(), BaseRows(self)
        self.state, self.use = QLabel(), QPushButton(self.tr("Use this base"))
        self.file = QPushButton(self.tr("Choose a file…"))
        self.folder = QPushButton(self.tr("Add a folder…"))
        self.again = QPushButton(self.tr("Search again"))
        self._build()
        self._listen()
        models.look()
        models.look_at_recent()
        self._fill()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Let the arrow keys move in the list while the field keeps the focus."""
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress and event.key() in _MOVES:
            self.list.keyPressEvent(event)
            return True
        return super().eventFilter(watched, event)

    def choose_file(self) -> None:
        """Ask for a file."""
        words = self.tr("Choose a base")
        path, _ = QFileDialog.getOpenFileName(self, words, "", self.tr("Models (*.safetensors);;All files (*)"))
        if path:
            self._take(str(Path(path)))

    def add_folder(self) -> None:
        """Ask for a folder, and list the models in it from now on."""
        folder = QFileDialog.getExistingDirectory(self, self.tr("A folder of models, or of a tool that keeps models"))
        if folder:
            self._models.add_folder(Path(folder))

    def _build(self) -> None:
        self.field.setPlaceholderText(self.tr("Search by name, folder, tool or family"))
        self.field.setAccessibleName(self.tr("Search for a base"))
        self.field.setClearButtonEnabled(True)
        self.list.setAccessibleName(self.tr("Bases"))
        self.list.setModel(self.rows)
        self.list.setItemDelegate(BaseDelegate(self.list))
        self.list.setMouseTracking(True)
        self.list.setVerticalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.state.setProperty("role", "muted")
        self.state.setWordWrap(True)
        self.use.setDefault(True)
        for button in (self.file, self.folder, self.again):
            button.setAutoDefault(False)
        self.folder.setToolTip(self.tr("Its models are used where they lie: nothing is copied or moved"))
        row = QHBoxLayout()
        for button in (self.file, self.folder, self.again):
            row.addWidget(button)
        row.addStretch()
        row.addWidget(self.use)
        column = QVBoxLayout(self)
        for part in (self.field, self.list, self.state):
            column.addWidget(part)
        column.addLayout(row)

    def _listen(self) -> None:
        until_destroyed(self, self._models.changed.connect(lambda _: self._fill()))
        self.field.textChanged.connect(lambda _: self._fill())
        self.field.installEventFilter(self)
        self.list.selectionModel().currentChanged.connect(lambda *_: self._mark())
        self.list.activated.connect(lambda index: self._choose(index))
        self.use.clicked.connect(lambda: self._choose(self.list.currentIndex()))
        self.file.clicked.connect(lambda: self.choose_file())
        self.folder.clicked.connect(lambda: self.add_folder())
        self.again.clicked.connect(lambda: self._models.look(again=True))

    def _fill(self) -> None:
        """Show what answers; what was current stays so where it still answers."""
        before = self.list.currentIndex().data(Qt.ItemDataRole.UserRole)
        titles = (self.tr("Used last"), self.tr("On this PC"), self.tr("Cannot be used as a base"))
        used = {text: self._models.judged.get(text) for text in self._models.recent}
        self.rows.show(rows(self._models.bases, used, self.field.text(), titles))
        kept = self.rows.match(self.rows.index(0), Qt.ItemDataRole.UserRole, before, 1, Qt.MatchFlag.MatchExactly)
        self.list.setCurrentIndex(kept[0] if before and kept else self.rows.first())
        self._mark()

    def _mark(self) -> None:
        self.use.setEnabled(self.list.currentIndex().isValid())
        self.again.setEnabled(not self._models.looking)
        self.state.setText(self._words())

    def _words(self) -> str:
        usable = sum(not one.told.problem for one in self._models.bases)
        others = len(self._models.bases) - usable
        if self._models.looking:
            return self.tr("Looking on this PC… %n base(s) so far.", "", usable)
        words = self.tr("%n base(s) on this PC.", "", usable)
        if others and not self.field.text():
            more = self.tr("%n other file(s) cannot be used: search for one to see why.", "", others)
            return f"{words} {more}"
        return words

    def _choose(self, index: QModelIndex) -> None:
        if index.isValid() and index.flags() & Qt.ItemFlag.ItemIsSelectable:
            self._take(str(index.data(Qt.ItemDataRole.UserRole)))

    def _take(self, text: str) -> None:
        self.text = text
        self.accept()
