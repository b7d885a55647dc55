"""Tells above the caption what keeps changes from being saved, with what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.edits.saving import Notice, SaveState
from app.core.session import Session


class Safety(QFrame):
    """Problems and conflicts of saving, one below the other; empty while there are none.

    `told` carries what is said once, above the page: a sentence, and a button's title with what it does, or None.
    """

    told = Signal(str, object)
    retry_asked = Signal()
    choose_asked = Signal()
    recovered_asked = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("notice")
        self.setAccessibleName(self.tr("What is not saved"))
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(10, 8, 10, 8)
        self._shown: list[tuple[str, str, Callable[[], None]]] = []
        self._rows: list[QWidget] = []
        self.hide()
        ends = [session.saver.state.connect(self._show), session.saver.notices.connect(self._tell)]
        self.destroyed.connect(lambda: [end() for end in ends])
        self._show(session.saver.now)

    def _show(self, state: SaveState) -> None:
        problems = [f"{one.sentence} {one.remedy}" for one in state.problems]
        rows = [(words, self.tr("Try again"), self.retry_asked.emit) for words in problems]
        if state.conflicts:
            words = self.tr("Another program changed %n value(s) that you changed too.", "", len(state.conflicts))
            words += " " + self.tr("Nothing was overwritten.")
            rows.append((words, self.tr("Choose…"), self.choose_asked.emit))
        if [words for words, *_ in rows] == [words for words, *_ in self._shown]:
            return
        self._shown = rows
        while self._rows:
            row = self._rows.pop()
            row.hide()
            row.deleteLater()
        for words, title, act in rows:
            self._rows.append(self._row(words, title, act))
            self._column.addWidget(self._rows[-1])
        self.setVisible(bool(rows))

    def _row(self, words: str, title: str, act: Callable[[], None]) -> QWidget:
        row = QWidget()
        line = QHBoxLayout(row)
        line.setContentsMargins(0, 0, 0, 0)
        label, button = QLabel(words), QPushButton(title)
        label.setWordWrap(True)
        label.setProperty("role", "warning")
        label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        button.setAccessibleDescription(words)
        button.clicked.connect(lambda: act())
        line.addWidget(label, 1)
        line.addWidget(button, 0, Qt.AlignmentFlag.AlignTop)
        return row

    def _tell(self, notice: Notice) -> None:
        folder = Path(notice.root).name
        if notice.code == "notice.recovered":
            words = self.tr("Impasto ended before it saved %n change(s) in {folder}.", "", notice.count)
            words += " " + self.tr("They are saved now; where another program wrote meanwhile, you are asked.")
            act = (self.tr("Show…"), self.recovered_asked.emit)
        elif notice.code == "notice.converted":
            words = self.tr("Converted %n caption(s) in {folder} from another encoding to UTF-8.", "", notice.count)
            words += " " + self.tr("The originals are backed up.")
            act = None
        else:
            words = self.tr("metadata.jsonl of {folder} holds %n caption(s).", "", notice.count)
            words += " " + self.tr("Yours are in .txt files now, which come before it.")
            act = None
        self.told.emit(words.format(folder=folder), act)
