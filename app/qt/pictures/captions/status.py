"""Tells above the caption what keeps changes from being saved, with what can be done about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.edits.save_state import SaveNotice, SaveProblem, SaveState
from app.core.library import Altered, Picture
from app.core.session import Session
from app.core.tags.index import Summary
from app.core.tags.splitting import Lines
from app.core.words import in_words
from app.qt.pictures.captions.text import CHUNK, TokenCount
from app.qt.widgets import plain_tip, until_destroyed


class SaveStatusPanel(QFrame):
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

    def _tell(self, notice: SaveNotice) -> None:
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

    def _left(self, notice: SaveNotice) -> tuple[str, tuple[str, Callable[[], None]] | None]:
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


class Chosen:
    """Follows the view when it is told to. What a filter hides is not among them: nobody sees what would happen."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.order: Sequence[int] = []
        self.hidden = 0
        """How many are chosen besides, but not shown."""
        self._parts: tuple[frozenset[int], Sequence[int]] = frozenset(), ()
        self._pictures: list[Picture] | None = []

    def __len__(self) -> int:
        return len(self.order)

    @property
    def pictures(self) -> list[Picture]:
        """The pictures in their order; looked up when they are wanted first, which takes 5 ms for 100,000."""
        if self._pictures is None:
            self._pictures = list(map(self._session.library.pictures.__getitem__, self.order))
        return self._pictures

    def follow(self) -> bool:
        """Take them from the view; tell whether there are others now, or none."""
        view, library = self._session.view, self._session.library.pictures
        current = [view.current] if view.current is not None and view.current in library else []
        chosen = len(view.selected or current)
        # With one picture chosen there is no need to gather from all that are shown.
        single = view.selected.issubset(current)
        current = [number for number in current if number in view.ids]
        shown = current if single else view.scope()
        order, self.hidden = shown or current, chosen - len(shown)
        if order and order == self.order:
            return False
        self.order, self._parts, self._pictures = order, (view.selected, current), None
        return True

    def touched(self, altered: Altered) -> bool:
        """Tell whether one of them, also one that is hidden, is another now."""
        return not all(map(altered.altered.isdisjoint, self._parts))


Told = tuple[str, str]
"""A sentence and the role of the label that shows it."""


class StateWords(QObject):
    """Makes sentences; each with the look it takes."""

    def title(self, count: int, hidden: int) -> str:
        """Return what stands over the captions of many pictures, or of none."""
        if count:
            return self.tr("%n picture(s)", "", count)
        return self.tr("No selected picture is shown") if hidden else self.tr("No picture selected")

    def hint(self, count: int, hidden: int) -> str:
        """Return what can be done with no picture, or with many, and how many of the selected a filter hides."""
        words = self.tr("The filter hides %n selected picture(s); nothing is changed there.", "", hidden)
        parts = [words] if hidden else []
        if not count and not hidden:
            parts.append(self.tr("Choose a picture to write its caption, or several to tag them together."))
        if count > 1:
            parts.append(self.tr("A tag that you add or remove is added to or removed from all of them."))
        return " ".join(parts)

    def of_one(self, picture: Picture, lines: Lines) -> Told:
        """Return what is to be known of one picture's caption."""
        parts = [self._caption(picture, lines)]
        role = "warning" if not (picture.caption or "").strip() else "muted"
        if picture.excluded:
            parts.append(self.tr("Excluded from training."))
        if picture.problem:
            parts.append(picture.problem.replace(str(picture.path), picture.name))  # the whole way takes three lines
            role = "bad"
        return " ".join(part for part in parts if part), role

    def of_many(self, summary: Summary, pictures: Sequence[Picture]) -> Told:
        """Return how many of the pictures lack what."""
        excluded = sum(picture.excluded for picture in pictures)
        damaged = sum(picture.problem is not None for picture in pictures)
        words = [
            self.tr("%n without caption file", "", summary.missing) if summary.missing else "",
            self.tr("%n with an empty caption", "", summary.empty) if summary.empty else "",
            self.tr("%n excluded", "", excluded) if excluded else "",
            self.tr("%n damaged", "", damaged) if damaged else "",
        ]
        return ", ".join(word for word in words if word), "warning" if summary.missing or summary.empty else "muted"

    def of_tokens(self, measured: Sequence[TokenCount] | None, limit: int) -> Told:
        """Return how long the caption is; of several, the longest."""
        if measured is None:
            return self.tr("Counting tokens…"), "muted"
        longest = max(measured, key=lambda one: one.tokens)
        if longest.tokens > limit:
            words = self.tr("{count} of {limit} tokens, %n cut off", "", longest.tokens - limit)
            return words.format(count=longest.tokens, limit=limit), "warning"
        if limit > CHUNK and longest.tokens > CHUNK:
            row = (longest.tokens - 1) // CHUNK + 1
            words = self.tr("{count} of {limit} tokens, row {row} of {rows}")
            return words.format(count=longest.tokens, limit=limit, row=row, rows=limit // CHUNK), "muted"
        return self.tr("{count} of {limit} tokens").format(count=longest.tokens, limit=limit), "muted"

    def about_tokens(self, measured: Sequence[TokenCount] | None) -> str:
        """Return how they are counted."""
        words = self.tr("The text encoder reads 75 tokens in a row.")
        if measured and any(one.trigger for one in measured):
            words += " " + self.tr("Counted with the trigger word, which training puts first.")
        return words

    def there_already(self, tags: Sequence[str]) -> str:
        """Return that an added tag changed nothing."""
        return self.tr("{tag} is there already.").format(tag=", ".join(tags))

    def _caption(self, picture: Picture, lines: Lines) -> str:
        if picture.caption is None:
            return self.tr("No caption file yet; the first tag makes one.")
        if not picture.caption.strip():
            return self.tr("The caption file is empty.")
        count = sum(bool(row.strip()) for row in picture.caption.split("\n"))
        if count < 2:
            return ""
        if lines == "variants":
            return self.tr("%n caption(s) to choose from, one a line.", "", count)
        return self.tr("%n line(s), read as one caption.", "", count)
