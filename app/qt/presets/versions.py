"""What a preset was before, with what going back would change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QDateTime, QLocale, Signal
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QHBoxLayout, QListWidget, QVBoxLayout, QWidget

from app.core.session import Session
from app.core.words import in_words
from app.qt.dialogs.parts import close_row
from app.qt.parts import plain_label, say, while_there
from app.qt.presets.details import rows_of
from app.qt.tables import Table
from trainer.config.presets.library import Shelved
from trainer.errors import ImpastoError

if TYPE_CHECKING:
    from app.core.presets.presets import Past


class VersionsDialog(QDialog):
    """Lists the versions, the latest first; `changed` tells where the preset lies that went back to one."""

    changed = Signal(object)

    def __init__(self, session: Session, shelved: Shelved, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._shelved = session, shelved
        self.past: list[Past] = []
        self.setWindowTitle(self.tr("Earlier versions of {name}").format(name=shelved.preset.name))
        self.setModal(True)
        self.resize(760, 420)
        self.told, self.fault = plain_label(), plain_label("bad")
        self.times = QListWidget()
        self.times.setAccessibleName(self.tr("Versions"))
        self.times.setMaximumWidth(220)
        titles = (self.tr("Setting"), self.tr("Now"), self.tr("In that version"))
        self.table = Table(titles, self.tr("What going back changes"))
        self.buttons = close_row(self)
        self.back = self.buttons.addButton(self.tr("Go back to this"), QDialogButtonBox.ButtonRole.ActionRole)
        self.back.setEnabled(False)
        row, column = QHBoxLayout(), QVBoxLayout(self)
        row.addWidget(self.times)
        row.addWidget(self.table, 1)
        column.setContentsMargins(18, 18, 18, 12)
        column.setSpacing(12)
        column.addWidget(self.told)
        column.addLayout(row, 1)
        column.addWidget(self.fault)
        column.addWidget(self.buttons)
        say(self.fault, "")
        say(self.told, self.tr("Looking…"), "muted")
        self.times.currentRowChanged.connect(self._show)
        self.back.clicked.connect(self._go_back)
        session.presets.versions(shelved, while_there(self, self._have))

    def _have(self, past: list[Past]) -> None:
        self.past = past
        none = self.tr("It was never changed, so there are none.")
        say(self.told, self.tr("What it is now stays as a version too.") if past else none, "muted")
        for version, _ in past:
            when = QDateTime.fromSecsSinceEpoch(int(version.until.timestamp()))
            self.times.addItem(QLocale().toString(when, QLocale.FormatType.ShortFormat))
        self.times.setCurrentRow(0 if past else -1)

    def _show(self, row: int) -> None:
        self.table.show_rows(rows_of(self.past[row][1]) if row >= 0 else [])
        self.back.setEnabled(row >= 0)

    def _go_back(self) -> None:
        self.back.setEnabled(False)
        version = self.past[self.times.currentRow()][0]
        self._session.presets.go_back(
            self._shelved, version, while_there(self, self._done), while_there(self, self._refuse)
        )

    def _done(self, path: Path) -> None:
        self.accept()
        self.changed.emit(path)

    def _refuse(self, error: ImpastoError) -> None:
        self.back.setEnabled(True)
        say(self.fault, in_words(error))
