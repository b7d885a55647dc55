"""Dialogs for the Presets page: edit a preset, add a received one, restore an earlier version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QDateTime, QLocale, Signal
from PySide6.QtGui import QPixmap
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFileDialog,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListWidget,
    QPlainTextEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.core.session import Session
from app.core.words import full_message
from app.qt.presets.cards import CostPanel, PresetHeading, rows_of
from app.qt.tables import Table
from app.qt.widgets import close_row, plain_label, set_message, while_alive
from trainer.config.presets.library import PresetEntry, Received, same_name
from trainer.errors import ImpastoError

if TYPE_CHECKING:
    from app.core.presets.presets import Past


class EditDialog(QDialog):
    """Dialog for editing a preset's details; `changed` carries its file. Saving keeps the earlier version."""

    changed = Signal(object)

    def __init__(self, session: Session, shelved: PresetEntry, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._entry = session, shelved
        self._image: Path | None = None
        self._without = False
        preset = shelved.preset
        self.setWindowTitle(self.tr("Edit preset"))
        self.setModal(True)
        self.resize(560, 420)
        self.name, self.author, self.license = (
            QLineEdit(text) for text in (preset.name, preset.author, preset.license)
        )
        self.words = QLineEdit(", ".join(preset.trigger_words))
        self.notes = QPlainTextEdit(preset.notes)
        self.notes.setTabChangesFocus(True)
        self.pictured, self.fault = plain_label("muted"), plain_label("bad")
        self.choose = QPushButton(self.tr("Choose an image…"))
        self.remove = QPushButton(self.tr("Remove image"))
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Save | QDialogButtonBox.StandardButton.Cancel)
        self._lay_out()
        self._update_image()
        set_message(self.fault, "")
        self.choose.clicked.connect(self._choose)
        self.remove.clicked.connect(lambda: self.show_image(None))
        self.buttons.accepted.connect(self._save)
        self.buttons.rejected.connect(self.reject)

    def show_image(self, path: Path | None) -> None:
        """Set the image file to use for the preset; None removes the preset's image."""
        self._image, self._without = path, path is None
        self._update_image()

    def _lay_out(self) -> None:
        form, image, column = QFormLayout(), QHBoxLayout(), QVBoxLayout(self)
        rows = (
            (self.tr("&Name"), self.name),
            (self.tr("&Author"), self.author),
            (self.tr("&License"), self.license),
            (self.tr("&Trigger words"), self.words),
            (self.tr("&Description"), self.notes),
        )
        for title, widget in rows:
            form.addRow(title, widget)
            widget.setAccessibleName(title.replace("&", ""))
        self.license.setPlaceholderText(self.tr("for example CC0-1.0 or CC-BY-4.0"))
        self.words.setPlaceholderText(self.tr("separated by commas"))
        image.addWidget(self.pictured, 1)
        image.addWidget(self.choose)
        image.addWidget(self.remove)
        form.addRow(self.tr("Image"), image)
        column.setContentsMargins(18, 18, 18, 12)
        column.setSpacing(12)
        column.addLayout(form, 1)
        column.addWidget(self.fault)
        column.addWidget(self.buttons)

    def _choose(self) -> None:
        kinds = self.tr("Images (*.png *.jpg *.jpeg *.webp)")
        chosen = QFileDialog.getOpenFileName(self, self.tr("Choose an image that shows the result"), "", kinds)[0]
        if chosen:
            self.show_image(Path(chosen))

    def _update_image(self) -> None:
        has = self._image is not None or (self._entry.preset.preview is not None and not self._without)
        self.pictured.setText(self._image.name if self._image else self.tr("Current image") if has else self.tr("None"))
        self.remove.setEnabled(has)

    def _save(self) -> None:
        words = tuple(word.strip() for word in self.words.text().split(",") if word.strip())
        details: dict[str, object] = {
            "name": self.name.text().strip(),
            "author": self.author.text().strip(),
            "license": self.license.text().strip(),
            "notes": self.notes.toPlainText().strip(),
            "trigger_words": words,
        }
        if self._image is not None or self._without:
            details["image"] = self._image
        preset = self._entry.preset
        stated = {key: value for key, value in details.items() if key == "image" or value != getattr(preset, key)}
        if not stated:
            self.accept()
            return
        self.buttons.setEnabled(False)
        self._session.presets.revise(
            self._entry, stated, while_alive(self, self._on_done), while_alive(self, self._on_failed)
        )

    def _on_done(self, path: Path) -> None:
        self.accept()
        self.changed.emit(path)

    def _on_failed(self, error: ImpastoError) -> None:
        self.buttons.setEnabled(True)
        set_message(self.fault, full_message(error))


_Roles = QDialogButtonBox.ButtonRole


class ReceiveDialog(QDialog):
    """Dialog that shows a received preset and adds it if the user agrees; `kept` then carries its file."""

    kept = Signal(object)

    def __init__(
        self, session: Session, received: Received, image: QPixmap | None, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._session, self.received = session, received
        self.setWindowTitle(self.tr("Add preset"))
        self.setModal(True)
        self.resize(760, 640)
        self.about, self.outlook = PresetHeading(), CostPanel(session.presets.cost_estimates)
        self.heading, self.fault = plain_label("heading"), plain_label("bad")
        here = self.tr("Yours") if received.existing else self.tr("Default")
        self.table = Table((self.tr("Setting"), here, self.tr("In this preset")), self.tr("Differences"))
        self.name = QLineEdit(received.free_name if received.built_in else received.preset.name)
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self.keep = self.buttons.addButton("", _Roles.AcceptRole)
        self.both = self.buttons.addButton(self.tr("Keep both"), _Roles.ActionRole)
        self._lay_out()
        self._fill(image)
        self.keep.clicked.connect(lambda: self._keep(self.name.text().strip()))
        self.both.clicked.connect(lambda: self._keep(received.free_name))
        self.buttons.rejected.connect(self.reject)
        self.name.textChanged.connect(lambda _: self._update_buttons())
        self._update_buttons()
        session.presets.cost_estimates.request([(received.file, received.preset)])

    def _lay_out(self) -> None:
        trust = QLabel(
            self.tr("A preset contains only settings and text: no code, no paths, and nothing about anyone's PC.")
        )
        trust.setProperty("role", "muted")
        trust.setWordWrap(True)
        title = QLabel(self.tr("&Name"))
        title.setBuddy(self.name)
        self.name.setAccessibleName(self.tr("Name"))
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

    def _fill(self, image: QPixmap | None) -> None:
        received = self.received
        self.about.show_preset(received.preset, "", image)
        self.outlook.show_preset(received.file, received.preset)
        self.table.show_rows(rows_of(received.changes))
        self.table.setVisible(bool(received.changes))
        set_message(self.heading, self._heading())
        set_message(self.fault, "")

    def _heading(self) -> str:
        received = self.received
        if received.is_unchanged:
            return self.tr("You already have this preset with the same settings.")
        if received.existing is not None:
            words = self.tr("You already have a preset named “{name}”. The new one differs in:")
            return words.format(name=received.existing.preset.name)
        if received.built_in:
            return self.tr("A built-in preset already has this name, so choose another. This preset sets:")
        return self.tr("Differs from defaults")

    def _update_buttons(self) -> None:
        """Update the buttons: if the user already has a preset with the entered name, offer to replace it."""
        name, former = self.name.text().strip(), self.received.existing
        replaces = former is not None and same_name(name, former.preset.name)
        self.keep.setText(self.tr("Replace mine") if replaces else self.tr("Add preset"))
        self.keep.setEnabled(bool(name) and not (replaces and self.received.is_unchanged))
        self.keep.setDefault(True)
        self.keep.setToolTip(self.tr("Your preset is kept as an earlier version") if replaces else "")
        self.both.setVisible(replaces and not self.received.is_unchanged)

    def _keep(self, name: str) -> None:
        self.buttons.setEnabled(False)
        preset = self.received.preset
        self._session.presets.add(
            preset, name, "received", while_alive(self, self._on_done), while_alive(self, self._on_failed)
        )

    def _on_done(self, path: Path) -> None:
        self.accept()
        self.kept.emit(path)

    def _on_failed(self, error: ImpastoError) -> None:
        self.buttons.setEnabled(True)
        set_message(self.fault, full_message(error))


class VersionsDialog(QDialog):
    """Dialog with a preset's earlier versions, newest first; `changed` carries the restored preset's file."""

    changed = Signal(object)

    def __init__(self, session: Session, shelved: PresetEntry, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._entry = session, shelved
        self.past: list[Past] = []
        self.setWindowTitle(self.tr("Earlier versions of {name}").format(name=shelved.preset.name))
        self.setModal(True)
        self.resize(760, 420)
        self.hint, self.fault = plain_label(), plain_label("bad")
        self.times = QListWidget()
        self.times.setAccessibleName(self.tr("Versions"))
        self.times.setMaximumWidth(220)
        titles = (self.tr("Setting"), self.tr("Now"), self.tr("In that version"))
        self.table = Table(titles, self.tr("Changes if you restore this version"))
        self.buttons = close_row(self)
        self.back = self.buttons.addButton(self.tr("Restore this version"), QDialogButtonBox.ButtonRole.ActionRole)
        self.back.setEnabled(False)
        row, column = QHBoxLayout(), QVBoxLayout(self)
        row.addWidget(self.times)
        row.addWidget(self.table, 1)
        column.setContentsMargins(18, 18, 18, 12)
        column.setSpacing(12)
        column.addWidget(self.hint)
        column.addLayout(row, 1)
        column.addWidget(self.fault)
        column.addWidget(self.buttons)
        set_message(self.fault, "")
        set_message(self.hint, self.tr("Reading…"), "muted")
        self.times.currentRowChanged.connect(self._show)
        self.back.clicked.connect(self._go_back)
        session.presets.versions(shelved, while_alive(self, self._on_versions))

    def _on_versions(self, past: list[Past]) -> None:
        self.past = past
        none = self.tr("No earlier versions: this preset was never changed.")
        set_message(self.hint, self.tr("Restoring a version also keeps the current one.") if past else none, "muted")
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
        self._session.presets.restore(
            self._entry, version, while_alive(self, self._on_done), while_alive(self, self._on_failed)
        )

    def _on_done(self, path: Path) -> None:
        self.accept()
        self.changed.emit(path)

    def _on_failed(self, error: ImpastoError) -> None:
        self.back.setEnabled(True)
        set_message(self.fault, full_message(error))
