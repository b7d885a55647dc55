"""Dialogs for exporting a saved LoRA and its model card; no LoRA is replaced without asking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import (
    QComboBox,
    QDialog,
    QDialogButtonBox,
    QFileDialog,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app.core.after.export import Candidate, Exported, FileExistsConflict, LoraSummary, export, read_summary
from app.core.models.verdict import Destination
from app.core.session import Session
from app.core.tasks import handle_only
from app.qt.runs.after.strip import ImageView
from app.qt.widgets import ComboBox, close_row, plain_tip, reveal
from trainer.errors import ImpastoError, LoraFileError
from trainer.protocol import files
from trainer.protocol.places import write_remedy

_COMMON_NAMES = {"lora", "loras", "models", "autoimport"}  # folder names that do not identify a program
_LICENSES = ("CC0-1.0", "CC-BY-4.0", "CC-BY-NC-4.0", "CreativeML Open RAIL-M", "OpenRAIL++")


def destination_name(destination: Destination) -> str:
    """Return the program that a LoRA folder belongs to or, if unknown, a distinctive folder name.

    The distinctive name is the last name in the path that is not a common one such as "models".
    """
    folder = destination.folder
    names = (path.name for path in (folder, *folder.parents) if path.name and path.name.lower() not in _COMMON_NAMES)
    return destination.kind or next(names, str(folder))


class ExportDialog(QDialog):
    """Dialog for exporting a LoRA; `summary`, `folder` and `name` are the user's choices."""

    folder_chosen = Signal(object)
    """The user chose this folder, which was not listed and should be remembered."""

    def __init__(
        self,
        session: Session,
        candidate: Candidate,
        summary: LoraSummary,
        destinations: Sequence[Destination],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.folder_box, self.folder_button = ComboBox(), QPushButton(self.tr("Another folder…"))
        self.name, self.title, self.author = (
            QLineEdit(candidate.file.stem),
            QLineEdit(summary.title),
            QLineEdit(summary.author),
        )
        self.triggers, self.license, self.description = QLineEdit(summary.triggers), ComboBox(), QPlainTextEdit()
        self.image_box, self.image = ComboBox(), ImageView(session, self.tr("No image"))
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self.export_button = self.buttons.addButton(self.tr("Export"), QDialogButtonBox.ButtonRole.AcceptRole)
        self.path = QLabel()
        self.setWindowTitle(self.tr("Export step {step}").format(step=candidate.step))
        self._fill(candidate, summary, destinations)
        self._lay_out()
        self._listen()
        self._refresh()

    @property
    def folder(self) -> Path | None:
        """The target folder; None until one is chosen."""
        found = self.folder_box.currentData()
        return Path(found) if found else None

    @property
    def summary(self) -> LoraSummary:
        """The metadata to write to the exported file."""
        image = self.image_box.currentData()
        return LoraSummary(
            self.title.text().strip(),
            self.author.text().strip(),
            self.license.currentText().strip(),
            self.description.toPlainText().strip(),
            self.triggers.text().strip(),
            Path(image) if image else None,
        )

    def add_folder(self, folder: Path) -> None:
        """Add a folder to the list, select it, and emit `folder_chosen`."""
        self.folder_box.insertItem(0, f"{folder.name}   {folder}", str(folder))
        self.folder_box.setCurrentIndex(0)
        self.folder_chosen.emit(folder)

    # --- inside

    def _fill(self, candidate: Candidate, summary: LoraSummary, destinations: Sequence[Destination]) -> None:
        for one in destinations:
            self.folder_box.addItem(f"{destination_name(one)}   {one.folder}", str(one.folder))
        self.license.setEditable(True)
        self.license.addItems(["", *_LICENSES])
        self.license.setCurrentText(summary.license)
        self.description.setPlainText(summary.description)
        for index, file in candidate.images.items():
            self.image_box.addItem(self.tr("Preview {number}").format(number=index + 1), str(file))
        self.image_box.addItem(self.tr("None"), "")
        if summary.image:
            place = self.image_box.findData(str(summary.image))
            if place < 0:
                self.image_box.insertItem(0, self.tr("Your last image"), str(summary.image))
            self.image_box.setCurrentIndex(max(place, 0))

    def _refresh(self) -> None:
        folder, image = self.folder, self.image_box.currentData()
        ready = bool(folder and self.name.text().strip())
        self.export_button.setEnabled(ready)
        self.path.setText(str(folder / f"{self.name.text().strip()}.safetensors") if folder and ready else "")
        self.path.setToolTip(plain_tip(self.path.text()))
        if self.image.file != (Path(image) if image else None):
            self.image.show_file(Path(image) if image else None)

    def _ask_folder(self) -> None:
        found = QFileDialog.getExistingDirectory(self, self.tr("Choose a folder for LoRAs"))
        if found:
            self.add_folder(Path(found))

    def _listen(self) -> None:
        self.folder_box.currentIndexChanged.connect(lambda _: self._refresh())
        self.image_box.currentIndexChanged.connect(lambda _: self._refresh())
        self.name.textChanged.connect(lambda _: self._refresh())
        self.folder_button.clicked.connect(self._ask_folder)
        self.buttons.accepted.connect(self.accept)
        self.buttons.rejected.connect(self.reject)

    def _lay_out(self) -> None:
        self.folder_box.setMinimumContentsLength(24)
        self.folder_box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.folder_box.setPlaceholderText(self.tr("Choose a folder"))
        self.folder_button.setAutoDefault(False)
        self.export_button.setDefault(True)
        self.description.setTabChangesFocus(True)
        self.description.setFixedHeight(74)
        self.triggers.setPlaceholderText(self.tr("separated by commas"))
        self.author.setPlaceholderText(self.tr("your public name"))
        self.path.setProperty("role", "muted")
        self.path.setTextFormat(Qt.TextFormat.PlainText)
        self.path.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.image.setFixedSize(200, 200)
        place = QHBoxLayout()
        place.addWidget(self.folder_box, 1)
        place.addWidget(self.folder_button)
        place.setSpacing(10)
        form = QFormLayout()
        form.setHorizontalSpacing(14)
        form.setVerticalSpacing(10)
        rows: list[tuple[str, QWidget]] = [
            (self.tr("File name"), self.name),
            (self.tr("Title"), self.title),
            (self.tr("Trigger words"), self.triggers),
            (self.tr("Author"), self.author),
            (self.tr("License"), self.license),
            (self.tr("Description"), self.description),
        ]
        form.addRow(self.tr("To"), place)
        self.folder_box.setAccessibleName(self.tr("To"))
        for words, widget in rows:
            form.addRow(words, widget)
            widget.setAccessibleName(words)
        self.image_box.setAccessibleName(self.tr("Image"))
        right = QVBoxLayout()
        right.addWidget(QLabel(self.tr("Image")))
        right.addWidget(self.image_box)
        right.addWidget(self.image)
        right.addStretch(1)
        row = QHBoxLayout()
        row.setSpacing(18)
        row.addLayout(form, 1)
        row.addLayout(right)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addLayout(row)
        column.addWidget(self.path)
        column.addWidget(self.buttons)
        self.resize(800, self.sizeHint().height())


class Exporting(QObject):
    """Runs exports for a panel, and remembers the folder used last."""

    notified = Signal(str, str, object)
    failed = Signal(object)
    opened = Signal(object)
    """Dialog that the panel should open."""
    used = Signal()
    """Emitted when the result of `destination` has changed."""

    def __init__(self, session: Session, parent: QWidget) -> None:
        super().__init__(parent)
        self._session, self._parent = session, parent
        self._used: Destination | None = None

    def destination(self) -> Destination | None:
        """Return the folder used last, or else the first known one; None if there is none."""
        return self._used or next(iter(self._session.models.destinations()), None)

    def ask(self, candidate: Candidate, image: Path | None) -> None:
        """Ask for the folder and the metadata (by default, the file's), then export the LoRA."""
        self._with_about(candidate, image, lambda summary: self._ask(candidate, summary))

    def send(self, candidate: Candidate, image: Path | None, destination: Destination) -> None:
        """Export a LoRA under its file name, with its current metadata and this image."""
        self._use(destination)
        name = candidate.file.stem
        self._with_about(candidate, image, lambda summary: self._export(candidate, destination.folder, name, summary))

    def _with_about(self, candidate: Candidate, image: Path | None, then: Callable[[LoraSummary], None]) -> None:
        self._session.tasks.run(
            lambda: read_summary(candidate.file),
            lambda summary: then(replace(summary, image=image)),
            handle_only(ImpastoError, self.failed.emit),
        )

    def _ask(self, candidate: Candidate, summary: LoraSummary) -> None:
        dialog = ExportDialog(self._session, candidate, summary, self._session.models.destinations(), self._parent)
        dialog.folder_chosen.connect(self._session.models.add_destination)
        dialog.accepted.connect(lambda: self._export_as(candidate, dialog))
        self.opened.emit(dialog)

    def _export_as(self, candidate: Candidate, dialog: ExportDialog) -> None:
        folder = dialog.folder
        if folder:
            known = self._session.models.destinations()
            self._use(next((one for one in known if one.folder == folder), Destination("", folder)))
            self._export(candidate, folder, dialog.name.text().strip(), dialog.summary)

    def _export(
        self, candidate: Candidate, folder: Path, name: str, summary: LoraSummary, *, over: bool = False
    ) -> None:
        def refused(fault: ImpastoError) -> None:
            if isinstance(fault, FileExistsConflict):
                again = (self.tr("Replace"), lambda: self._export(candidate, folder, name, summary, over=True))
                self.notified.emit(fault.sentence, "warning", again)
            else:
                self.failed.emit(fault)

        work = partial(export, candidate.file, folder, name, summary, replace=over)
        self._session.tasks.run(work, self._on_exported, handle_only(ImpastoError, refused))

    def _on_exported(self, made: Exported) -> None:
        words = self.tr("Exported {name} to {folder}.").format(name=made.file.name, folder=made.file.parent)
        self.notified.emit(words, "info", (self.tr("Show file"), lambda: reveal(made.file)))

    def _use(self, destination: Destination) -> None:
        self._used = destination
        self.used.emit()


class ModelCardDialog(QDialog):
    """Editor for the model card, in the Markdown that Civitai, Hugging Face and GitHub render."""

    message_shown = Signal(str)
    failed = Signal(object)

    def __init__(self, session: Session, text: str, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._file_name = session, f"{name}.md"
        self.text = QPlainTextEdit(text)
        self.setWindowTitle(self.tr("Model card"))
        self.resize(720, 620)
        words = QLabel(self.tr("Describes the LoRA and how to use it, for sharing. Edit it as you like."))
        words.setProperty("role", "muted")
        words.setWordWrap(True)
        self.text.setAccessibleName(self.tr("Model card"))
        self.text.setTabChangesFocus(True)
        buttons = close_row(self)
        self.copy_button = buttons.addButton(self.tr("Copy"), QDialogButtonBox.ButtonRole.ActionRole)
        self.save_button = buttons.addButton(self.tr("Save…"), QDialogButtonBox.ButtonRole.ActionRole)
        self.copy_button.clicked.connect(self.copy)
        self.save_button.clicked.connect(self._ask)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addWidget(words)
        column.addWidget(self.text, 1)
        column.addWidget(buttons)

    def copy(self) -> None:
        """Copy the model card to the clipboard."""
        QGuiApplication.clipboard().setText(self.text.toPlainText())
        self.message_shown.emit(self.tr("Model card copied."))

    def save(self, file: Path) -> None:
        """Write the model card to a file."""
        text = self.text.toPlainText()
        self._session.tasks.run(
            lambda: files.write_text(file, text),
            lambda _: self.message_shown.emit(self.tr("Saved {name}.").format(name=file.name)),
            handle_only(OSError, lambda fault: self._on_save_failed(file, fault)),
        )

    def _ask(self) -> None:
        found, _ = QFileDialog.getSaveFileName(self, self.tr("Save the model card"), self._file_name, "Markdown (*.md)")
        if found:
            self.save(Path(found))

    def _on_save_failed(self, file: Path, fault: OSError) -> None:
        sentence = f"Could not write {file}: {fault.strerror or fault}."
        self.failed.emit(LoraFileError("card.file", sentence, write_remedy(fault)))
