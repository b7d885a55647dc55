"""Pictures that were moved to the system's trash, as one step of the history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PySide6.QtCore import QFile, QObject, Signal

from app.core.edits.history import Ended
from app.core.library import Picture
from app.core.session import Session
from app.core.words import first_names, in_words
from app.qt.widgets import while_there
from trainer.errors import DatasetError, ImpastoError


@dataclass
class TrashedFiles:
    """What one deletion did, file by file."""

    pictures: list[int] = field(default_factory=list)
    moved: list[tuple[Path, Path | None]] = field(default_factory=list)
    """Where each file was, and where in the trash it lies, as far as the system says so."""
    kept: list[Path] = field(default_factory=list)
    """Pictures that the system would not take."""


def throw_away(pictures: Iterable[Picture], shared: Callable[[Picture], bool]) -> TrashedFiles:
    """Move pictures to the trash with captions and masks; those that `shared` says others use stay.

    The picture goes first: where the trash will not take it, all stays.
    """
    # Brings numpy and Pillow, for which the window does not wait.
    from app.core.disk.reading import file_state
    from trainer.dataset.caption_files import SUFFIXES
    from trainer.dataset.folders import MASK

    thrown = TrashedFiles()
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


def bring_back(thrown: TrashedFiles) -> list[Path]:
    """Move what a deletion took back to where it was; return what could not be, of which nothing is overwritten."""
    from app.core.disk.reading import file_state

    left = []
    for was, lies in thrown.moved:
        if lies is None or file_state(was) or not QFile.rename(str(lies), str(was)):
            left.append(was)
        else:
            QFile.remove(str(_record(lies)))
    return left


def throw_files(paths: Iterable[Path]) -> TrashedFiles:
    """Move files to the trash; those that the system will not take are not among the moved."""
    thrown = TrashedFiles()
    for path in paths:
        throw_file(path, thrown)
    return thrown


def throw_file(path: Path, thrown: TrashedFiles) -> bool:
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


class Deletion(QObject):
    """Moves pictures with their captions and masks to the trash, and back to where they were.

    A worker moves the files. The pictures leave the library when their turn comes, before the first file moves, so that
    nobody works on what is about to go.
    """

    done = Signal()
    """The pictures lie in the trash, as far as it took them."""

    def __init__(self, session: Session, pictures: Sequence[Picture], parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._pictures = session, pictures
        self._thrown = TrashedFiles()
        self.lies = False
        """Whether its pictures lie in the trash."""
        self.name = _named(len(pictures))

    @property
    def count(self) -> int:
        """How many pictures it moved."""
        return len(self._thrown.pictures)

    def redo(self, ended: Ended) -> None:
        """Move them to the trash; what was typed of them is written first, so that it goes along."""
        saver, pictures = self._session.saver, self._pictures
        unsaved = any(saver.unsaved(picture) for picture in pictures)
        names = [(one.folder, one.name) for one in self._session.library.pictures.values()]
        self._session.datasets.drop(one.id for one in pictures)
        chosen = self._chosen()

        def work() -> TrashedFiles:
            from app.core.disk.reading import stem_of  # numpy and Pillow, for which the window does not wait

            if unsaved:
                saver.flush()
            stems = Counter((folder, stem_of(name)) for folder, name in names)  # those of one stem share a caption
            return throw_away(pictures, lambda one: stems[one.folder, stem_of(one.name)] > 1)

        self._run(work, lambda thrown: self._gone(thrown, chosen, ended), ended)

    def _gone(self, thrown: TrashedFiles, chosen: object, ended: Ended) -> None:
        self._thrown = thrown
        self.lies = bool(thrown.pictures)
        self.name = _named(self.count)
        gone = set(thrown.pictures)
        self._take_back([one for one in self._pictures if one.id not in gone], chosen)
        ended(None if self.lies else self._kept())
        if self.lies:
            self.done.emit()

    def undo(self, ended: Ended) -> None:
        """Bring files back, of which nothing is overwritten; `ended` is told of those that could not be."""
        self.lies, thrown = False, self._thrown
        chosen = self._chosen()

        def back(left: Sequence[Path]) -> None:
            gone = set(thrown.pictures)
            self._take_back([one for one in self._pictures if one.id in gone and one.path not in left], chosen)
            self._session.datasets.refresh(whole=True)
            ended(self._lost(left) if left else None)

        self._run(lambda: bring_back(thrown), back, ended)

    def _run(self, work: Callable[[], object], have: Callable[..., None], ended: Ended) -> None:
        def failed(fault: BaseException) -> None:
            self._session.datasets.moved(self._pictures)
            self._session.datasets.refresh(whole=True)  # which finds those from among them that are there
            ended(self._broken_off())
            raise fault

        self._session.tasks.run(work, while_there(self, have), while_there(self, failed))

    def _chosen(self) -> object:
        return self._session.view.selected, self._session.view.current

    def _take_back(self, pictures: Sequence[Picture], chosen: object) -> None:
        """Enter pictures that are there again; they are selected, unless the user selected others meanwhile."""
        self._session.datasets.moved(self._pictures)
        self._session.datasets.take_back(pictures)
        if pictures and self._chosen() == chosen:
            self._session.view.select([one.id for one in pictures], pictures[0].id)

    def told(self) -> str:
        """Return what it did, in words."""
        moved = self.tr("Moved %n picture(s) to the trash.", "", self.count)
        kept = self._kept() if self._thrown.kept else None
        return f"{moved} {in_words(kept)}" if kept else moved

    def _kept(self) -> DatasetError:
        names = first_names(self._thrown.kept)
        sentence = self.tr("The system's trash did not take %n: {names}.", "", len(self._thrown.kept))
        remedy = self.tr("They stay where they are: remove them with the system's own file manager.")
        return DatasetError("trash.refused", sentence.format(names=names), remedy)

    def _lost(self, left: Sequence[Path]) -> DatasetError:
        names = first_names(left)
        sentence = self.tr("%n file(s) could not be brought back: {names}.", "", len(left))
        remedy = self.tr("Look for them in the system's trash; nothing was put in the place of other files.")
        return DatasetError("trash.not_back", sentence.format(names=names), remedy)

    def _broken_off(self) -> DatasetError:
        sentence = self.tr("Moving files to the trash or back was broken off by a fault in Impasto.")
        remedy = self.tr("What is there is shown; look for the rest in the system's trash.")
        return DatasetError("trash.fault", sentence, remedy)


class Return:
    """Brings back what a deletion moved to the trash, as a step of its own after all that was done since."""

    def __init__(self, deletion: Deletion, back: Callable[[], object]) -> None:
        self.name = "Bring back 1 picture" if deletion.count == 1 else f"Bring back {deletion.count} pictures"
        self.undo = deletion.redo
        self._deletion, self._back = deletion, back
        deletion.lies = False  # nobody brings it back twice

    def redo(self, ended: Ended) -> None:
        """Bring them back, and call `back` where that went well."""

        def over(error: ImpastoError | None) -> None:
            ended(error)
            if error is None:
                self._back()

        self._deletion.undo(over)


def _named(count: int) -> str:
    return "Move 1 picture to the trash" if count == 1 else f"Move {count} pictures to the trash"
