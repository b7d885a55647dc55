"""Tells above the caption what keeps changes from being saved, with what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.edits.save_state import Notice, SaveProblem, SaveState
from app.core.session import Session
from app.core.words import in_words
from app.qt.parts import until_destroyed
from app.qt.tips import plain_tip


class Safety(QFrame):
    """Problems and conflicts of saving, one below the other; empty while there are none.

    `told` carries what is said once, above the page: a sentence, and a button's title with what it does, or None.
    `outdated` carries such a sentence when it is no longer true.
    """

    told = Signal(str, object)
    outdated = Signal(str)
    retry_asked = Signal()
    choose_asked = Signal()
    recovered_asked = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("notice")
        self.setAccessibleName(self.tr("What is not saved"))
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(10, 8, 10, 8)
        self._library = session.library
        self._shown: list[_Row] = []
        self._rows: list[QWidget] = []
        self._unsettled: list[str] = []
        self.hide()
        until_destroyed(self, session.saver.state.connect(self._show), session.saver.notices.connect(self._tell))
        self._show(session.saver.now)

    def _show(self, state: SaveState) -> None:
        if not state.conflicts and not state.problems:
            while self._unsettled:
                self.outdated.emit(self._unsettled.pop())
        rows = [
            _Row(self._shortly(one), one.sentence, one.remedy, self.tr("Try again"), self.retry_asked.emit)
            for one in state.problems
        ]
        if state.conflicts:
            words = self.tr("Another program changed %n value(s) that you changed too.", "", len(state.conflicts))
            remedy = self.tr("Nothing was overwritten.")
            rows.append(_Row(words, words, remedy, self.tr("Choose…"), self.choose_asked.emit))
        if [row.words for row in rows] == [row.words for row in self._shown]:
            return
        self._shown = rows
        while self._rows:
            former = self._rows.pop()
            former.hide()
            former.deleteLater()
        for row in rows:
            self._rows.append(_made(row))
            self._column.addWidget(self._rows[-1])
        self.setVisible(bool(rows))

    def _shortly(self, problem: SaveProblem) -> str:
        """Say it with the names of files and folders only: the column is narrow, and the tip has the whole."""
        words = problem.sentence
        for number in problem.pictures & self._library.pictures.keys():
            picture = self._library.pictures[number]
            for path in (picture.path, picture.folder.path, picture.folder.root):
                words = words.replace(str(path), path.name)
        return words

    def _tell(self, notice: Notice) -> None:
        folder = Path(notice.root).name
        act: tuple[str, Callable[[], None]] | None
        if notice.code in ("notice.recovered", "notice.left"):
            words, act = self._left(notice)
        elif notice.code == "notice.converted":
            words = self.tr("Converted %n caption(s) in {folder} from another encoding to UTF-8.", "", notice.count)
            words += " " + self.tr("The originals are backed up.")
            act = None
        elif notice.code == "notice.backups_damaged":
            words = self.tr("The file with the backups of {folder} is damaged; it is kept as {file}.")
            words += " " + self.tr("New backups go into a new file.")
            act = None
        else:
            words = self.tr("metadata.jsonl of {folder} holds %n caption(s).", "", notice.count)
            words += " " + self.tr("Yours are in .txt files now, which come before it.")
            act = None
        words = words.format(folder=folder, file=notice.file)
        if notice.in_conflict or notice.refused:
            self._unsettled.append(words)
        self.told.emit(words, act)

    def _left(self, notice: Notice) -> tuple[str, tuple[str, Callable[[], None]] | None]:
        """Return what earlier sessions left unsaved and what has come of it, with the button that shows it."""
        if notice.code == "notice.recovered":
            words = [self.tr("Impasto stopped before it saved %n change(s) in {folder}.", "", notice.count)]
        else:
            words = [self.tr("Not saved when you closed Impasto: %n change(s) in {folder}.", "", notice.count)]
        saved = notice.count - notice.in_conflict - notice.refused
        if saved == notice.count:
            words.append(self.tr("Everything is saved now."))
        elif saved:
            words.append(self.tr("Saved now: %n.", "", saved))
        if notice.in_conflict:
            words.append(
                self.tr("Also changed by another program and waiting for your choice: %n.", "", notice.in_conflict)
            )
        if notice.refused:
            words.append(self.tr("Still not saved: %n.", "", notice.refused))
        if notice.code == "notice.recovered":
            return " ".join(words), (self.tr("Show…"), self.recovered_asked.emit)
        return " ".join(words), (self.tr("Choose…"), self.choose_asked.emit) if notice.in_conflict else None


@dataclass(frozen=True, slots=True)
class _Row:
    """What is wrong, shortly and in a whole sentence, what to do, and the button's title with what it does."""

    short: str
    sentence: str
    remedy: str
    title: str
    act: Callable[[], None]

    @property
    def words(self) -> str:
        """All of it, as a screen reader says it."""
        return in_words(self)


def _made(row: _Row) -> QWidget:
    made = QWidget()
    button = QPushButton(row.title)
    button.setAccessibleDescription(row.words)
    button.clicked.connect(lambda: row.act())
    line, column = QHBoxLayout(), QVBoxLayout(made)
    for layout in (line, column):
        layout.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(4)
    line.addWidget(_label(row.short, "warning", row.sentence), 1)
    line.addWidget(button, 0, Qt.AlignmentFlag.AlignTop)
    column.addLayout(line)
    column.addWidget(_label(row.remedy, "muted"))
    return made


def _label(words: str, role: str, whole: str = "") -> QLabel:
    label = QLabel(words)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setWordWrap(True)
    label.setProperty("role", role)
    label.setToolTip(plain_tip(whole if whole != words else ""))
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label
