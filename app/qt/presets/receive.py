"""Shows a preset that arrived before anything is kept: what it is, what it costs here, what it would change."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtGui import QPixmap
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QHBoxLayout, QLabel, QLineEdit, QVBoxLayout, QWidget

from app.core.presets.receiving import Received
from app.core.session import Session
from app.core.words import in_words
from app.qt.parts import plain_label, say, while_there
from app.qt.presets.details import About, rows_of
from app.qt.presets.outlook_line import OutlookLine
from app.qt.tables import Table
from trainer.config.presets.library import same_name
from trainer.errors import ImpastoError

_Roles = QDialogButtonBox.ButtonRole


class ReceiveDialog(QDialog):
    """Nothing is written until the user agrees; `kept` tells where it then lies."""

    kept = Signal(object)

    def __init__(
        self, session: Session, received: Received, picture: QPixmap | None, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._session, self.received = session, received
        self.setWindowTitle(self.tr("A preset arrived"))
        self.setModal(True)
        self.resize(760, 640)
        self.about, self.outlook = About(), OutlookLine(session.presets.outlooks)
        self.heading, self.fault = plain_label("heading"), plain_label("bad")
        here = self.tr("Yours") if received.former else self.tr("As usual")
        self.table = Table((self.tr("Setting"), here, self.tr("In this preset")), self.tr("What it changes"))
        self.name = QLineEdit(received.free_name if received.built_in else received.preset.name)
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self.keep = self.buttons.addButton("", _Roles.AcceptRole)
        self.both = self.buttons.addButton(self.tr("Keep both"), _Roles.ActionRole)
        self._lay_out()
        self._fill(picture)
        self.keep.clicked.connect(lambda: self._keep(self.name.text().strip()))
        self.both.clicked.connect(lambda: self._keep(received.free_name))
        self.buttons.rejected.connect(self.reject)
        self.name.textChanged.connect(lambda _: self._offer())
        self._offer()
        session.presets.outlooks.want([(received.place, received.preset)])

    def _lay_out(self) -> None:
        trust = QLabel(self.tr("A preset holds settings and words only: no program, no path, nothing of anybody's PC."))
        trust.setProperty("role", "muted")
        trust.setWordWrap(True)
        title = QLabel(self.tr("&Keep it as"))
        title.setBuddy(self.name)
        self.name.setAccessibleName(self.tr("Keep it as"))
        row = QHBoxLayout()
        row.addWidget(title)
        row.addWidget(self.name, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(18, 18, 18, 12)
        column.setSpacing(12)
        for widget in (self.about, self.outlook, self.heading):
            column.addWidget(widget)
        column.addWidget(self.table, 1)
        column.addLayout(row)
        for label in (self.fault, trust):
            column.addWidget(label)
        column.addWidget(self.buttons)

    def _fill(self, picture: QPixmap | None) -> None:
        received = self.received
        self.about.show_preset(received.preset, "", picture)
        self.outlook.show_preset(received.place, received.preset)
        self.table.show_rows(rows_of(received.changes))
        self.table.setVisible(bool(received.changes))
        say(self.heading, self._heading())
        say(self.fault, "")

    def _heading(self) -> str:
        received = self.received
        if received.had_already:
            return self.tr("You have it already, setting for setting.")
        if received.former is not None:
            words = self.tr("You have a preset “{name}”. This one is different in:")
            return words.format(name=received.former.preset.name)
        if received.built_in:
            return self.tr("A preset that comes with Impasto has its name, so it needs another. It sets:")
        return self.tr("What it sets otherwise than a new job")

    def _offer(self) -> None:
        """Say on the button what keeping it under the name that stands there does."""
        name, former = self.name.text().strip(), self.received.former
        replaces = former is not None and same_name(name, former.preset.name)
        self.keep.setText(self.tr("Replace mine") if replaces else self.tr("Keep it"))
        self.keep.setEnabled(bool(name) and not (replaces and self.received.had_already))
        self.keep.setDefault(True)
        self.keep.setToolTip(self.tr("Yours stays as an earlier version") if replaces else "")
        self.both.setVisible(replaces and not self.received.had_already)

    def _keep(self, name: str) -> None:
        self.buttons.setEnabled(False)
        preset = self.received.preset
        self._session.presets.keep(
            preset, name, "received", while_there(self, self._done), while_there(self, self._refuse)
        )

    def _done(self, path: Path) -> None:
        self.accept()
        self.kept.emit(path)

    def _refuse(self, error: ImpastoError) -> None:
        self.buttons.setEnabled(True)
        say(self.fault, in_words(error))
