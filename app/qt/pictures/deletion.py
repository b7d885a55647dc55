"""Pictures that were moved to the system's trash, as one step of the history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QObject

from app.core.edits.edit import Ended
from app.core.pictures import Picture
from app.core.session import Session
from app.core.words import first_names
from app.qt.pictures.trash import Thrown, bring_back, throw_away
from trainer.errors import DatasetError


class Deletion(QObject):
    """Moves pictures with their captions and masks to the trash, and back to where they were."""

    def __init__(self, session: Session, pictures: Sequence[Picture]) -> None:
        super().__init__()
        self._session, self._pictures = session, pictures
        self._thrown = Thrown()
        self.lies = False
        """Whether its pictures lie in the trash."""
        self.name = "Move 1 picture to the trash"

    @property
    def count(self) -> int:
        """How many pictures it moved."""
        return len(self._thrown.pictures)

    def do(self) -> bool:
        """Move them to the trash; what was typed of them is written first, so that it goes along. False: none went."""
        if any(self._session.saver.unsaved(picture) for picture in self._pictures):
            self._session.history.finish()
            self._session.saver.flush()
        stems = self._stems()
        self._thrown = throw_away(self._pictures, lambda one: stems[one.folder.path, one.path.stem] > 1)
        self._session.datasets.drop(self._thrown.pictures)
        self.lies = bool(self._thrown.pictures)
        self.name = "Move 1 picture to the trash" if self.count == 1 else f"Move {self.count} pictures to the trash"
        return self.lies

    def undo(self, ended: Ended) -> None:
        """Bring them back."""
        ended(self.bring_back())

    def redo(self, ended: Ended) -> None:
        """Move them to the trash again."""
        self.do()
        ended(self._kept() if self._thrown.kept else None)

    def bring_back(self) -> DatasetError | None:
        """Bring files back, of which nothing is overwritten; return in words what could not be."""
        left = bring_back(self._thrown)
        self.lies = False
        gone = set(self._thrown.pictures)
        back = [one for one in self._pictures if one.id in gone and one.path not in left]
        self._session.datasets.take_back(back)
        self._session.datasets.refresh(whole=True)
        if back:
            self._session.view.select([one.id for one in back], back[0].id)
        return self._lost(left) if left else None

    def told(self) -> str:
        """Return what it did, in words."""
        moved = [self.tr("Moved %n picture(s) to the trash.", "", self.count)] if self.count else []
        kept = self._kept() if self._thrown.kept else None
        return " ".join([*moved, kept.sentence, kept.remedy] if kept else moved)

    def _stems(self) -> Counter[tuple[Path, str]]:
        """Count pictures by folder and stem: those of one stem share a caption."""
        return Counter((one.folder.path, one.path.stem) for one in self._session.library.pictures.values())

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
