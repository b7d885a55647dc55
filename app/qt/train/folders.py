"""The folders of a job's dataset: what each is for, how often it is shown, and how it got there."""

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
from app.core.jobs.essentials import FOLDERS, Pictures
from app.core.jobs.job_file import drop
from app.core.session import Session
from app.qt.theme import set_icon
from app.qt.train.form import words
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, Elided, SpinBox, plain_tip

_KINDS = {
    "train": QT_TRANSLATE_NOOP("Train", "to learn"),
    "regularisation": QT_TRANSLATE_NOOP("Train", "regularisation"),
    "validation": QT_TRANSLATE_NOOP("Train", "only to measure"),
}
_MOST = 10_000


class FolderRows(QWidget):
    """A row for each folder, and a button that adds more."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._draft: Draft | None = None
        self.rows: list[FolderRow] = []
        self.add = QPushButton(self.tr("Add pictures…"))
        self.add.setAutoDefault(False)
        set_icon(self.add, "folder-add")
        self._menu = QMenu(self)
        self.add.clicked.connect(lambda: self._offer())
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(6)
        self._column.addWidget(self.add, 0, Qt.AlignmentFlag.AlignLeft)

    def show_draft(self, draft: Draft, pictures: Sequence[Pictures]) -> None:
        """Show this job's folders; `pictures` are those that are open, with their numbers."""
        self._draft = draft
        counted = zip(essentials.folders(draft.values), essentials.counts(draft, pictures), strict=True)
        listed = [(place, each, count) for place, (each, count) in enumerate(counted) if each.get("path")]
        while len(self.rows) > len(listed):
            row = self.rows.pop()
            row.hide()
            row.deleteLater()
        while len(self.rows) < len(listed):
            row = FolderRow()
            row.edited.connect(self._change)
            row.removed.connect(self._remove)
            self._column.insertWidget(len(self.rows), row)
            self.rows.append(row)
        for row, shown in zip(self.rows, listed, strict=True):
            row.show_folder(*shown)

    def add_folder(self, folder: Path) -> None:
        """Take a folder into the dataset, with those inside it where pictures lie only there."""
        if self._draft is not None:
            known = {each.path: each for each in self._open()}
            essentials.add_pictures(self._draft, [known.get(folder, Pictures(folder, False, 0))])

    def _open(self) -> list[Pictures]:
        return essentials.open_pictures(self._session.library, self._session.datasets.folders)

    def _offer(self) -> None:
        """Offer the folders that are open and not in the job yet; else ask for one."""
        if self._draft is None:
            return
        self._menu.clear()
        for each in essentials.not_held(self._draft, self._open()):
            title = self.tr("{folder} (%Ln picture(s))", "", each.count).format(folder=each.path.name or each.path)
            act = self._menu.addAction(title.replace("&", "&&"))
            act.triggered.connect(lambda _=False, path=each.path: self.add_folder(path))
        if self._menu.isEmpty():
            self._ask()
            return
        self._menu.addSeparator()
        self._menu.addAction(self.tr("Another folder…")).triggered.connect(lambda: self._ask())
        self._menu.popup(self.add.mapToGlobal(self.add.rect().bottomLeft()))

    def _ask(self) -> None:
        chosen = QFileDialog.getExistingDirectory(self, self.tr("Pictures to train on"))
        if chosen:
            self.add_folder(Path(chosen))

    def _change(self, place: int, name: str, value: object) -> None:
        if self._draft is not None:
            self._draft.set(f"{FOLDERS}.{place}.{name}", value)

    def _remove(self, place: int) -> None:
        if self._draft is not None:
            self._draft.edit(essentials.FOLDER_REMOVED, lambda values: drop(values, f"{FOLDERS}.{place}"))


class FolderRow(QWidget):
    """Name and number of pictures, use, repeats, and a button that takes it out of the job."""

    edited = Signal(int, str, object)
    """Place in the list, key in the folder's table, value; None: as the folder itself says."""
    removed = Signal(int)

    def __init__(self) -> None:
        super().__init__()
        self._place = 0
        self._kind_shown = ""
        self.name, self.count = Elided(), QLabel()
        self.kind, self.repeats, self.remove = ComboBox(), SpinBox(), QToolButton()
        self._build()
        self.kind.activated.connect(lambda _: self._choose())
        self.repeats.valueChanged.connect(lambda value: self.edited.emit(self._place, "repeats", value or None))
        self.remove.clicked.connect(lambda: self.removed.emit(self._place))

    def show_folder(self, place: int, folder: dict[str, Any], count: int | None) -> None:
        """Show one table of `dataset.folders`."""
        self._place = place
        path = str(folder["path"])
        name = Path(path).name or path
        self.name.setText(name)
        self.name.setToolTip(plain_tip(path))
        self.count.setText("" if count is None else self.tr("%Ln picture(s)", "", count))
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
            (self.remove, self.tr("Remove from the job")),
        ):
            part.setAccessibleName(f"{what}: {name}")

    def _choose(self) -> None:
        kind = self.kind.currentData()
        self.edited.emit(self._place, "kind", None if kind == "train" else kind)

    def _build(self) -> None:
        self.count.setProperty("role", "muted")
        for kind, title in _KINDS.items():
            self.kind.addItem(words(title), kind)
        self.kind.setFixedWidth(140)
        self.kind.setToolTip(
            "dataset.folders.kind\n" + self.tr("Regularisation pictures keep the base's idea of the class.")
        )
        self.repeats.setRange(0, _MOST)
        self.repeats.setSpecialValueText(self.tr("automatic"))
        self.repeats.setSuffix(self.tr(" × an epoch"))
        self.repeats.setKeyboardTracking(False)
        self.repeats.setToolTip(
            "dataset.folders.repeats\n"
            + self.tr("How often each picture is shown in an epoch; automatic: as the folder says, or once.")
        )
        self.repeats.setFixedWidth(128)
        self.repeats.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt passes over the style sheet's padding here
        self.remove.setIconSize(QSize(16, 16))
        self.remove.setToolTip(self.tr("Remove from the job; the pictures stay where they are"))
        set_icon(self.remove, "close", "muted")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self.name, 1)
        row.addWidget(self.count)
        row.addStretch()
        for part in (self.kind, self.repeats, self.remove):
            row.addWidget(part)
