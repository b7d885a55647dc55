"""What a run said: what should be known of it in words, and below all that its engine printed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QFontDatabase, QGuiApplication, QHideEvent, QKeyEvent, QShowEvent, QTextCursor, QTextDocument
from PySide6.QtWidgets import QHBoxLayout, QLabel, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app.core.runs import log as logs
from app.core.runs.log import ROOM, LogChunk, report_on
from app.core.session import Session
from app.core.tasks import Tasks, only, raise_again
from app.qt.actions.commands import Action, Commands
from app.qt.runs.remarks import RemarkPanel, RemarkText, sentence
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import moment

if TYPE_CHECKING:
    from app.core.runs.run import Run


_Found = TypeVar("_Found")

_MOST = 16 * ROOM
"""Bytes of the log that are held."""
_FAR = 8 * ROOM
"""Where so much was printed since the last look, only its end is read."""
ACTIONS = (
    Action("log.find", _NOOP("Action", "Find in the log"), "runs", "ask_what", ("Ctrl+F",), "has_run", icon="search"),
    Action("log.next", _NOOP("Action", "Next place in the log"), "runs", "find_next", ("F3",), "has_run", icon="down"),
    Action(
        "log.previous",
        _NOOP("Action", "Previous place in the log"),
        "runs",
        "find_previous",
        ("Shift+F3",),
        "has_run",
        icon="up",
    ),
    Action("log.end", _NOOP("Action", "End of the log"), "runs", "to_end", ("Ctrl+Shift+End",), "is_away"),
    Action(
        "log.copy",
        _NOOP("Action", "Copy all for a bug report"),
        "runs",
        "copy_all",
        (),
        "has_run",
        icon="copy",
        tip=_NOOP("Action", "Copies versions, remarks, the job and the end of the log; your home folder is left out."),
    ),
)


class LogText(QPlainTextEdit):
    """Shows a log from its end on; it goes along with what is printed unless the user has scrolled up."""

    moved = Signal()
    """It shows another part of the log."""
    unreadable = Signal(str)
    """The log cannot be read: why."""
    missed = Signal()
    """What was sought is nowhere in the log."""

    def __init__(self, tasks: Tasks, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._tasks = tasks
        self._log: Path | None = None
        self._torn = False
        self._pieces: deque[LogChunk] = deque()
        self._size = 0
        self._more = False
        """Whether there is more of the log than a few lines below what is held."""
        self._asked = 0
        self._busy = False
        self._wish: Callable[[], None] | None = None
        """What the user asked for meanwhile."""
        self._filling = False
        self._follows = True
        """Whether the user wants to see what comes."""
        self.setReadOnly(True)
        self.setUndoRedoEnabled(False)
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self.setTabChangesFocus(True)
        self.setAccessibleName(self.tr("Log of the engine"))
        self.verticalScrollBar().valueChanged.connect(self._scrolled)
        self.verticalScrollBar().rangeChanged.connect(lambda *_: self._go_along())

    def show_log(self, log: Path | None) -> None:
        """Show the end of another log, or nothing."""
        self._log, self._torn = log, True
        self._asked += 1
        self._busy, self._wish = False, None
        self._put(())
        self.to_end()

    def follow(self, alive: bool) -> None:
        """Read what was printed since; `alive` tells whether more is to come, so that half a line waits for its end."""
        self._torn = not alive
        if not self._pieces:
            if not self._busy:  # else its end is on its way, and a second time would pull back who scrolls up meanwhile
                self.to_end()
        elif self.at_end:
            self._read_after()

    def to_end(self) -> None:
        """Show the end of the log."""
        log, torn = self._log, self._torn
        if log:
            self._ask(lambda: logs.read_end(log, torn=torn), self._show_end, self.to_end)

    @property
    def at_end(self) -> bool:
        """Whether all up to the end of the log, as it was when last read, is held."""
        return not self._more

    @property
    def at_bottom(self) -> bool:
        """Whether it is scrolled down."""
        return self.verticalScrollBar().value() >= self.verticalScrollBar().maximum()

    # --- finding

    def seek(self, wanted: str, *, back: bool) -> None:
        """Select the next place, or the one before, that holds a text; first of what is held, then of all the log."""
        if not wanted or self._find_here(wanted, back):
            return
        start = self._pieces[0].start if back and self._pieces else self._pieces[-1].end if self._pieces else 0
        if self._busy:
            self._wish = lambda: self.seek(wanted, back=back)
        else:
            self._seek_from(wanted, back, start, around=True)

    def _find_here(self, wanted: str, back: bool) -> bool:
        return self.find(wanted, QTextDocument.FindFlag.FindBackward if back else QTextDocument.FindFlag(0))

    def _seek_from(self, wanted: str, back: bool, start: int, *, around: bool) -> None:
        log, size = self._log, self._size
        if log is None:
            return

        def done(place: int | None) -> None:
            if place is not None:
                self._show_at(place, wanted)
            elif around:  # once more, from the other end
                self._seek_from(wanted, back, size if back else 0, around=False)
            else:
                self.missed.emit()

        self._ask(lambda: logs.find(log, wanted, start, back=back), done)

    def _show_at(self, place: int, wanted: str) -> None:
        """Show the part of the log around a line."""
        log, torn = self._log, self._torn
        assert log is not None

        def read() -> tuple[LogChunk, LogChunk]:
            return logs.read_before(log, place), logs.read_after(log, place, torn=torn)

        def done(found: tuple[LogChunk, LogChunk]) -> None:
            self._follows = False
            self._put(found)
            cursor = QTextCursor(self.document().findBlockByNumber(len(found[0].lines)))
            self.setTextCursor(cursor)
            self._find_here(wanted, False)
            self.centerCursor()
            self.moved.emit()

        self._ask(read, done)

    # --- reading

    def _ask(
        self, work: Callable[[], _Found], done: Callable[[_Found], None], again: Callable[[], None] | None = None
    ) -> None:
        """Do one thing at a time on a worker, `again` when that is over; what another log is shown after is dropped."""
        if self._busy:
            self._wish = again or self._wish
            return
        self._busy, asked = True, self._asked

        def deliver(found: _Found) -> None:
            if asked == self._asked:
                self._busy = False
                done(found)
                self._grant()

        def fail(fault: OSError) -> None:
            if asked == self._asked:
                self._busy = False
                self.unreadable.emit(fault.strerror or str(fault))
                self._grant()

        self._tasks.run(work, deliver, only(OSError, fail), kept=False)

    def _grant(self) -> None:
        """Do what was asked for meanwhile."""
        wish = self._wish
        if wish and not self._busy:
            self._wish = None
            wish()

    def _show_end(self, piece: LogChunk) -> None:
        self._put((piece,) if piece.lines else ())
        self._follows = True
        self._go_along()
        self.moved.emit()

    def _read_after(self) -> None:
        log, torn = self._log, self._torn
        if log and self._pieces:
            end = self._pieces[-1].end
            self._ask(lambda: logs.read_after(log, end, torn=torn), self._go_on)

    def _go_on(self, piece: LogChunk) -> None:
        """Take in what comes after what is held; the log may have become another meanwhile."""
        if piece.size < self._pieces[-1].end or (self._follows and piece.size - piece.end > _FAR):
            self.to_end()
            return
        self._size, self._more = piece.size, piece.more
        if not piece.lines:
            return
        self._pieces.append(piece)
        self._fill(lambda: self.appendPlainText("\n".join(piece.lines)))
        self._drop(first=True)
        self._go_along()
        self.moved.emit()

    def _read_before(self) -> None:
        log = self._log
        start = self._pieces[0].start if self._pieces else 0
        if log and start:
            self._ask(lambda: logs.read_before(log, start), self._go_back, self._read_before)

    def _go_back(self, piece: LogChunk) -> None:
        bar = self.verticalScrollBar()
        here = bar.value()
        self._pieces.appendleft(piece)
        cursor = QTextCursor(self.document())
        self._fill(lambda: cursor.insertText("\n".join(piece.lines) + "\n"))
        bar.setValue(here + len(piece.lines))
        self._drop(first=False)
        self.moved.emit()

    def _drop(self, *, first: bool) -> None:
        """Forget lines at one end, when more are held than should be."""
        while sum(piece.end - piece.start for piece in self._pieces) > _MOST and len(self._pieces) > 1:
            gone = self._pieces.popleft() if first else self._pieces.pop()
            self._more = self._more or not first
            bar, here = self.verticalScrollBar(), self.verticalScrollBar().value()
            self._fill(lambda gone=gone: self._cut(len(gone.lines), first=first))  # type: ignore[misc]
            bar.setValue(max(0, here - len(gone.lines)) if first else here)

    def _cut(self, lines: int, *, first: bool) -> None:
        document = self.document()
        cursor = QTextCursor(document)
        if first:
            cursor.setPosition(document.findBlockByNumber(lines).position(), QTextCursor.MoveMode.KeepAnchor)
        else:
            cursor.setPosition(document.findBlockByNumber(document.blockCount() - lines).position() - 1)
            cursor.movePosition(QTextCursor.MoveOperation.End, QTextCursor.MoveMode.KeepAnchor)
        cursor.removeSelectedText()

    def _put(self, pieces: tuple[LogChunk, ...]) -> None:
        """Hold these pieces and nothing else."""
        held = [piece for piece in pieces if piece.lines]
        self._pieces = deque(held)
        self._size = max((piece.size for piece in pieces), default=0)
        self._more = bool(pieces) and pieces[-1].more
        self._fill(lambda: self.setPlainText("\n".join(line for piece in held for line in piece.lines)))

    def _fill(self, change: Callable[[], None]) -> None:
        """Change the text without taking the scroll bar's moves for the user's."""
        before, self._filling = self._filling, True
        change()
        self._filling = before

    def _go_along(self) -> None:
        """Stay at the end, unless the user has scrolled up."""
        if self._follows:
            bar = self.verticalScrollBar()
            self._fill(lambda: bar.setValue(bar.maximum()))

    def _scrolled(self) -> None:
        if self._filling or not self._pieces:
            return
        bar = self.verticalScrollBar()
        self._follows = self.at_bottom and self.at_end
        if bar.value() == bar.minimum() and self._pieces[0].start > 0:
            self._read_before()
        elif self.at_bottom and not self.at_end:
            self._read_after()
        self.moved.emit()


class LogView(QWidget):
    """Shows the log of one run, with its remarks above."""

    said = Signal(str)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self._run: Run | None = None
        self._ends: list[Callable[[], None]] = []
        self.remarks = RemarkPanel()
        self.text = LogText(session.tasks)
        self.field = QLineEdit()
        self.result = QLabel()
        commands.add(ACTIONS, self)
        self._lay_out()
        self.text.moved.connect(commands.refresh)
        self.text.missed.connect(lambda: self.result.setText(self.tr("Not in the log")))
        self.text.unreadable.connect(self._tell_unreadable)
        self.field.textEdited.connect(lambda _: self.result.clear())
        self.field.installEventFilter(self)

    def show_run(self, run: Run | None) -> None:
        """Show another run, or none."""
        for end in self._ends:
            end()
        self._run = run
        self._ends = [run.looked.connect(lambda _: self._follow())] if run else []
        self.result.clear()
        self.text.show_log(run.directory.console if run else None)
        self.remarks.show_told(self.told())
        self._commands.refresh()

    def told(self) -> list[RemarkText]:
        """Return what should be known of the run in words, the latest first."""
        now = time.time()
        remarks = reversed(self._run.remarks.all) if self._run else ()
        return [RemarkText(one.kind, sentence(one), moment((one.last or one.event).time, now)) for one in remarks]

    def _follow(self) -> None:
        run = self._run
        if run and self.isVisible():
            self.remarks.show_told(self.told())
            self.text.follow(run.alive)

    def _tell_unreadable(self, why: str) -> None:
        self.result.setText(self.tr("The log cannot be read: {why}").format(why=why))

    # --- what the table of actions names

    def has_run(self) -> bool:
        """Tell whether there is a log."""
        return self._run is not None

    def is_away(self) -> bool:
        """Tell whether the end of the log is not what is seen."""
        return self._run is not None and not (self.text.at_bottom and self.text.at_end)

    def ask_what(self) -> None:
        """Ask what to look for."""
        self.field.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.field.selectAll()

    def find_next(self) -> None:
        """Go to the next place that holds what is asked for."""
        self._seek(back=False)

    def find_previous(self) -> None:
        """Go to the place before."""
        self._seek(back=True)

    def to_end(self) -> None:
        """Show the end of the log, and go along with what is printed."""
        self.text.to_end()

    def copy_all(self) -> None:
        """Put all that helps to understand what went wrong on the clipboard."""
        run = self._run
        if run:
            remarks = [f"{one.when} {one.sentence}".strip() for one in self.told()]
            self._session.tasks.run(lambda: report_on(run.directory, remarks), self._copied, raise_again)

    def _copied(self, text: str) -> None:
        QGuiApplication.clipboard().setText(text)
        self.said.emit(self.tr("Copied: paste it into the bug report."))

    def _seek(self, *, back: bool) -> None:
        self.result.clear()
        self.text.seek(self.field.text(), back=back)

    # --- Qt's events

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Enter finds the next place, with Shift the one before; Escape goes back to the log."""
        if watched is self.field and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._seek(back=bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
                return True
            if event.key() == Qt.Key.Key_Escape:
                self.text.setFocus()
                return True
        return super().eventFilter(watched, event)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Catch up with what was printed while it was hidden."""
        super().showEvent(event)
        self._follow()
        self._commands.refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Its actions cannot be done while it is not seen."""
        super().hideEvent(event)
        self._commands.refresh()

    def _lay_out(self) -> None:
        self.text.setPlaceholderText(self.tr("Nothing was printed here yet."))
        self.field.setPlaceholderText(self.tr("Find in the log"))
        self.field.setAccessibleName(self.tr("Find in the log"))
        self.field.setClearButtonEnabled(True)
        self.field.setMaximumWidth(280)
        self.result.setProperty("role", "warning")
        self.result.setTextFormat(Qt.TextFormat.PlainText)
        row = QHBoxLayout()
        row.setContentsMargins(8, 4, 8, 4)
        row.addWidget(self.field, 1)
        for name in ("log.previous", "log.next"):
            row.addWidget(self._commands.button(name))
        row.addWidget(self.result)
        row.addStretch(1)
        row.addWidget(self._commands.button("log.end", Qt.ToolButtonStyle.ToolButtonTextOnly))
        row.addWidget(self._commands.button("log.copy", Qt.ToolButtonStyle.ToolButtonTextBesideIcon))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.remarks)
        column.addLayout(row)
        column.addWidget(self.text, 1)
