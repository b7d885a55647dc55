"""The folders of a job's dataset, one per row; a button in each row shows the folder's other settings below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import (
    QFileDialog,
    QHBoxLayout,
    QLabel,
    QMenu,
    QPushButton,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.jobs import essentials
from app.core.jobs.draft import Draft
from app.core.jobs.essentials import FOLDERS, ImageFolder
from app.core.jobs.job_file import drop
from app.core.session import Session
from app.qt.theme import set_icon
from app.qt.train.form import DraftEditor, translated
from app.qt.train.item_settings import ItemSettings
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, ElidedLabel, SpinBox, plain_tip

_KINDS = {
    "train": QT_TRANSLATE_NOOP("Train", "training"),
    "regularization": QT_TRANSLATE_NOOP("Train", "regularization"),
    "validation": QT_TRANSLATE_NOOP("Train", "validation"),
}
_MAX_REPEATS = 10_000
_ABOVE = ("path", "kind", "repeats", "trigger")
"""Keys of a folder that its row, or the essentials around it, already show."""


class FolderRows(DraftEditor):
    """List of the dataset's folders, with a button that adds one."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.rows: list[FolderRow] = []
        self.add = QPushButton(self.tr("Add images…"))
        self.add.setAutoDefault(False)
        set_icon(self.add, "folder-add")
        self._menu = QMenu(self)
        self.add.clicked.connect(lambda: self._offer())
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(6)
        self._column.addWidget(self.add, 0, Qt.AlignmentFlag.AlignLeft)

    def show_draft(self, draft: Draft, images: Sequence[ImageFolder]) -> None:
        """Show this job's folders; `images` lists the open folders with their image counts."""
        self._draft = draft
        counted = zip(essentials.folders(draft.values), essentials.counts(draft, images), strict=True)
        listed = [(place, each, count) for place, (each, count) in enumerate(counted) if each.get("path")]
        while len(self.rows) > len(listed):
            row = self.rows.pop()
            row.hide()
            row.deleteLater()
        while len(self.rows) < len(listed):
            row = FolderRow()
            row.edited.connect(self._change)
            row.setting_edited.connect(self._on_edited)
            row.left.connect(self._on_left)
            row.removed.connect(self._remove)
            self._column.insertWidget(len(self.rows), row)
            self.rows.append(row)
        for row, shown in zip(self.rows, listed, strict=True):
            row.show_folder(*shown)
            row.show_draft(draft)

    def add_folder(self, folder: Path) -> None:
        """Add a folder to the dataset, or its subfolders if only those contain images."""
        if self._draft is not None:
            known = {each.path: each for each in self._open()}
            essentials.add_images(self._draft, [known.get(folder, ImageFolder(folder, False, 0))])

    def _open(self) -> list[ImageFolder]:
        return essentials.open_images(self._session.library, self._session.datasets.folders)

    def _offer(self) -> None:
        """Show a menu of the open folders that are not in the job; if there are none, ask for a folder."""
        if self._draft is None:
            return
        self._menu.clear()
        for each in essentials.not_in_job(self._draft, self._open()):
            title = self.tr("{folder} (%Ln image(s))", "", each.count).format(folder=each.path.name or each.path)
            act = self._menu.addAction(title.replace("&", "&&"))
            act.triggered.connect(lambda _=False, path=each.path: self.add_folder(path))
        if self._menu.isEmpty():
            self._ask()
            return
        self._menu.addSeparator()
        self._menu.addAction(self.tr("Another folder…")).triggered.connect(lambda: self._ask())
        self._menu.popup(self.add.mapToGlobal(self.add.rect().bottomLeft()))

    def _ask(self) -> None:
        chosen = QFileDialog.getExistingDirectory(self, self.tr("Choose images to train on"))
        if chosen:
            self.add_folder(Path(chosen))

    def _change(self, place: int, name: str, value: object) -> None:
        if self._draft is not None:
            self._draft.set(f"{FOLDERS}.{place}.{name}", value)

    def _remove(self, place: int) -> None:
        if self._draft is not None:
            self._draft.edit(essentials.FOLDER_REMOVED, lambda values: drop(values, f"{FOLDERS}.{place}"))


class FolderRow(QWidget):
    """Row for one folder: name, image count, use, repeats, and buttons for other settings and for its removal."""

    edited = Signal(int, str, object)
    """Index of the folder, key in its table, and new value (None removes the key)."""
    setting_edited = Signal(str, object, bool)
    """Key in the job, new value, and whether the user is still typing."""
    left = Signal()
    removed = Signal(int)

    def __init__(self) -> None:
        super().__init__()
        self._place = 0
        self._path = ""
        self.name, self.count = ElidedLabel(), QLabel()
        self.kind, self.repeats, self.more, self.remove = ComboBox(), SpinBox(), QToolButton(), QToolButton()
        self._settings = ItemSettings(FOLDERS, _ABOVE, indent=24)
        self.details = self._settings.rows
        """Rows of the folder's other settings, if they have been opened."""
        self._build()
        self.kind.activated.connect(lambda _: self._on_kind_activated())
        self.repeats.valueChanged.connect(lambda value: self.edited.emit(self._place, "repeats", value or None))
        self._settings.edited.connect(self.setting_edited)
        self._settings.left.connect(self.left)
        self.more.toggled.connect(self._on_more_toggled)
        self.remove.clicked.connect(lambda: self.removed.emit(self._place))

    def show_folder(self, place: int, folder: dict[str, Any], count: int | None) -> None:
        """Show the entry at index `place` of `dataset.folders`, and its image count unless `count` is None."""
        path = str(folder["path"])
        if (place, path) != (self._place, self._path):
            self._close_details()
        self._place, self._path = place, path
        name = Path(path).name or path
        self.name.setText(name)
        self.name.setToolTip(plain_tip(path))
        self.count.setText("" if count is None else self.tr("%Ln image(s)", "", count))
        kind = str(folder.get("kind", "train"))
        if self.kind.findData(kind) < 0:
            self.kind.addItem(kind, kind)
        self.kind.setCurrentIndex(self.kind.findData(kind))
        repeats = folder.get("repeats")
        self.repeats.blockSignals(True)
        self.repeats.setValue(repeats if isinstance(repeats, int) else 0)
        self.repeats.blockSignals(False)
        for part, what in (
            (self.kind, self.tr("Use")),
            (self.repeats, self.tr("Repeats")),
            (self.more, self.tr("More settings")),
            (self.remove, self.tr("Remove from the job")),
        ):
            part.setAccessibleName(f"{what}: {name}")

    def show_draft(self, draft: Draft) -> None:
        """Show the folder's other settings in this job, if they are open."""
        self._settings.show_draft(draft)

    def _on_more_toggled(self, on: bool) -> None:
        if on:
            self._settings.open(self._place)
        else:
            self._settings.hide()

    def _close_details(self) -> None:
        self._settings.clear()
        self.more.setChecked(False)

    def _on_kind_activated(self) -> None:
        kind = self.kind.currentData()
        self.edited.emit(self._place, "kind", None if kind == "train" else kind)

    def _build(self) -> None:
        self.count.setProperty("role", "muted")
        for kind, title in _KINDS.items():
            self.kind.addItem(translated(title), kind)
        self.kind.setFixedWidth(140)
        self.kind.setToolTip(
            "dataset.folders.kind\n" + self.tr("Regularization images preserve the base's idea of the class.")
        )
        self.repeats.setRange(0, _MAX_REPEATS)
        self.repeats.setSpecialValueText(self.tr("automatic"))
        self.repeats.setSuffix(self.tr(" × per epoch"))
        self.repeats.setKeyboardTracking(False)
        self.repeats.setToolTip(
            "dataset.folders.repeats\n"
            + self.tr(
                "Number of times each image is used per epoch. Automatic: read from the folder's name, or else 1."
            )
        )
        self.repeats.setFixedWidth(128)
        self.repeats.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt ignores the style sheet's padding here
        self.more.setCheckable(True)
        self.more.setToolTip(self.tr("Captions, crops, masks and other settings for this folder only"))
        self.remove.setToolTip(self.tr("Remove from the job; the images are kept"))
        for button, drawing in ((self.more, "more"), (self.remove, "close")):
            button.setIconSize(QSize(16, 16))
            set_icon(button, drawing, "muted")
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.name, 1)
        row.addWidget(self.count)
        row.addStretch()
        for part in (self.kind, self.repeats, self.more, self.remove):
            row.addWidget(part)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(row)
        column.addWidget(self._settings)
