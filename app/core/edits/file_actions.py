"""Files beside pictures that were written whole, as steps of the history: a mask painted, originals restored."""

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
from app.core.edits.writer import Neighbours
from app.core.library import Library, Picture
from app.core.tasks import Tasks
from app.core.words import first_names
from trainer.errors import DatasetError


class Rewriting:
    """A step of the history: files of one dataset that were written."""

    def __init__(self, rewriter: Rewriter, name: str, root: Path, files: Sequence[Written]) -> None:
        self.name, self._rewriter, self._root, self._files = name, rewriter, root, files

    def undo(self, ended: Ended) -> None:
        """Let the files hold what they held before."""
        self._rewriter.write(self._root, [file.inverse() for file in self._files], ended)

    def redo(self, ended: Ended) -> None:
        """Let them hold again what was written."""
        self._rewriter.write(self._root, self._files, ended)


class Rewriter:
    """Takes such writings back and does them again on a worker; belongs to the library's thread."""

    def __init__(self, library: Library, history: History, saver: Saver, backups: Backups, tasks: Tasks) -> None:
        self._library, self._history, self._saver = library, history, saver
        self._backups, self._tasks = backups, tasks

    def record(self, name: str, root: Path, files: Sequence[Written]) -> None:
        """Enter files that were written into the history."""
        if files:
            self._history.record(Rewriting(self, name, root, files))

    def write(self, root: Path, files: Sequence[Written], ended: Ended) -> None:
        """Write files that still hold what they are known to; the others stay, and `ended` is told of them."""
        pictures = self._beside(files)

        def work() -> tuple[list[Path], Mapping[int, Mapping[str, Any]]]:
            self._saver.flush()  # what was undone just before may lead to what they are known to hold
            return _write(self._backups, root, files), _facts(root, pictures)

        def done(result: tuple[list[Path], Mapping[int, Mapping[str, Any]]]) -> None:
            left, facts = result
            self._learn(facts)
            ended(_changed(left) if left else None)

        def failed(fault: BaseException) -> None:
            ended(refusal(fault, root) if isinstance(fault, OSError) else None)
            if not isinstance(fault, OSError):
                raise fault

        self._tasks.run(work, done, failed)

    def _beside(self, files: Sequence[Written]) -> list[Picture]:
        from trainer.dataset.folders import MASK  # late: it brings numpy and Pillow

        stems = {(written.file.parent, written.file.stem.removesuffix(MASK)) for written in files}
        folders = {folder for folder, _ in stems}
        pictures = [one for one in self._library.pictures.values() if one.folder.path in folders]
        return [one for one in pictures if (one.folder.path, one.path.stem) in stems]

    def _learn(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        learned = {}
        for number, values in facts.items():
            picture = self._library.pictures.get(number)
            unsaved = self._saver.unsaved(picture) if picture else ()
            learned[number] = {name: value for name, value in values.items() if name not in unsaved}
        self._library.learn(learned, "caption", "mask")


def _write(backups: Backups, root: Path, files: Sequence[Written]) -> list[Path]:
    """Write files, keeping what they hold; return those that hold something else by now. Raises OSError."""
    backups.keep(str(root), [(file.relative_to(root).as_posix(), before) for file, before, _ in files])
    left = [written.file for written in files if not written.write(durable=not SYNCS_FILE_SYSTEM)]
    sync_file_system(str(root))
    return left


def _facts(root: Path, pictures: Sequence[Picture]) -> dict[int, dict[str, Any]]:
    """Return what stands beside pictures now, by their ids; what cannot be read waits for the next look at the disk."""
    from app.core.edits.masks import mask_path  # late, as above
    from trainer.protocol.files import long_path

    around, facts = Neighbours(root), {}
    for picture in pictures:
        try:
            facts[picture.id] = {
                "caption": writer.look(str(picture.path), around).text,
                "mask": os.path.lexists(long_path(mask_path(picture.path))),
            }
        except (OSError, DatasetError):
            continue
    return facts


def _changed(left: Sequence[Path]) -> DatasetError:
    names = first_names(left)
    return DatasetError(
        "undo.changed",
        f"{len(left)} of the files were written by another program meanwhile and stay as they are: {names}.",
        "Look at them: nothing of theirs was overwritten, and what they held before is kept as a backup.",
    )
