"""Exports a saved LoRA, and asks before it replaces anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QWidget

from app.core.after.export import About, Candidate, Exported, TakenError, about, export
from app.core.models.verdict import Destination
from app.core.session import Session
from app.core.tasks import only
from app.qt.reveal import reveal
from app.qt.runs.after.export_dialog import ExportDialog
from trainer.errors import ImpastoError


class Exporting(QObject):
    """One for a panel; it remembers which folder was used last."""

    told = Signal(str, str, object)
    failed = Signal(object)
    opened = Signal(object)
    """A dialog is to be opened."""
    used = Signal()
    """`destination` is another now."""

    def __init__(self, session: Session, parent: QWidget) -> None:
        super().__init__(parent)
        self._session, self._parent = session, parent
        self._used: Destination | None = None

    def destination(self) -> Destination | None:
        """Return the folder used last, else the first that is known."""
        return self._used or next(iter(self._session.models.destinations()), None)

    def ask(self, candidate: Candidate, picture: Path | None) -> None:
        """Ask where a LoRA goes and what it says of itself, which begins with what it says now."""
        self._with_about(candidate, picture, lambda told: self._ask(candidate, told))

    def send(self, candidate: Candidate, picture: Path | None, destination: Destination) -> None:
        """Export a LoRA as it is, with a picture."""
        self._use(destination)
        name = candidate.file.stem
        self._with_about(candidate, picture, lambda told: self._export(candidate, destination.folder, name, told))

    def _with_about(self, candidate: Candidate, picture: Path | None, then: Callable[[About], None]) -> None:
        self._session.tasks.run(
            lambda: about(candidate.file),
            lambda told: then(replace(told, picture=picture)),
            only(ImpastoError, self.failed.emit),
        )

    def _ask(self, candidate: Candidate, told: About) -> None:
        dialog = ExportDialog(self._session, candidate, told, self._session.models.destinations(), self._parent)
        dialog.folder_chosen.connect(self._session.models.add_destination)
        dialog.accepted.connect(lambda: self._export_as(candidate, dialog))
        self.opened.emit(dialog)

    def _export_as(self, candidate: Candidate, dialog: ExportDialog) -> None:
        folder = dialog.folder
        if folder:
            known = self._session.models.destinations()
            self._use(next((one for one in known if one.folder == folder), Destination("", folder)))
            self._export(candidate, folder, dialog.name.text().strip(), dialog.told)

    def _export(self, candidate: Candidate, folder: Path, name: str, told: About, *, over: bool = False) -> None:
        def refused(fault: ImpastoError) -> None:
            if isinstance(fault, TakenError):
                again = (self.tr("Replace"), lambda: self._export(candidate, folder, name, told, over=True))
                self.told.emit(fault.sentence, "warning", again)
            else:
                self.failed.emit(fault)

        work = partial(export, candidate.file, folder, name, told, replace=over)
        self._session.tasks.run(work, self._say, only(ImpastoError, refused))

    def _say(self, made: Exported) -> None:
        words = self.tr("{name} is in {folder}.").format(name=made.file.name, folder=made.file.parent)
        self.told.emit(words, "info", (self.tr("Show it"), lambda: reveal(made.file)))

    def _use(self, destination: Destination) -> None:
        self._used = destination
        self.used.emit()
