"""Move images to the system's trash and back, as steps in the undo history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PySide6.QtCore import QFile, QObject, Signal

from app.core.edits.history import Ended
from app.core.library import LibraryImage
from app.core.session import Session
from app.core.words import first_names, full_message
from app.qt.widgets import while_alive
from trainer.errors import DatasetError, ImpastoError


@dataclass
class TrashedFiles:
    """Result of one deletion: the ids of the removed images, and the files that were moved."""

    images: list[int] = field(default_factory=list)
    moved: list[tuple[Path, Path | None]] = field(default_factory=list)
    """Original path of each file, and its path in the trash; None if the system does not report one."""
    kept: list[Path] = field(default_factory=list)
    """Images that could not be moved to the trash."""


def trash_images(images: Iterable[LibraryImage], shared: Callable[[LibraryImage], bool]) -> TrashedFiles:
    """Move images to the trash, each with its caption and mask unless `shared` says that another image uses them.

    The image is moved first; if that fails, its caption and mask are not moved.
    """
    # Imports numpy and Pillow, which would delay the first window.
    from app.core.disk.reading import file_state
    from trainer.dataset.caption_files import SUFFIXES
    from trainer.dataset.folders import MASK

    trashed = TrashedFiles()
    for image in images:
        path = image.path
        if file_state(path) is None:
            trashed.images.append(image.id)
            continue
        if not trash_file(path, trashed):
            trashed.kept.append(path)
            continue
        trashed.images.append(image.id)
        if not shared(image):
            for ending in (*SUFFIXES, f"{MASK}.png"):
                sidecar = path.with_name(path.stem + ending)
                if file_state(sidecar):
                    trash_file(sidecar, trashed)
    return trashed


def restore_files(trashed: TrashedFiles) -> list[Path]:
    """Restore files from the trash without overwriting any; return the original paths of those not restored."""
    from app.core.disk.reading import file_state

    left = []
    for original, in_trash in trashed.moved:
        if in_trash is None or file_state(original) or not QFile.rename(str(in_trash), str(original)):
            left.append(original)
        else:
            QFile.remove(str(_record(in_trash)))
    return left


def trash_files(paths: Iterable[Path]) -> TrashedFiles:
    """Move files to the trash; the result's `moved` lists only the files that could be moved."""
    trashed = TrashedFiles()
    for path in paths:
        trash_file(path, trashed)
    return trashed


def trash_file(path: Path, trashed: TrashedFiles) -> bool:
    """Move one file to the trash and record it in `trashed`; return False if it could not be moved."""
    file = QFile(str(path))
    if not file.moveToTrash():
        return False
    # On success, QFile's name becomes the path in the trash, if the system reports it.
    in_trash = Path(file.fileName())
    trashed.moved.append((path, in_trash if in_trash != path and file.fileName() else None))
    return True


def _record(in_trash: Path) -> Path:
    """Return the path of the .trashinfo file for a file in the trash; only Linux has such files."""
    return in_trash.parent.parent / "info" / f"{in_trash.name}.trashinfo"


class TrashStep(QObject):
    """History step that moves images with their captions and masks to the trash, and back.

    A worker moves the files. The images leave the library before the first file is moved, so that nothing can edit them
    in the meantime.
    """

    done = Signal()
    """Emitted when the images are in the trash, except those that could not be moved."""

    def __init__(self, session: Session, images: Sequence[LibraryImage], parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._images = session, images
        self._trashed = TrashedFiles()
        self.in_trash = False
        """Whether this deletion's images are in the trash."""
        self.name = _step_name(len(images))

    @property
    def count(self) -> int:
        """Return the number of images that were moved."""
        return len(self._trashed.images)

    def mark_restored(self) -> None:
        """Record that a history step restores the images, so that they are not restored twice."""
        self.in_trash = False

    def redo(self, ended: Ended) -> None:
        """Move the images to the trash, after writing their unsaved edits."""
        saver, images = self._session.saver, self._images
        unsaved = any(saver.unsaved(image) for image in images)
        names = [(one.folder, one.name) for one in self._session.library.images.values()]
        self._session.datasets.drop(one.id for one in images)
        selection = self._selection()

        def work() -> TrashedFiles:
            from app.core.disk.reading import stem_of  # imports numpy and Pillow

            if unsaved:
                saver.flush()
            # Images with the same stem share a caption, which must then stay in place.
            stems = Counter((folder, stem_of(name)) for folder, name in names)
            return trash_images(images, lambda one: stems[one.folder, stem_of(one.name)] > 1)

        self._run(work, lambda trashed: self._on_moved(trashed, selection, ended), ended)

    def _on_moved(self, trashed: TrashedFiles, selection: object, ended: Ended) -> None:
        self._trashed = trashed
        self.in_trash = bool(trashed.images)
        self.name = _step_name(self.count)
        gone = set(trashed.images)
        self._take_back([one for one in self._images if one.id not in gone], selection)
        ended(None if self.in_trash else self._refused_error())
        if self.in_trash:
            self.done.emit()

    def undo(self, ended: Ended) -> None:
        """Restore the files without overwriting any.

        Calls `ended` with None, or with an error that names the files that could not be restored.
        """
        self.in_trash, trashed = False, self._trashed
        selection = self._selection()

        def back(left: Sequence[Path]) -> None:
            gone = set(trashed.images)
            self._take_back([one for one in self._images if one.id in gone and one.path not in left], selection)
            self._session.datasets.refresh(whole=True)
            ended(self._restore_error(left) if left else None)

        self._run(lambda: restore_files(trashed), back, ended)

    def _run(self, work: Callable[[], object], done: Callable[..., None], ended: Ended) -> None:
        def failed(fault: BaseException) -> None:
            self._session.datasets.moved(self._images)
            self._session.datasets.refresh(whole=True)  # finds the images that are still there
            ended(self._interrupted_error())
            raise fault

        self._session.tasks.run(work, while_alive(self, done), while_alive(self, failed))

    def _selection(self) -> object:
        return self._session.view.selected, self._session.view.current

    def _take_back(self, images: Sequence[LibraryImage], selection: object) -> None:
        """Add restored images to the library; select them unless the user changed the selection in the meantime."""
        self._session.datasets.moved(self._images)
        self._session.datasets.take_back(images)
        if images and self._selection() == selection:
            self._session.view.select([one.id for one in images], images[0].id)

    def message(self) -> str:
        """Return a message about the result."""
        moved = self.tr("Moved %n image(s) to the trash.", "", self.count)
        kept = self._refused_error() if self._trashed.kept else None
        return f"{moved} {full_message(kept)}" if kept else moved

    def _refused_error(self) -> DatasetError:
        names = first_names(self._trashed.kept)
        sentence = self.tr("Could not move %n image(s) to the trash: {names}.", "", len(self._trashed.kept))
        remedy = self.tr("They were not changed. Delete them in your file manager.")
        return DatasetError("trash.refused", sentence.format(names=names), remedy)

    def _restore_error(self, left: Sequence[Path]) -> DatasetError:
        names = first_names(left)
        sentence = self.tr("Could not restore %n file(s): {names}.", "", len(left))
        remedy = self.tr("Look for them in the system's trash. No other files were overwritten.")
        return DatasetError("trash.not_back", sentence.format(names=names), remedy)

    def _interrupted_error(self) -> DatasetError:
        sentence = self.tr("An error in Impasto interrupted moving files to or from the trash.")
        remedy = self.tr("Images that still exist are shown. Look for the others in the system's trash.")
        return DatasetError("trash.fault", sentence, remedy)


class RestoreStep:
    """History step that restores deleted images, without undoing later edits."""

    def __init__(self, deletion: TrashStep, back: Callable[[], object]) -> None:
        self.name = "Restore 1 image" if deletion.count == 1 else f"Restore {deletion.count} images"
        self.undo = deletion.redo
        self._deletion, self._on_restored = deletion, back
        deletion.mark_restored()

    def redo(self, ended: Ended) -> None:
        """Restore the images; on success, call the callback given to the constructor."""

        def over(error: ImpastoError | None) -> None:
            ended(error)
            if error is None:
                self._on_restored()

        self._deletion.undo(over)


def _step_name(count: int) -> str:
    return "Move 1 image to the trash" if count == 1 else f"Move {count} images to the trash"
