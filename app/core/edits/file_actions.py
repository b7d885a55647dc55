"""Undoable writes of whole files that belong to images, such as painted masks or restored originals."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.core.edits import writer
from app.core.edits.backups import Backups, Written
from app.core.edits.history import Ended, History
from app.core.edits.safe_files import SYNCS_FILE_SYSTEM, refusal, sync_file_system
from app.core.edits.saver import Saver
from app.core.edits.writer import Neighbors
from app.core.library import Library, LibraryImage
from app.core.tasks import Tasks
from app.core.words import first_names
from trainer.errors import DatasetError


class Rewriting:
    """A history step that writes files of one dataset."""

    def __init__(self, rewriter: Rewriter, name: str, root: Path, files: Sequence[Written]) -> None:
        self.name, self._rewriter, self._root, self._files = name, rewriter, root, files

    def undo(self, ended: Ended) -> None:
        """Restore the earlier contents of the files."""
        self._rewriter.write(self._root, [file.inverse() for file in self._files], ended)

    def redo(self, ended: Ended) -> None:
        """Write the new contents again."""
        self._rewriter.write(self._root, self._files, ended)


class Rewriter:
    """Undoes and redoes file writes on a worker; belongs to the library's thread."""

    def __init__(self, library: Library, history: History, saver: Saver, backups: Backups, tasks: Tasks) -> None:
        self._library, self._history, self._saver = library, history, saver
        self._backups, self._tasks = backups, tasks

    def record(self, name: str, root: Path, files: Sequence[Written]) -> None:
        """Add a completed write to the history."""
        if files:
            self._history.record(Rewriting(self, name, root, files))

    def write(self, root: Path, files: Sequence[Written], ended: Ended) -> None:
        """Write the files that are unchanged since the last write; report the others to `ended`."""
        images = self._images_of(files)

        def work() -> tuple[list[Path], Mapping[int, Mapping[str, Any]]]:
            self._saver.flush()  # an undo just before may still be writing the contents that are expected here
            return _write(self._backups, root, files), _facts(root, images)

        def done(result: tuple[list[Path], Mapping[int, Mapping[str, Any]]]) -> None:
            left, facts = result
            self._learn(facts)
            ended(_changed(left) if left else None)

        def failed(fault: BaseException) -> None:
            ended(refusal(fault, root) if isinstance(fault, OSError) else None)
            if not isinstance(fault, OSError):
                raise fault

        self._tasks.run(work, done, failed)

    def _images_of(self, files: Sequence[Written]) -> list[LibraryImage]:
        from trainer.dataset.folders import MASK  # late: imports numpy and Pillow

        stems = {(written.file.parent, written.file.stem.removesuffix(MASK)) for written in files}
        folders = {folder for folder, _ in stems}
        images = [one for one in self._library.images.values() if one.folder.path in folders]
        return [one for one in images if (one.folder.path, one.path.stem) in stems]

    def _learn(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        learned = {}
        for number, values in facts.items():
            image = self._library.images.get(number)
            unsaved = self._saver.unsaved(image) if image else ()
            learned[number] = {name: value for name, value in values.items() if name not in unsaved}
        self._library.set_facts(learned, "caption", "mask")


def _write(backups: Backups, root: Path, files: Sequence[Written]) -> list[Path]:
    """Back up and write files; return those skipped because another program changed them. Raises OSError."""
    backups.keep(str(root), [(file.relative_to(root).as_posix(), before) for file, before, _ in files])
    left = [written.file for written in files if not written.write(durable=not SYNCS_FILE_SYSTEM)]
    sync_file_system(str(root))
    return left


def _facts(root: Path, images: Sequence[LibraryImage]) -> dict[int, dict[str, Any]]:
    """Return the captions on disk and whether masks exist, by image id; unreadable ones are left out."""
    from app.core.edits.masks import mask_path  # late, as above
    from trainer.protocol.files import long_path

    around, facts = Neighbors(root), {}
    for image in images:
        try:
            facts[image.id] = {
                "caption": writer.read_caption(str(image.path), around).text,
                "mask": os.path.lexists(long_path(mask_path(image.path))),
            }
        except (OSError, DatasetError):
            continue
    return facts


def _changed(left: Sequence[Path]) -> DatasetError:
    return DatasetError(
        "undo.changed",
        f"Could not change all files: another program has changed {first_names(left)}.",
        "Check these files: nothing was overwritten, and their earlier versions are kept as backups.",
    )
