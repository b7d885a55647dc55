"""Moves pictures with what belongs to them to the system's trash, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from PySide6.QtCore import QFile

from app.core.library import Picture


@dataclass
class Thrown:
    """What one deletion did, file by file."""

    pictures: list[int] = field(default_factory=list)
    moved: list[tuple[Path, Path | None]] = field(default_factory=list)
    """Where each file was, and where in the trash it lies, as far as the system says so."""
    kept: list[Path] = field(default_factory=list)
    """Pictures that the system would not take."""


def throw_away(pictures: Iterable[Picture], shared: Callable[[Picture], bool]) -> Thrown:
    """Move pictures to the trash with captions and masks; those that `shared` says others use stay.

    The picture goes first: where the trash will not take it, all stays.
    """
    # Brings numpy and Pillow, for which the window does not wait.
    from app.core.disk.reading import file_state
    from trainer.dataset.caption_files import SUFFIXES
    from trainer.dataset.folders import MASK

    thrown = Thrown()
    for picture in pictures:
        path = picture.path
        if file_state(path) is None:
            thrown.pictures.append(picture.id)
            continue
        if not throw_file(path, thrown):
            thrown.kept.append(path)
            continue
        thrown.pictures.append(picture.id)
        if not shared(picture):
            for ending in (*SUFFIXES, f"{MASK}.png"):
                beside = path.with_name(path.stem + ending)
                if file_state(beside):
                    throw_file(beside, thrown)
    return thrown


def bring_back(thrown: Thrown) -> list[Path]:
    """Move what a deletion took back to where it was; return what could not be, of which nothing is overwritten."""
    from app.core.disk.reading import file_state

    left = []
    for was, lies in thrown.moved:
        if lies is None or file_state(was) or not QFile.rename(str(lies), str(was)):
            left.append(was)
        else:
            QFile.remove(str(_record(lies)))
    return left


def throw_files(paths: Iterable[Path]) -> Thrown:
    """Move files to the trash; those that the system will not take are not among the moved."""
    thrown = Thrown()
    for path in paths:
        throw_file(path, thrown)
    return thrown


def throw_file(path: Path, thrown: Thrown) -> bool:
    """Move one file to the trash and note it; False where the system will not take it."""
    file = QFile(str(path))
    if not file.moveToTrash():
        return False
    # Afterwards the file goes by the name that it has in the trash, where the system tells it.
    lies = Path(file.fileName())
    thrown.moved.append((path, lies if lies != path and file.fileName() else None))
    return True


def _record(lies: Path) -> Path:
    """Return what a Linux desktop keeps of a file in its trash; elsewhere it is not there."""
    return lies.parent.parent / "info" / f"{lies.name}.trashinfo"
