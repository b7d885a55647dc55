"""Import dropped and pasted images: a worker copies them into a dataset; dropped folders open as datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QBuffer, QCoreApplication, QIODevice, QMimeData, QObject
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QGuiApplication, QImage
from PySide6.QtWidgets import QWidget

from app.core.session import Session
from app.core.words import first_names
from app.qt.widgets import while_alive

if TYPE_CHECKING:  # imports numpy and Pillow
    from app.core.disk.importing import Imported


class ImageImporter(QObject):
    """Imports images into the current image's folder or the last opened dataset; `say` shows messages."""

    def __init__(self, session: Session, parent: QWidget, say: Callable[[str], None]) -> None:
        super().__init__(parent)
        self._session, self._say = session, say

    def enter(self, event: QDragEnterEvent) -> None:
        """Accept dragged files and images."""
        if event.mimeData().hasUrls() or event.mimeData().hasImage():
            event.acceptProposedAction()

    def drop(self, event: QDropEvent) -> None:
        """Import the dropped files or image."""
        self.import_data(event.mimeData())
        event.acceptProposedAction()

    def paste(self) -> None:
        """Import the clipboard's contents."""
        self.import_data(QGuiApplication.clipboard().mimeData())

    def import_data(self, data: QMimeData) -> None:
        """Import dropped or pasted data: open folders, copy image files, or save image data as a file.

        LoRAs and presets open on their own pages.
        """
        paths = [Path(url.toLocalFile()) for url in data.urls() if url.isLocalFile()]
        if paths:
            self._session.navigator.open_paths(paths, while_alive(self, self._on_sorted))
        elif data.hasImage():
            self._save_image(data.imageData())
        else:
            self._say(self.tr("The clipboard has no image."))

    def _on_sorted(self, folders: list[Path], images: list[Path], others: list[Path]) -> None:
        for folder in folders:
            self._session.datasets.open(folder)
        if images:
            self._import(images, others)
        elif others:
            self._say(unsupported_files_message(others))

    @property
    def target(self) -> Path | None:
        """Return the folder that images are copied into; None if no dataset is open."""
        image = self._session.library.images.get(self._session.view.current or 0)
        return image.folder.path if image else next(reversed(self._session.datasets.folders), None)

    def _import(self, images: list[Path], others: list[Path]) -> None:
        target = self.target
        if target is None:  # no dataset is open: open the images' own folders
            for folder in dict.fromkeys(path.parent for path in images):
                self._session.datasets.open(folder)
            if others:
                self._say(unsupported_files_message(others))
            return

        def work() -> Imported:
            from app.core.disk.importing import copy_in

            return copy_in([*images, *others], target)

        self._session.tasks.run(work, lambda done: self._on_imported(done, target), self._on_failed)

    def _save_image(self, image: QImage) -> None:
        target = self.target
        if target is None:
            self._say(self.tr("Open a folder first: pasted images are saved there."))
            return
        buffer = QBuffer()
        buffer.open(QIODevice.OpenModeFlag.WriteOnly)
        image.save(buffer, "PNG")  # type: ignore[call-overload]
        data, stem = bytes(buffer.data().data()), self.tr("pasted")

        def work() -> Imported:
            from app.core.disk.importing import keep_pasted

            return keep_pasted(data, target, stem)

        self._session.tasks.run(work, lambda done: self._on_imported(done, target), self._on_failed)

    def _on_imported(self, imported: Imported, target: Path) -> None:
        words = self.tr("Copied %n image(s) into {folder}.", "", len(imported.copied)).format(folder=target.name)
        if imported.skipped:
            words += " " + self.tr("Skipped %n file(s).", "", imported.skipped)
        self._say(" ".join([words, *(problem.sentence for problem in imported.problems[:2])]))
        self._session.datasets.refresh(whole=True)

    def _on_failed(self, fault: BaseException) -> None:
        self._say(str(fault))


def unsupported_files_message(files: list[Path]) -> str:
    """Return a message about files that the app cannot open."""
    words = QCoreApplication.translate(
        "ImageImporter", "Cannot open {names}. Drop folders, images, captions, LoRAs or presets."
    )
    return words.format(names=first_names(files))
