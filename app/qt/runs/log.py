"""The log of a run: remarks as sentences and, below them, everything that the engine printed."""

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
from app.core.runs.log import CHUNK_BYTES, LogChunk, report_on
from app.core.session import Session
from app.core.tasks import Tasks, handle_only, reraise
from app.qt.actions.commands import Action, Commands
from app.qt.runs.remarks import RemarkPanel, RemarkText, sentence
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import format_past

if TYPE_CHECKING:
    from app.core.runs.run import Run


_Result = TypeVar("_Result")

_MAX_BYTES = 16 * CHUNK_BYTES
"""Maximum number of bytes of the log kept in memory."""
_JUMP_BYTES = 8 * CHUNK_BYTES
"""Number of new bytes above which only the end of the log is read."""
ACTIONS = (
    Action("log.find", _NOOP("Action", "Find in the log"), "runs", "ask_what", ("Ctrl+F",), "has_run", icon="search"),
    Action("log.next", _NOOP("Action", "Next match in the log"), "runs", "find_next", ("F3",), "has_run", icon="down"),
    Action(
        "log.previous",
        _NOOP("Action", "Previous match in the log"),
        "runs",
        "find_previous",
        ("Shift+F3",),
        "has_run",
        icon="up",
    ),
    Action("log.end", _NOOP("Action", "Go to the end of the log"), "runs", "to_end", ("Ctrl+Shift+End",), "is_away"),
    Action(
        "log.copy",
        _NOOP("Action", "Copy bug report"),
        "runs",
        "copy_all",
        (),
        "has_run",
        icon="copy",
        tip=_NOOP(
            "Action",
            "Copies versions, remarks, the job and the end of the log; the path of your home folder is removed.",
        ),
    ),
)


class LogText(QPlainTextEdit):
    """Log viewer that starts at the end and follows new output unless the user has scrolled up.

    It contains only a part of a long log, in chunks that a worker reads as the user scrolls.
    """

    moved = Signal()
    """Emitted when another part of the log may have become visible."""
    unreadable = Signal(str)
    """Reason why the log cannot be read."""
    not_found = Signal()
    """Emitted if the log does not contain the text that the user searched for."""

    def __init__(self, tasks: Tasks, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._tasks = tasks
        self._log: Path | None = None
        self._take_partial_line = False
        self._chunks: deque[LogChunk] = deque()
        self._size = 0
        self._more = False
        """Whether the log has more than a few lines after the loaded chunks."""
        self._requested = 0
        self._busy = False
        self._pending_request: Callable[[], None] | None = None
        """The user's request that will run after the current read, or None."""
        self._filling = False
        self._follows = True
        """Whether the view scrolls to new output."""
        self.setReadOnly(True)
        self.setUndoRedoEnabled(False)
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self.setTabChangesFocus(True)
        self.setAccessibleName(self.tr("Engine log"))
        self.verticalScrollBar().valueChanged.connect(self._on_scrolled)
        self.verticalScrollBar().rangeChanged.connect(lambda *_: self._scroll_to_end())

    def show_log(self, log: Path | None) -> None:
        """Show the end of another log, or nothing for None."""
        self._log, self._take_partial_line = log, True
        self._requested += 1
        self._busy, self._pending_request = False, None
        self._put(())
        self.to_end()

    def follow(self, alive: bool) -> None:
        """Read new output; while the run is `alive`, an incomplete last line is not shown yet."""
        self._take_partial_line = not alive
        if not self._chunks:
            if not self._busy:  # otherwise the end is being read; a second read would undo scrolling up
                self.to_end()
        elif self.at_end:
            self._read_after()

    def to_end(self) -> None:
        """Show the end of the log."""
        log, torn = self._log, self._take_partial_line
        if log:
            self._ask(lambda: logs.read_end(log, torn=torn), self._show_end, self.to_end)

    @property
    def at_end(self) -> bool:
        """Whether the loaded chunks include the end of the log, as of the last read."""
        return not self._more

    @property
    def at_bottom(self) -> bool:
        """Whether the view is scrolled to the bottom."""
        return self.verticalScrollBar().value() >= self.verticalScrollBar().maximum()

    # --- finding

    def seek(self, wanted: str, *, back: bool) -> None:
        """Select the next or previous match of a text: first in the loaded chunks, then in the whole log."""
        if not wanted or self._find_here(wanted, back):
            return
        start = self._chunks[0].start if back and self._chunks else self._chunks[-1].end if self._chunks else 0
        if self._busy:
            self._pending_request = lambda: self.seek(wanted, back=back)
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
            elif around:  # wrap around and search from the other end
                self._seek_from(wanted, back, size if back else 0, around=False)
            else:
                self.not_found.emit()

        self._ask(lambda: logs.find(log, wanted, start, back=back), done)

    def _show_at(self, place: int, wanted: str) -> None:
        """Show the part of the log around a byte offset and select the first match after it."""
        log, torn = self._log, self._take_partial_line
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
        self, work: Callable[[], _Result], done: Callable[[_Result], None], again: Callable[[], None] | None = None
    ) -> None:
        """Read from the log with `work` on a worker and pass the result to `done`.

        If another read is still running, do not call `work`; call `again`, if given, after that read instead. Results
        for a previously shown log are ignored.
        """
        if self._busy:
            self._pending_request = again or self._pending_request
            return
        self._busy, asked = True, self._requested

        def deliver(found: _Result) -> None:
            if asked == self._requested:  # otherwise `show_log` has already reset `_busy` for another log
                self._busy = False
                done(found)
                self._run_pending()

        def fail(fault: OSError) -> None:
            if asked == self._requested:
                self._busy = False
                self.unreadable.emit(fault.strerror or str(fault))
                self._run_pending()

        self._tasks.run(work, deliver, handle_only(OSError, fail), kept=False)

    def _run_pending(self) -> None:
        """Run the pending request."""
        request = self._pending_request
        if request and not self._busy:
            self._pending_request = None
            request()

    def _show_end(self, chunk: LogChunk) -> None:
        self._put((chunk,) if chunk.lines else ())
        self._follows = True
        self._scroll_to_end()
        self.moved.emit()

    def _read_after(self) -> None:
        log, torn = self._log, self._take_partial_line
        if log and self._chunks:
            end = self._chunks[-1].end
            self._ask(lambda: logs.read_after(log, end, torn=torn), self._append)

    def _append(self, chunk: LogChunk) -> None:
        """Append a chunk; if the log was replaced or has too much new output, show its end instead."""
        # A file that is shorter than what was read before has been replaced or truncated.
        if chunk.size < self._chunks[-1].end or (self._follows and chunk.size - chunk.end > _JUMP_BYTES):
            self.to_end()
            return
        self._size, self._more = chunk.size, chunk.more
        if not chunk.lines:
            return
        self._chunks.append(chunk)
        self._fill(lambda: self.appendPlainText("\n".join(chunk.lines)))
        self._drop(first=True)
        self._scroll_to_end()
        self.moved.emit()

    def _read_before(self) -> None:
        log = self._log
        start = self._chunks[0].start if self._chunks else 0
        if log and start:
            self._ask(lambda: logs.read_before(log, start), self._prepend, self._read_before)

    def _prepend(self, chunk: LogChunk) -> None:
        bar = self.verticalScrollBar()
        here = bar.value()
        self._chunks.appendleft(chunk)
        cursor = QTextCursor(self.document())
        self._fill(lambda: cursor.insertText("\n".join(chunk.lines) + "\n"))
        bar.setValue(here + len(chunk.lines))  # lines are not wrapped, so the scroll bar counts lines
        self._drop(first=False)
        self.moved.emit()

    def _drop(self, *, first: bool) -> None:
        """Drop the first or last chunks until the rest is within the limit; keep the visible lines in place."""
        while sum(chunk.end - chunk.start for chunk in self._chunks) > _MAX_BYTES and len(self._chunks) > 1:
            gone = self._chunks.popleft() if first else self._chunks.pop()
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
            # One character earlier, to remove the line break before these lines too.
            cursor.setPosition(document.findBlockByNumber(document.blockCount() - lines).position() - 1)
            cursor.movePosition(QTextCursor.MoveOperation.End, QTextCursor.MoveMode.KeepAnchor)
        cursor.removeSelectedText()

    def _put(self, chunks: tuple[LogChunk, ...]) -> None:
        """Replace the loaded chunks with these."""
        held = [chunk for chunk in chunks if chunk.lines]
        self._chunks = deque(held)
        self._size = max((chunk.size for chunk in chunks), default=0)
        self._more = bool(chunks) and chunks[-1].more
        self._fill(lambda: self.setPlainText("\n".join(line for chunk in held for line in chunk.lines)))

    def _fill(self, change: Callable[[], None]) -> None:
        """Call `change`, which changes the text, without treating scroll bar movement as scrolling by the user."""
        before, self._filling = self._filling, True  # calls can be nested: changing the text also scrolls to the end
        change()
        self._filling = before

    def _scroll_to_end(self) -> None:
        """Scroll to the end, unless the user has scrolled up."""
        if self._follows:
            bar = self.verticalScrollBar()
            self._fill(lambda: bar.setValue(bar.maximum()))

    def _on_scrolled(self) -> None:
        if self._filling or not self._chunks:
            return
        bar = self.verticalScrollBar()
        self._follows = self.at_bottom and self.at_end
        if bar.value() == bar.minimum() and self._chunks[0].start > 0:
            self._read_before()
        elif self.at_bottom and not self.at_end:
            self._read_after()
        self.moved.emit()


class LogView(QWidget):
    """Log of one run with a search field, below the run's remarks."""

    message_shown = Signal(str)

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
        self.text.not_found.connect(lambda: self.result.setText(self.tr("No matches")))
        self.text.unreadable.connect(self._on_unreadable)
        self.field.textEdited.connect(lambda _: self.result.clear())
        self.field.installEventFilter(self)

    def show_run(self, run: Run | None) -> None:
        """Show another run, or nothing for None."""
        for end in self._ends:
            end()
        self._run = run
        self._ends = [run.polled.connect(lambda _: self._follow_run())] if run else []
        self.result.clear()
        self.text.show_log(run.directory.console if run else None)
        self.remarks.show_remarks(self.remark_texts())
        self._commands.refresh()

    def remark_texts(self) -> list[RemarkText]:
        """Return the run's remarks as sentences, latest first."""
        now = time.time()
        remarks = reversed(self._run.remarks.all) if self._run else ()
        return [RemarkText(one.kind, sentence(one), format_past((one.last or one.event).time, now)) for one in remarks]

    def _follow_run(self) -> None:
        run = self._run
        if run and self.isVisible():
            self.remarks.show_remarks(self.remark_texts())
            self.text.follow(run.alive)

    def _on_unreadable(self, why: str) -> None:
        self.result.setText(self.tr("Could not read the log: {why}").format(why=why))

    # --- called by actions

    def has_run(self) -> bool:
        """Return whether a run is shown."""
        return self._run is not None

    def is_away(self) -> bool:
        """Return whether the view is not at the end of the log."""
        return self._run is not None and not (self.text.at_bottom and self.text.at_end)

    def ask_what(self) -> None:
        """Focus the search field."""
        self.field.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.field.selectAll()

    def find_next(self) -> None:
        """Go to the next match."""
        self._seek(back=False)

    def find_previous(self) -> None:
        """Go to the previous match."""
        self._seek(back=True)

    def to_end(self) -> None:
        """Show the end of the log and follow new output."""
        self.text.to_end()

    def copy_all(self) -> None:
        """Copy a bug report to the clipboard: versions, remarks, the job and the end of the log."""
        run = self._run
        if run:
            remarks = [f"{one.when} {one.sentence}".strip() for one in self.remark_texts()]
            self._session.tasks.run(lambda: report_on(run.directory, remarks), self._on_report, reraise)

    def _on_report(self, text: str) -> None:
        QGuiApplication.clipboard().setText(text)
        self.message_shown.emit(self.tr("Copied. Paste it into your bug report."))

    def _seek(self, *, back: bool) -> None:
        self.result.clear()
        self.text.seek(self.field.text(), back=back)

    # --- Qt's events

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Handle keys in the search field: Enter and Shift+Enter find matches, Escape returns to the log."""
        if watched is self.field and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._seek(back=bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
                return True
            if event.key() == Qt.Key.Key_Escape:
                self.text.setFocus()
                return True
        return super().eventFilter(watched, event)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Read the output that was printed while the log was hidden."""
        super().showEvent(event)
        self._follow_run()
        self._commands.refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Disable the commands, which work only while the log is visible."""
        super().hideEvent(event)
        self._commands.refresh()

    def _lay_out(self) -> None:
        self.text.setPlaceholderText(self.tr("No output yet."))
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
