"""The dialog that brings captions back to what they were before the app first wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QItemSelection, Signal
from PySide6.QtWidgets import (
    QAbstractItemView,
    QDialog,
    QDialogButtonBox,
    QHBoxLayout,
    QLabel,
    QVBoxLayout,
    QWidget,
)

from app.core.edits.backups import Backups, Written
from app.core.edits.safe_files import refusal
from app.core.session import Session
from app.core.tasks import only
from app.core.words import in_words
from app.qt.inputs import ComboBox
from app.qt.parts import while_there
from app.qt.pictures.captions.preview import Preview, Row
from trainer.dataset.caption_files import SUFFIXES
from trainer.errors import DatasetError
from trainer.protocol.reading import read_bytes


class RestoreDialog(QDialog):
    """Lists the caption files of a dataset that are not what they were; restores those chosen, or all."""

    said = Signal(str)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.setWindowTitle(self.tr("Restore original captions"))
        self.resize(820, 520)
        self.datasets, self.told, self.fault = ComboBox(), QLabel(), QLabel()
        self.preview = Preview()
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        role = QDialogButtonBox.ButtonRole.ActionRole
        self.chosen = self.buttons.addButton("", role)
        self.all = self.buttons.addButton("", role)
        self._build()
        self.datasets.currentIndexChanged.connect(lambda _: self._turn())
        self.preview.selectionModel().selectionChanged.connect(self._offer)
        self.chosen.clicked.connect(lambda: self._restore(self._selected()))
        self.all.clicked.connect(lambda: self._restore(self.preview.list.changes))
        self.buttons.rejected.connect(self.reject)
        self._look()

    def _build(self) -> None:
        for folder in self._session.datasets.folders:
            self.datasets.addItem(folder.name, str(folder))
        self.datasets.setAccessibleName(self.tr("Dataset"))
        self.told.setWordWrap(True)
        self.fault.setWordWrap(True)
        self.fault.setProperty("role", "bad")
        self.fault.hide()
        self.preview.setAccessibleName(self.tr("Captions that are not what they were"))
        self.preview.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        row = QHBoxLayout()
        row.addWidget(QLabel(self.tr("Captions of")))
        row.addWidget(self.datasets)
        row.addStretch(1)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addLayout(row)
        for widget in (self.told, self.fault):
            column.addWidget(widget)
        column.addWidget(self.preview, 1)
        column.addWidget(self.buttons)

    @property
    def root(self) -> str:
        """The dataset's folder."""
        return str(self.datasets.currentData() or "")

    def _turn(self) -> None:
        """Begin with another dataset: what hindered the one before is none of its."""
        self.fault.hide()
        self._look()

    def _look(self) -> None:
        """Compare the originals of the dataset with its files, behind; what waits to be written is written first."""
        self._show([])
        self.told.setText(self.tr("Comparing…"))
        if not self.root:
            self._have([])
            return
        saver, backups, root = self._session.saver, self._session.backups, self.root

        def compare() -> list[tuple[str, Row]]:
            saver.flush()
            return _changed(backups, root)

        def have(rows: Sequence[tuple[str, Row]]) -> None:
            if root == self.root:  # else another dataset was chosen meanwhile
                self._have(rows)

        def failed(fault: OSError) -> None:
            if root == self.root:
                self.told.setText("")
                self._tell(fault, self.tr("Open this window again when that is mended."))

        self._session.tasks.run(compare, while_there(self, have), only(OSError, while_there(self, failed)))

    def _have(self, rows: Sequence[tuple[str, Row]]) -> None:
        words = self.tr("%n caption file(s) changed since Impasto first wrote there.", "", len(rows))
        words += " " + self.tr("The upper line is what stands there, the lower one the original.")
        words += " " + self.tr("What stands there now is kept too.")
        self.told.setText(words if rows else self.tr("All captions are what they were before Impasto."))
        self._show(rows)

    def _show(self, rows: Sequence[tuple[str, Row]]) -> None:
        self.preview.list.show(rows, lambda pair: pair[1])
        self._offer(QItemSelection(), QItemSelection())

    def _offer(self, _: QItemSelection, __: QItemSelection) -> None:
        count, chosen = len(self.preview.list.changes), len(self._selected())
        self.all.setText(self.tr("Restore all %n", "", count) if count else self.tr("Restore all"))
        self.all.setEnabled(bool(count))
        self.chosen.setText(self.tr("Restore the %n chosen", "", chosen) if chosen else self.tr("Restore those chosen"))
        self.chosen.setEnabled(bool(chosen))

    def _selected(self) -> list[tuple[str, Row]]:
        rows = self.preview.selectionModel().selectedRows()
        return [self.preview.list.changes[index.row()] for index in rows]

    def _restore(self, rows: Sequence[tuple[str, Row]]) -> None:
        files = [file for file, _ in rows]
        self._show([])  # nothing of it is asked for twice
        self.datasets.setEnabled(False)
        self.told.setText(self.tr("Restoring…"))
        saver, backups, root = self._session.saver, self._session.backups, self.root

        def restore() -> Sequence[Written]:
            saver.flush()
            return backups.restore(root, files)

        def have(written: Sequence[Written]) -> None:
            self._session.rewriter.record(_named(len(written)), Path(root), written)
            self._session.datasets.refresh(whole=True)
            told(len(written))

        told, failed = while_there(self, self._restored), only(OSError, while_there(self, self._refused))
        self._session.history.settle(lambda: self._session.tasks.run(restore, have, failed))

    def _restored(self, count: int) -> None:
        self.datasets.setEnabled(True)
        self.said.emit(self.tr("%n caption file(s) restored.", "", count))
        self._turn()

    def _refused(self, fault: OSError) -> None:
        """Say what hinders it, and show what is left to restore."""
        self.datasets.setEnabled(True)
        self._tell(fault, self.tr("These files still need to be restored. Fix the problem, then try again."))
        self._look()

    def _tell(self, fault: OSError, remedy: str) -> None:
        """Say what hinders it; nothing of this is tried again by itself, as edits are."""
        reason = refusal(fault, Path(self.root))
        self.fault.setText(in_words(DatasetError(reason.code, reason.sentence, remedy)))
        self.fault.show()


def _named(count: int) -> str:
    return "Restore 1 original caption" if count == 1 else f"Restore {count} original captions"


def _changed(backups: Backups, root: str) -> list[tuple[str, Row]]:
    """Return the caption files of a dataset that are not what they were, each with both; raises OSError."""
    found = []
    for version in backups.originals(root):
        file = Path(root, version.file)
        if file.suffix.lower() in SUFFIXES and (now := _read(file)) != version.data:
            found.append((version.file, Row(version.file, _text(now), _text(version.data) or "")))
    return found


def _read(file: Path) -> bytes | None:
    try:
        return read_bytes(file, "image")  # masks too
    except FileNotFoundError:
        return None


def _text(data: bytes | None) -> str | None:
    from trainer.dataset.caption_files import NotACaptionError, decode_caption

    if data is None:
        return None
    try:
        return decode_caption(data).text
    except NotACaptionError:
        return data[:200].decode("utf-8", "replace")
